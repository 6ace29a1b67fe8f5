"""Every supported family runs in spans of layers exactly as its own model does; every other is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    FalconConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

from layerskip import Engine
from layerskip.model.cache import SharedCache
from layerskip.model.families import FAMILIES, FULL_ATTENTION, SLIDING_ATTENTION, family_of
from layerskip.model.layered import LayeredModel, RotaryTables
from layerskip.model.placement import Placement
from tests import kit

EXITS = [1, 2, 3, kit.NUM_LAYERS]
IMPLEMENTATIONS = [
    (family, implementation)
    for family in kit.CONFIGS
    for implementation in ("eager", "sdpa")
    # Gemma2's soft-cap in the softmax is beyond sdpa, which transformers refuses for it.
    if (family, implementation) != ("gemma2", "sdpa")
]

Mistake = Callable[[LayeredModel], None]


def exit_state(layered: LayeredModel, ids: torch.Tensor, exit_layer: int) -> torch.Tensor:
    """Returns the output of layer `exit_layer` over whole prompts, `(rows, width, hidden)`."""
    rows, width = ids.shape
    placement = Placement.prompt([width] * rows, layered.device)
    return layered.run(
        layered.embed(ids, placement.positions),
        0,
        exit_layer,
        placement=placement,
        cache=SharedCache(layered.num_layers, rows, width + 1),
        rotary=layered.rotary_tables(width + 1),
    )


@torch.no_grad()
def exit_logits(
    model: PreTrainedModel, ids: torch.Tensor, exit_layer: int, mistake: Mistake | None = None
) -> torch.Tensor:
    """Returns the exit head's logits, `(rows, width, vocabulary)`, from a wrapper that makes `mistake`, if given."""
    layered = LayeredModel(model)
    if mistake is not None:
        mistake(layered)
    return layered.logits(exit_state(layered, ids, exit_layer))


@torch.no_grad()
def own_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Returns what the model's own forward gives, without a cache."""
    return model(ids, use_cache=False).logits


@cache
def shared(family: str, implementation: str | None = None, num_layers: int = kit.NUM_LAYERS) -> PreTrainedModel:
    """Returns a model for tests that change nothing in it, cut to its first layers if asked."""
    if num_layers < kit.NUM_LAYERS:
        return kit.truncated(shared(family, implementation), num_layers)
    return kit.build(
        kit.CONFIGS[family](), **({} if implementation is None else {"attn_implementation": implementation})
    )


def batch(rows: int) -> torch.Tensor:
    """Returns `rows` different prompts of the kit's length, `(rows, width)`."""
    return torch.stack([kit.prompt_tensor()[0].roll(row) for row in range(rows)])


def test_every_family_of_the_table_is_tested_here() -> None:
    assert set(kit.CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("family", "implementation"), IMPLEMENTATIONS)
