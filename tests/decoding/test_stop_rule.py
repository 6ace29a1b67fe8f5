"""The stop rule: another draft where it brings more than its time brings elsewhere."""

from __future__ import annotations

import random

import pytest

from layerskip.decoding.cost import CostTable
from layerskip.decoding.stop_rule import PRIOR_TOKENS, StopRule, pays

TABLE = CostTable(
    exit_layers=(2, 5),
    draft_steps=(0.25, 0.5),
    verifications=((2.0, 2.25, 2.5, 2.125), (2.0, 2.0, 2.0, 2.0)),
    autoregressive_step=2.0,
    head=0.125,
    draft_head=0.0625,
)


def test_a_step_pays_if_it_brings_more_than_its_time_does_elsewhere() -> None:
    assert pays(0.51, 0.25, 2.0)
    assert not pays(0.5, 0.25, 2.0)
    assert not pays(0.49, 0.25, 2.0)


@pytest.mark.parametrize("seconds", [0.0, -0.1])
def test_a_step_that_takes_nothing_always_pays(seconds: float) -> None:
    assert pays(0.0, seconds, 3.0)


def test_the_rate_begins_with_plain_decoding() -> None:
    assert StopRule(TABLE).rate == 0.5


def test_the_rate_is_tokens_per_second_with_a_prior() -> None:
    rule = StopRule(TABLE)
    rule.book(2.5, 4)
    rule.book(2.5, 3)
    assert rule.rate == (PRIOR_TOKENS + 7) / (2 * PRIOR_TOKENS + 5)


def test_rounds_that_lose_leave_the_rate_of_plain_decoding() -> None:
    rule = StopRule(TABLE)
    rule.book(10.0, 1)
    assert rule.rate == 0.5


def test_the_next_draft_costs_its_step_and_the_wider_verification() -> None:
    rule = StopRule(TABLE)
    # (0.25 + 0.25) seconds at half a token each.
    assert rule.goes_on(2, 0, 0.26)
    assert not rule.goes_on(2, 0, 0.25)
    # The other exit takes 0.5 and verifies at no more.
    assert rule.goes_on(5, 1, 0.26)
    assert not rule.goes_on(5, 1, 0.25)


def test_a_wider_verification_that_was_measured_faster_pays() -> None:
    # 3 · 0.25 + 2.125 is less than 2 · 0.25 + 2.5.
    assert StopRule(TABLE).goes_on(2, 2, 0.0)


def test_faster_decoding_asks_for_more() -> None:
    rule = StopRule(TABLE)
    assert rule.goes_on(5, 1, 0.4)
    for _ in range(10):
        rule.book(2.5, 4)
    assert rule.rate > 1
    assert not rule.goes_on(5, 1, 0.4)


def test_nothing_is_drafted_beyond_the_table() -> None:
    rule = StopRule(TABLE)
    assert rule.goes_on(5, 2, 1.0)
    assert not rule.goes_on(5, 3, 1.0)


def test_an_exit_without_costs_is_refused() -> None:
    with pytest.raises(ValueError, match="exit_layer=3 was not measured"):
        StopRule(TABLE).goes_on(3, 0, 1.0)


def test_exits_are_calibrated_apart() -> None:
    rule = StopRule(TABLE)
    for _ in range(8):
        rule.observe(2, 0.9, 0.0)
    assert rule.chance(2, 0.9) == pytest.approx(0.18)
    assert rule.chance(5, 0.9) == pytest.approx(0.9)


def decode(threshold: float | None, tokens: int = 2000) -> float:
    """Table seconds for tokens whose drafts are accepted as often as their confidence says, 0.97 or 0.15.

    The rule decides; with a threshold, that confidence alone does.
    """
    draws = random.Random(0)
    table = CostTable((1,), (0.2,), (tuple(1 + 0.1 * width for width in range(9)),), 1.0, 0.1, 0.1)
    rule = StopRule(table)
    emitted, seconds = 0, 0.0
    while emitted < tokens:
        drafts, chance, accepted, is_open = 0, 1.0, 0, True
        while True:
            confidence = draws.choice((0.97, 0.97, 0.15))
            chance *= rule.chance(1, confidence)
            if not (rule.goes_on(1, drafts, chance) if threshold is None else drafts < 8 and confidence > threshold):
                break
            drafts += 1
            right = draws.random() < confidence
            if is_open:
                rule.observe(1, confidence, float(right))
                accepted += right
            is_open = is_open and right
        spent = table.round_seconds(1, drafts)
        rule.book(spent, accepted + 1)
        seconds, emitted = seconds + spent, emitted + accepted + 1
    return seconds / emitted


def test_stopping_where_it_does_not_pay_is_faster_than_never_stopping_and_than_plain_decoding() -> None:
    assert decode(None) < decode(threshold=0.0) * 0.9
    assert decode(None) < 0.95


def test_a_dear_first_token_pays_where_more_that_follow_are_cheap() -> None:
    """A verification of two tokens costs nearly two steps, one of nine hardly more than that."""
    table = CostTable((2,), (0.05,), ((1.0, 1.75, *(1.8 + 0.02 * width for width in range(7))),), 1.0, 0.05, 0.01)
    rule = StopRule(table)
    assert not rule.goes_on(2, 0, 0.75)
    # 0.75 + 0.56 + 0.42 + … tokens for 0.8, 0.9, 1.0, … steps.
    assert rule.goes_on(2, 0, 0.75, following=0.75)
    assert not rule.goes_on(2, 0, 0.4, following=0.4)
    # Once there, each further token is cheap.
    assert rule.goes_on(2, 3, 0.2) and not rule.goes_on(2, 3, 0.05)


def test_looking_further_never_goes_beyond_the_table() -> None:
    rule = StopRule(TABLE)
    longest = TABLE.max_num_draft_tokens
    assert not rule.goes_on(5, longest, 1.0, following=1.0)
    assert rule.goes_on(5, longest - 1, 1.0, following=1.0)
