"""Masks and placements against constructions that go token by token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip.model.masks import attention_mask
from layerskip.model.placement import Placement

CPU = torch.device("cpu")
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Pass:
    """Where the tokens of one pass stand: the first position and the number of live tokens of each row."""

    starts: list[int]
    live: list[int]
    width: int
    scratch: int

    @property
    def placement(self) -> Placement:
        return Placement.of(self.starts, self.live, self.width, self.scratch, CPU)

    @property
    def is_uniform(self) -> bool:
        return len(set(self.starts)) == 1 and set(self.live) == {self.width}


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    """Draws a pass of up to four rows, of which some may be dead altogether, but not all."""
    width = draw(st.integers(1, 5))
    rows = draw(st.integers(1, 4))
    starts = draw(st.lists(st.integers(0, 12), min_size=rows, max_size=rows))
    live = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows).filter(any))
    if draw(st.booleans()):
        starts, live = [starts[0]] * rows, [width] * rows
    return Pass(starts, live, width, max(starts) + width + draw(st.integers(0, 3)))


windows = st.one_of(st.none(), st.integers(1, 20))


def sees(position: int, slot: int, window: int | None) -> bool:
    """Whether a token sees a slot, from the definition: nothing later, and no more than `window` back."""
    return slot <= position and (window is None or position - slot < window)


def seen_by_mask(mask: torch.Tensor, row: int, token: int) -> list[int]:
    """Returns the slots that a mask leaves open, and checks that it holds nothing but 0 and the lowest value."""
    line = mask[row if mask.shape[0] > 1 else 0, 0, token]
    assert set(line.tolist()) <= {0.0, LOWEST}
    return (line == 0).nonzero().flatten().tolist()


# Placement


@given(passes())
def test_a_placement_follows_from_where_live_tokens_stand(tokens: Pass) -> None:
    """Live tokens stand in a row and dead ones at the scratch slot; a start is given exactly where rows stand alike and
    none is dead."""
    placement = tokens.placement
    positions = placement.positions.expand(len(tokens.starts), -1).tolist()
    for row, (start, live) in enumerate(zip(tokens.starts, tokens.live, strict=True)):
        assert positions[row][:live] == list(range(start, start + live))
        assert positions[row][live:] == [tokens.scratch] * (tokens.width - live)
    assert placement.ends == tuple(start + live for start, live in zip(tokens.starts, tokens.live, strict=True))
    assert placement.padding == tuple(tokens.width - live for live in tokens.live)
    assert placement.view == max(placement.ends)
    assert placement.view <= tokens.scratch
    assert placement.start == (tokens.starts[0] if tokens.is_uniform else None)
    assert placement.positions.shape == (1 if tokens.is_uniform else len(tokens.starts), tokens.width)


def test_a_prompt_stands_at_the_left_edge_and_its_padding_is_dead() -> None:
    placement = Placement.prompt([3, 5, 1], CPU)
    assert (placement.start, placement.width, placement.view) == (0, 5, 5)
    assert placement.positions.tolist() == [[0, 1, 2, 3, 4]]
    assert placement.ends == placement.live == (3, 5, 1)
    assert placement.padding == (2, 0, 4)


# Masks


@settings(max_examples=300)
@given(passes(), windows, st.booleans())
def test_mask_equals_the_definition_and_is_left_out_exactly_where_attention_is_right_without(
    tokens: Pass, window: int | None, causal_by_flag: bool
) -> None:
    placement = tokens.placement
    mask = attention_mask(placement, window, torch.float32, causal_by_flag)
    nothing_falls_out = window is None or window >= placement.view
    right_without = tokens.is_uniform and (tokens.width == 1 or (causal_by_flag and tokens.starts[0] == 0))
    assert (mask is None) == (nothing_falls_out and right_without)
    # No live token sees the scratch slot.
    assert mask is None or mask.shape[-1] <= tokens.scratch
    for row, (start, live) in enumerate(zip(tokens.starts, tokens.live, strict=True)):
        for token in range(live):
            expected = [slot for slot in range(placement.view) if sees(start + token, slot, window)]
            if mask is not None:
                assert seen_by_mask(mask, row, token) == expected
            elif tokens.width == 1:
                assert expected == list(range(placement.view))
            else:
                # The implementation makes a lower triangle by itself, which is right for a whole prompt only.
                assert causal_by_flag and start == 0 and placement.view == tokens.width
                assert expected == list(range(token + 1))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), windows)
def test_mask_of_prompts_with_padding_equals_the_definition_for_live_tokens(
    lengths: list[int], window: int | None
) -> None:
    mask = attention_mask(Placement.prompt(lengths, CPU), window, torch.float32, causal_by_flag=False)
    for row, length in enumerate(lengths):
        for token in range(length if mask is not None else 0):
            assert mask is not None
            expected = [slot for slot in range(token + 1) if sees(token, slot, window)]
            assert seen_by_mask(mask, row, token) == expected
    if mask is None:
        assert max(lengths) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mask_has_the_type_and_shape_that_attention_adds(dtype: torch.dtype) -> None:
    mask = attention_mask(Placement.of([4, 2], [3, 1], 3, 9, CPU), 3, dtype, causal_by_flag=True)
    assert mask is not None
    assert mask.dtype == dtype
    assert mask.shape == (2, 1, 3, 7)
    assert mask.min() == torch.finfo(dtype).min


def test_one_mask_serves_all_rows_that_stand_alike() -> None:
    mask = attention_mask(Placement.of([4, 4], [3, 3], 3, 9, CPU), None, torch.float32, causal_by_flag=True)
    assert mask is not None
    assert mask.shape == (1, 1, 3, 7)


def test_a_dead_token_that_sees_nothing_still_gives_finite_attention() -> None:
    """Its window lies behind the view; a mask of minus infinity would give NaN, which a norm spreads to no other row
    but a check for NaN would trip over."""
    mask = attention_mask(Placement.of([0, 3], [1, 0], 1, 20, CPU), 2, torch.float32, causal_by_flag=True)
    assert mask is not None
    assert seen_by_mask(mask, 1, 0) == []
    assert torch.softmax(torch.randn(1) + mask, dim=-1).isfinite().all()
