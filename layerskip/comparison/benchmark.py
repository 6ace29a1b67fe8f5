"""Measuring ways to generate against each other: the same prompts and the same budget, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from layerskip.comparison.hooks import layer_tokens, module_seconds
from layerskip.decoding.engine import Engine
from layerskip.decoding.options import token_ids
from layerskip.decoding.plan import Wishes
from layerskip.decoding.prompts import Prompts
from layerskip.decoding.statistics import Statistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Batch:
    """Prompts that are answered together: ids, padded on the left, and their mask, `(rows, tokens)` each."""

    ids: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[list[int]], device: torch.device | str = "cpu") -> Batch:
        """Returns some rows of token ids as a batch."""
        return cls(*Prompts(list(rows)).left_padded(0, torch.device(device)))


@dataclass(frozen=True)
class Run:
    """One generation: the new tokens of each row, and the seconds up to the first of them and after it.

    Attributes:
        decoded: tokens that came after the first ones were handed out; `decode_seconds` is what they took.
        statistics: the engine's own; `None` for other ways to generate.
    """

    token_ids: list[list[int]]
    decoded: int
    prefill_seconds: float
    decode_seconds: float
    statistics: Statistics | None = None


@dataclass(frozen=True)
class Arm:
    """A way to generate.

    Attributes:
        name: what it is.
        generate: a function from prompts and a number of new tokens to a `Run`.
        exit_layer: E, where it has one.
        num_draft_tokens: γ, where it drafts.
        draft_vocab_size: how many token ids it drafts from; `None` where it drafts with the full head or not at all.
    """

    name: str
    generate: Callable[[Batch, int], Run]
    exit_layer: int | None = None
    num_draft_tokens: int | None = None
    draft_vocab_size: int | None = None


@dataclass(frozen=True)
class RoundCosts:
    """What the parts of a round of one row cost, counted in steps of plain decoding.

    Attributes:
        c: seconds of drafting per draft that was processed.
        verify_cost: seconds of verification per round.
        predicted: the speed-up that these give, without what a round spends elsewhere:
            tokens per round / (verify_cost + drafts per round · c).
    """

    c: float
    verify_cost: float
    predicted: float


def round_costs(runs: Sequence[Run], seconds_per_token: float) -> RoundCosts | None:
    """Returns the costs of some runs together; `None` where none of them drafted, or rows shared their rounds.

    Args:
        runs: of one arm.
        seconds_per_token: of plain decoding.
    """
    done = [run.statistics for run in runs if run.statistics is not None and len(run.token_ids) == 1]
    rounds = sum(counted.rounds for counted in done)
    drafts = sum(counted.draft_tokens_processed for counted in done)
    if not drafts:
        return None
    c = sum(counted.seconds["draft"] for counted in done) / drafts / seconds_per_token
    verify_cost = sum(counted.seconds["verify"] for counted in done) / rounds / seconds_per_token
    tokens = sum(counted.emitted - 1 for counted in done)
    return RoundCosts(c, verify_cost, tokens / rounds / (verify_cost + drafts / rounds * c))


@dataclass(frozen=True)
class Measurement:
    """What was measured for one arm.

    Attributes:
        name, exit_layer, num_draft_tokens, draft_vocab_size: the arm's.
        decode_tokens_per_second: after the first token, the median over repeats of all prompts together; rows of a
            batch add up.
        lowest, highest: the same, slowest and fastest repeat.
        ratio: its speed over the first arm's: the median of the ratios of each repeat, since both drift together.
        prefill_seconds: time to the first token, median over prompts and repeats.
        layer_tokens: layers × tokens that were executed for one pass over all prompts, prefill included.
        same_as_first: prompts for which every token is the first arm's; `None` where tokens are drawn.
        draft_acceptance_rate: of all timed runs; `None` where nothing was drafted, or not by the engine.
        outside_share: share of the time after the first token that is spent outside the calls of embedding, layers,
            norm and head, on the first prompt; `None` for an arm that hands out several tokens at first, whose
            prefill cannot be told from its first round, and with a draft vocabulary, whose rows of the head are
            multiplied outside its module.
        c, verify_cost, predicted: as in `RoundCosts`, medians over repeats; `None` for an arm that is not the engine's
            or drafts nothing, and in batches of several rows.
    """

    name: str
    exit_layer: int | None
    num_draft_tokens: int | None
    draft_vocab_size: int | None
    decode_tokens_per_second: float
    lowest: float
    highest: float
    ratio: float
    prefill_seconds: float
    layer_tokens: int
    same_as_first: int | None
    draft_acceptance_rate: float | None
    outside_share: float | None
    c: float | None
    verify_cost: float | None
    predicted: float | None


class TokenClock:
    """A transformers streamer that notes when tokens arrive, and how many; its first `put` is the prompt."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        """Notes the time and the number of tokens."""
        self.arrivals.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Nothing to do."""


