"""What the tests of the hook share: models, inputs, and `generate` with and without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedModel,
)

import layerskip
from tests import kit

FAMILIES = tuple(kit.CONFIGS)
GRADED = [
    *((family, grade) for family in ("llama", "gemma2") for grade in ("none", "some", "all")),
    *((family, "some") for family in ("qwen3", "gemma3_text", "gpt2")),
]
SLIDING = ("qwen3", "gemma2", "gemma3_text")
NEW = 12
# Rows of 10 and 6 tokens, padded on the left.
SHORT = kit.PROMPT[4:]
PADDED = torch.tensor([kit.PROMPT, [0] * 4 + SHORT, [8, 20, 31, 60, 2, 9, 77, 12, 4, 4]])
MASK = torch.tensor([[1] * 10, [0] * 4 + [1] * 6, [1] * 10])
USER_TURN = torch.tensor([[61, 17, 30, 2, 85]])


@cache
def graded(family: str, grade: str = "some") -> PreTrainedModel:
    """Returns a model that tests share, so that none may change it."""
    return kit.graded(family, grade)


def hook(**arguments: Any) -> Callable[..., Any]:
    """Returns what is tested, at exit 2."""
    return layerskip.self_speculative(exit_layer=kit.EXIT_LAYER, **arguments)


def plain(model: PreTrainedModel, *inputs: torch.Tensor, **arguments: Any) -> Any:
    """Returns what `generate` itself gives."""
    return model.generate(*inputs, **arguments)


def ours(model: PreTrainedModel, *inputs: torch.Tensor, **arguments: Any) -> Any:
    """Returns what `generate` gives with the hook."""
    return model.generate(*inputs, custom_generate=hook(), **arguments)


def check_equal(model: PreTrainedModel, *inputs: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Checks that both give the same sequences, and returns these."""
    expected = plain(model, *inputs, **arguments)
    given = ours(model, *inputs, **arguments)
    assert torch.equal(given, expected)
    assert given.dtype == expected.dtype
    return given


def first_turn(model: PreTrainedModel, who: Callable[..., Any], prompt: torch.Tensor, **arguments: Any) -> Any:
    return who(model, prompt, return_dict_in_generate=True, pad_token_id=0, **arguments)


def refused(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    error: type[Exception],
    match: str,
    ids: torch.Tensor | None = None,
    decode: Callable[..., Any] | None = None,
) -> None:
    """Checks that a call is refused before any layer runs, that nothing changed, and that the next call is right."""
    configs = [copy.deepcopy(each.to_dict()) for each in (model.config, model.generation_config)]
    options = {"max_new_tokens": 8, "pad_token_id": 0, **arguments}
    with kit.counted_layers(model) as counts, pytest.raises(error, match=match):
        model.generate(ids if ids is not None else kit.prompt_tensor(), custom_generate=decode or hook(), **options)
    assert counts == [0] * kit.NUM_LAYERS
    assert [each.to_dict() for each in (model.config, model.generation_config)] == configs
    expected = kit.reference(model, kit.prompt_tensor(), max_new_tokens=8)
    assert torch.equal(ours(model, kit.prompt_tensor(), max_new_tokens=8), expected)
