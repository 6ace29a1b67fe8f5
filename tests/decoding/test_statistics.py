"""Statistics: their identities, their names, and `None` where there is nothing to divide by."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip import Engine, Statistics
from layerskip.decoding.statistics import PHASES, Tally, acceptance_by_position
from tests import kit

NAMES = [
    "strategy",
    "exit_layer",
    "num_draft_tokens",
    "rounds",
    "rounds_by_exit",
    "drafted",
    "accepted",
    "emitted",
    "cut",
    "draft_tokens_processed",
    "draft_tokens_verified",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "acceptance_by_position",
    "acceptance_histogram",
    "early_layer_tokens",
    "late_layer_tokens",
    "padding_tokens",
    "seconds",
    "compile_seconds",
    "decode_tokens_per_second",
]

# An identity that is wrong fails in nearly every example.
few = settings(max_examples=40)
# What a round may come to: (drafted, accepted), the latter never larger.
outcome = st.integers(0, 5).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
rounds = st.lists(outcome, max_size=12)


def tally_of(outcomes: list[tuple[int, int]], cut: int = 0) -> Tally:
    """Returns the counts of a row whose rounds came to `outcomes`, `cut` of them without their own token."""
    accepted = sum(accepts for _, accepts in outcomes)
    return Tally(outcomes=Counter(outcomes), emitted=1 + accepted + len(outcomes) - cut, cut=cut)


def statistics_of(*rows: list[tuple[int, int]]) -> Statistics:
    return Statistics.of([tally_of(row) for row in rows], Counter(), "self_speculative", 2, 4)


# From tallies


@few
@given(rounds, rounds)
def test_totals_are_sums_over_rows(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    together, one, other = statistics_of(first, second), statistics_of(first), statistics_of(second)
    for name in ("rounds", "drafted", "accepted", "emitted", "cut", "draft_tokens_processed"):
        assert getattr(together, name) == getattr(one, name) + getattr(other, name)


@few
@given(rounds, rounds)
def test_rates_follow_from_the_totals(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    figures = statistics_of(first, second)
    assert figures.draft_acceptance_rate == (figures.accepted / figures.drafted if figures.drafted else None)
    assert figures.mean_acceptance_length == ((figures.emitted - 2) / figures.rounds if figures.rounds else None)


@few
@given(rounds)
def test_histogram_counts_every_round_and_every_accepted_draft(outcomes: list[tuple[int, int]]) -> None:
    figures = statistics_of(outcomes)
    assert sum(figures.acceptance_histogram.values()) == figures.rounds == len(outcomes)
    assert sum(accepted * count for accepted, count in figures.acceptance_histogram.items()) == figures.accepted
    assert list(figures.acceptance_histogram) == sorted(figures.acceptance_histogram)


@few
@given(rounds)
def test_acceptance_by_position_equals_the_definition(outcomes: list[tuple[int, int]]) -> None:
    rates = acceptance_by_position(Counter(outcomes))
    assert len(rates) == max((drafted for drafted, _ in outcomes), default=0)
    for index, rate in enumerate(rates, start=1):
        accepted_so_far = [accepted >= index for drafted, accepted in outcomes if drafted >= index]
        assert rate == sum(accepted_so_far) / len(accepted_so_far)


def test_acceptance_by_position_divides_by_the_rounds_that_drafted_so_far() -> None:
    """One round of two drafts and one of four: the third draft was tried once, and accepted."""
    assert acceptance_by_position(Counter([(2, 1), (4, 3)])) == (1.0, 0.5, 1.0, 0.0)


def test_a_row_that_ended_with_prefill_has_no_rates() -> None:
    figures = statistics_of([])
    assert figures.draft_acceptance_rate is None
    assert figures.mean_acceptance_length is None
    assert figures.decode_tokens_per_second is None
    assert figures.acceptance_by_position == ()
    assert figures.acceptance_histogram == {}


def test_rounds_that_drafted_nothing_have_a_length_but_no_acceptance_rate() -> None:
    figures = statistics_of([(0, 0), (0, 0)])
    assert figures.draft_acceptance_rate is None
    assert figures.mean_acceptance_length == 1.0
    assert figures.acceptance_by_position == ()
    assert figures.acceptance_histogram == {0: 2}


def test_all_rejected_is_a_rate_of_zero_and_not_none() -> None:
    assert statistics_of([(4, 0)]).draft_acceptance_rate == 0.0


def test_tokens_per_second_leaves_out_prefill_and_its_tokens() -> None:
    seconds = Counter({"prefill": 100.0, "draft": 1.0, "verify": 2.0, "other": 1.0})
    figures = Statistics.of([tally_of([(4, 3)]), tally_of([(4, 3)])], seconds, "self_speculative", 2, 4)
    assert figures.decode_tokens_per_second == 8 / 4.0
    assert figures.seconds == dict(seconds)


def test_seconds_name_every_phase_even_where_none_was_spent() -> None:
    assert statistics_of([(1, 1)]).seconds == dict.fromkeys(PHASES, 0)
    assert PHASES == ("prefill", "draft", "verify", "other")


# Several calls


@few
@given(st.lists(st.lists(rounds, min_size=1, max_size=3), min_size=1, max_size=3))
def test_calls_together_are_one_call_of_all_their_rows(calls: list[list[list[tuple[int, int]]]]) -> None:
    """Not a mean of rates: a call that drafted four once and one that drafted one often count by their rounds."""
    together = Statistics.total([statistics_of(*rows) for rows in calls])
    assert together == statistics_of(*(row for rows in calls for row in rows))


def test_calls_together_keep_their_rows_and_add_up_their_times() -> None:
    one, other = speculate(), speculate(max_new_tokens=5)
    together = Statistics.total([one, other])
    assert together.per_row == one.per_row + other.per_row
    assert together.seconds == {phase: one.seconds[phase] + other.seconds[phase] for phase in PHASES}
    assert together.early_layer_tokens == one.early_layer_tokens + other.early_layer_tokens
    assert together.emitted == one.emitted + other.emitted
    assert Statistics.total([one]) == one


@pytest.mark.parametrize("others", [[], [{"exit_layer": 3}], [{"strategy": "autoregressive"}]])
def test_calls_of_different_settings_are_not_added_up(others: list[dict[str, Any]]) -> None:
    calls = [speculate(**other) for other in others]
    with pytest.raises(ValueError, match="pass one or more calls of the same strategy"):
        Statistics.total([speculate(), *calls] if calls else [])


# Names


def test_names_are_those_of_the_documentation() -> None:
    """With the counts they come from, which do not appear in JSON."""
    assert [field.name for field in fields(Statistics)] == [*NAMES, "per_row", "tallies"]


@cache
def speculate(**arguments: Any) -> Statistics:
    """Returns the statistics of MIX for two prompts, one of which ends early."""
    settings = {"max_new_tokens": 24, "eos_token_id": late_token(), "pad_token_id": 0, **arguments}
    return Engine(kit.mixed(), exit_layer=2, num_draft_tokens=4).generate(two_prompts(), **settings).statistics


def two_prompts() -> torch.Tensor:
    return torch.stack([kit.prompt_tensor()[0], kit.prompt_tensor()[0].flip(0)])


@cache
def late_token() -> int:
    """Returns the eighth token of MIX's answer to the second prompt."""
    return int(kit.reference(kit.mixed(), two_prompts(), 8)[1, -1])


