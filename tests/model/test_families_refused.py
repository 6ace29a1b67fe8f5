"""Families, settings and attention implementations that cannot be run are refused by name, before anything runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    Gemma3nTextConfig,
    GptOssConfig,
    JambaConfig,
    MambaConfig,
    MptConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    T5Config,
)

import layerskip
from layerskip import Engine
from layerskip.model.families import FAMILIES, family_of
from tests import kit
from tests.families_kit import CONFIGS, built, falcon_config

SUPPORTED = ", ".join(sorted(FAMILIES))
BIASED = "since its attention adds a bias for every distance (ALiBi)"
RECURRENT = "since its layers keep a recurrent state, which cannot be rolled back"
SHARED = "since its upper layers read the keys and values of lower ones (num_kv_shared_layers=2)"
SMALL = {"vocab_size": kit.VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def gemma3n_config() -> Gemma3nTextConfig:
    """Six layers, the last two of which have no keys and values of their own."""
    layer_types = ["sliding_attention", "full_attention"] * 3
    peculiar = {"num_hidden_layers": 6, "layer_types": layer_types, "num_kv_shared_layers": 2, "head_dim": 8}
    small = {"vocab_size_per_layer_input": kit.VOCAB, "hidden_size_per_layer_input": 4, "laurel_rank": 4}
    return Gemma3nTextConfig(**{**kit.COMMON, **peculiar, **small})


REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "bloom": (lambda: BloomConfig(vocab_size=kit.VOCAB, hidden_size=32, n_layer=2, n_head=4), BIASED),
    "mpt": (lambda: MptConfig(vocab_size=kit.VOCAB, d_model=32, n_layers=2, n_heads=4), BIASED),
    "mamba": (lambda: MambaConfig(vocab_size=kit.VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4), RECURRENT),
    "jamba": (lambda: JambaConfig(**SMALL, intermediate_size=64, mamba_d_state=4, use_mamba_kernels=False), RECURRENT),
    "qwen3_next": (lambda: Qwen3NextConfig(**SMALL, head_dim=8, num_experts=4, linear_num_key_heads=2), RECURRENT),
    "gemma3n_text": (gemma3n_config, SHARED),
    "gpt_oss": (lambda: GptOssConfig(**SMALL, head_dim=8, num_local_experts=4, intermediate_size=64), ""),
}
# From their configurations alone.
OTHERS = (
    "mamba2 recurrent_gemma rwkv falcon_h1 gemma3 gemma3n gemma4 gemma4_text cohere2 olmo3 deepseek_v3 starcoder2 bert"
)


def tiny(config: PreTrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config).eval()


def refused(message: str) -> Any:
    """Returns what checks that a family is refused with `message`, and that the message ends in what is supported."""
    return pytest.raises(ValueError, match=rf"^{message}.*; supported families: {SUPPORTED}\.$")


# Families


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_not_supported_is_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    """By the engine before any layer runs, by loading before weights are looked for: the folder has none."""
    config, reason = REFUSED[family]
    with refused(f"model_type='{family}' is not supported") as refusal:
        Engine(tiny(config()))
    assert reason in str(refusal.value)
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError) as on_loading:
        layerskip.load(tmp_path)
    assert str(on_loading.value) == str(refusal.value)


@pytest.mark.parametrize("family", OTHERS.split())
def test_every_other_family_is_refused_by_name_from_its_configuration(family: str) -> None:
    with refused(f"model_type='{family}' is not supported"):
        family_of(AutoConfig.for_model(family))


@pytest.mark.parametrize("family", ["mamba2", "recurrent_gemma", "rwkv", "falcon_h1"])
def test_recurrent_families_are_told_why(family: str) -> None:
    with pytest.raises(ValueError, match=RECURRENT):
        family_of(AutoConfig.for_model(family))


def test_keys_and_values_that_layers_share_are_the_reason_where_there_are_any() -> None:
    with pytest.raises(ValueError, match=r"'gemma4_text'.*num_kv_shared_layers=2"):
        family_of(AutoConfig.for_model("gemma4_text", num_kv_shared_layers=2))
    with pytest.raises(ValueError, match="'gemma4_text' is not supported; supported"):
        family_of(AutoConfig.for_model("gemma4_text", num_kv_shared_layers=0))


def test_an_encoder_decoder_model_is_refused_by_name() -> None:
    config = T5Config(vocab_size=97, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="model_type='t5' is an encoder-decoder model") as refusal:
        Engine(AutoModelForSeq2SeqLM.from_config(config).eval())
    assert SUPPORTED in str(refusal.value)


# Settings of supported families


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: kit.gemma3_config(use_bidirectional_attention=True), "use_bidirectional_attention=True .*gemma3_text"),
        (lambda: kit.gpt2_config(add_cross_attention=True, is_decoder=True), "add_cross_attention=True .*gpt2"),
        (lambda: falcon_config(alibi=True), "alibi=True .*falcon"),
    ],
    ids=["gemma3_text", "gpt2", "falcon"],
)
def test_a_setting_that_a_family_cannot_run_is_refused_by_name(
    config: Callable[[], PreTrainedConfig], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny(config()))
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        layerskip.load(tmp_path)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *((family, other) for family in CONFIGS for other in ("flash_attention_2", "flex_attention")),
        ("falcon", "eager"),
        ("gemma2", "sdpa"),
    ],
)
def test_an_attention_implementation_that_a_family_cannot_run_is_refused_by_name(
    family: str, implementation: str
) -> None:
    model = copy.deepcopy(built(family))
    model.config._attn_implementation = implementation
    allowed = {"gemma2": "'eager'", "falcon": "'sdpa'"}.get(family, "'sdpa' or 'eager'")
    with pytest.raises(ValueError, match=rf"attn_implementation='{implementation}'.*load the model with {allowed}\.$"):
        Engine(model)


def test_falcons_eager_attention_is_refused_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    falcon_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"attn_implementation='eager'.*model_type='falcon'; allowed: 'sdpa'"):
        layerskip.load(tmp_path, attn_implementation="eager")


@pytest.mark.parametrize("family", CONFIGS)
def test_a_patched_number_of_layers_is_refused(family: str) -> None:
    """Cutting `config.num_hidden_layers` is a known trick to exit early; the wrapper would count wrong layers."""
    model = copy.deepcopy(built(family))
    model.config.num_hidden_layers = 2
    if "layer_types" in model.config.to_dict():
        model.config.layer_types = model.config.layer_types[:2]
    with pytest.raises(ValueError, match="num_hidden_layers=2, but the model has 4 layers"):
        Engine(model)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3"])
def test_layers_that_slide_without_a_window_are_refused_by_name(family: str) -> None:
    config = CONFIGS[family](use_sliding_window=False, layer_types=["sliding_attention"] * kit.NUM_LAYERS)
    config.sliding_window = None
    with pytest.raises(
        ValueError, match=rf"layer_types of model_type='{family}' has 'sliding_attention', but sliding_w"
    ):
        family_of(config)


def test_an_unknown_layer_type_is_refused_by_name() -> None:
    model = kit.build(kit.qwen3_config())
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"layer_types=\['chunked_attention'\].*qwen3"):
        Engine(model)


def test_logits_without_their_scale_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"logit_scale=None .*model_type='cohere'; use model\.generate"):
        family_of(CONFIGS["cohere"](logit_scale=None))
