"""Rounds of several kinds by turns, and rounds that end where they no longer pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import CostTable, Engine
from layerskip.decoding.loop import DecodeLoop
from layerskip.decoding.rows import DecodeSettings
from layerskip.decoding.stop_rule import StopRule
from layerskip.decoding.stopping import Stops
from layerskip.model.layered import LayeredModel
from tests import kit
from tests.decoding.levers_kit import (
    LONGEST,
    PROMPTS,
    REPEATS,
    TABLES,
    cpu_like,
    gpu_like,
    model_of,
    plain,
    recorded_drafts,
)

# Rounds without drafts between others


def rounds_of(model: PreTrainedModel, cells: Sequence[tuple[int, int]], prompts: Sequence[list[int]]) -> DecodeLoop:
    """Returns a loop that has run rounds of other exits and lengths by turns, all of its budget."""
    settings = DecodeSettings(2, kit.NUM_LAYERS, 3, Stops(40))
    run = DecodeLoop(LayeredModel(model), prompts, settings)
    number = 0
    blocks = run.blocks()
    next(blocks)
    while run.active:
        exit_layer, drafts = cells[number % len(cells)]
        run.chain.settings = replace(run.chain.settings, exit_layer=exit_layer, num_draft_tokens=drafts)
        next(blocks)
        number += 1
    return run


MIXED_ROUNDS = {
    "0 and 3 drafts": [(2, 0), (2, 3)],
    "3, then twice none": [(2, 3), (2, 0), (2, 0)],
    "exits 2, 3, plain": [(2, 3), (3, 2), (4, 0)],
    "plain and exit 3": [(4, 0), (3, 4)],
    "deep to shallow": [(3, 3), (2, 4), (4, 0), (3, 1), (2, 0), (2, 1)],
}


@pytest.mark.parametrize("cells", MIXED_ROUNDS)
def test_rounds_of_all_kinds_by_turns_accept_all_that_a_right_exit_drafts(cells: str) -> None:
    model = model_of("identical")
    for prompts in ([REPEATS], PROMPTS):
        run = rounds_of(model, MIXED_ROUNDS[cells], prompts)
        for row, prompt in zip(run.rows, prompts, strict=True):
            assert row.tokens == plain("identical", tuple(prompt), 40)
            assert all(drafted == accepted for drafted, accepted in row.tally.outcomes)
            assert sum(accepted * count for (_, accepted), count in row.tally.outcomes.items()) > 0
        assert {exit_layer for exit_layer, _, _ in run.rows[0].tally.work} == {
            exit_layer for exit_layer, _ in MIXED_ROUNDS[cells]
        }


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        *(("mixed", cells) for cells in MIXED_ROUNDS),
        ("rejected", "3, then twice none"),
        ("rejected", "deep to shallow"),
        ("gemma2 some", "exits 2, 3, plain"),
        ("gemma2 some", "deep to shallow"),
    ],
)
def test_rounds_of_all_kinds_by_turns_equal_generate(name: str, cells: str) -> None:
    for prompts in ([REPEATS[:9]], PROMPTS):
        run = rounds_of(model_of(name), MIXED_ROUNDS[cells], prompts)
        for row, prompt in zip(run.rows, prompts, strict=True):
            assert row.tokens == plain(name, tuple(prompt), 40)


# Drafts that end where they no longer pay


def events(
    model: PreTrainedModel, table: CostTable, **arguments: Any
) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Returns what each round of a call emitted, by drafts that end by cost."""
    seed = arguments.pop("seed", None)
    if seed is not None:
        arguments = {**arguments, "do_sample": True, "generator": torch.Generator().manual_seed(seed)}
    options = {"exit_layer": 2, "draft_stop": "adaptive", "cost_table": table}
    exits = {name: arguments.pop(name) for name in ("exit_layer", "copy_ngrams") if name in arguments}
    stream = Engine(model, **{**options, **exits}).stream(kit.prompt_tensor(REPEATS), max_new_tokens=60, **arguments)
    return [(event.token_ids, event.accepted) for event in stream]