def test_json_holds_the_same_names_and_figures() -> None:
    figures = speculate()
    stored = json.loads(json.dumps(figures.to_dict()))
    assert list(stored) == [*NAMES, "per_row"]
    for name in NAMES:
        value = getattr(figures, name)
        if name in ("acceptance_histogram", "rounds_by_exit"):
            value = {str(key): count for key, count in value.items()}
        elif name == "acceptance_by_position":
            value = list(value)
        assert stored[name] == value
    assert [list(row)[: len(NAMES)] for row in stored["per_row"]] == [NAMES] * 2
    assert [row["emitted"] for row in stored["per_row"]] == [row.emitted for row in figures.per_row]


# From runs


RUNS: dict[str, dict[str, Any]] = {
    "speculative": {},
    "long drafts": {"num_draft_tokens": 8},
    "one new token": {"max_new_tokens": 1},
    "two new tokens": {"max_new_tokens": 2},
    "autoregressive": {"strategy": "autoregressive"},
    "early exit": {"strategy": "early_exit"},
}


@pytest.mark.parametrize("run", list(RUNS))
def test_emitted_is_rows_plus_accepted_plus_rounds_minus_cut(run: str) -> None:
    figures = speculate(**RUNS[run])
    assert figures.emitted == 2 + figures.accepted + figures.rounds - figures.cut
    for row in figures.per_row:
        assert row.emitted == 1 + row.accepted + row.rounds - row.cut


