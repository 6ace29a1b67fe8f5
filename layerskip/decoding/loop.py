"""The decode loop: prefill, then rounds of drafting, verifying and accepting, for any number of rows at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from layerskip.decoding.acceptance import accept_greedy
from layerskip.decoding.statistics import Tally
from layerskip.model.cache import SharedCache
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement


@dataclass(frozen=True)
class DecodeSettings:
    """What the loop needs to know.

    Attributes:
        exit_layer: E, the layers that run token by token; equal to `depth` where nothing is drafted.
        depth: the layer whose exit gives the output: L, or E for an answer from the early layers alone.
        num_draft_tokens: γ; 0 drafts nothing, and a round is one step of plain decoding.
        max_new_tokens: the budget of every row, at least 1.
        eos_token_ids: tokens that end a row; they are part of the output.
        keep_logits: keep the logits that each emitted token was chosen from.
    """

    exit_layer: int
    depth: int
    num_draft_tokens: int
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    keep_logits: bool = False


@dataclass
class Row:
    """One sequence that is being decoded.

    Attributes:
        index: its place in the caller's batch.
        prompt: the prompt's token ids.
        tokens: new token ids so far.
        logits: what they were chosen from, `(vocabulary,)` in fp32 each, when asked for.
        finish_reason: "stop" (an EOS token) or "length"; `None` while it goes on.
        tally: its counts.
    """

    index: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    finish_reason: str | None = None
    tally: Tally = field(default_factory=Tally)

    @property
    def committed(self) -> int:
        """Tokens that are settled; the cache holds all but the last."""
        return len(self.prompt) + len(self.tokens)


@dataclass(frozen=True)
class Block:
    """What one round (or prefill) emitted for one row: tokens, and for each whether it was drafted and accepted."""

    row: int
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]


class DecodeLoop:
    """One generation call: its rows, its cache, and what is yet to do.

    Iterate over `blocks()` to run it; `rows` then holds the outcome, in the caller's order.
    """

    def __init__(
        self,
        model: LayeredModel,
        prompts: Sequence[list[int]],
        settings: DecodeSettings,
        draft_token_ids: torch.Tensor | None = None,
    ) -> None:
        """Allocates the cache for all `prompts` (non-empty lists of token ids); runs no layer yet.

        Args:
            draft_token_ids: what drafts are chosen from, as `DraftHead.of` takes them; `None` for all tokens. They
                never touch what is emitted.

        Raises:
            ValueError: a head of which no rows can be taken for drafts.
        """
        self.model = model
        self.settings = settings
        self.rows = [Row(index, list(prompt)) for index, prompt in enumerate(prompts)]
        self.active = list(self.rows)
        # The last emitted token is never processed, so the last slot stays free: dead tokens go there.
        capacity = max(len(prompt) for prompt in prompts) + settings.max_new_tokens
        self.scratch = capacity - 1
        self.cache = SharedCache(settings.depth, len(prompts), capacity)
        self.rotary = model.rotary_tables(capacity)
        self.seconds: Counter[str] = Counter()
        begin = time.perf_counter()
        self.draft_head = None if draft_token_ids is None else DraftHead.of(model, draft_token_ids)
        self._book(self.rows, other=time.perf_counter() - begin)

    def blocks(self) -> Iterator[list[Block]]:
        """Yields what prefill and then every round emitted, for the rows that were active in it."""
        yield self._prefill()
        while self.active:
            yield self._round()

    @torch.inference_mode()
    def _prefill(self) -> list[Block]:
        """Runs all layers over the prompts and emits each row's first token."""
        begin = time.perf_counter()
        rows = list(self.active)
        lengths = [len(row.prompt) for row in rows]
        placement = Placement.prompt(lengths, self.model.device)
        padded = [row.prompt + [0] * (placement.width - len(row.prompt)) for row in rows]
        hidden = self._run(self._embed(padded, placement), 0, self.settings.depth, placement)
        last = torch.tensor(lengths, device=hidden.device) - 1
        logits = self.model.logits(hidden[torch.arange(len(lengths), device=hidden.device), last].unsqueeze(1))
        blocks = self._commit([[] for _ in rows], logits.argmax(-1).tolist(), logits)
        self._roll_back()
        self._book(rows, prefill=time.perf_counter() - begin)
        return blocks

    @torch.inference_mode()
    def _round(self) -> list[Block]:
        """Drafts with the early layers, verifies with the rest, accepts, and rolls back to what is settled."""
        begin = time.perf_counter()
        rows = list(self.active)
        starts = [row.committed - 1 for row in rows]
        drafts, states = self._draft(starts)
        drafted = time.perf_counter()
        # The last draft passes the early layers too: if all are accepted, its keys must be there.
        states.append(self._early_pass(starts, drafts, len(states)))
        live = [len(draft) + 1 for draft in drafts]
        placement = Placement.of(starts, live, len(states), self.scratch, self.model.device)
        hidden = states[0] if len(states) == 1 else torch.cat(states, dim=1)
        logits = self.model.logits(self._run(hidden, self.settings.exit_layer, self.settings.depth, placement))
        targets = logits.argmax(-1).tolist()
        verified = time.perf_counter()
        for row, draft in zip(rows, drafts, strict=True):
            row.tally.draft_tokens_processed += len(draft)
        blocks = self._commit(drafts, targets, logits)
        self._roll_back()
        self._book(rows, draft=drafted - begin, verify=verified - drafted, other=time.perf_counter() - verified)
        return blocks

    def _draft(self, starts: list[int]) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Drafts with the early layers, token by token, from each row's last token on.

        Returns:
            The drafts of each row, and the exit states of every step, `(rows, 1, hidden)` each: those of the last
            token and of all drafts but the last, so that layers 1..E never see them again.
        """
        left = [self.settings.max_new_tokens - len(row.tokens) - 1 for row in self.active]
        drafts: list[list[int]] = [[] for _ in self.active]
        states: list[torch.Tensor] = []
        while True:
            step = len(states)
            drafting = [
                index
                for index, draft in enumerate(drafts)
                if len(draft) == step < min(self.settings.num_draft_tokens, left[index])
                and not (draft and draft[-1] in self.settings.eos_token_ids)
            ]
            if not drafting:
                return drafts, states
            states.append(self._early_pass(starts, drafts, step))
            choices = self._choose(states[-1]).tolist()
            for index in drafting:
                drafts[index].append(choices[index][0])

    def _choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the drafts that follow exit states `(rows, 1, hidden)`: token ids `(rows, 1)`."""
        if self.draft_head is None:
            return self.model.logits(hidden).argmax(-1)
        return self.draft_head.choose(hidden)

    def _early_pass(self, starts: list[int], drafts: list[list[int]], step: int) -> torch.Tensor:
        """Runs layers 1..E over the `step`-th token of the round in each row that has one; the others' are dead.

        Returns:
            The exit states, `(rows, 1, hidden)`.
        """
        live = [int(len(draft) >= step) for draft in drafts]
        tokens = [
            [draft[step - 1] if step and alive else row.tokens[-1]]
            for row, draft, alive in zip(self.active, drafts, live, strict=True)
        ]
        positions = [start + min(step, len(draft) + 1) for start, draft in zip(starts, drafts, strict=True)]
        placement = Placement.of(positions, live, 1, self.scratch, self.model.device)
        return self._run(self._embed(tokens, placement), 0, self.settings.exit_layer, placement)

    def _embed(self, tokens: list[list[int]], placement: Placement) -> torch.Tensor:
        return self.model.embed(torch.tensor(tokens, device=self.model.device), placement.positions)

    def _run(self, hidden: torch.Tensor, start: int, stop: int, placement: Placement) -> torch.Tensor:
        """Runs a span of layers; counts early tokens where layer 1 runs, late ones where layer L does."""
        if start == stop:
            return hidden
        for row, live, padding in zip(self.active, placement.live, placement.padding, strict=True):
            if start == 0:
                row.tally.early_layer_tokens += live
                row.tally.padding_tokens += padding
            if stop == self.model.num_layers:
                row.tally.late_layer_tokens += live
        return self.model.run(hidden, start, stop, placement=placement, cache=self.cache, rotary=self.rotary)

    def _commit(self, drafts: list[list[int]], targets: list[list[int]], logits: torch.Tensor) -> list[Block]:
        """Settles what each row emits: its accepted drafts and the target that follows, cut at the first stop.

        Args:
            drafts: of each active row.
            targets: the full model's choices for each active row, at least one more than drafts.
            logits: what these were chosen from, `(rows, width, vocabulary)`.
        """
        blocks = []
        for index, (row, draft, target) in enumerate(zip(self.active, drafts, targets, strict=True)):
            accepted = accept_greedy(draft, target)
            emitted = [*draft[:accepted], target[accepted]]
            for count, token in enumerate(emitted, start=1):
                if token in self.settings.eos_token_ids:
                    row.finish_reason = "stop"
                elif len(row.tokens) + count == self.settings.max_new_tokens:
                    row.finish_reason = "length"
                if row.finish_reason is not None:
                    emitted = emitted[:count]
                    break
            kept = min(accepted, len(emitted))
            was_cut = len(emitted) <= accepted
            if row.tokens:
                row.tally.outcomes[kept if was_cut else len(draft), kept] += 1
                row.tally.cut += was_cut
            row.tally.emitted += len(emitted)
            row.tokens += emitted
            if self.settings.keep_logits:
                # A copy, since a view would keep the whole round's logits alive.
                row.logits += logits[index, : len(emitted)].to(torch.float32, copy=True).unbind()
            flags = tuple(position < kept for position in range(len(emitted)))
            blocks.append(Block(row.index, tuple(emitted), flags))
        return blocks

    def _book(self, rows: list[Row], **seconds: float) -> None:
        """Books the time of a round's phases to the call and to every row that took part."""
        for counter in (self.seconds, *(row.tally.seconds for row in rows)):
            counter.update(seconds)

    def _roll_back(self) -> None:
        """Cuts the cache to what is settled, and moves finished rows behind the active ones."""
        self.cache.rollback([row.committed - 1 for row in self.active])
        for index in reversed(range(len(self.active))):
            if self.active[index].finish_reason is not None:
                last = len(self.active) - 1
                if index != last:
                    self.cache.swap(index, last)
                self.active[index] = self.active[last]
                self.active.pop()
