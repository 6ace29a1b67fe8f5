"""Measuring ways to generate against each other: the same prompts and the same budget, interleaved."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from tqdm import tqdm

from layerskip.comparison.arms import Arm, Run
from layerskip.comparison.batches import Batch
from layerskip.comparison.hooks import Counts, counts_of, warm_up_batches

Made = TypeVar("Made")


@dataclass(frozen=True)
class Sample:
    """One timed run: of the arm with a label, on the batch with an index, in a pass over all batches, from 0."""

    arm: str
    batch: int
    repeat: int
    run: Run


@dataclass(frozen=True)
class RoundCosts:
    """What the parts of a round of one row cost, counted in steps of plain decoding.

    Attributes:
        c: seconds of drafting per draft that was processed.
        verify_cost: seconds of all the rest per round.
    """

    c: float
    verify_cost: float


@dataclass(frozen=True, kw_only=True)
class Measurement(Counts):
    """What was measured for one arm; what `Counts` holds is of the warm-up's prompts.

    Attributes:
        label: tells the arms apart.
        name, exit_layer, num_draft_tokens, draft_vocab_size: the arm's.
        decode_tokens_per_second: after the first token, the median over repeats of all prompts together; rows of a
            batch add up.
        lowest, highest: the same, slowest and fastest repeat.
        ratio: its speed over the first arm's: the median of the ratios of each repeat, since both drift together.
        lowest_ratio, highest_ratio: likewise, of the repeats.
        prefill_seconds: time to the first token, median over prompts and repeats.
        answers: how many answers a repeat has.
        new_tokens, decoded: tokens of all timed answers, and those of them that `decode_tokens_per_second` is about.
        same_as_first: answers whose every token is the first arm's, in every repeat; `None` where tokens are drawn.
        draft_acceptance_rate, mean_acceptance_length: accepted drafts over drafted ones, and tokens per round, of all
            timed runs; `None` where nothing was drafted, or not by the engine.
        work: (E, steps, V, rounds) of all timed runs, as in `Rounds`; none for an arm that is not the engine's.
        c, verify_cost: as in `RoundCosts`, medians over repeats; `None` for an arm that is not the engine's
            or drafts nothing, and in batches of several rows.
    """

    label: str
    name: str
    exit_layer: int | str | None
    num_draft_tokens: int | None
    draft_vocab_size: int | None
    decode_tokens_per_second: float
    lowest: float
    highest: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    prefill_seconds: float
    answers: int
    new_tokens: int
    decoded: int
    same_as_first: int | None
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    work: tuple[tuple[int, int, int, int], ...]
    c: float | None
    verify_cost: float | None


# --- Running ----------------------------------------------------------------------------------------------------------


def warm_up(
    arms: Sequence[Arm], batches: Sequence[Batch], max_new_tokens: int, *, failed: dict[str, str] | None = None
) -> dict[str, Counts]:
    """Runs every arm on the same few prompts, untimed, and returns what was counted on them, by label.

    These are the first batches, and one of each further shape, which a compiled model would be compiled for.

    Args:
        failed: takes what is wrong with an arm that raises, by label; without it the error is raised.

    Raises:
        ValueError: fewer than two tokens, or two arms of one label.
    """
    _check(arms, max_new_tokens)
    chosen = warm_up_batches(batches)
    counts = {}
    for arm in tqdm(arms, unit="arm", desc="warming up"):
        made = _attempt(arm, failed, counts_of, arm, chosen, max_new_tokens)
        if made is not None:
            counts[arm.label] = made
    return counts


def timed(
    arms: Sequence[Arm],
    batches: Sequence[Batch],
    max_new_tokens: int,
    repeats: int,
    *,
    done: Collection[tuple[str, int, int]] = (),
    failed: dict[str, str] | None = None,
) -> Iterator[Sample]:
    """Yields timed runs: repeat by repeat, prompts by prompts, every arm in turn, so that all drift together.

    A progress bar on standard error counts generations.

    Args:
        done: label, batch and repeat of what an interrupted measurement has already; it is left out.
        failed: arms in it are left out; one that raises is put there, and the others go on. Without it the error is
            raised.

    Raises:
        ValueError: fewer than two tokens, no repeat, or two arms of one label.
    """
    _check(arms, max_new_tokens)
    if repeats < 1:
        raise ValueError(f"repeats={repeats} measures nothing; pass 1 or more.")
    cells = [(arm, batch, repeat) for repeat in range(repeats) for batch in range(len(batches)) for arm in arms]
    left = [(arm, batch, repeat) for arm, batch, repeat in cells if (arm.label, batch, repeat) not in done]
    for arm, batch, repeat in tqdm(left, unit="generation", desc="measuring"):
        if failed is None or arm.label not in failed:
            run = _attempt(arm, failed, arm.generate, batches[batch], max_new_tokens)
            if run is not None:
                yield Sample(arm.label, batch, repeat, run)


def tune(
    arms: Sequence[Arm], batches: Sequence[Batch], max_new_tokens: int, *, failed: dict[str, str] | None = None
) -> tuple[list[Arm], dict[str, float]]:
    """Returns the fastest arm of each name, in their order, and the tokens per second of all that had to be timed.

    All arms that share a name with another one run on all batches, interleaved, after each has run on the first one.

    What `failed` is, and what is raised, is as of `timed`.
    """
    rivals = [arm for arm in arms if sum(other.name == arm.name for other in arms) > 1]
    for arm in tqdm(rivals, unit="arm", desc="warming up"):
        _attempt(arm, failed, arm.generate, batches[0], max_new_tokens)
    runs: dict[str, list[Run]] = {arm.label: [] for arm in rivals}
    for sample in timed(rivals, batches, max_new_tokens, 1, failed=failed):
        runs[sample.arm].append(sample.run)
    sound = [arm for arm in arms if arm.label not in (failed or {})]
    speeds = {arm.label: _speed(runs[arm.label]) or 0.0 for arm in sound if arm.label in runs}
    best = {arm.name: arm for arm in sorted(sound, key=lambda arm: speeds.get(arm.label, 0.0))}
    return [arm for arm in sound if best[arm.name] is arm], speeds


def _check(arms: Sequence[Arm], max_new_tokens: int) -> None:
    if max_new_tokens < 2:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves nothing to time after the first token; pass 2 or more."
        )
    labels = [arm.label for arm in arms]
    if len(set(labels)) < len(labels):
        raise ValueError(f"arms {labels} share labels; give each one its own.")


def _attempt(arm: Arm, failed: dict[str, str] | None, make: Callable[..., Made], *arguments: Any) -> Made | None:
    """Returns what `make` makes of the arguments; `None` where it raises and `failed` takes the reason."""
    try:
        return make(*arguments)
    except Exception as error:
        if failed is None:
            raise
        failed[arm.label] = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        return None


# --- Figures ----------------------------------------------------------------------------------------------------------


def round_costs(runs: Sequence[Run], seconds_per_token: float) -> RoundCosts | None:
    """Returns the costs of some runs together; `None` where none of them drafted, rows shared their rounds, or rounds
    drafted otherwise than one token after the other with one exit.

    Args:
        runs: of one arm.
        seconds_per_token: of plain decoding.
    """
    done = [run.rounds for run in runs if run.rounds is not None and len(run.token_ids) == 1]
    rounds = sum(counted.rounds for counted in done)
    drafts = sum(counted.draft_tokens_processed for counted in done)
    work = [entry for counted in done for entry in counted.work]
    is_plain = len({exit_layer for exit_layer, *_ in work}) <= 1 and all(
        steps == verified for _, steps, verified, _ in work
    )
    if not drafts or not is_plain:
        return None
    c = sum(counted.draft_seconds for counted in done) / drafts / seconds_per_token
    return RoundCosts(c, sum(counted.verify_seconds for counted in done) / rounds / seconds_per_token)


def summarise(
    arms: Sequence[Arm],
    samples: Sequence[Sample],
    *,
    counts: Mapping[str, Counts] | None = None,
    compare: bool = True,
) -> list[Measurement]:
    """Returns the figures of every arm; the first arm is plain decoding, which the others are compared with.

    Of a repeat only those prompts count that all arms have answered, and only the repeats with the most of them, so
    that every figure is about the same prompts.

    Args:
        arms: that have samples; samples of others are left out.
        samples: in any order.
        counts: what `warm_up` returned.
        compare: whether the arms are to give the same tokens; not where they are drawn.

    Raises:
        ValueError: no prompt that all arms have answered, or an arm whose answers all came with their first token.
    """
    passes = _passes(arms, samples)
    if not passes:
        raise ValueError("no prompt was answered by all arms; measure on.")
    return [_measurement(arm, arms[0], passes, (counts or {}).get(arm.label, Counts()), compare) for arm in arms]


def category_ratios(
    arms: Sequence[Arm], samples: Sequence[Sample], categories: Sequence[str | None]
) -> dict[str, dict[str, float | None]]:
    """Returns, for each category, the ratio of each arm by label, as in `Measurement`, on its prompts alone.

    It is `None` where an arm's answers all came with their first token. Prompts without a category are left out, and
    so is a category of which no prompt was answered by all arms.

    Args:
        arms, samples: as of `summarise`.
        categories: of each batch.
    """
    ratios: dict[str, dict[str, float | None]] = {}
    for category in dict.fromkeys(categories):
        passes = _passes(arms, [sample for sample in samples if categories[sample.batch] == category])
        if category is not None and passes:
            pairs = {
                arm.label: [(_speed(runs[arm.label]), _speed(runs[arms[0].label])) for runs in passes] for arm in arms
            }
            ratios[category] = {
                label: _median([mine / first for mine, first in speeds if mine and first])
                for label, speeds in pairs.items()
            }
    return ratios


def _passes(arms: Sequence[Arm], samples: Sequence[Sample]) -> list[dict[str, list[Run]]]:
    """Returns, for each repeat that counts, the runs of each arm by label, all on the same prompts."""
    runs = {(sample.repeat, sample.batch, sample.arm): sample.run for sample in samples}
    answered: dict[int, list[int]] = {}
    for repeat, batch in sorted({(sample.repeat, sample.batch) for sample in samples}):
        if all((repeat, batch, arm.label) in runs for arm in arms):
            answered.setdefault(repeat, []).append(batch)
    most = max(map(len, answered.values()), default=0)
    return [
        {arm.label: [runs[repeat, batch, arm.label] for batch in batches] for arm in arms}
        for repeat, batches in answered.items()
        if len(batches) == most
    ]


def _measurement(
    arm: Arm, first: Arm, passes: Sequence[Mapping[str, Sequence[Run]]], counts: Counts, compare: bool
) -> Measurement:
    mine, firsts = ([runs[label] for runs in passes] for label in (arm.label, first.label))
    speeds, first_speeds = (
        [_decoding_speed(arm, runs) for runs in mine],
        [_decoding_speed(first, runs) for runs in firsts],
    )
    ratios = [speed / other for speed, other in zip(speeds, first_speeds, strict=True)]
    costs = [round_costs(runs, 1 / speed) for runs, speed in zip(mine, first_speeds, strict=True)]
    made = [cost for cost in costs if cost is not None]
    every = [run for runs in mine for run in runs]
    rounds = [run.rounds for run in every if run.rounds is not None]
    drafted, count = sum(each.drafted for each in rounds), sum(each.rounds for each in rounds)
    decoded = sum(run.decoded for run in every)
    work: Counter[tuple[int, int, int]] = Counter()
    for exit_layer, steps, verified, times in (entry for each in rounds for entry in each.work):
        work[exit_layer, steps, verified] += times
    return Measurement(
        label=arm.label,
        name=arm.name,
        exit_layer=arm.exit_layer,
        num_draft_tokens=arm.num_draft_tokens,
        draft_vocab_size=arm.draft_vocab_size,
        decode_tokens_per_second=statistics.median(speeds),
        lowest=min(speeds),
        highest=max(speeds),
        ratio=statistics.median(ratios),
        lowest_ratio=min(ratios),
        highest_ratio=max(ratios),
        prefill_seconds=statistics.median(run.prefill_seconds for run in every),
        answers=sum(len(run.token_ids) for run in mine[0]),
        new_tokens=sum(len(answer) for run in every for answer in run.token_ids),
        decoded=decoded,
        same_as_first=_same(mine, firsts) if compare else None,
        draft_acceptance_rate=sum(each.accepted for each in rounds) / drafted if drafted else None,
        mean_acceptance_length=decoded / count if drafted else None,
        work=tuple((*round_, times) for round_, times in sorted(work.items())),
        c=_median([cost.c for cost in made]),
        verify_cost=_median([cost.verify_cost for cost in made]),
        **asdict(counts),
    )


def _same(mine: Sequence[Sequence[Run]], firsts: Sequence[Sequence[Run]]) -> int:
    """Returns how many answers are the first arm's in every repeat."""
    answers, others = ([[answer for run in runs for answer in run.token_ids] for runs in arm] for arm in (mine, firsts))
    repeats = [[one == other for one, other in zip(*pair, strict=True)] for pair in zip(answers, others, strict=True)]
    return sum(map(all, zip(*repeats, strict=True)))


def _speed(runs: Sequence[Run]) -> float | None:
    """Returns tokens per second after the first ones; `None` where none came after them."""
    decoded = sum(run.decoded for run in runs)
    return decoded / sum(run.decode_seconds for run in runs) if decoded else None


def _decoding_speed(arm: Arm, runs: Sequence[Run]) -> float:
    speed = _speed(runs)
    if speed is None:
        raise ValueError(f"every answer of {arm.label} came with its first token, which leaves nothing to time.")
    return speed


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