@pytest.mark.parametrize("run", list(RUNS))
def test_per_row_figures_add_up_to_the_totals(run: str) -> None:
    figures = speculate(**RUNS[run])
    assert len(figures.per_row) == 2
    for name in NAMES:
        values = [getattr(row, name) for row in figures.per_row]
        total = getattr(figures, name)
        if name in ("strategy", "exit_layer", "num_draft_tokens"):
            assert values == [total] * 2
        elif name == "acceptance_histogram":
            assert dict(sum((Counter(value) for value in values), Counter())) == total
        elif isinstance(total, int):
            assert sum(values) == total
    assert all(row.per_row == () for row in figures.per_row)


@pytest.mark.parametrize("run", ["autoregressive", "early exit", "one new token"])
def test_acceptance_is_none_where_nothing_was_drafted(run: str) -> None:
    figures = speculate(**RUNS[run])
    assert figures.drafted == figures.accepted == figures.draft_tokens_processed == figures.cut == 0
    assert figures.draft_acceptance_rate is None
    assert figures.acceptance_by_position == ()


def test_statistics_name_what_was_done() -> None:
    def named(**arguments: Any) -> tuple[str, int | None, int | None]:
        figures = speculate(**arguments)
        return figures.strategy, figures.exit_layer, figures.num_draft_tokens

    assert named() == ("self_speculative", 2, 4)
    assert named(exit_layer=3, num_draft_tokens=6) == ("self_speculative", 3, 6)
    assert named(strategy="autoregressive") == ("autoregressive", None, None)
    assert named(strategy="early_exit") == ("early_exit", 2, None)


def test_one_new_token_is_no_round() -> None:
    figures = speculate(max_new_tokens=1)
    assert figures.rounds == 0
    assert figures.emitted == 2
    assert figures.mean_acceptance_length is None
    assert figures.decode_tokens_per_second is None


@pytest.mark.parametrize("run", list(RUNS))
def test_layer_tokens_are_prompt_plus_drafts_plus_rounds(run: str) -> None:
    figures = speculate(**RUNS[run])
    work = 2 * len(kit.PROMPT) + figures.draft_tokens_processed + figures.rounds
    assert figures.early_layer_tokens == work
    assert figures.late_layer_tokens == (0 if run == "early exit" else work)


def test_a_block_that_ends_at_an_eos_among_the_drafts_is_cut_there() -> None:
    """Every draft of ID is accepted; the EOS is a draft, so that the round's own target is cut away."""
    model = kit.identical()
    expected = kit.reference(model, kit.prompt_tensor())[0, len(kit.PROMPT) :].tolist()
    engine = Engine(model, exit_layer=2, num_draft_tokens=6)
    figures = engine.generate(kit.prompt_tensor(), max_new_tokens=24, eos_token_id=expected[3]).statistics
    assert (figures.emitted, figures.rounds, figures.cut) == (4, 1, 1)
    assert figures.drafted == figures.accepted == figures.draft_tokens_processed == 3
    assert figures.acceptance_histogram == {3: 1}
    assert figures.draft_acceptance_rate == 1.0


def test_seconds_of_all_phases_are_counted() -> None:
    figures = speculate()
    assert list(figures.seconds) == list(PHASES)
    assert all(seconds > 0 for seconds in figures.seconds.values())
    assert figures.seconds["draft"] > figures.seconds["other"]
    assert figures.decode_tokens_per_second is not None and figures.decode_tokens_per_second > 0
    for row in figures.per_row:
        assert all(row.seconds[phase] <= figures.seconds[phase] for phase in PHASES)