def _choosing(temperature: float | None, stop_at_eos: bool) -> dict[str, Any]:
    """Returns the settings of `generate` for greedy decoding, or for drawing tokens from the whole vocabulary."""
    settings: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return settings if stop_at_eos else {**settings, "eos_token_id": None}


def transformers_arm(
    name: str,
    model: PreTrainedModel,
    arm: Arm | None = None,
    *,
    stop_at_eos: bool = False,
    temperature: float | None = None,
    **options: Any,
) -> Arm:
    """Returns the arm that calls `model.generate` with these options.

    Args:
        name: what it is called.
        model: its generation config is given the draft length of `arm`.
        arm: the arm whose exit layer and draft length this one shares.
        stop_at_eos: whether the model's end-of-sequence tokens end an answer.
        temperature: draw tokens at it; by default greedy.
        options: of `generate`.
    """
    settings = {**_choosing(temperature, stop_at_eos), "pad_token_id": 0}
    eos = model.generation_config.eos_token_id if stop_at_eos else None

    def generate(batch: Batch, max_new_tokens: int) -> Run:
        clock = TokenClock()
        if arm is not None:
            # `generate` ignores num_assistant_tokens as an argument; it reads it from the model's generation config.
            model.generation_config.num_assistant_tokens = arm.num_draft_tokens
        run: Any = model.generate
        begin = time.perf_counter()
        sequences = run(
            batch.ids,
            attention_mask=batch.mask,
            streamer=clock,
            max_new_tokens=max_new_tokens,
            **settings,
            **options,
        )
        end = time.perf_counter()
        first, arrived = clock.arrivals[1]
        tokens = [_up_to(row, eos) for row in sequences[:, batch.ids.shape[1] :].tolist()]
        return Run(tokens, sum(map(len, tokens)) - arrived, first - begin, end - first)

    return Arm(name, generate, arm.exit_layer if arm else None, arm.num_draft_tokens if arm else None)


def _up_to(tokens: list[int], eos: int | list[int] | None) -> list[int]:
    """Returns tokens up to the first one that ends a row; what fills it up behind is left out."""
    ends = set(token_ids("eos_token_id", eos))
    return next((tokens[:count] for count, token in enumerate(tokens, start=1) if token in ends), tokens)


def engine_arm(
    name: str,
    engine: Engine,
    *,
    stop_at_eos: bool = False,
    strategy: str = "self_speculative",
    exit_layer: int | None = None,
    num_draft_tokens: int | None = None,
    temperature: float | None = None,
) -> Arm:
    """Returns the arm that calls `Engine.generate`.

    Args:
        name: what it is called.
        engine: whose model and draft vocabulary it has.
        stop_at_eos: whether the model's end-of-sequence tokens end an answer.
        strategy: of `Engine.generate`.
        exit_layer: likewise.
        num_draft_tokens: likewise.
        temperature: draw tokens at it; by default greedy.

    Raises:
        TypeError, ValueError: what `Engine.plan` refuses.
    """
    plan = engine.plan(strategy, Wishes(exit_layer, num_draft_tokens))
    settings = {**_choosing(temperature, stop_at_eos), "pad_token_id": 0}

    def generate(batch: Batch, max_new_tokens: int) -> Run:
        begin = time.perf_counter()
        result = engine.generate(
            batch.ids,
            attention_mask=batch.mask,
            strategy=strategy,
            exit_layer=exit_layer,
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max_new_tokens,
            **settings,
        )
        seconds = time.perf_counter() - begin
        prefill = result.statistics.seconds["prefill"]
        tokens = result.new_token_ids
        return Run(tokens, sum(map(len, tokens)) - len(tokens), prefill, seconds - prefill, result.statistics)

    return Arm(name, generate, plan.exit_layer, plan.num_draft_tokens, plan.draft_vocab_size)


