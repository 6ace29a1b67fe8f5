"""Greedy tokens are those of plain decoding whatever decides on the rounds; what rounds cost; what they learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import layerskip
from layerskip import CostTable, Engine
from layerskip.decoding.loop import DecodeLoop
from layerskip.decoding.ngrams import NgramIndex
from layerskip.decoding.rows import DecodeSettings
from layerskip.decoding.stop_rule import StopRule
from layerskip.decoding.stopping import Stops
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement
from tests import kit
from tests.decoding.levers_kit import (
    COMBINATIONS,
    LONGEST,
    TABLES,
    cpu_like,
    engine_of,
    gpu_like,
    looping,
    name_of,
    padded,
    recorded_drafts,
)

NEW = 24
REPEATS = [5, 9, 33, 7, 52, 18, 5, 9, 33, 7, 52, 44, 3, 5, 9, 33]
PROMPTS = [REPEATS, kit.PROMPT[:6], [8, 20, 8]]
BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "l4": kit.l4,
    "mixed": kit.mixed,
    "identical": kit.identical,
    "rejected": lambda: kit.rejected("llama"),
    "looping": lambda: looping(kit.mixed()),
    **{f"gemma2 {grade}": lambda grade=grade: kit.graded("gemma2", grade) for grade in ("none", "some", "all")},
}
NEW_COMBINATIONS = COMBINATIONS[1:]
"""All but the one that decodes as it always has."""


@cache
def model_of(name: str) -> PreTrainedModel:
    """A model that tests share, so that none may change it."""
    return BUILDERS[name]()


@cache
def plain(name: str, prompt: tuple[int, ...], max_new_tokens: int = NEW, **arguments: Any) -> list[int]:
    """The new tokens of greedy `generate`; `arguments` are of things that can be compared."""
    ids = kit.prompt_tensor(list(prompt))
    said = kit.reference(model_of(name), ids, max_new_tokens, attention_mask=torch.ones_like(ids), **arguments)
    return said[0, len(prompt) :].tolist()


def combined(all_of_them: bool) -> pytest.MarkDecorator:
    """Returns what runs a test with combinations and tables; tables are no matter where nothing is decided by cost."""
    cases = [(options, table) for options in NEW_COMBINATIONS for table in TABLES]
    cases = [case for case in cases if case[1] == "gpu" or "auto" in case[0].values() or "adaptive" in case[0].values()]
    named = {f"{name_of(options)}-{table}": (options, table) for options, table in cases}
    chosen = named if all_of_them else SOME
    return pytest.mark.parametrize(("options", "table"), [pytest.param(*named[name], id=name) for name in chosen])


SOME = ("2-static-checked-gpu", "2-adaptive-trusted-cpu", "auto-static-trusted-gpu", "auto-adaptive-checked-gpu")
"""Every option is in two of these."""
combinations, some_combinations = combined(True), combined(False)


# Greedy tokens


@combinations
def test_one_row_equals_generate(options: dict[str, Any], table: str) -> None:
    for name in ("l4", "mixed", "identical", "rejected", "looping", "gemma2 some"):
        result = engine_of(model_of(name), options, table).generate(kit.prompt_tensor(REPEATS), max_new_tokens=NEW)
        assert result.new_token_ids[0] == plain(name, tuple(REPEATS)), name


@combinations
def test_rows_of_different_lengths_equal_generate(options: dict[str, Any], table: str) -> None:
    ids, mask = padded(PROMPTS)
    for name in ("mixed", "looping"):
        engine = engine_of(model_of(name), options, table)
        result = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
        for row, prompt in enumerate(PROMPTS):
            assert result.new_token_ids[row] == plain(name, tuple(prompt)), (name, row)


@some_combinations
def test_every_model_equals_generate_row_by_row(options: dict[str, Any], table: str) -> None:
    ids, mask = padded(PROMPTS)
    for name in BUILDERS:
        engine = engine_of(model_of(name), options, table)
        result = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
        for row, prompt in enumerate(PROMPTS):
            assert result.new_token_ids[row] == plain(name, tuple(prompt)), (name, row)


@some_combinations
def test_rows_end_with_eos_as_generate_ends_them(options: dict[str, Any], table: str) -> None:
    """At different places; the row that goes on longest is not the first."""
    ids, mask = padded(PROMPTS)
    for name in ("mixed", "identical", "looping"):
        eos = plain(name, tuple(PROMPTS[0]))[5]
        arguments = {"max_new_tokens": NEW, "eos_token_id": eos, "pad_token_id": 0}
        expected = kit.reference(model_of(name), ids, attention_mask=mask, **arguments)
        result = engine_of(model_of(name), options, table).generate(ids, attention_mask=mask, **arguments)
        assert torch.equal(result.sequences, expected), name
        assert result.finish_reasons[0] == "stop"
        assert all(tokens.index(eos) == len(tokens) - 1 for tokens in result.new_token_ids if eos in tokens)


PROCESSED: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.4},
    "no repeated trigram": {"no_repeat_ngram_size": 3},
    "both, and bad words": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[3], [7, 52]]},
}


@pytest.mark.parametrize("processed", PROCESSED)
@some_combinations
def test_processed_scores_give_generates_tokens(options: dict[str, Any], table: str, processed: str) -> None:
    ids, mask = padded(PROMPTS)
    for name in ("mixed", "looping"):
        arguments = {"max_new_tokens": NEW, "pad_token_id": 0, **PROCESSED[processed]}
        expected = kit.reference(model_of(name), ids, attention_mask=mask, **arguments)
        result = engine_of(model_of(name), options, table).generate(ids, attention_mask=mask, **arguments)
        assert torch.equal(result.sequences, expected), name


@some_combinations
def test_a_trimmed_draft_head_gives_generates_tokens(options: dict[str, Any], table: str) -> None:
    """With half of the emitted tokens in it, plainly and behind processors."""
    for name in ("mixed", "looping", "identical"):
        emitted = plain(name, tuple(REPEATS))
        ids = torch.tensor(list(dict.fromkeys([*emitted[::2], *range(20)])))
        engine = engine_of(model_of(name), options, table, draft_token_ids=ids)
        assert engine.generate(kit.prompt_tensor(REPEATS), max_new_tokens=NEW).new_token_ids[0] == emitted, name
        expected = kit.reference(model_of(name), kit.prompt_tensor(REPEATS), NEW, repetition_penalty=1.4)
        result = engine.generate(kit.prompt_tensor(REPEATS), max_new_tokens=NEW, repetition_penalty=1.4)
        assert torch.equal(result.sequences, expected), name


@some_combinations
def test_stopping_criteria_and_scores_are_as_generates(options: dict[str, Any], table: str) -> None:
    def ends(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= len(REPEATS) + 3 and int(ids[0, -1]) % 3 == 0)

    model = model_of("mixed")
    arguments = {"max_new_tokens": NEW, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    expected: Any = kit.reference(
        model,
        kit.prompt_tensor(REPEATS),
        **arguments,
        stopping_criteria=[ends],
        return_dict_in_generate=True,
    )
    result = engine_of(model, options, table).generate(
        kit.prompt_tensor(REPEATS), stopping_criteria=[ends], **arguments
    )
    assert torch.equal(result.sequences, expected.sequences)
    assert result.finish_reasons == ["criteria"]
    assert len(REPEATS) + 3 <= result.sequences.shape[1] < len(REPEATS) + NEW
    assert result.scores is not None and result.logits is not None
    torch.testing.assert_close(torch.stack(result.scores), torch.stack(expected.scores), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), atol=1e-4, rtol=0)


@some_combinations
def test_the_hook_gives_generates_tokens(options: dict[str, Any], table: str) -> None:
    ids, mask = padded(PROMPTS)
    for name in ("mixed", "looping"):
        arguments = {"attention_mask": mask, "max_new_tokens": NEW, "repetition_penalty": 1.1, "pad_token_id": 0}
        hook = layerskip.self_speculative(cost_table=TABLES[table], **options)
        given = model_of(name).generate(ids, custom_generate=hook, **arguments)
        assert torch.equal(given, kit.reference(model_of(name), ids, **arguments)), name


@some_combinations
def test_a_turn_behind_a_cache_equals_one_that_is_told_everything(options: dict[str, Any], table: str) -> None:
    """Where spans are copied, they come from what the cache holds: what is new says nothing twice."""
    for name in ("mixed", "looping"):
        model = model_of(name)
        engine = engine_of(model, options, table)
        first = engine.generate(kit.prompt_tensor(REPEATS), max_new_tokens=12, return_cache=True)
        said = [*first.sequences[0].tolist(), 9, 33]
        result = engine.generate(kit.prompt_tensor(said), max_new_tokens=NEW, cache=first.cache)
        assert result.new_token_ids[0] == plain(name, tuple(said)), name
        whole = engine.generate(kit.prompt_tensor(said), max_new_tokens=NEW)
        # Rounds are the same as without the cache, copies among them.
        for key in ("rounds", "acceptance_histogram", "draft_tokens_processed", "draft_tokens_verified"):
            assert getattr(result.statistics, key) == getattr(whole.statistics, key), (name, key)


@pytest.mark.parametrize("copies", ["checked", "trusted"])
def test_copies_come_from_the_cached_part(copies: str) -> None:
    """The new turn says nothing twice."""
    model = model_of("looping")
    engine = engine_of(model, {"exit_layer": 2, "copy_ngrams": copies})
    first = engine.generate(kit.prompt_tensor(REPEATS), max_new_tokens=12, return_cache=True)
    # Each token follows from the one before: with what prefill gives, this one is the end of a pair of the cache.
    said = [*first.sequences[0].tolist(), first.new_token_ids[0][2]]
    new = plain("looping", tuple(said), 3)
    with recorded_drafts() as seen:
        engine.generate(kit.prompt_tensor(said), max_new_tokens=6, cache=first.cache)
    expected = NgramIndex([*said, new[0]]).continuation(4).tokens
    assert seen[0].draft.rows[0].copy.tokens == expected != []


# Counted work


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


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7])
def test_cut_rounds_count_as_in_plain_rounds(max_new_tokens: int) -> None:
    """Also where an EOS token stands among accepted drafts."""
    for options in NEW_COMBINATIONS:
        for eos in (None, plain("identical", tuple(REPEATS))[4]):
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


@pytest.mark.parametrize("cells", MIXED_ROUNDS)
@pytest.mark.parametrize("name", ["mixed", "rejected", "l4", "gemma2 some"])
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


@pytest.mark.parametrize(
    "more", [{}, {"exit_layer": "auto"}, {"exit_layer": "auto", "copy_ngrams": "checked"}], ids=str
)
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
