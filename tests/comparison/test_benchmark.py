"""Measuring: figures from recorded runs, and what is run in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from layerskip import Engine
from layerskip.comparison.arms import Arm, RoundCounts, Run, engine_arm, transformers_arm
from layerskip.comparison.batches import Batch
from layerskip.comparison.benchmark import Sample, category_ratios, round_costs, summarise, timed, tune, warm_up
from layerskip.comparison.hooks import Counts
from layerskip.comparison.table import format_table
from tests import kit

TOKENS = list(range(11))
BATCHES = [Batch.of([kit.PROMPT]), Batch.of([kit.PROMPT[:5]])]


def unused(batch: Batch, max_new_tokens: int) -> Run:
    raise AssertionError("a summary runs nothing")


FIRST, SLOW = Arm("first", unused), Arm("slow", unused, num_draft_tokens=4)


def samples(arm: Arm, seconds: Sequence[Sequence[float]], tokens: list[int] = TOKENS) -> list[Sample]:
    """Recorded runs of ten tokens after the first: seconds of each repeat, prompt by prompt."""
    return [
        Sample(arm.label, batch, repeat, Run([tokens], len(tokens) - 1, taken / 10, taken))
        for repeat, each in enumerate(seconds)
        for batch, taken in enumerate(each)
    ]


def playing(name: str, notes: list[str], fails_at: int | None = None, **settings: Any) -> Arm:
    """An arm that notes its name when it runs; from a certain run on it fails."""
    left = [fails_at]

    def generate(batch: Batch, max_new_tokens: int) -> Run:
        notes.append(name)
        if left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("worn out\nbeyond repair")
        return Run([TOKENS[:max_new_tokens]], max_new_tokens - 1, 0.5, 1.0)

    return Arm(name, generate, **settings)


# Figures


def test_ratios_are_medians_over_repeats_and_may_fall_below_one() -> None:
    runs = samples(FIRST, [[1.0], [2.0], [4.0]]) + samples(SLOW, [[2.0], [2.5], [16.0]], [0] * 11)
    first, slow = summarise([FIRST, SLOW], runs)
    assert (first.ratio, first.decode_tokens_per_second, first.lowest, first.highest) == (1.0, 5.0, 2.5, 10.0)
    assert (slow.ratio, slow.lowest_ratio, slow.highest_ratio) == (0.5, 0.25, 0.8)
    assert (first.same_as_first, slow.same_as_first, slow.answers) == (1, 0, 1)
    assert (slow.label, slow.prefill_seconds, slow.new_tokens, slow.decoded) == ("slow γ=4", 0.25, 33, 30)


def test_prompts_of_a_repeat_add_up() -> None:
    runs = samples(FIRST, [[1.0, 3.0]]) + samples(SLOW, [[4.0, 4.0]])
    first, slow = summarise([FIRST, SLOW], list(reversed(runs)))
    assert (first.decode_tokens_per_second, slow.decode_tokens_per_second, slow.ratio) == (5.0, 2.5, 0.5)


def test_an_answer_is_the_same_if_it_is_so_in_every_repeat() -> None:
    runs = samples(FIRST, [[1.0, 1.0]] * 2) + samples(SLOW, [[1.0, 1.0]] * 2)
    runs[-1] = replace(runs[-1], run=Run([[0] * 11], 10, 0.1, 1.0))
    assert summarise([FIRST, SLOW], runs)[1].same_as_first == 1
    assert summarise([FIRST, SLOW], runs, compare=False)[1].same_as_first is None


def test_a_repeat_that_was_broken_off_does_not_count() -> None:
    """Nor do prompts that not every arm has answered, where there is nothing better."""
    whole = samples(FIRST, [[1.0, 1.0]]) + samples(SLOW, [[2.0, 2.0]])
    rest = [Sample(arm.label, 0, 1, Run([TOKENS], 10, 0.1, 100.0)) for arm in (FIRST, SLOW)]
    assert summarise([FIRST, SLOW], whole + rest) == summarise([FIRST, SLOW], whole)
    (_, slow) = summarise([FIRST, SLOW], whole[:-1])
    assert (slow.answers, slow.ratio) == (1, 0.5)
    with pytest.raises(ValueError, match="no prompt was answered by all arms"):
        summarise([FIRST, SLOW], whole[:2])
    assert [measured.label for measured in summarise([FIRST], whole[:2])] == ["first"]


def test_answers_that_come_at_once_have_no_speed() -> None:
    runs = [*samples(FIRST, [[1.0]]), Sample(SLOW.label, 0, 0, Run([[1]], 0, 1.0, 0.0))]
    with pytest.raises(ValueError, match=r"every answer of slow γ=4 came with its first token"):
        summarise([FIRST, SLOW], runs)


def test_categories_have_ratios_of_their_own() -> None:
    runs = samples(FIRST, [[1.0, 1.0, 1.0]] * 2) + samples(SLOW, [[2.0, 0.5, 1.0], [4.0, 0.5, 1.0]])
    ratios = category_ratios([FIRST, SLOW], runs, ["hard", "easy", None])
    assert ratios == {"hard": {"first": 1.0, "slow γ=4": 0.375}, "easy": {"first": 1.0, "slow γ=4": 2.0}}
    assert category_ratios([FIRST, SLOW], runs[:3], ["hard", "easy", None]) == {}
    at_once = [*samples(FIRST, [[1.0]]), Sample(SLOW.label, 0, 0, Run([[1]], 0, 1.0, 0.0))]
    assert category_ratios([FIRST, SLOW], at_once, ["short"]) == {"short": {"first": 1.0, "slow γ=4": None}}


def test_what_was_counted_stands_beside_what_was_timed() -> None:
    counts = Counts(layer_tokens=4.5, weight_bytes=100, cache_bytes=10, compile_seconds=7.0)
    first, slow = summarise([FIRST, SLOW], samples(FIRST, [[1.0]]) + samples(SLOW, [[1.0]]), counts={"first": counts})
    assert (first.layer_tokens, first.weight_bytes, first.cache_bytes, first.compile_seconds) == (4.5, 100, 10, 7.0)
    assert (slow.layer_tokens, slow.weight_bytes) == (None, None)


ROUNDS = RoundCounts(rounds=3, drafted=8, accepted=5, draft_tokens_processed=9, draft_seconds=4.5, verify_seconds=6.0)


def test_costs_of_rounds_are_counted_in_steps_of_plain_decoding() -> None:
    run = Run([[1] * 9], 8, 1.0, 12.0, ROUNDS)
    costs = round_costs([run, run], seconds_per_token=1.0)
    assert costs is not None
    assert (costs.c, costs.verify_cost) == (0.5, 2.0)
    slower = round_costs([run], seconds_per_token=2.0)
    assert slower is not None
    assert (slower.c, slower.verify_cost) == (0.25, 1.0)


def test_what_drafts_nothing_has_no_costs() -> None:
    assert round_costs([Run([[1]], 0, 1.0, 1.0)], 1.0) is None
    plain = replace(ROUNDS, drafted=0, accepted=0, draft_tokens_processed=0)
    assert round_costs([Run([[1]], 0, 1.0, 1.0, plain)], 1.0) is None
    assert round_costs([Run([[1], [2]], 0, 1.0, 1.0, ROUNDS)], 1.0) is None


def test_figures_of_rounds_are_of_all_timed_runs() -> None:
    runs = [Sample("slow γ=4", 0, repeat, Run([TOKENS], 10, 1.0, 12.0, ROUNDS)) for repeat in range(2)]
    first, slow = summarise([FIRST, SLOW], samples(FIRST, [[10.0], [10.0]]) + runs)
    assert (slow.draft_acceptance_rate, slow.mean_acceptance_length) == (5 / 8, 10 / 3)
    assert (slow.c, slow.verify_cost) == (0.5, 2.0)
    assert (first.draft_acceptance_rate, first.mean_acceptance_length, first.c) == (None,) * 3


def test_rounds_of_one_kind_add_up() -> None:
    runs = samples(FIRST, [[1.0, 1.0]])
    for batch, work in enumerate([((2, 3, 3, 4), (4, 0, 0, 1)), ((2, 1, 1, 2), (2, 3, 3, 5))]):
        runs.append(Sample("slow γ=4", batch, 0, Run([TOKENS], 10, 1.0, 12.0, replace(ROUNDS, work=work))))
    first, slow = summarise([FIRST, SLOW], runs)
    assert slow.work == ((2, 1, 1, 2), (2, 3, 3, 9), (4, 0, 0, 1))
    assert first.work == ()


# Running


def test_arms_take_turns_on_every_prompt() -> None:
    notes: list[str] = []
    made = list(timed([playing("a", notes), playing("b", notes)], BATCHES, 4, 2))
    assert notes == ["a", "b"] * 4
    assert [(sample.arm, sample.batch, sample.repeat) for sample in made] == [
        (arm, batch, repeat) for repeat in (0, 1) for batch in (0, 1) for arm in ("a", "b")
    ]
    assert all(sample.run.token_ids == [TOKENS[:4]] for sample in made)


def test_an_interrupted_measurement_goes_on() -> None:
    arms = [playing("a", []), playing("b", [])]
    done = [(sample.arm, sample.batch, sample.repeat) for sample in list(timed(arms, BATCHES, 4, 2))[:5]]
    rest = [(sample.arm, sample.batch, sample.repeat) for sample in timed(arms, BATCHES, 4, 2, done=done)]
    assert rest == [("b", 0, 1), ("a", 1, 1), ("b", 1, 1)]


def test_an_arm_that_fails_is_taken_out_and_the_others_go_on() -> None:
    notes: list[str] = []
    arms = [playing("a", notes), playing("b", notes, fails_at=1), playing("c", notes)]
    failed: dict[str, str] = {}
    made = list(timed(arms, BATCHES, 4, 2, failed=failed))
    assert failed == {"b": "RuntimeError: worn out"}
    assert notes == ["a", "b", "c"] * 2 + ["a", "c"] * 2
    assert [sample.arm for sample in made].count("b") == 1
    with pytest.raises(RuntimeError, match="worn out"):
        list(timed([playing("b", [], fails_at=1)], BATCHES, 4, 1))


def test_every_arm_warms_up_on_the_same_prompts() -> None:
    notes: list[str] = []
    failed: dict[str, str] = {}
    arms = [playing("a", notes), playing("b", notes, fails_at=0), playing("c", notes)]
    assert warm_up(arms, BATCHES * 3, 4, failed=failed) == {"a": Counts(), "c": Counts()}
    assert failed == {"b": "RuntimeError: worn out"}
    assert [notes.count(name) for name in "abc"] == [4, 1, 4]


def test_warming_up_counts_work_and_memory() -> None:
    """Both run every layer for prompt + 7 tokens, over batches of 10 and 5 tokens with 8 new ones each."""
    model = kit.mixed()
    arms = [
        engine_arm("ours", Engine(model), strategy="autoregressive"),
        transformers_arm("theirs", model),
        engine_arm("drafts", Engine(model), exit_layer=2, num_draft_tokens=3),
    ]
    counts = warm_up(arms, BATCHES, 8)
    plain = kit.NUM_LAYERS * (10 + 7 + 5 + 7) / 16
    assert [counts[label].layer_tokens for label in ("ours", "theirs")] == [plain, plain]
    assert counts["drafts E=2 γ=3"].layer_tokens > plain
    assert len({each.weight_bytes for each in counts.values()}) == 1
    assert all(
        each.cache_bytes and each.peak_bytes is None and each.compile_seconds is None for each in counts.values()
    )


def test_answers_of_one_token_leave_nothing_to_time() -> None:
    """Which the prompts of the warm-up alone do not tell: others may be answered at length."""
    first = kit.without_cache(kit.mixed(), [44, 3], 1)[0]
    arm = engine_arm("plain", Engine(kit.mixed(eos_token_id=first)), stop_at_eos=True, strategy="autoregressive")
    short, long = Batch.of([[44, 3]]), Batch.of([kit.PROMPT])
    assert warm_up([arm], [short], 4)["plain"].layer_tokens == kit.NUM_LAYERS * 2
    with pytest.raises(ValueError, match="came with its first token"):
        summarise([arm], list(timed([arm], [short], 4, 1)))
    (measured,) = summarise([arm], list(timed([arm], [short, long], 4, 1)))
    assert (measured.answers, measured.decoded) == (2, 3)


@pytest.mark.parametrize(("max_new_tokens", "repeats", "name"), [(1, 1, "max_new_tokens=1"), (4, 0, "repeats=0")])
def test_nothing_to_measure_is_refused(max_new_tokens: int, repeats: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        next(timed([playing("a", [])], BATCHES, max_new_tokens, repeats))


@pytest.mark.parametrize("run", [warm_up, lambda *arguments: next(timed(*arguments, 1))])
def test_arms_are_told_apart_by_their_labels(run: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="share labels"):
        run([playing("a", []), playing("a", [])], BATCHES, 4)


def paced(name: str, drafts: int, seconds: float) -> Arm:
    """An arm with a draft length, whose ten tokens after the first take some seconds."""
    return Arm(name, lambda batch, max_new_tokens: Run([TOKENS], 10, 0.5, seconds), num_draft_tokens=drafts)


def test_the_fastest_of_each_name_is_chosen() -> None:
    arms = [Arm("plain", unused), paced("a", 2, 5.0), paced("a", 4, 2.0), paced("b", 2, 1.0), paced("b", 4, 2.5)]
    chosen, speeds = tune(arms, BATCHES, 11)
    assert [arm.label for arm in chosen] == ["plain", "a γ=4", "b γ=2"]
    assert speeds == {"a γ=2": 2.0, "a γ=4": 5.0, "b γ=2": 10.0, "b γ=4": 4.0}


def test_what_fails_while_tuning_is_not_chosen() -> None:
    failed: dict[str, str] = {}
    arms = [paced("a", 2, 5.0), playing("a", [], fails_at=1, num_draft_tokens=4)]
    chosen, speeds = tune(arms, BATCHES, 11, failed=failed)
    assert [arm.label for arm in chosen] == ["a γ=2"]
    assert (list(speeds), failed) == (["a γ=2"], {"a γ=4": "RuntimeError: worn out"})


def test_a_table_aligns_its_columns() -> None:
    lines = format_table(["name", "figure"], [["a", 1.234], ["longer", None]]).splitlines()
    assert lines == ["name    figure", "------  ------", "a         1.23", "longer       –"]