@pytest.mark.parametrize("more", [{}, {"exit_layer": "auto", "copy_ngrams": "checked"}], ids=str)
@pytest.mark.parametrize("seed", [None, 0])
def test_the_same_seed_and_table_give_the_same_rounds(seed: int | None, more: dict[str, Any]) -> None:
    arguments = more if seed is None else {**more, "seed": seed}
    for name in ("mixed", "looping"):
        first = events(model_of(name), gpu_like(), **arguments)
        assert events(model_of(name), gpu_like(), **arguments) == first


@pytest.mark.parametrize("seed", [None, 0])
def test_another_table_gives_other_rounds(seed: int | None) -> None:
    arguments = {} if seed is None else {"seed": seed}
    cheap, dear = (events(model_of("mixed"), table, **arguments) for table in (gpu_like(), cpu_like()))
    assert cheap != dear
    if seed is None:
        tokens = [[token for ids, _ in rounds for token in ids] for rounds in (cheap, dear)]
        assert tokens[0] == tokens[1]


def counts_of(name: str, table: CostTable, max_new_tokens: int = 120, **options: Any) -> list[int]:
    """Returns how many tokens each round drafted."""
    settings = {"exit_layer": 2, "draft_stop": "adaptive", **options}
    with recorded_drafts() as seen:
        Engine(model_of(name), cost_table=table, **settings).generate(
            kit.prompt_tensor(REPEATS), max_new_tokens=max_new_tokens
        )
    return [len(each.tokens[0]) for each in seen]


def test_a_right_exit_drafts_as_far_as_the_table_goes_where_drafts_are_cheap() -> None:
    cheap = CostTable((2,), (0.01,), ((1.0,) * (LONGEST + 1),), 1.0, 0.01, 0.01)
    counts = counts_of("identical", cheap)
    # The last rounds end with the budget.
    assert set(counts[4:-2]) == {LONGEST}


def test_a_length_of_the_call_is_a_limit() -> None:
    cheap = CostTable((2,), (0.01,), ((1.0,) * (LONGEST + 1),), 1.0, 0.01, 0.01)
    assert max(counts_of("identical", cheap, num_draft_tokens=3)) == 3


@pytest.mark.parametrize("name", ["rejected", "gemma2 none"])
@pytest.mark.parametrize("table", TABLES)
def test_an_exit_that_is_never_right_nearly_stops_drafting(name: str, table: str) -> None:
    counts = counts_of(name, TABLES[table])
    assert len(counts) == 119
    assert sum(counts[-60:]) <= 6, sum(counts)


def test_what_is_left_out_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is drafted, the next candidate is still compared with what the model says."""
    observed: list[tuple[int, float, float]] = []
    intact = StopRule.observe

    def recording(rule: StopRule, exit_layer: int, confidence: float, accepted: float) -> None:
        observed.append((exit_layer, confidence, accepted))
        intact(rule, exit_layer, confidence, accepted)

    monkeypatch.setattr(StopRule, "observe", recording)
    with recorded_drafts() as seen:
        Engine(model_of("mixed"), exit_layer=2, draft_stop="adaptive", cost_table=TABLES["cpu"]).generate(
            kit.prompt_tensor(REPEATS), max_new_tokens=60
        )
    said = plain("mixed", tuple(REPEATS), 60)
    expected = []
    for each in seen:
        (row,), place = each.draft.rows, len(each.before[0])
        candidates = [*row.tokens, *([] if row.left_out is None else [row.left_out])]
        for offset, (token, confidence) in enumerate(zip(candidates, row.confidences, strict=True)):
            if candidates[:offset] != said[place : place + offset]:
                break
            # A candidate behind accepted drafts has the model's own token beside it.
            expected.append((2, confidence, float(token == said[place + offset])))
    assert observed == expected
    left_out = [each for each in seen if not each.tokens[0] and each.draft.rows[0].left_out is not None]
    assert left_out


def test_an_exit_that_turns_right_is_drafted_with_again() -> None:
    """A rule that has seen nothing but failures recovers by what it leaves out, without a draft."""
    rule = StopRule(TABLES["gpu"])
    for _ in range(20):
        rule.observe(2, 0.5, 0.0)
    assert not rule.goes_on(2, 0, rule.chance(2, 0.5))
    for _ in range(40):
        rule.observe(2, 0.5, 1.0)
    assert rule.goes_on(2, 0, rule.chance(2, 0.5))
