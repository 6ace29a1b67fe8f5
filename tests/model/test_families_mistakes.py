"""Controls: a peculiarity of a family that is missed changes its exit logits, so that the tests of families see it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip.model.families import FULL_ATTENTION, SLIDING_ATTENTION
from layerskip.model.layered import LayeredModel, RotaryTables
from tests import kit
from tests.families_kit import CONFIGS, ROTATED, WINDOWED, built, own_logits, with_biases
from tests.model.exits_kit import Mistake, batch, exit_logits, exit_state


def drop_the_finish(layered: LayeredModel) -> None:
    layered.family = replace(layered.family, finish_logits=lambda logits, config: logits)


def drop_the_norm(layered: LayeredModel) -> None:
    layered.norm = nn.Identity()


def norm_twice(layered: LayeredModel) -> None:
    layered.norm = nn.Sequential(layered.norm, layered.norm)


def attend_to_everything_before(layered: LayeredModel) -> None:
    layered.layer_types = (FULL_ATTENTION,) * layered.num_layers


def let_all_layers_slide(layered: LayeredModel) -> None:
    layered.layer_types = (SLIDING_ATTENTION,) * layered.num_layers
    rotary = layered.rotary_tables
    if not layered.family.rotary_by_layer_type:
        layered.rotary_tables = lambda tokens: RotaryTables(  # type: ignore[method-assign]
            dict.fromkeys([SLIDING_ATTENTION], next(iter(rotary(tokens).tables.values())))
        )


def skip_the_embedding_scale(layered: LayeredModel) -> None:
    # Gemma's scale is in the module.
    layered.embedding = nn.Embedding.from_pretrained(layered.embedding.weight)
    layered.family = replace(layered.family, scale_embedding=lambda embedded, config: embedded)


def skip_the_rotation(layered: LayeredModel) -> None:
    rotary = layered.rotary_tables
    layered.rotary_tables = lambda tokens: RotaryTables(  # type: ignore[method-assign]
        {kind: (torch.ones_like(cos), torch.zeros_like(sin)) for kind, (cos, sin) in rotary(tokens).tables.items()}
    )


def rotate_all_layers_like(layer_type: str) -> Mistake:
    def mistake(layered: LayeredModel) -> None:
        rotary = layered.rotary_tables
        layered.rotary_tables = lambda tokens: RotaryTables(  # type: ignore[method-assign]
            dict.fromkeys(layered.layer_types, rotary(tokens).tables[layer_type])
        )

    return mistake


def start_positions_at_one(layered: LayeredModel) -> None:
    embed = layered.embed
    layered.embed = lambda ids, positions: embed(ids, positions + 1)  # type: ignore[method-assign]


def cut_or_filled_up(projection: nn.Module) -> nn.Linear:
    """Returns what fits in a projection's place, and projects nothing."""
    plain = nn.Linear(projection.in_features, projection.out_features, bias=False)
    nn.init.eye_(plain.weight)
    return plain


def skip_the_projection_in(layered: LayeredModel) -> None:
    layered.project_in = cut_or_filled_up(layered.project_in)


def skip_the_projection_out(layered: LayeredModel) -> None:
    layered.project_out = cut_or_filled_up(layered.project_out)


def mistakes_of(family: str) -> dict[str, Mistake]:
    """What can be missed outside of a family's layers.

    What layers do by themselves cannot be: biases, norms of heads, parallel blocks, multipliers of residuals, experts,
    and that some of SmolLM3's layers do not rotate.
    """
    found = {}
    if family != "opt":
        found["the norm is dropped"] = drop_the_norm
    if family in ROTATED:
        found["no rotation"] = skip_the_rotation
    else:
        found["positions one too high"] = start_positions_at_one
    if family in WINDOWED:
        found["no window"] = attend_to_everything_before
    if family in ("qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3"):
        found["a window in every layer"] = let_all_layers_slide
    if family in ("gemma2", "gemma3_text", "granite", "cohere"):
        found["the soft-cap or scale of logits is dropped"] = drop_the_finish
    if family in ("gemma2", "gemma3_text", "granite"):
        found["the embedding is not scaled"] = skip_the_embedding_scale
    if family == "gemma2":
        found["the norm is applied twice"] = norm_twice
    if family == "gemma3_text":
        found["one rotary table, the local"] = rotate_all_layers_like(SLIDING_ATTENTION)
        found["one rotary table, the global"] = rotate_all_layers_like(FULL_ATTENTION)
    if family == "opt":
        found["nothing projected before the layers"] = skip_the_projection_in
        found["nothing projected before the head"] = skip_the_projection_out
    return found


