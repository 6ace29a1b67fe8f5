"""Loading a folder of LoRA adapters: the model that they adapt, what they say about exits, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import layerskip
from layerskip.model.draft_head import write_draft_token_ids
from layerskip.training.checkpoint import recipe_metadata, write_adapter_metadata
from tests import kit

SHORT = {"max_new_tokens": 6}
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint of MIX with a tokenizer."""
    kit.mixed().save_pretrained(tmp_path / "base")
    kit.word_tokenizer(kit.VOCAB).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def save_adapters(base: Path, folder: Path, targets: list[str] = TARGETS, rank: int = 4, **settings: Any) -> Path:
    """Saves adapters that change what the model in `base` says, as training does."""
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM", **settings)
    adapted = peft.get_peft_model(layerskip.load(base).model, config)
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    write_adapter_metadata(folder, recipe_metadata([1, 2], {"rank": rank}))
    return folder


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """Adapters on MIX, the exits of which were not compared yet."""
    return save_adapters(base, tmp_path / "adapters")


def own_generate(base: Path, folder: Path) -> torch.Tensor:
    """Returns what the model with the adapters beside its weights generates."""
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder)).eval()
    options = {"attention_mask": torch.ones_like(kit.prompt_tensor()), "do_sample": False, "pad_token_id": 0}
    return model.generate(input_ids=kit.prompt_tensor(), max_new_tokens=24, **options)


