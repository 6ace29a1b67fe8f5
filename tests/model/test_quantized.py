"""Quantised models: which decode exactly what they decode alone, and which are refused because they could not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import bitsandbytes
import gguf
import pytest
import torch
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerTensor,
    quantize_,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GgufConfig, PreTrainedModel, TorchAoConfig

import layerskip
from layerskip.model.quantization import check_quantization, check_stored_quantization
from tests import kit

IDS = kit.prompt_tensor()
NEW = 16


def bits8(threshold: float = 0.0) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)


def bits4(**settings: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **settings)


# Through transformers, from a saved checkpoint.
LOADED: dict[str, Callable[[], Any]] = {
    "bitsandbytes, 8 bits": bits8,
    "bitsandbytes, nf4": lambda: bits4(bnb_4bit_quant_type="nf4"),
    "bitsandbytes, fp4, nested, head too": lambda: bits4(bnb_4bit_use_double_quant=True, llm_int8_skip_modules=[]),
    "torchao, int8": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
}
# By the user, in a model that is there; the head as well.
IN_PLACE: dict[str, Callable[[], Any]] = {
    "torchao, int8, head too": Int8WeightOnlyConfig,
    "torchao, int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4),
    "torchao, float8": Float8WeightOnlyConfig,
    "torchao, int8 inputs": Int8DynamicActivationInt8WeightConfig,
    "torchao, int8 inputs, int4": lambda: Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
}
WITH_QUANTISED_HEAD = ("bitsandbytes, fp4, nested, head too", "torchao, int8, head too")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of MIX."""
    folder = tmp_path_factory.mktemp("plain")
    kit.mixed().save_pretrained(folder)
    return folder


@cache
def quantised(kind: str, plain: Path) -> PreTrainedModel:
    if kind in LOADED:
        return AutoModelForCausalLM.from_pretrained(plain, quantization_config=LOADED[kind](), device_map="cpu")
    model = kit.mixed()
    quantize_(model, IN_PLACE[kind]())
    return model


def numbers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns all that a model holds, unpacked where torchao packs it."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {
        name: (value.dequantize() if type(value).__module__.startswith("torchao.") else value).clone()
        for name, value in state.items()
    }


# Decoded exactly


@pytest.mark.parametrize("kind", [*LOADED, *IN_PLACE])
def test_a_quantised_model_decodes_what_it_decodes_alone_and_stays_as_it_is(kind: str, plain: Path) -> None:
    model = quantised(kind, plain)
    check_quantization(model)
    expected = kit.reference(model, IDS, NEW)
    before = numbers(model)
    result = layerskip.Engine(model, exit_layer=2).generate(IDS, max_new_tokens=NEW)
    assert torch.equal(result.sequences, expected)
    assert 0 < result.statistics.accepted < result.statistics.drafted
    assert result.statistics.emitted == 1 + result.statistics.accepted + result.statistics.rounds
    after = numbers(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert expected[0, len(kit.PROMPT) :].tolist() == kit.without_cache(model, kit.PROMPT, NEW)


@pytest.mark.parametrize("kind", ["bitsandbytes, nf4", "torchao, int8"])
def test_the_hook_decodes_with_quantised_weights_and_samples(kind: str, plain: Path) -> None:
    model = quantised(kind, plain)
    decode = layerskip.self_speculative(exit_layer=2)
    greedy = {"custom_generate": decode, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **greedy), kit.reference(model, IDS, NEW))
    engine = layerskip.Engine(model, exit_layer=2)
    sampled = [
        engine.generate(IDS, max_new_tokens=8, do_sample=True, generator=torch.Generator().manual_seed(1)).sequences
        for _ in range(2)
    ]
    assert sampled[0].shape == (1, len(kit.PROMPT) + 8)
    assert torch.equal(*sampled)


