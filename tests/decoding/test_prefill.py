"""Prefill: what it builds beside the layers' own work, and prompts that pass in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip import Engine
from layerskip.decoding import loop
from layerskip.model import layered
from tests import kit

LONG = [token % kit.VOCAB for token in range(3, 300, 7)]


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...] | None]:
    """The shapes of the masks of all passes, `None` for one without."""
    seen: list[tuple[int, ...] | None] = []
    intact = layered.attention_mask

    def recording(*arguments: Any) -> torch.Tensor | None:
        mask = intact(*arguments)
        seen.append(None if mask is None else tuple(mask.shape))
        return mask

    monkeypatch.setattr(layered, "attention_mask", recording)
    return seen


def answer(model: Any, prompt: list[int], **options: Any) -> list[int]:
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(prompt), max_new_tokens=8, **options)
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(prompt), max_new_tokens=8))
    counted = result.statistics
    assert counted.early_layer_tokens == len(prompt) + counted.draft_tokens_processed + counted.rounds
    assert counted.late_layer_tokens == len(prompt) + counted.draft_tokens_verified + counted.rounds
    return result.new_token_ids[0]


def test_a_single_prompt_and_single_steps_build_no_mask(masks: list[tuple[int, ...] | None]) -> None:
    answer(kit.mixed(), LONG)
    assert masks[0] is None
    # Beside verification, of some tokens at once, nothing has one.
    assert {shape[2] for shape in masks if shape is not None} <= {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("family", "implementation"),
    # Gemma 2 has no sdpa.
    [
        *((family, "eager") for family in kit.CONFIGS),
        *((family, "sdpa") for family in kit.CONFIGS if family != "gemma2"),
    ],
)
def test_a_prompt_that_needs_a_mask_passes_in_pieces(
    family: str, implementation: str, masks: list[tuple[int, ...] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PIECE", 16)
    model = kit.scale_late_layers(kit.build(kit.CONFIGS[family](attn_implementation=implementation)), 0.3)
    answer(model, LONG)
    sizes = [shape[2] for shape in masks if shape is not None]
    needs_one = implementation == "eager" or family in ("qwen3", "gemma3_text")
    assert (16 in sizes) == needs_one and max(sizes) <= 16


def test_what_follows_a_cache_passes_in_pieces(
    masks: list[tuple[int, ...] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PIECE", 16)
    engine = Engine(kit.mixed(), exit_layer=2)
    first = engine.generate(kit.prompt_tensor(LONG[:5]), max_new_tokens=2, return_cache=True)
    del masks[:]
    second = engine.generate(kit.prompt_tensor(LONG), max_new_tokens=8, cache=first.cache)
    assert torch.equal(second.sequences, kit.reference(engine.model, kit.prompt_tensor(LONG), max_new_tokens=8))
    assert masks[:2] == [(1, 1, 16, 21), (1, 1, 16, 37)]


def test_embedded_prompts_pass_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    import layerskip

    monkeypatch.setattr(loop, "PIECE", 16)
    model = kit.scale_late_layers(kit.build(kit.gemma3_config()), 0.3)
    embedded = model.get_input_embeddings()(kit.prompt_tensor(LONG))
    arguments = {"inputs_embeds": embedded, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = model.generate(**arguments)
        found = model.generate(**arguments, custom_generate=layerskip.self_speculative(exit_layer=2))
    assert torch.equal(found, expected)
