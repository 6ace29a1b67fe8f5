"""Measuring: figures from recorded runs, and counts from real ones."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from layerskip import Engine
from layerskip.comparison.benchmark import (
    Arm,
    Batch,
    Run,
    engine_arm,
    measure,
    round_costs,
    share_outside_modules,
    transformers_arm,
)
from layerskip.comparison.hooks import layer_tokens, module_seconds
from layerskip.comparison.table import format_table
from layerskip.decoding.statistics import Statistics
from tests import kit


def recorded(name: str, seconds: list[float], token_ids: list[int]) -> Arm:
    """An arm whose timed runs take the given times; the first pass and what follows it are not timed."""
    left = [*[1.0] * 3, *seconds]

    def generate(batch: Batch, max_new_tokens: int) -> Run:
        return Run([token_ids], len(token_ids) - 1, 0.5, left.pop(0))

    return Arm(name, generate)


def test_ratios_are_medians_over_repeats_and_may_fall_below_one() -> None:
    tokens = list(range(11))
    arms = [recorded("first", [1.0, 2.0, 4.0], tokens), recorded("slow", [2.0, 2.5, 16.0], [0] * 11)]
    *_, (first, slow) = measure(kit.l4(), arms, [Batch.of([kit.PROMPT])], 11, repeats=3)
    assert (first.ratio, first.decode_tokens_per_second, first.lowest, first.highest) == (1.0, 5.0, 2.5, 10.0)
    assert slow.ratio == 0.5
    assert (first.same_as_first, slow.same_as_first) == (1, 0)


def test_layer_tokens_of_plain_decoding_are_layers_times_tokens() -> None:
    model = kit.mixed()
    for arm in (engine_arm("ours", Engine(model), strategy="autoregressive"), transformers_arm("theirs", model)):
        with layer_tokens(model) as counted:
            run = arm.generate(Batch.of([kit.PROMPT]), 8)
        assert counted == [kit.NUM_LAYERS * (len(kit.PROMPT) + 7)]
        assert run.token_ids == [kit.without_cache(model, kit.PROMPT, 8)]
        assert run.decoded == 7


def test_first_tokens_that_arrive_together_are_not_counted_as_decoded() -> None:
    model = kit.identical()
    model.generation_config.num_assistant_tokens = 4
    ids = Batch.of([kit.PROMPT])
    run = transformers_arm("theirs", model, assistant_early_exit=kit.EXIT_LAYER).generate(ids, 16)
    assert run.token_ids == [kit.without_cache(model, kit.PROMPT, 16)]
    assert run.decoded < 15
    assert share_outside_modules(model, transformers_arm("a", model, assistant_early_exit=2), ids, 16) is None


def counted(**changes: Any) -> Statistics:
    """Statistics of a run of 3 rounds with 9 drafts and 8 tokens after the first."""
    result = Engine(kit.mixed()).generate(kit.prompt_tensor(), strategy="autoregressive", max_new_tokens=2)
    figures = {"rounds": 3, "draft_tokens_processed": 9, "emitted": 9, "seconds": {"draft": 4.5, "verify": 6.0}}
    return replace(result.statistics, **{**figures, **changes})


def test_costs_of_rounds_are_counted_in_steps_of_plain_decoding() -> None:
    run = Run([[1] * 9], 8, 1.0, 12.0, counted())
    costs = round_costs([run, run], seconds_per_token=1.0)
    assert costs is not None
    assert (costs.c, costs.verify_cost) == (0.5, 2.0)
    assert costs.predicted == pytest.approx((8 / 3) / (2.0 + 3 * 0.5))
    slower = round_costs([run], seconds_per_token=2.0)
    assert slower is not None
    assert (slower.c, slower.verify_cost) == (0.25, 1.0)
    assert slower.predicted == pytest.approx(2 * costs.predicted)


def test_what_drafts_nothing_has_no_costs() -> None:
    assert round_costs([Run([[1]], 0, 1.0, 1.0)], 1.0) is None
    assert round_costs([Run([[1]], 0, 1.0, 1.0, counted(draft_tokens_processed=0))], 1.0) is None


def test_answers_end_at_eos_where_that_is_asked_for() -> None:
    """35 ends MIX's answer in the middle; all arms emit the same tokens up to there."""
    model = kit.mixed(eos_token_id=35)
    plain = kit.without_cache(model, [44, 3], 12)
    expected = plain[: plain.index(35) + 1]
    assert 1 < len(expected) < 12
    engine = Engine(model)
    drafts = engine_arm("ours", engine, stop_at_eos=True, exit_layer=2, num_draft_tokens=3)
    arms = [
        engine_arm("plain", engine, stop_at_eos=True, strategy="autoregressive"),
        transformers_arm("theirs", model, stop_at_eos=True),
        drafts,
        transformers_arm("early", model, drafts, stop_at_eos=True, assistant_early_exit=2),
    ]
    for arm in arms:
        assert arm.generate(Batch.of([[44, 3]]), 12).token_ids == [expected]
    assert model.generation_config.num_assistant_tokens == 3
    *_, measured = measure(model, arms, [Batch.of([[44, 3]])], 12, repeats=2)
    assert [measurement.same_as_first for measurement in measured] == [1, 1, 1, 1]
    assert [measurement.c is None for measurement in measured] == [True, True, False, True]
    assert measured[2].predicted is not None
    assert measured[2].predicted > 0
    for arm in (engine_arm("on", engine, strategy="autoregressive"), transformers_arm("on", model)):
        assert arm.generate(Batch.of([[44, 3]]), 12).token_ids == [plain]