def edit(folder: Path, **changes: Any) -> Path:
    """Changes entries of adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


# What is there


@pytest.mark.parametrize("strategy", ["self_speculative", "autoregressive"])
def test_greedy_tokens_are_those_of_the_model_with_its_adapters(base: Path, folder: Path, strategy: str) -> None:
    exit_layer = 2 if strategy == "self_speculative" else None
    result = layerskip.load(folder).generate(
        kit.prompt_tensor(), strategy=strategy, exit_layer=exit_layer, max_new_tokens=24
    )
    expected = own_generate(base, folder)
    assert torch.equal(result.sequences, expected)
    assert not torch.equal(expected, kit.reference(kit.mixed(), kit.prompt_tensor()))


@pytest.mark.parametrize(
    "settings",
    [
        {"targets": ["q_proj", "lm_head"]},
        {"targets": ["q_proj", "embed_tokens"]},
        {"use_rslora": True},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"layers_to_transform": [1, 3]},
    ],
    ids=lambda settings: str(next(iter(settings.items()))),
)
def test_other_kinds_of_lora_are_merged_as_well(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it saves the embedding as well
        folder = save_adapters(base, tmp_path / "adapters", **settings)
    result = layerskip.load(folder).generate(kit.prompt_tensor(), exit_layer=2, max_new_tokens=24)
    assert torch.equal(result.sequences, own_generate(base, folder))


def test_the_model_is_a_plain_one_as_if_it_had_been_loaded(base: Path, folder: Path) -> None:
    plain, merged = layerskip.load(base).model, layerskip.load(folder).model
    assert type(merged) is type(plain)
    assert list(merged.state_dict()) == list(plain.state_dict())
    assert all(parameter.requires_grad for parameter in merged.parameters())
    assert not any(module.training for module in merged.modules())


def test_the_model_saved_again_is_a_checkpoint_that_needs_no_base(folder: Path, base: Path, tmp_path: Path) -> None:
    expected = own_generate(base, folder)
    layerskip.load(folder).model.save_pretrained(tmp_path / "merged")
    shutil.rmtree(base)
    engine = layerskip.load(tmp_path / "merged", exit_layer=2)
    assert torch.equal(engine.generate(kit.prompt_tensor(), max_new_tokens=24).sequences, expected)
    assert engine.metadata.exit_layers == (1, 2)


def test_adapters_trained_on_top_of_merged_ones_load_both(folder: Path, tmp_path: Path) -> None:
    above = save_adapters(folder, tmp_path / "above", targets=["o_proj"])
    assert json.loads((above / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    expected = layerskip.load(folder).model
    expected = peft.PeftModel.from_pretrained(expected, str(above)).eval()
    result = layerskip.load(above).generate(kit.prompt_tensor(), exit_layer=2, max_new_tokens=24)
    assert torch.equal(result.sequences, kit.reference(expected.merge_and_unload(), kit.prompt_tensor()))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float32])
def test_dtype_is_honoured(folder: Path, dtype: Any) -> None:
    wanted = torch.bfloat16 if dtype == "bfloat16" else dtype
    assert {parameter.dtype for parameter in layerskip.load(folder, dtype=dtype).model.parameters()} == {wanted}


def test_dtype_is_by_default_that_of_the_base_model(base: Path, folder: Path) -> None:
    kit.mixed().bfloat16().save_pretrained(base)
    assert layerskip.load(folder).model.dtype == torch.bfloat16


def test_attn_implementation_is_honoured(folder: Path) -> None:
    model = layerskip.load(folder, attn_implementation="eager").model
    assert model.config._attn_implementation == "eager"


def test_the_tokenizer_is_the_folders_own_or_else_the_base_models(folder: Path) -> None:
    tokenizer = layerskip.load(folder).tokenizer
    assert tokenizer is not None and len(tokenizer) == kit.VOCAB
    kit.word_tokenizer(50).save_pretrained(folder)
    tokenizer = layerskip.load(folder).tokenizer
    assert tokenizer is not None and len(tokenizer) == 50


# Rounding


def deltas(folder: Path) -> dict[str, torch.Tensor]:
    """Returns what plain adapters of scale 2 add to the weights that they adapt, in fp32."""
    tensors = load_file(folder / "adapter_model.safetensors")
    ends = ("lora_A.weight", "lora_B.weight")
    names = [name.removesuffix(ends[0]) for name in tensors if name.endswith(ends[0])]
    return {
        name.removeprefix("base_model.model.") + "weight": tensors[name + ends[1]] @ tensors[name + ends[0]] * 2
        for name in names
    }


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_merged_weights_are_rounded_once(base: Path, folder: Path, stored: torch.dtype) -> None:
    original = kit.mixed().to(stored)
    original.save_pretrained(base)
    added = deltas(folder)
    assert len(added) == 3 * kit.NUM_LAYERS
    merged = layerskip.load(folder, dtype="bfloat16").model.state_dict()
    rounded_twice = 0
    for name, weight in original.state_dict().items():
        expected = weight.float() + added[name] if name in added else weight
        assert torch.equal(merged[name], expected.to(torch.bfloat16)), name
        if name in added:
            rounded_twice += int((merged[name] != (weight.bfloat16().float() + added[name]).bfloat16()).sum())
    # A control: where the base is rounded first, other weights come out.
    assert (rounded_twice > 0) == (stored == torch.float32)


def test_adapters_on_adapters_are_rounded_once_and_in_the_type_of_the_model_beneath(
    base: Path, folder: Path, tmp_path: Path
) -> None:
    above = save_adapters(folder, tmp_path / "above")
    kit.mixed().bfloat16().save_pretrained(base)
    original, lower, upper = kit.mixed().bfloat16().state_dict(), deltas(folder), deltas(above)
    merged = layerskip.load(above).model.state_dict()
    rounded_twice = 0
    for name, delta in lower.items():
        weight = original[name].float() + delta
        assert torch.equal(merged[name], (weight + upper[name]).bfloat16()), name
        rounded_twice += int((merged[name] != (weight.bfloat16().float() + upper[name]).bfloat16()).sum())
    assert rounded_twice > 0


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_merged_model_in_bf16_is_the_one_that_loads_after_saving(
    base: Path, folder: Path, tmp_path: Path, dtype: str
) -> None:
    """Rotary tables and other buffers stay in their own type."""
    kit.mixed().bfloat16().save_pretrained(base)
    merged = layerskip.load(folder, dtype=dtype).model
    assert merged.config.dtype == torch.bfloat16
    merged.save_pretrained(tmp_path / "saved")
    again = layerskip.load(tmp_path / "saved").model

    def tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
        return {**dict(model.named_buffers()), **dict(model.named_parameters())}

    assert merged.model.rotary_emb.inv_freq.dtype == torch.float32
    assert tensors(merged).keys() == tensors(again).keys()
    for name, tensor in tensors(again).items():
        assert tensors(merged)[name].dtype == tensor.dtype and torch.equal(tensors(merged)[name], tensor), name


def test_a_tied_head_stays_tied(base: Path, tmp_path: Path) -> None:
    kit.mixed(tie_word_embeddings=True).save_pretrained(base)
    model = layerskip.load(save_adapters(base, tmp_path / "tied"), dtype="bfloat16").model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


# Another model beneath


@pytest.mark.parametrize("kind", [str, Path])
def test_base_stands_for_the_model_that_the_adapters_name(base: Path, folder: Path, tmp_path: Path, kind: type) -> None:
    expected = own_generate(base, folder)
    base.rename(tmp_path / "moved")
    engine = layerskip.load(folder, base=kind(tmp_path / "moved"), exit_layer=2)
    assert torch.equal(engine.generate(kit.prompt_tensor(), max_new_tokens=24).sequences, expected)
    assert engine.tokenizer is not None


def test_base_helps_where_the_adapters_name_none_or_a_revision_of_another(base: Path, folder: Path) -> None:
    edit(folder, base_model_name_or_path=None, revision="v2")
    assert layerskip.load(folder, base=base).layered.num_layers == kit.NUM_LAYERS


def test_base_may_be_a_folder_of_adapters_itself(base: Path, folder: Path, tmp_path: Path) -> None:
    above = save_adapters(folder, tmp_path / "above", targets=["o_proj"])
    expected = layerskip.load(above).model.state_dict()
    folder.rename(tmp_path / "moved")
    found = layerskip.load(above, base=tmp_path / "moved").model.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_base_beside_a_whole_model_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"base='other' is for a folder of adapters, but path_or_id=.* a whole model"):
        layerskip.load(base, base="other")


def test_a_base_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"for the model '.*nothing' \(base\), which cannot be loaded: .*no such folder"
    ):
        layerskip.load(folder, base=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (5, TypeError, "base=5 is a int; pass a folder or a hub id"),
        ("", ValueError, "base=''"),
        (None, ValueError, "base='.*adapters', the folder of the adapters itself"),
    ],
)
def test_a_base_that_can_be_none_is_refused(folder: Path, wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layerskip.load(folder, base=str(folder) if wrong is None else wrong)


# Draft token ids


def drafted_from(folder: Path) -> list[int] | None:
    ids = layerskip.load(folder).draft_token_ids
    return None if ids is None else ids.tolist()


def test_draft_token_ids_lie_beside_the_adapters(base: Path, folder: Path) -> None:
    expected = own_generate(base, folder)
    write_draft_token_ids(folder, torch.tensor([7, 3, 90]))
    describe(folder, {"format": 1, "exit_layer": 2, "draft_vocab_size": 2})
    engine = layerskip.load(folder)
    assert drafted_from(folder) == [7, 3, 90] and engine.metadata.draft_vocab_size == 2
    assert torch.equal(engine.generate(kit.prompt_tensor(), max_new_tokens=24).sequences, expected)


def test_draft_token_ids_go_with_the_metadata(base: Path, folder: Path) -> None:
    write_draft_token_ids(base, torch.tensor([5, 6]))
    assert drafted_from(folder) is None
    (folder / "layerskip.json").unlink()
    assert drafted_from(folder) == [5, 6]
    write_draft_token_ids(folder, torch.tensor([7]))
    assert drafted_from(folder) == [7]


def test_metadata_of_a_base_model_that_are_not_used_need_no_token_ids(base: Path, folder: Path) -> None:
    path = base / "config.json"
    stored = {"format": 1, "exit_layer": 3, "draft_vocab_size": 8}
    path.write_text(json.dumps({**json.loads(path.read_text()), "layerskip": stored}))
    assert drafted_from(folder) is None
    (folder / "layerskip.json").unlink()
    with pytest.raises(ValueError, match=r"draft_vocab_size=8, but there is no layerskip\.safetensors"):
        layerskip.load(folder)


@pytest.mark.parametrize(
    ("ids", "message"), [([kit.VOCAB], "token id 97; the model's .* is 0 to 96"), ([7], "holds 1 token ids")]
)
def test_draft_token_ids_that_do_not_fit_are_refused_before_the_base_is_read(
    base: Path, folder: Path, ids: list[int], message: str
) -> None:
    write_draft_token_ids(folder, torch.tensor(ids))
    describe(folder, {"format": 1, "draft_vocab_size": 2})
    (base / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"path_or_id='{folder}'.*layerskip\.safetensors .*{message}"):
        layerskip.load(folder)


# What the adapters say about their exits


def describe(folder: Path, metadata: Any) -> Path:
    write_adapter_metadata(folder, metadata)
    return folder


def test_trained_exits_are_known_and_named_where_none_is_recommended(folder: Path) -> None:
    engine = layerskip.load(folder)
    assert engine.metadata.exit_layers == (1, 2)
    with pytest.raises(ValueError, match=r"needs exit_layer=1\.\.3 \(trained are 1, 2\).*inference/compare_exits\.py"):
        engine.generate(kit.prompt_tensor(), **SHORT)


def test_the_recommendation_is_followed(folder: Path) -> None:
    describe(folder, {"format": 1, "exit_layer": 2, "num_draft_tokens": 3})
    statistics = layerskip.load(folder).generate(kit.prompt_tensor(), **SHORT).statistics
    assert (statistics.exit_layer, statistics.num_draft_tokens) == (2, 3)


@pytest.mark.parametrize("has_own", [True, False])
def test_the_metadata_is_the_folders_own_or_else_the_base_models(base: Path, folder: Path, has_own: bool) -> None:
    path = base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "layerskip": {"format": 1, "exit_layer": 3}}))
    if not has_own:
        (folder / "layerskip.json").unlink()
    metadata = layerskip.load(folder).metadata
    assert (metadata.exit_layer, metadata.exit_layers) == ((None, (1, 2)) if has_own else (3, ()))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": 9}, "is not in format 1"),
        ({"format": 1, "exit_layer": "2"}, "exit_layer='2' is a str, not an integer"),
        ({"format": 1, "exit_layers": [1, "2"]}, r"exit_layers\[1\]='2' is a str, not an integer"),
        ({"format": 1, "exit_layers": 2}, "exit_layers=2 is a int, not a list"),
    ],
)
def test_metadata_that_cannot_be_read_are_refused(folder: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"layerskip\.json.*{message}"):
        layerskip.load(describe(folder, metadata))


# What is refused


def test_without_peft_it_is_said_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r'pip install "layerskip\[lora\]"'):
        layerskip.load(folder)


def test_a_base_model_that_is_gone_is_named(base: Path, folder: Path) -> None:
    shutil.rmtree(base)
    with pytest.raises(ValueError, match=r"holds adapters for the model .*there is no such folder") as refusal:
        layerskip.load(folder)
    assert str(base) in str(refusal.value) and str(folder) in str(refusal.value)


@pytest.mark.parametrize("name", [None, "", 5])
def test_adapters_must_name_their_base_model(folder: Path, name: Any) -> None:
    with pytest.raises(ValueError, match=f"base_model_name_or_path={name!r}"):
        layerskip.load(edit(folder, base_model_name_or_path=name))


def test_adapters_cannot_be_their_own_base_model(folder: Path) -> None:
    with pytest.raises(ValueError, match="the folder of the adapters itself"):
        layerskip.load(edit(folder, base_model_name_or_path=str(folder)))


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", None])
def test_other_adapters_than_lora_are_refused(folder: Path, kind: str | None) -> None:
    with pytest.raises(ValueError, match=f"peft_type={kind!r}; supported is 'LORA'"):
        layerskip.load(edit(folder, peft_type=kind))


def test_a_damaged_configuration_is_named(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json is no JSON"):
        layerskip.load(folder)


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"is a folder of adapters without adapter_model\.safetensors"):
        layerskip.load(folder)


def test_damaged_weights_are_named(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"path_or_id=.*cannot be loaded"):
        layerskip.load(folder)


def other_sizes(base: Path, folder: Path) -> None:
    kit.mixed(intermediate_size=48).save_pretrained(base)


def fewer_layers(base: Path, folder: Path) -> None:
    kit.truncated(kit.mixed(), 3).save_pretrained(base)


def more_layers(base: Path, folder: Path) -> None:
    kit.build(kit.llama_config(num_hidden_layers=5)).save_pretrained(base)


def other_targets(base: Path, folder: Path) -> None:
    edit(folder, target_modules=["c_attn"])


def unknown_settings(base: Path, folder: Path) -> None:
    edit(folder, r="x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_sizes, "size mismatch for .*down_proj"),
        (fewer_layers, r"they hold beside what fits .*layers\.3\..* \(6 in all\)"),
        (more_layers, r"they lack .*layers\.4\..* \(6 in all\)"),
        (other_targets, "c_attn"),
        (unknown_settings, "'str' and 'int'"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_in_one_line(
    base: Path, folder: Path, change: Any, message: str, recwarn: pytest.WarningsRecorder
) -> None:
    change(base, folder)
    recwarn.clear()
    with pytest.raises(ValueError, match=f"do not fit their base model .*{message}") as refusal:
        layerskip.load(folder)
    assert "\n" not in str(refusal.value)
    assert not [warning for warning in recwarn if "adapter keys" in str(warning.message)]


def test_a_revision_beside_a_folder_of_adapters_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="revision='v2' is for models on the hub"):
        layerskip.load(folder, revision="v2")


def test_adapters_without_finite_numbers_are_refused(folder: Path) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    weights[next(iter(weights))][0, 0] = float("nan")
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors in path_or_id=.*lora_.* has no finite numbers"):
        layerskip.load(folder)


@pytest.mark.parametrize("pattern", [[1], {"(": 3}])
def test_settings_that_peft_cannot_read_are_refused(folder: Path, pattern: Any) -> None:
    with pytest.raises(ValueError, match=r"do not fit their base model"):
        layerskip.load(edit(folder, rank_pattern=pattern))


def test_a_whole_model_with_adapters_beside_it_is_refused(base: Path, folder: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder / name, base / name)
    with pytest.raises(ValueError, match=r"holds a whole model \(config.json\) and adapters"):
        layerskip.load(base)
