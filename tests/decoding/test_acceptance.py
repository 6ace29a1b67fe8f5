"""Greedy acceptance: the longest matching prefix, and nothing behind it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip.decoding.acceptance import accept_greedy

# Few different tokens, so that drafts and targets often agree.
tokens = st.integers(0, 2)


def naive(drafts: list[int], targets: list[int]) -> int:
    """The longest prefix, found by trying every length."""
    return max(length for length in range(len(drafts) + 1) if drafts[:length] == targets[:length])


@pytest.mark.parametrize(
    ("matches", "accepted"),
    [
        ([1, 0, 1, 1], 1),
        ([0, 1, 1, 1], 0),
        ([1, 1, 0, 1], 2),
        ([1, 1, 1, 0], 3),
        ([1, 1, 1, 1], 4),
        ([0, 0, 0, 0], 0),
        ([1], 1),
        ([0], 0),
    ],
)
def test_a_match_after_a_rejection_does_not_count(matches: list[int], accepted: int) -> None:
    targets = [10, 11, 12, 13][: len(matches)]
    drafts = [target if match else target + 50 for target, match in zip(targets, matches, strict=True)]
    assert accept_greedy(drafts, [*targets, 14]) == accepted


def test_no_draft_is_no_acceptance() -> None:
    assert accept_greedy([], [7]) == 0


@given(st.lists(tokens, max_size=8), st.lists(tokens, min_size=9, max_size=9))
def test_equals_the_longest_common_prefix(drafts: list[int], targets: list[int]) -> None:
    assert accept_greedy(drafts, targets[: len(drafts) + 1]) == naive(drafts, targets)


@given(st.lists(tokens, max_size=8), st.lists(tokens, min_size=9, max_size=9))
def test_targets_behind_those_of_the_drafts_change_nothing(drafts: list[int], targets: list[int]) -> None:
    """In a batch, rows that drafted less than others have targets for dead tokens behind their own."""
    assert accept_greedy(drafts, targets) == accept_greedy(drafts, targets[: len(drafts) + 1])


@given(st.lists(tokens, max_size=8), st.lists(tokens, min_size=9, max_size=9))
def test_there_is_always_a_target_to_emit_and_it_disagrees_with_the_next_draft(
    drafts: list[int], targets: list[int]
) -> None:
    accepted = accept_greedy(drafts, targets)
    assert 0 <= accepted <= len(drafts)
    if accepted < len(drafts):
        assert targets[accepted] != drafts[accepted]