@pytest.mark.parametrize("exit_layer", EXITS)
def test_exit_logits_equal_those_of_the_model_cut_there(
    family: str, implementation: str, exit_layer: int, rows: int
) -> None:
    logits = exit_logits(shared(family, implementation), batch(rows), exit_layer)
    assert logits.shape == (rows, len(kit.PROMPT), kit.VOCAB)
    expected = own_logits(shared(family, implementation, exit_layer), batch(rows))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_exit_state_keeps_the_batch_dimension(family: str, rows: int) -> None:
    model = shared(family)
    with torch.no_grad():
        state = exit_state(LayeredModel(model), batch(rows), kit.EXIT_LAYER)
    assert state.shape == (rows, len(kit.PROMPT), model.config.hidden_size)


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_exit_state_is_the_state_before_the_final_norm(family: str) -> None:
    """transformers norms its last hidden state and no other, so that layer 2 of 4 is the plain one."""
    model = shared(family)
    with torch.no_grad():
        state = exit_state(LayeredModel(model), batch(2), kit.EXIT_LAYER)
        hidden_states = model(batch(2), use_cache=False, output_hidden_states=True).hidden_states
    torch.testing.assert_close(state, hidden_states[kit.EXIT_LAYER], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_a_second_span_resumes_where_the_first_stopped(family: str) -> None:
    model = shared(family)
    layered = LayeredModel(model)
    rows, width = batch(3).shape
    placement = Placement.prompt([width] * rows, layered.device)
    call: dict[str, Any] = {
        "placement": placement,
        "cache": SharedCache(layered.num_layers, rows, width),
        "rotary": layered.rotary_tables(width),
    }
    with torch.no_grad():
        hidden = layered.embed(batch(3), placement.positions)
        for start, stop in [(0, 1), (1, 3), (3, 4)]:
            hidden = layered.run(hidden, start, stop, **call)
        logits = layered.logits(hidden)
    torch.testing.assert_close(logits, own_logits(model, batch(3)), rtol=0, atol=1e-5)


# Norm and head


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_exit_head_norms_each_state_by_its_own_statistics(family: str) -> None:
    """An early state is far smaller or larger than a late one; large embeddings make the difference plain."""
    model = kit.build(kit.CONFIGS[family]())
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10)
    for exit_layer in (1, 2, 3):
        expected = own_logits(kit.truncated(model, exit_layer), batch(2))
        torch.testing.assert_close(exit_logits(model, batch(2), exit_layer), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_exit_head_has_the_soft_cap(family: str) -> None:
    """With a cap of 1 under logits of about 20, no logit passes 1."""
    model = kit.build(kit.CONFIGS[family](final_logit_softcapping=1.0), spread=20.0)
    for exit_layer in (1, 2, 3):
        logits = exit_logits(model, batch(2), exit_layer)
        expected = own_logits(kit.truncated(model, exit_layer), batch(2))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        assert logits.abs().max() <= 1
        assert (exit_logits(model, batch(2), exit_layer, drop_the_soft_cap) - logits).abs().max() > 1


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_soft_cap_of_none_caps_nothing(family: str) -> None:
    model = kit.build(kit.CONFIGS[family](final_logit_softcapping=None), spread=20.0)
    logits = exit_logits(model, batch(2), 2)
    assert logits.abs().max() > 1
    torch.testing.assert_close(logits, own_logits(kit.truncated(model, 2), batch(2)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_norm_and_head_are_called_as_modules(family: str) -> None:
    """Sharding and offloading hook the modules; using their weights alone would pass them by."""
    model = kit.build(kit.CONFIGS[family]())
    called = []
    for name in ("norm", "head"):
        module = LayeredModel(model).norm if name == "norm" else model.get_output_embeddings()
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    for exit_layer in (1, 2, 3):
        called.clear()
        exit_logits(model, batch(2), exit_layer)
        assert called == ["norm", "head"]


@pytest.mark.parametrize("exit_layer", EXITS)
@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_exactly_the_layers_of_a_span_are_called(family: str, exit_layer: int) -> None:
    model = shared(family)
    with kit.counted_layers(model) as counts:
        exit_logits(model, batch(2), exit_layer)
    passed = 2 * len(kit.PROMPT)
    assert counts == [passed] * exit_layer + [0] * (kit.NUM_LAYERS - exit_layer)


def test_tied_head_is_the_embedding() -> None:
    model = kit.build(kit.llama_config(tie_word_embeddings=True))
    assert LayeredModel(model).head.weight is model.get_input_embeddings().weight
    torch.testing.assert_close(
        exit_logits(model, batch(2), 2), own_logits(kit.truncated(model, 2), batch(2)), rtol=0, atol=1e-5
    )


# Controls: the tests above notice it when a family's peculiarity is missed


def drop_the_soft_cap(layered: LayeredModel) -> None:
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
    layered.embedding = nn.Embedding.from_pretrained(layered.embedding.weight)


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


MISTAKES: dict[str, dict[str, Mistake]] = {
    "llama": {
        "the norm is dropped": drop_the_norm,
        "no rotation": skip_the_rotation,
    },
    "qwen3": {
        "the norm is dropped": drop_the_norm,
        "no rotation": skip_the_rotation,
        "no window": attend_to_everything_before,
        "a window in every layer": let_all_layers_slide,
    },
    "gemma2": {
        "the norm is dropped": drop_the_norm,
        "the norm is applied twice": norm_twice,
        "no rotation": skip_the_rotation,
        "no window": attend_to_everything_before,
        "a window in every layer": let_all_layers_slide,
        "the soft-cap is dropped": drop_the_soft_cap,
        "the embedding is not scaled": skip_the_embedding_scale,
    },
    "gemma3_text": {
        "the norm is dropped": drop_the_norm,
        "no rotation": skip_the_rotation,
        "no window": attend_to_everything_before,
        "a window in every layer": let_all_layers_slide,
        "the soft-cap is dropped": drop_the_soft_cap,
        "the embedding is not scaled": skip_the_embedding_scale,
        "one rotary table, the local": rotate_all_layers_like(SLIDING_ATTENTION),
        "one rotary table, the global": rotate_all_layers_like(FULL_ATTENTION),
    },
    "gpt2": {
        "the norm is dropped": drop_the_norm,
        "positions one too high": start_positions_at_one,
    },
}


@cache
def vivid(family: str) -> PreTrainedModel:
    """Returns a tiny model whose norms differ from one another, whose attention is not flat and whose head is large."""
    model = kit.build(kit.CONFIGS[family](), spread=20.0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.5)
            if "q_proj" in name or "k_proj" in name or "c_attn.weight" in name:
                parameter.mul_(8)
    return model


@pytest.mark.parametrize(
    ("family", "mistake"), [(family, mistake) for family, mistakes in MISTAKES.items() for mistake in mistakes]
)
def test_a_missed_peculiarity_changes_the_exit_logits(family: str, mistake: str) -> None:
    model = vivid(family)
    expected = own_logits(kit.truncated(model, 3), batch(2))
    torch.testing.assert_close(exit_logits(model, batch(2), 3), expected, rtol=0, atol=1e-5)
    wrong = exit_logits(model, batch(2), 3, MISTAKES[family][mistake])
    assert (wrong - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        ("gemma2", {"attn_logit_softcapping": 0.05}),
        ("gemma2", {"query_pre_attn_scalar": 1}),
        ("gemma3_text", {"query_pre_attn_scalar": 1}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": False}),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else value,
)
def test_what_layers_do_by_themselves_is_followed_and_matters(family: str, changes: dict[str, Any]) -> None:
    usual = vivid(family)
    peculiar = kit.build(kit.CONFIGS[family](**changes))
    peculiar.load_state_dict(usual.state_dict())
    expected = own_logits(kit.truncated(peculiar, 3), batch(2))
    torch.testing.assert_close(exit_logits(peculiar, batch(2), 3), expected, rtol=0, atol=1e-5)
    assert (exit_logits(usual, batch(2), 3) - expected).abs().max() > 1e-3


# Refusals


def tiny(config: PreTrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config).eval()


UNSUPPORTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "mistral": lambda: MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "bloom": lambda: BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
    "falcon": lambda: FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "mamba": lambda: MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4),
}


@pytest.mark.parametrize("family", list(UNSUPPORTED))
def test_an_unsupported_family_is_refused_with_the_list_of_supported_ones(family: str) -> None:
    with pytest.raises(ValueError, match=f"model_type='{family}'") as refusal:
        Engine(tiny(UNSUPPORTED[family]()))
    for supported in kit.CONFIGS:
        assert supported in str(refusal.value)


def test_an_encoder_decoder_model_is_refused_by_name() -> None:
    config = T5Config(vocab_size=97, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="model_type='t5' is an encoder-decoder model") as refusal:
        Engine(AutoModelForSeq2SeqLM.from_config(config).eval())
    assert "llama" in str(refusal.value)


def test_bidirectional_attention_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"use_bidirectional_attention=True .*gemma3_text"):
        Engine(kit.build(kit.gemma3_config(use_bidirectional_attention=True)))


def test_cross_attention_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"add_cross_attention=True .*gpt2"):
        Engine(kit.build(kit.gpt2_config(add_cross_attention=True, is_decoder=True)))


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_an_attention_implementation_with_other_masks_is_refused_by_name(family: str, implementation: str) -> None:
    model = kit.build(kit.CONFIGS[family]())
    model.config._attn_implementation = implementation
    allowed = "'eager'" if family == "gemma2" else "'sdpa' or 'eager'"
    with pytest.raises(ValueError, match=f"attn_implementation='{implementation}'.*{allowed}"):
        Engine(model)


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_a_patched_number_of_layers_is_refused(family: str) -> None:
    """Cutting `config.num_hidden_layers` is a known trick to exit early; the wrapper would count wrong layers."""
    model = kit.build(kit.CONFIGS[family]())
    model.config.num_hidden_layers = 2
    if "layer_types" in model.config.to_dict():
        model.config.layer_types = model.config.layer_types[:2]
    with pytest.raises(ValueError, match="num_hidden_layers=2, but the model has 4 layers"):
        Engine(model)


