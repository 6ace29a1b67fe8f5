"""Ways to generate, as arms that can be measured against each other: the engine's and those of transformers."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

from layerskip.comparison.batches import Batch
from layerskip.decoding.engine import Engine
from layerskip.decoding.options import token_ids
from layerskip.decoding.plan import Plan, Wishes
from layerskip.decoding.statistics import Statistics
from layerskip.model.draft_head import DraftHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RoundCounts:
    """What the engine counted in one run, over all its rows.

    Attributes:
        rounds: R.
        drafted, accepted: drafts, and those that were accepted.
        draft_tokens_processed: D.
        draft_seconds, verify_seconds: what drafting took, and all the rest of the rounds: on a GPU a verification is
            waited for only where its outcome is read.
        work: (E, steps, V, rounds), as `Tally.work` counts them; those of the last layer are steps of plain decoding.
    """

    rounds: int
    drafted: int
    accepted: int
    draft_tokens_processed: int
    draft_seconds: float
    verify_seconds: float
    work: tuple[tuple[int, int, int, int], ...] = ()

    def __post_init__(self) -> None:
        """Makes tuples of lists, which JSON reads them as."""
        object.__setattr__(self, "work", tuple(map(tuple, self.work)))

    @classmethod
    def of(cls, statistics: Statistics) -> RoundCounts:
        """Returns the counts of a call's statistics."""
        work = sum((tally.work for tally in statistics.tallies), Counter[tuple[int, int, int]]())
        return cls(
            rounds=statistics.rounds,
            drafted=statistics.drafted,
            accepted=statistics.accepted,
            draft_tokens_processed=statistics.draft_tokens_processed,
            draft_seconds=statistics.seconds["draft"],
            verify_seconds=statistics.seconds["verify"] + statistics.seconds["other"],
            work=tuple((*round_, count) for round_, count in sorted(work.items())),
        )


@dataclass(frozen=True)
class Run:
    """One generation: the new tokens of each row, and the seconds up to the first of them and after it.

    Attributes:
        decoded: tokens that came after the first ones were handed out; `decode_seconds` is what they took.
        rounds: what the engine counted; `None` for other ways to generate.
    """

    token_ids: list[list[int]]
    decoded: int
    prefill_seconds: float
    decode_seconds: float
    rounds: RoundCounts | None = None

    @property
    def seconds(self) -> float:
        """What the whole run took."""
        return self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True)
class Arm:
    """A way to generate.

    Attributes:
        name: what it is.
        generate: a function from prompts and a number of new tokens to a `Run`.
        exit_layer: E, where it has one; "auto" where it is chosen between rounds.
        num_draft_tokens: γ, where it drafts.
        draft_vocab_size: how many token ids it drafts from; `None` where it drafts with the full head or not at all.
        model: whose work and memory are counted; `None` where none can be.
        assistant: a second model that drafts.
        draft_head_bytes: copied rows of the model's head.
        counted: what runs in place of `generate` where hooks count; hooks would break up a compiled graph.
    """

    name: str
    generate: Callable[[Batch, int], Run]
    exit_layer: int | str | None = None
    num_draft_tokens: int | None = None
    draft_vocab_size: int | None = None
    model: PreTrainedModel | None = None
    assistant: PreTrainedModel | None = None
    draft_head_bytes: int = 0
    counted: Callable[[Batch, int], Run] | None = None

    @property
    def label(self) -> str:
        """The name with E and γ, where it has them; it tells the arms of a run apart."""
        exit_layer = "" if self.exit_layer is None else f" E={self.exit_layer}"
        return self.name + exit_layer + ("" if self.num_draft_tokens is None else f" γ={self.num_draft_tokens}")


class TokenClock(BaseStreamer):
    """A transformers streamer that notes when tokens arrive, and how many; its first `put` is the prompt."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        """Notes the time and the number of tokens."""
        self.arrivals.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Nothing to do."""