@pytest.mark.parametrize("kind", WITH_QUANTISED_HEAD)
def test_a_trimmed_draft_head_is_refused_where_the_head_is_quantised(kind: str, plain: Path) -> None:
    engine = layerskip.Engine(quantised(kind, plain), exit_layer=2, draft_token_ids=torch.arange(9))
    with pytest.raises(ValueError, match=f"draft_vocab_size=9 takes rows of a head .* draft_vocab_size={kit.VOCAB}"):
        engine.generate(IDS, max_new_tokens=NEW)


def test_the_plain_head_of_a_quantised_model_can_be_trimmed(plain: Path) -> None:
    model = quantised("bitsandbytes, nf4", plain)
    engine = layerskip.Engine(model, exit_layer=2, draft_token_ids=torch.arange(40))
    result = engine.generate(IDS, max_new_tokens=NEW)
    assert torch.equal(result.sequences, kit.reference(model, IDS, NEW))


# Refused: a token changes with those beside it

TOKEN = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
OUTLIER = TOKEN.index_fill(1, torch.tensor(3), 20.0)


def changes_beside_another(layer: torch.nn.Module) -> bool:
    """Whether a layer gives a token another output in a pass with a token that has one large input."""
    with torch.no_grad():
        return not torch.allclose(layer(TOKEN)[0], layer(torch.cat([TOKEN, OUTLIER]))[0], atol=1e-5)


def with_first_layer(layer: torch.nn.Module) -> PreTrainedModel:
    """Returns MIX with another layer for the queries of its first layer."""
    model = kit.mixed()
    model.model.layers[0].self_attn.q_proj = layer
    return model.eval()


def linear8(threshold: float) -> torch.nn.Module:
    layer = bitsandbytes.nn.Linear8bitLt(32, 32, bias=False, has_fp16_weights=False, threshold=threshold)
    layer.load_state_dict(torch.nn.Linear(32, 32, bias=False).state_dict())
    return layer.to("cpu").eval()


def torchao_layer(config: Any) -> torch.nn.Module:
    holder = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    quantize_(holder, config)
    return holder[0]


def dynamic_layer() -> torch.nn.Module:
    holder = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    return torch.ao.quantization.quantize_dynamic(holder, {torch.nn.Linear}, dtype=torch.qint8)[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear8(6.0), r"q_proj has llm_int8_threshold=6\.0: .*llm_int8_threshold=0\.0"),
        (
            lambda: torchao_layer(Int8DynamicActivationInt8WeightConfig(granularity=PerTensor())),
            r"q_proj\.weight is quantised by torchao .*PerTensor\(\).*supported are Int8WeightOnlyConfig",
        ),
        (dynamic_layer, r"q_proj was made by torch\.ao\.quantization\.quantize_dynamic.*Int8WeightOnlyConfig"),
    ],
    ids=["outliers of bitsandbytes", "torchao per tensor", "quantize_dynamic"],
)
def test_layers_in_which_tokens_depend_on_one_another_are_refused_by_name(
    make: Callable[[], torch.nn.Module], message: str
) -> None:
    torch.manual_seed(0)
    layer = make()
    assert changes_beside_another(layer)
    with pytest.raises(ValueError, match=message):
        check_quantization(with_first_layer(layer))


@pytest.mark.parametrize(
    "make",
    [
        lambda: linear8(0.0),
        lambda: torchao_layer(Int8DynamicActivationInt8WeightConfig()),
        lambda: torchao_layer(Int8WeightOnlyConfig()),
    ],
    ids=["bitsandbytes", "torchao per row", "torchao weights alone"],
)
def test_layers_that_compute_every_token_by_itself_are_allowed(make: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    layer = make()
    assert not changes_beside_another(layer)
    check_quantization(with_first_layer(layer))


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "fp8"])
def test_other_kinds_are_refused_by_name_before_weights_are_read(method: str, tmp_path: Path) -> None:
    config = kit.llama_config(quantization_config={"quant_method": method, "bits": 4})
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"quant_method='{method}', which are not supported; .*'torchao'"):
        layerskip.load(tmp_path)