def test_an_unknown_layer_type_is_refused_by_name() -> None:
    model = kit.build(kit.qwen3_config())
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"layer_types=\['chunked_attention'\].*qwen3"):
        Engine(model)


# The model stays the caller's


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that a wrapper could change: module tree, parameters, configurations, modes."""
    return {
        "modules": [(name, type(module), id(module), module.training) for name, module in model.named_modules()],
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "keys": list(model.state_dict()),
        "buffers": [name for name, _ in model.named_buffers()],
        "config": copy.deepcopy(model.config.to_dict()),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "attention": model.config._attn_implementation,
        "attributes": sorted(vars(model)),
    }


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_wrapping_and_generating_change_nothing_in_the_model(family: str) -> None:
    model = kit.build(kit.CONFIGS[family]())
    before = fingerprint(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = Engine(model, exit_layer=2)
    assert fingerprint(model) == before
    for strategy in ("self_speculative", "autoregressive", "early_exit"):
        engine.generate(batch(2), max_new_tokens=6, strategy=strategy)
    list(engine.stream(kit.prompt_tensor(), max_new_tokens=6))
    assert fingerprint(model) == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])


OTHERS = (
    "qwen2 phi3 gpt_neox gptj opt stablelm olmo2 cohere granite mixtral qwen3_moe gpt_oss smollm3 mpt jamba qwen3_next "
    "gemma3 gemma3n gemma3n_text"
)


@pytest.mark.parametrize("model_type", OTHERS.split())
def test_every_other_family_is_refused_by_name_from_its_configuration(model_type: str) -> None:
    with pytest.raises(ValueError, match=f"model_type='{model_type}'.*gemma2, gemma3_text, gpt2, llama, qwen3"):
        family_of(AutoConfig.for_model(model_type))