def engine_arm(
    name: str,
    engine: Engine,
    *,
    stop_at_eos: bool = False,
    strategy: str = "self_speculative",
    temperature: float | None = None,
    **options: Any,
) -> Arm:
    """Returns the arm that calls `Engine.generate`.

    Args:
        name: what it is called.
        engine: whose model and draft vocabulary it has.
        stop_at_eos: whether the model's end-of-sequence tokens end an answer.
        strategy: of `Engine.generate`.
        temperature: draw tokens at it; by default greedy.
        options: of `Engine.generate`: those of `Wishes`.

    Raises:
        TypeError, ValueError: what `Engine.plan` refuses.
    """
    plan = engine.plan(strategy, Wishes(**options))
    settings = {**_choosing(temperature, stop_at_eos), "strategy": strategy, **options}

    def generate(batch: Batch, max_new_tokens: int, **changes: Any) -> Run:
        clock = TokenClock() if len(batch.ids) == 1 else None
        how = {**settings, **changes, "max_new_tokens": max_new_tokens}
        begin = time.perf_counter()
        result = engine.generate(batch.ids, attention_mask=batch.mask, streamer=clock, **how)
        end = time.perf_counter()
        tokens, counted = result.new_token_ids, RoundCounts.of(result.statistics)
        # Nothing streams from several rows; the time of their rounds is what comes behind the first tokens.
        first = end - counted.draft_seconds - counted.verify_seconds if clock is None else clock.arrivals[1][0]
        return Run(tokens, sum(map(len, tokens)) - len(tokens), first - begin, end - first, counted)

    return Arm(
        name,
        generate,
        plan.exit_layer,
        plan.num_draft_tokens,
        plan.draft_vocab_size,
        model=engine.model,
        draft_head_bytes=_draft_head_bytes(engine, plan),
        counted=partial(generate, compile=False) if plan.compile else None,
    )


def _draft_head_bytes(engine: Engine, plan: Plan) -> int:
    """Returns the size of the rows that are copied out of the model's head for drafting."""
    ids = engine.drafted_token_ids(plan)
    if ids is None:
        return 0
    head = DraftHead.of(engine.layered, ids)
    return head.weight.nbytes + (0 if head.bias is None else head.bias.nbytes)


def transformers_arm(
    name: str,
    model: PreTrainedModel,
    *,
    stop_at_eos: bool = False,
    temperature: float | None = None,
    exit_layer: int | None = None,
    num_draft_tokens: int | None = None,
    assistant: PreTrainedModel | None = None,
    drafting: dict[str, Any] | None = None,
    **options: Any,
) -> Arm:
    """Returns the arm that calls `model.generate` with these options; both models are the same before and after a call.

    Args:
        name: what it is called.
        model: that generates.
        stop_at_eos: whether the model's end-of-sequence tokens end an answer.
        temperature: draw tokens at it; by default greedy.
        exit_layer: E of the arm; it changes nothing.
        num_draft_tokens: γ of the arm, which drafts and so answers one prompt at a time.
        assistant: another model, that drafts.
        drafting: values for the generation config of the model that drafts, which is the only place that `generate`
            reads them from.
        options: of `generate`.
    """
    settings = {**_choosing(temperature, stop_at_eos), **options}
    drafting = dict(drafting or {})
    if assistant is not None:
        settings["assistant_model"] = assistant
    eos = model.generation_config.eos_token_id if stop_at_eos else None
    if num_draft_tokens is not None:
        # Drafts are made without a mask, so that a padding token which is no EOS token is not seen in a text.
        settings["pad_token_id"] = next(iter(token_ids("eos_token_id", eos)), None)
        drafting["pad_token_id"] = None
    drafter = model if assistant is None else assistant
    # What `generate` leaves on the model for its later calls, such as the compiled graph.
    kept: dict[str, Any] = {}

    def generate(batch: Batch, max_new_tokens: int) -> Run:
        clock = TokenClock()
        with restored(drafter, {}), restored(model, kept):
            drafter.generation_config.update(**drafting)
            run: Any = model.generate
            begin = time.perf_counter()
            sequences = run(
                batch.ids, attention_mask=batch.mask, streamer=clock, max_new_tokens=max_new_tokens, **settings
            )
            end = time.perf_counter()
        first, arrived = clock.arrivals[1]
        tokens = [_up_to(row, eos) for row in sequences[:, batch.ids.shape[1] :].tolist()]
        return Run(tokens, sum(map(len, tokens)) - arrived, first - begin, end - first)

    return Arm(name, generate, exit_layer, num_draft_tokens, model=model, assistant=assistant)


