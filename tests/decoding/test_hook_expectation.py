"""What transformers expects of assisted generation: the tokens of greedy decoding, or scores that tie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedModel,
)

from layerskip.comparison.audit import NEAR_TIE_UNITS, spacing
from layerskip.model.cache import SharedCacheLayer
from tests import kit
from tests.decoding.hook_kit import (
    FAMILIES,
    MASK,
    PADDED,
    hook,
    ours,
    plain,
)

# What transformers expects of assisted generation: the tokens of greedy decoding, or a tie where they first differ.


def unexplained(expected: Any, given: Any, prompt: int, tolerance: Callable[[torch.Tensor], float]) -> list[int]:
    """Returns the rows of which the scores differ by more than rounding where tokens first differ, or before.

    Args:
        expected, given: outputs with scores.
        prompt: tokens of the prompts, padding included.
        tolerance: of a step's scores, `(vocabulary,)`, how far rounding may move them.
    """
    rows = []
    for row, (theirs, mine) in enumerate(zip(expected.sequences, given.sequences, strict=True)):
        differing = (theirs != mine).nonzero().flatten().tolist()
        compared = differing[0] - prompt + 1 if differing else len(expected.scores)
        steps = [(expected.scores[step][row], given.scores[step][row]) for step in range(compared)]
        if any(float((left - right).abs().max()) > tolerance(left) for left, right in steps):
            rows.append(row)
    return rows


def fp32_tolerance(scores: torch.Tensor) -> float:
    """The absolute and relative tolerance of transformers' own test."""
    return 1e-5 + 1e-5 * float(scores.abs().max())


def bf16_tolerance(scores: torch.Tensor) -> float:
    """A few units of the format at the largest score, twice, as both sides round."""
    return 2 * NEAR_TIE_UNITS * spacing(float(scores.abs().max()), torch.bfloat16)


TOLERANCES = {torch.float32: fp32_tolerance, torch.bfloat16: bf16_tolerance}
EXPECTATION = {
    "attention_mask": MASK,
    "max_new_tokens": 24,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_scores": True,
}


@cache
def in_type(family: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """Returns a model in a format, and what plain `generate` gives; tests share both."""
    model = kit.graded(family, "some").to(dtype)
    return model, plain(model, PADDED, **EXPECTATION)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_greedy_decoding_or_scores_tie(family: str, dtype: torch.dtype) -> None:
    model, expected = in_type(family, dtype)
    given = ours(model, PADDED, **EXPECTATION)
    assert unexplained(expected, given, 10, TOLERANCES[dtype]) == []
    if dtype == torch.float32:
        assert torch.equal(given.sequences, expected.sequences)


@contextmanager
def perturbed(layer: torch.nn.Module, row: int) -> Iterator[None]:
    """Adds to what a layer gives for the prompt of one row."""

    def add(module: torch.nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] != PADDED.shape[1]:
            return output
        changed = output.clone()
        changed[row] += 0.3 * torch.arange(output.shape[-1]).sin()
        return changed

    handle = layer.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(("place", "dtype"), [(1, torch.float32), (3, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_flags_the_row_whose_layer_output_is_wrong(family: str, place: int, dtype: torch.dtype) -> None:
    model, expected = in_type(family, dtype)
    with perturbed(kit.layers_of(model)[place], 1):
        given = ours(model, PADDED, **EXPECTATION)
    assert unexplained(expected, given, 10, TOLERANCES[dtype]) == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_flags_the_row_of_which_one_cached_token_is_wrong(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of its prompt, which every window still shows at first."""
    intact = SharedCacheLayer.update

    def corrupted(layer: SharedCacheLayer, *states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = intact(layer, *states, **kwargs)
        if states[0].shape[2] == PADDED.shape[1]:
            values[2, :, 9] = 3.0
        return keys, values

    model, expected = in_type(family, dtype)
    monkeypatch.setattr(SharedCacheLayer, "update", corrupted)
    given = ours(model, PADDED, **EXPECTATION)
    assert unexplained(expected, given, 10, TOLERANCES[dtype]) == [2]


def test_drafts_that_are_wrong_change_nothing(llama: PreTrainedModel) -> None:
    """Drafts come from five tokens alone, so that most are rejected."""
    few: Sequence[int] = [0, 1, 2, 3, 5]
    output = llama.generate(
        PADDED, custom_generate=hook(draft_token_ids=torch.tensor(few)), **EXPECTATION | {"output_logits": True}
    )
    assert output.statistics.draft_acceptance_rate < 0.2
    assert torch.equal(output.sequences, plain(llama, PADDED, **EXPECTATION).sequences)