def test_a_missing_package_is_named_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    config = kit.llama_config(quantization_config=bits4().to_dict())
    with pytest.raises(ImportError, match=r"quantised by bitsandbytes.*pip install \"layerskip\[quant\]\""):
        check_stored_quantization(config, "path_or_id='folder'")


# From a folder


@pytest.fixture(scope="module")
def stored(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that gives the folder of a saved quantised model."""

    @cache
    def save(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("stored")
        quantised(kind, plain).save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("options", [{}, {"device": "cpu", "dtype": torch.float32}, {"device_map": "auto"}])
@pytest.mark.parametrize("kind", ["bitsandbytes, 8 bits", "bitsandbytes, nf4", "torchao, int8"])
def test_a_quantised_checkpoint_loads_as_it_was_saved(
    kind: str, options: dict[str, Any], plain: Path, stored: Callable[[str], Path]
) -> None:
    engine = layerskip.load(stored(kind), exit_layer=2, **options)
    result = engine.generate(IDS, max_new_tokens=NEW)
    assert torch.equal(result.sequences, kit.reference(quantised(kind, plain), IDS, NEW))
    assert not any(module.training for module in engine.model.modules())


def test_stored_weights_cannot_be_cast(stored: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16 is not the type .* torch\.float32.*leave it out"):
        layerskip.load(stored("bitsandbytes, nf4"), dtype="bfloat16")


def test_a_stored_outlier_threshold_is_refused_and_can_be_set_to_0(tmp_path: Path, plain: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=bits8(6.0), device_map="cpu")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"llm_int8_threshold=6\.0.*the quantization_config of config\.json"):
        layerskip.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["llm_int8_threshold"] = 0.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_quantization(layerskip.load(tmp_path).model)


def test_adapters_on_a_quantised_model_are_not_merged(tmp_path: Path, stored: Callable[[str], Path]) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(kit.mixed(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"adapters on a model with quantised weights.*PeftModel.*layerskip\.Engine"):
        layerskip.load(tmp_path, base=stored("bitsandbytes, nf4"))


# GGUF

OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Writes a Llama in 8-bit blocks."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = OUTER | {
        f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}"
        for layer in range(config.num_hidden_layers)
        for ours, theirs in INNER.items()
    }
    blocks = gguf.GGMLQuantizationType.Q8_0
    for name, weight in model.state_dict().items():
        name = f"{names[name.removesuffix('.weight')]}.weight"
        if weight.dim() == 2:
            writer.add_tensor(name, gguf.quants.quantize(weight.numpy(), blocks), raw_dtype=blocks)
        else:
            writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_decodes_through_transformers_and_names_the_way_from_its_path(tmp_path: Path) -> None:
    write_gguf(kit.mixed(), tmp_path / "tiny.gguf")
    for path in (tmp_path, tmp_path / "tiny.gguf"):
        with pytest.raises(ValueError, match=r"from_pretrained\('.*', gguf_file='tiny\.gguf'\).*layerskip\.Engine"):
            layerskip.load(path)
    unpacked = {"gguf_file": "tiny.gguf", "dtype": torch.float32}
    for settings in ({}, {"quantization_config": GgufConfig(dequantize=True)}):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **unpacked, **settings)
        check_quantization(model)
        result = layerskip.Engine(model, exit_layer=2).generate(IDS, max_new_tokens=NEW)
        assert torch.equal(result.sequences, kit.reference(model, IDS, NEW))
        assert result.statistics.accepted > 0


def test_weights_left_in_gguf_blocks_are_refused_by_name() -> None:
    model = kit.mixed()
    model.config.quantization_config = GgufConfig()
    check_quantization(model)
    packed = torch.nn.Parameter(torch.zeros(32, 34, dtype=torch.uint8), requires_grad=False)
    model.model.layers[0].self_attn.q_proj.weight = packed
    with pytest.raises(ValueError, match=r"quant_method='gguf', which are not supported.*dequantize=True"):
        check_quantization(model)
