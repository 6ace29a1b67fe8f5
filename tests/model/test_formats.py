"""Checkpoints as they come: shards, pickled weights, number formats, vocabularies with padding, and older files."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import layerskip
from layerskip import Engine
from layerskip.comparison.audit import first_difference
from layerskip.model.metadata import update_metadata
from tests import kit

TEXT = " ".join(f"w{token}" for token in kit.PROMPT)
SHARD = "20KB"


def own_generate(folder: Path) -> torch.Tensor:
    """Returns what transformers alone makes of a folder, in fp32."""
    return kit.reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), kit.prompt_tensor())


# Files


@pytest.mark.parametrize("tied", [True, False])
def test_shards_with_a_tied_or_an_untied_head_load_and_save(tmp_path: Path, tied: bool) -> None:
    model = kit.mixed(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "first", max_shard_size=SHARD)
    layerskip.load(tmp_path / "first").model.save_pretrained(tmp_path / "again", max_shard_size=SHARD)
    expected = kit.reference(model, kit.prompt_tensor())
    for folder in (tmp_path / "first", tmp_path / "again"):
        assert len(list(folder.glob("model-*.safetensors"))) > 1
        engine = layerskip.load(folder, exit_layer=2)
        assert (engine.layered.head.weight is engine.layered.embedding.weight) is tied
        assert torch.equal(engine.generate(kit.prompt_tensor(), max_new_tokens=24).sequences, expected)


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """MIX with its weights in pytorch_model.bin."""
    model = kit.mixed()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    return tmp_path


def test_pickled_weights_load(pickled: Path) -> None:
    result = layerskip.load(pickled, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(result.sequences, kit.reference(kit.mixed(), kit.prompt_tensor()))


def test_pickled_weights_run_no_code(pickled: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return Path.touch, (pickled / "was-run",)

    torch.save({"lm_head.weight": Code()}, pickled / "pytorch_model.bin")
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        layerskip.load(pickled)
    assert not (pickled / "was-run").exists()


# Number formats


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MIX in fp32."""
    folder = tmp_path_factory.mktemp("formats")
    kit.mixed().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_every_number_format_greedy_tokens_differ_in_near_ties_at_most(folder: Path, dtype: torch.dtype) -> None:
    model = kit.mixed().to(dtype)
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(kit.prompt_tensor(), output_logits=True, return_dict_in_generate=True, **options)
    expected, logits = plain.sequences[0, 10:].tolist(), torch.stack(plain.logits)[:, 0]
    for engine in (layerskip.load(folder, dtype=dtype, exit_layer=2), Engine(model, exit_layer=2)):
        assert {weight.dtype for weight in engine.model.parameters()} == {dtype}
        given = engine.generate(kit.prompt_tensor(), **options).sequences[0, 10:].tolist()
        difference = first_difference(expected, given, logits, dtype)
        assert difference is None or (difference.is_near_tie and dtype != torch.float32)


# A vocabulary that is padded beyond the tokenizer


def test_tokens_that_the_tokenizer_lacks_are_drafted_and_verified_as_others_and_have_no_text() -> None:
    model, tokenizer = kit.identical(), kit.word_tokenizer(90)
    expected = kit.reference(model, kit.prompt_tensor())
    result = Engine(model, tokenizer, exit_layer=2).generate(TEXT, max_new_tokens=24)
    assert torch.equal(result.sequences, expected)
    emitted = expected[0, 10:].tolist()
    assert max(emitted[1:]) >= 90 and result.statistics.draft_acceptance_rate == 1
    # w0 is the unknown word, which texts leave out as well.
    assert result.texts == [" ".join(f"w{token}" for token in emitted if 0 < token < 90)]


def test_a_padded_vocabulary_where_the_exit_is_right_in_part() -> None:
    model = kit.mixed()
    engine = Engine(model, kit.word_tokenizer(90), exit_layer=2)
    expected = kit.reference(model, kit.prompt_tensor([96, 90, 44]))
    assert max(expected[0, 3:].tolist()) >= 90
    assert torch.equal(engine.generate(kit.prompt_tensor([96, 90, 44]), max_new_tokens=24).sequences, expected)
    events = list(engine.stream(TEXT, max_new_tokens=24))
    assert "".join(event.text for event in events) == events[-1].result.texts[0]