def test_rows_of_a_batch_are_measured_together() -> None:
    """Each arm answers two prompts of different lengths at once; tokens add up and are compared row by row."""
    model = kit.mixed()
    batch = Batch.of([kit.PROMPT, kit.PROMPT[:4]])
    expected = [kit.without_cache(model, row, 8) for row in (kit.PROMPT, kit.PROMPT[:4])]
    engine = Engine(model)
    arms = [
        engine_arm("plain", engine, strategy="autoregressive"),
        transformers_arm("theirs", model),
        engine_arm("ours", engine, exit_layer=2, num_draft_tokens=3),
    ]
    for arm in arms:
        run = arm.generate(batch, 8)
        assert (run.token_ids, run.decoded) == (expected, 14)
    *_, measured = measure(model, arms, [batch], 8, repeats=1)
    assert [measurement.same_as_first for measurement in measured] == [2, 2, 2]
    assert [measurement.c for measurement in measured] == [None] * 3
    assert measured[0].draft_acceptance_rate is measured[1].draft_acceptance_rate is None
    rate = engine.generate(batch.ids, attention_mask=batch.mask, exit_layer=2, num_draft_tokens=3, max_new_tokens=8)
    assert measured[2].draft_acceptance_rate == rate.statistics.draft_acceptance_rate


def test_drawn_tokens_are_not_compared() -> None:
    model = kit.identical()
    engine = Engine(model)
    arms = [
        engine_arm("plain", engine, strategy="autoregressive", temperature=1.5),
        transformers_arm("theirs", model, temperature=1.5),
        engine_arm("ours", engine, exit_layer=2, num_draft_tokens=3, temperature=1.5),
    ]
    for arm in arms:
        assert len({tuple(arm.generate(Batch.of([kit.PROMPT]), 8).token_ids[0]) for _ in range(10)}) > 1
    *_, measured = measure(model, arms, [Batch.of([kit.PROMPT])], 8, repeats=1, compare=False)
    assert [measurement.same_as_first for measurement in measured] == [None] * 3
    assert measured[2].draft_acceptance_rate == 1.0


def test_answers_of_one_token_leave_nothing_to_time() -> None:
    first = kit.without_cache(kit.mixed(), [44, 3], 1)[0]
    arm = engine_arm("plain", Engine(kit.mixed(eos_token_id=first)), stop_at_eos=True, strategy="autoregressive")
    with pytest.raises(ValueError, match="ends with its first token"):
        next(measure(kit.mixed(), [arm], [Batch.of([[44, 3]])], 4, 1))


def test_time_inside_modules_is_what_their_calls_take() -> None:
    model = kit.l4()
    handle = model.get_output_embeddings().register_forward_hook(lambda *_: time.sleep(0.01))
    with module_seconds(model) as seconds:
        Engine(model).generate(kit.prompt_tensor(), strategy="autoregressive", max_new_tokens=4)
    handle.remove()
    assert seconds[0] >= 0.04
    share = share_outside_modules(model, transformers_arm("theirs", model), Batch.of([kit.PROMPT]), 8)
    assert share is not None
    assert 0 < share < 1


@pytest.mark.parametrize(("max_new_tokens", "repeats", "name"), [(1, 1, "max_new_tokens=1"), (4, 0, "repeats=0")])
def test_nothing_to_measure_is_refused(max_new_tokens: int, repeats: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        next(measure(kit.l4(), [], [], max_new_tokens, repeats))


def test_a_table_aligns_its_columns() -> None:
    lines = format_table(["name", "figure"], [["a", 1.234], ["longer", None]]).splitlines()
    assert lines == ["name    figure", "------  ------", "a         1.23", "longer       –"]