def early_exit_arm(model: PreTrainedModel, exit_layer: int, num_draft_tokens: int, **choosing: Any) -> Arm:
    """Returns `hf_early_exit`: transformers' own self-speculation; `choosing` is as of `transformers_arm`.

    γ is the most that a round drafts. As transformers has it by default, and faster so, a round also ends behind a
    draft that the exit gives less than 0.4 to.
    """
    return transformers_arm(
        "hf_early_exit",
        model,
        exit_layer=exit_layer,
        num_draft_tokens=num_draft_tokens,
        drafting=_drafting(num_draft_tokens),
        assistant_early_exit=exit_layer,
        **choosing,
    )


def prompt_lookup_arm(model: PreTrainedModel, num_draft_tokens: int, **choosing: Any) -> Arm:
    """Returns `hf_prompt_lookup`, which drafts what followed where the last tokens stood before, γ tokens at most."""
    options: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "prompt_lookup_num_tokens": num_draft_tokens}
    return transformers_arm("hf_prompt_lookup", model, **options, **choosing)


def assistant_arm(model: PreTrainedModel, assistant: PreTrainedModel, num_draft_tokens: int, **choosing: Any) -> Arm:
    """Returns `hf_assistant`: a second model with the same vocabulary drafts, as `early_exit_arm` γ tokens at most."""
    drafting = _drafting(num_draft_tokens)
    options: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "assistant": assistant, "drafting": drafting}
    return transformers_arm("hf_assistant", model, **options, **choosing)


def _drafting(num_draft_tokens: int) -> dict[str, Any]:
    """Returns how transformers drafts γ tokens at most, whatever a model's own generation config says."""
    return {
        "num_assistant_tokens": num_draft_tokens,
        # Otherwise γ changes from round to round.
        "num_assistant_tokens_schedule": "constant",
        # Behind a draft that is less likely than this a round ends; transformers' own default, with which it is faster.
        "assistant_confidence_threshold": 0.4,
    }


def compiled_arm(model: PreTrainedModel, cache_length: int, **choosing: Any) -> Arm:
    """Returns `hf_compiled`: a static cache, whose steps after the prompt run through `torch.compile`.

    The graph is kept by the arm and is on the model only while it runs, so that other arms stay as they are.

    Args:
        model: that generates.
        cache_length: at least the tokens of the longest prompt and its answer; the same for all prompts, since another
            length would be compiled anew.
        choosing: as of `transformers_arm`.
    """
    from transformers import CompileConfig

    # CUDA graphs, the default, are for CUDA; elsewhere transformers compiles only where it is told to.
    how: Any = CompileConfig(mode="reduce-overhead" if model.device.type == "cuda" else "default")
    how._compile_all_devices = True
    static = {"cache_implementation": "static", "max_cache_len": cache_length, **choosing}
    eager = transformers_arm("hf_compiled", model, disable_compile=True, **static)
    return replace(transformers_arm("hf_compiled", model, compile_config=how, **static), counted=eager.generate)


@contextmanager
def restored(model: PreTrainedModel, kept: dict[str, Any]) -> Iterator[None]:
    """Gives a model its own state back after a block, whatever happens in it.

    That is its attributes, a copy of the generation config being the block's, and the number of layers in its
    configuration, which a failing early exit leaves changed.

    Args:
        kept: attributes that only the block is to see; those that it adds are put here.
    """
    before = dict(vars(model))
    config: Any = model.base_model.config
    num_hidden_layers = config.num_hidden_layers
    vars(model).update(kept)
    model.generation_config = copy.deepcopy(model.generation_config)
    try:
        yield
    finally:
        kept.update({name: value for name, value in vars(model).items() if name not in before})
        for name in kept:
            del vars(model)[name]
        vars(model).update(before)
        config.num_hidden_layers = num_hidden_layers


def _choosing(temperature: float | None, stop_at_eos: bool) -> dict[str, Any]:
    """Returns the settings of `generate` for greedy decoding, or for drawing tokens from the whole vocabulary."""
    settings: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    settings["pad_token_id"] = 0
    return settings if stop_at_eos else {**settings, "eos_token_id": None}


def _up_to(tokens: list[int], eos: int | list[int] | None) -> list[int]:
    """Returns tokens up to the first one that ends a row; what fills it up behind is left out."""
    ends = set(token_ids("eos_token_id", eos))
    return next((tokens[:count] for count, token in enumerate(tokens, start=1) if token in ends), tokens)
