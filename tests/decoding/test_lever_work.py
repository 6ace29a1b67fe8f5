"""What rounds cost that decide as they go, counted where layers run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from layerskip.decoding.loop import DecodeLoop
from layerskip.decoding.ngrams import NgramIndex
from layerskip.decoding.rows import DecodeSettings
from layerskip.decoding.stopping import Stops
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement
from tests import kit
from tests.decoding.levers_kit import (
    NEW,
    NEW_COMBINATIONS,
    PROMPTS,
    REPEATS,
    TABLES,
    combinations,
    engine_of,
    model_of,
    padded,
    plain,
    recorded_drafts,
    some_combinations,
)


@combinations
def test_one_row_costs_prompt_plus_drafts_plus_rounds(options: dict[str, Any], table: str) -> None:
    for name in ("l4", "identical", "looping"):
        model = model_of(name)
        with kit.counted_layers(model) as counts:
            statistics = (
                engine_of(model, options, table).generate(kit.prompt_tensor(REPEATS), max_new_tokens=NEW).statistics
            )
        begin = len(REPEATS) + statistics.rounds
        early, late = begin + statistics.draft_tokens_processed, begin + statistics.draft_tokens_verified
        assert (statistics.early_layer_tokens, statistics.late_layer_tokens) == (early, late), name
        assert (counts[0], counts[-1]) == (early, late), name
        if options["exit_layer"] == kit.EXIT_LAYER:
            assert counts == [early, early, late, late], name
        else:
            # Each layer belongs to the early ones of some rounds.
            assert all(early >= low >= high >= late for low, high in pairwise(counts)), name
        assert statistics.padding_tokens == 0
        assert statistics.emitted == NEW == 1 + statistics.accepted + statistics.rounds - statistics.cut
        assert sum(statistics.rounds_by_exit.values()) == statistics.rounds
        if options["copy_ngrams"] != "checked":
            assert statistics.draft_tokens_processed == statistics.draft_tokens_verified


@some_combinations
def test_rows_of_a_batch_cost_the_same_each_and_padding_beside(options: dict[str, Any], table: str) -> None:
    ids, mask = padded(PROMPTS)
    for name in ("mixed", "looping"):
        model = model_of(name)
        with kit.counted_layers(model) as counts:
            total = engine_of(model, options, table).generate(ids, attention_mask=mask, max_new_tokens=NEW).statistics
        for row, prompt in zip(total.per_row, PROMPTS, strict=True):
            assert row.early_layer_tokens == len(prompt) + row.draft_tokens_processed + row.rounds
            assert row.late_layer_tokens == len(prompt) + row.draft_tokens_verified + row.rounds
            assert row.emitted == NEW == 1 + row.accepted + row.rounds - row.cut
            if options["copy_ngrams"] != "checked":
                assert row.draft_tokens_processed == row.draft_tokens_verified
        for key in ("early_layer_tokens", "late_layer_tokens", "padding_tokens", "draft_tokens_verified"):
            assert getattr(total, key) == sum(getattr(row, key) for row in total.per_row)
        assert counts[0] == total.early_layer_tokens + total.padding_tokens
        assert total.padding_tokens > 0


@pytest.mark.parametrize(("max_new_tokens", "end"), [(1, None), (2, None), (3, None), (7, None), (7, 4)])
def test_cut_rounds_count_as_in_plain_rounds(max_new_tokens: int, end: int | None) -> None:
    """Also where an EOS token stands among accepted drafts."""
    eos = None if end is None else plain("identical", tuple(REPEATS))[end]
    for options in NEW_COMBINATIONS:
        statistics = (
            engine_of(model_of("identical"), options)
            .generate(kit.prompt_tensor(REPEATS), max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=0)
            .statistics
        )
        assert statistics.emitted == 1 + statistics.accepted + statistics.rounds - statistics.cut


def test_what_copies_pass_in_vain_is_what_verification_does_not_see() -> None:
    """D − V, summed from the spans: all that was copied and is no draft."""
    for name in ("mixed", "rejected", "looping"):
        model = model_of(name)
        with recorded_drafts() as seen:
            statistics = (
                engine_of(model, {"exit_layer": 2, "copy_ngrams": "checked"})
                .generate(kit.prompt_tensor(REPEATS), max_new_tokens=NEW)
                .statistics
            )
        assert statistics.draft_tokens_verified == sum(len(each.tokens[0]) for each in seen)
        cut = 0
        for each in seen:
            span = NgramIndex([*REPEATS, *each.before[0]]).continuation(each.draft.limits[0]).tokens
            pairs = zip(span, each.tokens[0], strict=False)
            agreed = next((place for place, (copied, token) in enumerate(pairs) if copied != token), len(span))
            cut += len(span) - agreed
        assert statistics.draft_tokens_processed - statistics.draft_tokens_verified == cut


def passes_of(name: str, settings: DecodeSettings) -> list[list[tuple[int, int]]]:
    """Returns for each layer what passed it: how many tokens were committed then, and the position."""
    layered = LayeredModel(model_of(name))
    passed: list[list[tuple[int, int]]] = [[] for _ in range(kit.NUM_LAYERS)]
    intact = layered.run

    def recording(hidden: torch.Tensor, start: int, stop: int, *, placement: Placement, **rest: Any) -> torch.Tensor:
        committed = run.rows[0].committed
        for layer in range(start, stop):
            passed[layer].extend((committed, position) for position in placement.positions[0].tolist())
        return intact(hidden, start, stop, placement=placement, **rest)

    layered.run = recording  # type: ignore[method-assign]
    run = DecodeLoop(layered, [REPEATS], settings)
    for _ in run.blocks():
        pass
    return passed


@some_combinations
def test_committed_tokens_pass_every_layer_once(options: dict[str, Any], table: str) -> None:
    costs = TABLES[table]
    settings = DecodeSettings(
        exit_layer=kit.EXIT_LAYER,
        depth=kit.NUM_LAYERS,
        num_draft_tokens=costs.max_num_draft_tokens,
        stops=Stops(NEW),
        chooses_exit=options["exit_layer"] == "auto",
        stops_drafts_early=options["draft_stop"] == "adaptive",
        copies_ngrams=options["copy_ngrams"] == "checked",
        trusts_copies=options["copy_ngrams"] == "trusted",
        costs=costs,
    )
    committed = len(REPEATS) + NEW - 1
    for name in ("mixed", "identical", "looping"):
        for seen in passes_of(name, settings):
            assert {position for _, position in seen} >= set(range(committed))
            # What was settled before a round does not pass in it, but for the last token, which no round has passed.
            assert all(position >= before - 1 for before, position in seen if before > len(REPEATS))
            # Nor does a place in one round twice, but for copies that were wrong.
            assert options["copy_ngrams"] == "checked" or len(seen) == len(set(seen))