@cache
def vivid(family: str) -> PreTrainedModel:
    """Returns a tiny model whose attention is not flat, whose head is large and whose norms differ."""
    changes = {"initializer_range": 0.2} if family in kit.CONFIGS else {}
    return with_biases(kit.build(CONFIGS[family](**changes), spread=2.0))


@cache
def expected(family: str) -> torch.Tensor:
    """The logits of `vivid` cut to three layers."""
    return own_logits(kit.truncated(vivid(family), 3), batch(2))


@pytest.mark.parametrize(
    ("family", "mistake"), [(family, mistake) for family in CONFIGS for mistake in mistakes_of(family)]
)
def test_a_missed_peculiarity_changes_the_exit_logits(family: str, mistake: str) -> None:
    torch.testing.assert_close(exit_logits(vivid(family), batch(2), 3), expected(family), rtol=0, atol=1e-5)
    wrong = exit_logits(vivid(family), batch(2), 3, mistakes_of(family)[mistake])
    assert (wrong - expected(family)).abs().max() > 1e-3


@pytest.mark.parametrize("family", CONFIGS)
def test_taking_a_tuple_for_a_tensor_or_the_other_way_round_is_noticed(family: str) -> None:
    """The first of a tensor would be its first row, without an error at the first layer."""
    layered = LayeredModel(built(family))
    layered.family = replace(layered.family, returns_tuple=not layered.family.returns_tuple)
    with torch.no_grad():
        state: Any = exit_state(layered, batch(3), 1)
    if family == "falcon":
        assert isinstance(state, tuple)
    else:
        assert state.dim() == 2


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        ("gemma2", {"attn_logit_softcapping": 0.05}),
        ("gemma2", {"query_pre_attn_scalar": 1}),
        ("gemma3_text", {"query_pre_attn_scalar": 1}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": False}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("phi3", {"partial_rotary_factor": 1.0}),
        ("stablelm", {"partial_rotary_factor": 1.0}),
        ("gpt_neox", {"rotary_pct": 1.0}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("gptj", {"rotary_dim": 8}),
        ("smollm3", {"layer_types": ["full_attention", "sliding_attention"] * 2, "no_rope_layers": [1] * 4}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"attention_multiplier": 1.0}),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else value,
)
def test_what_layers_do_by_themselves_is_followed_and_matters(family: str, changes: dict[str, Any]) -> None:
    peculiar = kit.build(CONFIGS[family](**changes))
    peculiar.load_state_dict(vivid(family).state_dict())
    logits = own_logits(kit.truncated(peculiar, 3), batch(2))
    torch.testing.assert_close(exit_logits(peculiar, batch(2), 3), logits, rtol=0, atol=1e-5)
    assert (expected(family) - logits).abs().max() > 1e-3


# Soft-caps and scales


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_exit_head_has_the_soft_cap(family: str) -> None:
    """With a cap of 1 under logits of about 20, no logit passes 1."""
    model = kit.build(CONFIGS[family](final_logit_softcapping=1.0), spread=20.0)
    for exit_layer in (1, 2, 3):
        logits = exit_logits(model, batch(2), exit_layer)
        reference = own_logits(kit.truncated(model, exit_layer), batch(2))
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-5)
        assert logits.abs().max() <= 1
        assert (exit_logits(model, batch(2), exit_layer, drop_the_finish) - logits).abs().max() > 1


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_soft_cap_of_none_caps_nothing(family: str) -> None:
    model = kit.build(CONFIGS[family](final_logit_softcapping=None), spread=20.0)
    logits = exit_logits(model, batch(2), 2)
    assert logits.abs().max() > 1
    torch.testing.assert_close(logits, own_logits(kit.truncated(model, 2), batch(2)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_exit_head_has_the_scale(family: str) -> None:
    """Both are a quarter of what the head gives."""
    for exit_layer in (1, 2, 3):
        logits = exit_logits(built(family), batch(2), exit_layer)
        unscaled = exit_logits(built(family), batch(2), exit_layer, drop_the_finish)
        torch.testing.assert_close(logits, unscaled / 4, rtol=0, atol=1e-6)
        assert (unscaled - logits).abs().max() > 0.3