def measure(
    model: PreTrainedModel,
    arms: Sequence[Arm],
    prompts: Sequence[Batch],
    max_new_tokens: int,
    repeats: int,
    *,
    compare: bool = True,
) -> Iterator[list[Measurement]]:
    """Runs all arms on all prompts, interleaved, and yields the measurements so far after every repeat.

    The first arm is plain decoding, which the others are compared with. One pass that is not timed comes first: it
    warms everything up, counts the layers' work and compares tokens. A progress bar on standard error counts
    generations.

    Args:
        compare: whether the arms are to give the same tokens; not where they are drawn.

    Raises:
        ValueError: fewer than two tokens or answers that end with their first one, which leave nothing to time, or no
            repeat.
    """
    if max_new_tokens < 2:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves nothing to time after the first token; pass 2 or more."
        )
    if repeats < 1:
        raise ValueError(f"repeats={repeats} measures nothing; pass 1 or more.")
    with tqdm(total=len(arms) * len(prompts) * (repeats + 1), unit="generation", desc="warming up") as progress:
        work, tokens, outside = [], [], []
        for arm in arms:
            with layer_tokens(model) as counted:
                runs = [_run(arm, batch, max_new_tokens, progress) for batch in prompts]
            tokens.append([row for run in runs for row in run.token_ids])
            if all(len(answer) == 1 for answer in tokens[-1]):
                raise ValueError(f"every answer of {arm.name} ends with its first token; pass other prompts.")
            work.append(counted[0])
            is_trimmed = arm.draft_vocab_size is not None
            outside.append(None if is_trimmed else share_outside_modules(model, arm, prompts[0], max_new_tokens))
        same = [sum(ours == first for ours, first in zip(mine, tokens[0], strict=True)) for mine in tokens]
        progress.set_description("measuring")
        speeds: list[list[float]] = [[] for _ in arms]
        prefills: list[list[float]] = [[] for _ in arms]
        costs: list[list[RoundCosts]] = [[] for _ in arms]
        done: list[list[Statistics]] = [[] for _ in arms]
        for _ in range(repeats):
            timed: list[list[Run]] = [[] for _ in arms]
            for batch in prompts:
                for index, arm in enumerate(arms):
                    timed[index].append(_run(arm, batch, max_new_tokens, progress))
            for index, mine in enumerate(timed):
                done[index] += [run.statistics for run in mine if run.statistics is not None]
                speeds[index].append(sum(run.decoded for run in mine) / sum(run.decode_seconds for run in mine))
                prefills[index] += [run.prefill_seconds for run in mine]
                cost = round_costs(mine, 1 / speeds[0][-1])
                costs[index] += [] if cost is None else [cost]
            yield [
                Measurement(
                    name=arm.name,
                    exit_layer=arm.exit_layer,
                    num_draft_tokens=arm.num_draft_tokens,
                    draft_vocab_size=arm.draft_vocab_size,
                    decode_tokens_per_second=statistics.median(speeds[index]),
                    lowest=min(speeds[index]),
                    highest=max(speeds[index]),
                    ratio=statistics.median(mine / first for mine, first in zip(speeds[index], speeds[0], strict=True)),
                    prefill_seconds=statistics.median(prefills[index]),
                    layer_tokens=work[index],
                    same_as_first=same[index] if compare else None,
                    draft_acceptance_rate=Statistics.total(done[index]).draft_acceptance_rate if done[index] else None,
                    outside_share=outside[index],
                    c=_median([cost.c for cost in costs[index]]),
                    verify_cost=_median([cost.verify_cost for cost in costs[index]]),
                    predicted=_median([cost.predicted for cost in costs[index]]),
                )
                for index, arm in enumerate(arms)
            ]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _run(arm: Arm, batch: Batch, max_new_tokens: int, progress: tqdm[Any]) -> Run:
    run = arm.generate(batch, max_new_tokens)
    progress.update()
    return run


def share_outside_modules(model: PreTrainedModel, arm: Arm, batch: Batch, max_new_tokens: int) -> float | None:
    """Returns which share of the time after the first token an arm spends outside the model's modules.

    The hooks that time the modules lengthen what is outside a little. What a call for one token spends inside them is
    taken for the prefill's part; `None` where an arm's first tokens come from a round as well, or none follow.
    """
    with module_seconds(model) as seconds:
        arm.generate(batch, 1)
    prefill = seconds[0]
    with module_seconds(model) as seconds:
        run = arm.generate(batch, max_new_tokens)
    if run.decoded < max(sum(map(len, run.token_ids)) - len(run.token_ids), 1):
        return None
    return 1 - (seconds[0] - prefill) / run.decode_seconds
