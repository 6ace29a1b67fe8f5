"""Greedy rounds of one row as compiled graphs: one call of the device and one read by the host for a whole round."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from layerskip.decoding.ranks import tensor_parallel_mesh
from layerskip.model.devices import is_dispatched
from layerskip.model.draft_head import DraftHead
from layerskip.model.families import SLIDING_ATTENTION
from layerskip.model.fixed_cache import FixedCache, fixed_mask
from layerskip.model.layered import LayeredModel, RotaryTables

SMALLEST_CAPACITY = 64
# CUDA graphs are recorded at the second call and replayed from the third on.
WARM_UP_CALLS = 3


@dataclass(frozen=True)
class CompiledSettings:
    """What a graph is made for; another value of any of them takes another graph.

    Attributes:
        exit_layer: E, the layers that run token by token; equal to `depth` where nothing is drafted.
        depth: the layer whose exit gives the output: L, or E for an answer from the early layers alone.
        num_draft_tokens: γ, how many tokens every round drafts; 0 for steps of plain decoding.
        capacity: slots of the cache; see `rounded_capacity`.
        draft_token_ids: what drafts are chosen from, ascending; `None` for all tokens.
        eos_token_ids: behind which nothing counts as drafted.
        backend: of `torch.compile`.
    """

    exit_layer: int
    depth: int
    num_draft_tokens: int
    capacity: int
    draft_token_ids: tuple[int, ...] | None = None
    eos_token_ids: frozenset[int] = frozenset()
    backend: str = "inductor"


@dataclass(frozen=True)
class CompiledOutcome:
    """What one round has found.

    Attributes:
        drafts: those that count: none behind an EOS token, none that the call does not allow.
        targets: the full model's choice after the last token and after each of the drafts.
        accepted: how many of the drafts, from the first on, equal the targets.
    """

    drafts: list[int]
    targets: list[int]
    accepted: int


def rounded_capacity(model: LayeredModel, tokens: int) -> int:
    """Returns how many slots a cache for `tokens` tokens gets: the next power of two, so that few graphs serve all.

    Exactly `tokens` where the model cannot hold as many positions as that power.
    """
    rounded: int = max(SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length())
    try:
        model.check_length(rounded)
    except ValueError:
        return tokens
    return rounded


class CompiledRounds:
    """The compiled rounds of one model and one setting, with the cache that they work on; one call at a time uses it.

    A call resets it, lets prefill run through `cache`, `rotary` and `scratch` as through its own, prepares, and then
    asks for one round after the other. The modules of the model run as they are; nothing in it changes.
    """

    def __init__(self, model: LayeredModel, settings: CompiledSettings) -> None:
        """Compiles nothing yet.

        Raises:
            ValueError: a model that is not whole on one device, or a head of which no rows can be taken for drafts.
        """
        if tensor_parallel_mesh(model.model) is not None:
            raise ValueError("compile=True does not go with a tensor parallel model; leave it out.")
        if is_dispatched(model.model):
            raise ValueError(
                "compile=True does not go with a model that accelerate has spread over devices or offloaded "
                "(device_map), whose modules move what they are given; leave one of them out."
            )
        self.model = model
        self.settings = settings
        self.device = model.device
        self.dtype = model.embedding.weight.dtype
        self.compile_seconds = 0.0
        with _outside_inference_mode():
            self.cache = FixedCache(settings.depth, settings.capacity)
            self.rotary = model.rotary_tables(settings.capacity)
            ids = settings.draft_token_ids
            self.draft_head = None if ids is None else DraftHead.of(model, torch.tensor(ids))
            # The last token, its position, and how many drafts the call allows.
            self.feed = torch.zeros(3, dtype=torch.long, device=self.device)
            self.eos = torch.tensor(sorted(settings.eos_token_ids), dtype=torch.long, device=self.device)
            fixed = [self.feed, self.eos, *(table for pair in self.rotary.tables.values() for table in pair)]
            if self.draft_head is not None:
                fixed += [self.draft_head.token_ids, self.draft_head.weight]
                fixed += [] if self.draft_head.bias is None else [self.draft_head.bias]
            for tensor in fixed:
                torch._dynamo.mark_static_address(tensor)
        self.is_prepared = False
        self._compiled = self._compile()

    @property
    def scratch(self) -> int:
        """The slot and position of dead tokens: the last one, which no live token ever takes."""
        return self.settings.capacity - 1

    def fits(self, model: LayeredModel, settings: CompiledSettings) -> bool:
        """Returns whether the graphs serve a call with `settings` on a model as it is now.

        They do while its parts are the same modules, in the same place and type. Changed weights need nothing anew;
        what else is exchanged inside a module makes torch compile again by itself.
        """
        mine, parts = _parts(self.model), _parts(model)
        same_parts = len(mine) == len(parts) and all(one is other for one, other in zip(mine, parts, strict=True))
        weight = model.embedding.weight
        return same_parts and settings == self.settings and (weight.device, weight.dtype) == (self.device, self.dtype)

    def reset(self) -> None:
        """Makes ready for another call: an empty cache, and copies of rotary tables and draft rows brought up to date.

        The weights may have changed since the last call.
        """
        with _outside_inference_mode():
            self.cache.reset()
            tables = self.model.rotary_tables(self.settings.capacity).tables
            for kind, pair in self.rotary.tables.items():
                for held, new in zip(pair, tables[kind], strict=True):
                    held.copy_(new)
            draft = self.draft_head
            if draft is not None:
                torch.index_select(self.model.head.weight.detach(), 0, draft.token_ids, out=draft.weight)
                if draft.bias is not None:
                    torch.index_select(self.model.head.bias.detach(), 0, draft.token_ids, out=draft.bias)

    def prepare(self) -> float:
        """Compiles and warms up, where that is yet to be done; prefill must have come before.

        Returns:
            The seconds that this took, which `compile_seconds` adds up; 0.0 where nothing was to do.

        Raises:
            RuntimeError: the round cannot be compiled; the message gives the reason.
        """
        if self.is_prepared:
            return 0.0
        begin = time.perf_counter()
        try:
            for _ in range(WARM_UP_CALLS):
                # All tokens are dead, so that the cache stays as it is.
                self._run(0, self.scratch, 0)
        except Exception as error:
            reason = " ".join(" ".join(str(error).splitlines()[:3]).split())
            raise RuntimeError(
                f"compile=True: torch.compile failed with {type(error).__name__}: {reason} Leave compile out to decode "
                "without it."
            ) from error
        self.is_prepared = True
        seconds = time.perf_counter() - begin
        self.compile_seconds += seconds
        return seconds

    def round(self, token: int, position: int, allowed: int) -> CompiledOutcome:
        """Runs one round and reads its outcome.

        Args:
            token: the last one emitted.
            position: where it stands; the cache holds all that comes before.
            allowed: at most how many of the γ drafts count, from 0 on; what is left of the budget minus one.
        """
        *tokens, drafted, accepted = self._run(token, position, allowed)
        drafts, targets = tokens[: self.settings.num_draft_tokens], tokens[self.settings.num_draft_tokens :]
        self.cache.set_length(position + 1 + drafted)
        return CompiledOutcome(drafts[:drafted], targets[: drafted + 1], accepted)

    def _run(self, *feed: int) -> list[int]:
        with _outside_inference_mode():
            self.feed.copy_(torch.tensor(feed))
            outcome: list[int] = self._compiled(self).tolist()
        return outcome

    def _compile(self) -> Callable[[CompiledRounds], torch.Tensor]:
        # torch keeps what it compiled with the code object, a few graphs for each at most; one of our own keeps the
        # graphs of other settings and models apart, and takes them along when it goes.
        function = types.FunctionType(_greedy_round.__code__.replace(), globals(), "greedy_round")
        on_cuda = self.device.type == "cuda" and self.settings.backend == "inductor"
        compiled: Callable[[CompiledRounds], torch.Tensor] = torch.compile(
            function,
            fullgraph=True,
            dynamic=False,
            backend=self.settings.backend,
            mode="reduce-overhead" if on_cuda else None,
        )
        return compiled

    def early(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Returns the exit state of one token `(1,)` at `position`, `(1,)`: `(1, 1, hidden)`."""
        hidden = self.model.embed(token.unsqueeze(0), position.unsqueeze(0))
        return self.span(hidden, 0, self.settings.exit_layer, position)

    def span(self, hidden: torch.Tensor, start: int, stop: int, positions: torch.Tensor) -> torch.Tensor:
        """Runs layers `start + 1 .. stop` over states `(1, width, hidden)` of tokens at `positions`, `(width,)`."""
        model, cache = self.model, self.cache.at(positions)
        kinds = model.layer_types[start:stop]
        masks = {
            kind: fixed_mask(
                positions,
                self.settings.capacity,
                model.config.sliding_window if kind == SLIDING_ATTENTION else None,
                hidden.dtype,
            )
            for kind in dict.fromkeys(kinds)
        }
        rows = {kind: _rows(self.rotary, kind, positions) for kind in masks} if self.rotary.tables else {}
        for layer, kind in zip(model.layers[start:stop], kinds, strict=True):
            hidden = model.family.run_layer(layer, hidden, masks[kind], cache, rows.get(kind))
        return hidden

    def draft(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the best token `(1,)` after an exit state `(1, 1, hidden)`."""
        if self.draft_head is not None:
            return self.draft_head.choose(hidden)[0]
        return self.model.logits(hidden).argmax(-1)[0]


def _greedy_round(rounds: CompiledRounds) -> torch.Tensor:
    """Drafts, verifies and accepts: all of a round, traced into one graph.

    Returns:
        `(γ + γ + 1 + 2,)` in int64: the drafts, the targets, how many drafts count, and how many are accepted.
    """
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "torch.compile ran the round without compiling it: it is switched off (TORCH_COMPILE_DISABLE, "
            "torch.compiler.set_stance), or hides an error (torch._dynamo.config.suppress_errors)."
        )
    token, first, allowed = rounds.feed[0:1], rounds.feed[1:2], rounds.feed[2:3]
    position, alive = first, torch.ones_like(token, dtype=torch.bool)
    drafts, counted, positions, states = [], [], [position], [rounds.early(token, position)]
    for step in range(rounds.settings.num_draft_tokens):
        token = rounds.draft(states[-1])
        alive = alive & (allowed > step)
        # Dead drafts go through the layers as well, behind everything that counts.
        position = torch.where(alive, first + step + 1, rounds.scratch)
        drafts.append(token)
        counted.append(alive)
        positions.append(position)
        # The last draft too: if all are accepted, its keys must be there.
        states.append(rounds.early(token, position))
        alive = alive & ~torch.isin(token, rounds.eos)
    hidden = rounds.span(torch.cat(states, 1), rounds.settings.exit_layer, rounds.settings.depth, torch.cat(positions))
    targets = rounds.model.logits(hidden).argmax(-1)[0]
    if not drafts:
        return torch.cat([targets, torch.zeros_like(targets), torch.zeros_like(targets)])
    found, alive = torch.cat(drafts), torch.cat(counted)
    matches = (found == targets[:-1]) & alive
    accepted = matches.long().cumprod(0).sum(0, keepdim=True)
    return torch.cat([found, targets, alive.long().sum(0, keepdim=True), accepted])


def _rows(rotary: RotaryTables, kind: str, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary.tables[kind]
    return cos.index_select(1, positions), sin.index_select(1, positions)


def _parts(model: LayeredModel) -> list[object]:
    """Returns the modules that a graph calls."""
    return [model.model, *model.ends, *model.layers]


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Without gradients, but in the mode in which compiled graphs may write to tensors of any call."""
    with torch.inference_mode(False), torch.no_grad():
        yield