# Folders as older versions of transformers wrote them, such as those of the released LayerSkip checkpoints

COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.2",
    "use_cache": True,
    "vocab_size": kit.VOCAB,
}
LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# What config.json says beside COMMON, and the end tokens of generation_config.json.
OLD: dict[str, tuple[dict[str, Any], Any]] = {
    "Llama 2": ({"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096, "rope_theta": 10000.0}, 2),
    "Llama 3": ({"bos_token_id": 80, "eos_token_id": 81, "max_position_embeddings": 8192, "rope_theta": 5e5}, [81, 89]),
    "Llama 3.2": (
        {
            "bos_token_id": 80,
            "eos_token_id": [81, 88, 89],
            "head_dim": 8,
            "max_position_embeddings": 131072,
            "rope_scaling": LLAMA3_ROPE,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        [81, 88, 89],
    ),
    "Code Llama": ({"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 16384, "rope_theta": 1e6}, 2),
}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def old_folder(path: Path, kind: str) -> Path:
    """Writes a tiny checkpoint of the shape of a released one."""
    config, eos = OLD[kind]
    model: PreTrainedModel = kit.mixed(tie_word_embeddings=config.get("tie_word_embeddings", False)).bfloat16()
    model.save_pretrained(path, max_shard_size=SHARD)
    kit.word_tokenizer().save_pretrained(path)
    write_json(path / "config.json", {**COMMON, **config})
    generation = {"do_sample": True, "eos_token_id": eos, "temperature": 0.6, "top_p": 0.9}
    write_json(path / "generation_config.json", {"transformers_version": "4.45.2", **generation})
    assert (path / "model.safetensors.index.json").is_file()
    return path


@pytest.mark.parametrize("kind", list(OLD))
def test_older_files_load_and_generate_what_transformers_does(tmp_path: Path, kind: str) -> None:
    folder = old_folder(tmp_path, kind)
    engine = layerskip.load(folder, exit_layer=2, dtype="float32")
    expected = own_generate(folder)
    result = engine.generate(TEXT, max_new_tokens=24, do_sample=False)
    assert torch.equal(result.sequences, expected)
    # One of its tokens as the only one, and as the last of those that end a text.
    config, eos = OLD[kind]
    rope = {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    assert engine.model.config.rope_parameters == rope
    token = expected[0, 14].item()
    eos = token if isinstance(eos, int) else [*eos[:-1], token]
    path = folder / "generation_config.json"
    write_json(path, {**json.loads(path.read_text()), "eos_token_id": eos})
    result = layerskip.load(folder, exit_layer=2, dtype="float32").generate(TEXT, max_new_tokens=24, do_sample=False)
    assert torch.equal(result.sequences, own_generate(folder))
    assert result.finish_reasons == ["stop"] and result.sequences.shape[1] <= 15


def test_without_an_exit_layer_it_is_said_how_to_find_one_which_can_be_saved(tmp_path: Path) -> None:
    folder = old_folder(tmp_path, "Llama 3.2")
    engine = layerskip.load(folder)
    with pytest.raises(ValueError, match=r"needs exit_layer=1\.\.3.*inference/compare_exits\.py"):
        engine.generate(TEXT)
    assert engine.model.dtype == torch.bfloat16
    before = json.loads((folder / "config.json").read_text())
    update_metadata(folder, {"exit_layer": 2, "num_draft_tokens": 3})
    after = json.loads((folder / "config.json").read_text())
    assert after.pop("layerskip") == {"format": 1, "exit_layer": 2, "num_draft_tokens": 3}
    assert after == before
    statistics = layerskip.load(folder).generate(TEXT, max_new_tokens=4, do_sample=False).statistics
    assert (statistics.exit_layer, statistics.num_draft_tokens) == (2, 3)
