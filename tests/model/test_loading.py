"""Loading a checkpoint: what is found, what is refused, and what it says about its exits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from transformers import AutoModelForSeq2SeqLM, Starcoder2Config, Starcoder2ForCausalLM, T5Config

import layerskip
from layerskip.decoding.plan import DEFAULT_NUM_DRAFT_TOKENS, Plan, Wishes
from layerskip.model import location
from layerskip.model.draft_head import TENSORS_FILE, write_draft_token_ids
from layerskip.training.checkpoint import recipe_metadata, saved_with
from tests import kit

WEIGHTS = "model.safetensors"
SHORT = {"max_new_tokens": 6}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of MIX without a tokenizer."""
    kit.mixed().save_pretrained(tmp_path / "mixed")
    return tmp_path / "mixed"


class Hub:
    """Stands in for `HfApi` and records what it is asked; answers with an error where one is given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[tuple[str, str | None]] = []

    def __call__(self) -> Hub:
        return self

    def model_info(self, name: str, *, revision: str | None = None, timeout: float | None = None) -> None:
        assert timeout is not None
        self.asked.append((name, revision))
        if self.error is not None:
            raise self.error


@pytest.fixture
def hub_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception | None], Hub]:
    """Returns a function that replaces the hub by one that raises an error."""

    def replace(error: Exception | None) -> Hub:
        hub = Hub(error)
        monkeypatch.setattr(location, "HfApi", hub)
        return hub

    return replace


def not_found(kind: type[RepositoryNotFoundError] | type[RevisionNotFoundError]) -> Exception:
    response: Any = SimpleNamespace(headers={}, request=None)
    return kind("404 Client Error", response=response)


# What is there


def test_a_folder_without_a_tokenizer_gives_an_engine_for_token_ids(folder: Path) -> None:
    engine = layerskip.load(folder, exit_layer=2)
    assert engine.tokenizer is None
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(result.sequences, kit.reference(kit.mixed(), kit.prompt_tensor()))
    assert result.texts is None


def test_a_folder_with_a_tokenizer_generates_text(folder: Path) -> None:
    kit.word_tokenizer(kit.VOCAB).save_pretrained(folder)
    engine = layerskip.load(folder, exit_layer=2)
    result = engine.generate(" ".join(f"w{token}" for token in kit.PROMPT), max_new_tokens=24)
    expected = kit.reference(kit.mixed(), kit.prompt_tensor())
    assert torch.equal(result.sequences, expected)
    new_tokens = expected[0, len(kit.PROMPT) :].tolist()
    assert result.texts == [" ".join(f"w{token}" for token in new_tokens)]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_may_be_a_string_or_a_path(folder: Path, kind: type) -> None:
    assert layerskip.load(kind(folder)).layered.num_layers == kit.NUM_LAYERS


def test_a_relative_path_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert layerskip.load("mixed").layered.num_layers == kit.NUM_LAYERS


def test_a_local_folder_asks_no_hub(folder: Path, hub_of: Callable[[Exception | None], Hub]) -> None:
    hub = hub_of(ConnectionError("no network"))
    layerskip.load(folder)
    assert hub.asked == []


def test_the_model_is_loaded_in_eval_mode(folder: Path) -> None:
    assert not any(module.training for module in layerskip.load(folder).model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_dtype_is_honoured(folder: Path, dtype: str | torch.dtype) -> None:
    assert layerskip.load(folder, dtype=dtype).model.dtype == torch.bfloat16


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_dtype_is_by_default_the_checkpoints_own(tmp_path: Path, stored: torch.dtype) -> None:
    kit.mixed().to(stored).save_pretrained(tmp_path)
    assert layerskip.load(tmp_path).model.dtype == stored


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_device_is_honoured(folder: Path, device: str | torch.device) -> None:
    assert {parameter.device.type for parameter in layerskip.load(folder, device=device).model.parameters()} == {"meta"}


def test_device_map_is_honoured(folder: Path) -> None:
    placed = layerskip.load(folder, device_map={"": "meta"}).model
    assert {parameter.device.type for parameter in placed.parameters()} == {"meta"}
    engine = layerskip.load(folder, device_map="auto", exit_layer=2)
    assert not any(module.training for module in engine.model.modules())
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(result.sequences.cpu(), kit.reference(kit.mixed(), kit.prompt_tensor()))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attn_implementation_is_honoured(folder: Path, implementation: str) -> None:
    engine = layerskip.load(folder, attn_implementation=implementation, exit_layer=2)
    assert engine.model.config._attn_implementation == implementation
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(result.sequences, kit.reference(kit.mixed(), kit.prompt_tensor()))


# What is not there


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path_or_id='.*' is a folder without a model: it has no config\.json"):
        layerskip.load(tmp_path)


def test_a_folder_with_a_configuration_but_no_weights_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="path_or_id=") as refusal:
        layerskip.load(folder)
    assert str(folder) in str(refusal.value)


def test_a_file_instead_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"path_or_id='.*config\.json' is a file; pass the folder"):
        layerskip.load(folder / "config.json")


@pytest.mark.parametrize(
    "spelling",
    [
        "./nothing",
        "../nothing",
        "./nothing/checkpoint-10",
        "~/nothing-of-that-name",
        "{tmp}/nothing",
        "{tmp}/nothing/checkpoint-10",
        "{tmp}/nothing/",
        "nothing/",
        "runs/today/checkpoint-10",
        "there/nothing",
        "my model",
        "nothing/my model",
        ".nothing",
        "nothing..10",
        "C:\\models\\nothing",
        ".\\nothing",
        "nothing\\checkpoint-10",
    ],
)
def test_a_mistyped_path_is_refused_without_asking_the_hub(
    spelling: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hub_of: Callable[[Exception | None], Hub],
) -> None:
    """The hub's retries take half a minute; "there" is a folder, in which the name was mistyped."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    hub = hub_of(None)
    with pytest.raises(ValueError, match="there is no such folder; check the path") as refusal:
        layerskip.load(spelling.format(tmp=tmp_path))
    assert repr(spelling.format(tmp=tmp_path)) in str(refusal.value)
    assert hub.asked == []


@pytest.mark.parametrize("path", [Path("nothing"), Path("runs/nothing")])
def test_a_path_object_is_never_taken_for_a_hub_id(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_of: Callable[[Exception | None], Hub]
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = hub_of(ConnectionError("no network"))
    with pytest.raises(ValueError, match="there is no such folder"):
        layerskip.load(path)
    assert hub.asked == []


@pytest.mark.parametrize("path_or_id", [5, None, b"model", ["model"]])
def test_what_is_no_path_is_refused_by_name(path_or_id: Any) -> None:
    with pytest.raises(TypeError, match="path_or_id"):
        layerskip.load(path_or_id)


# The hub


@pytest.mark.parametrize("error", [ConnectionError("no route to host"), TimeoutError("timed out")])
@pytest.mark.parametrize("name", ["nobody/nothing", "nothing"])
def test_an_unreachable_hub_is_told_from_a_model_that_is_not_there(
    error: Exception,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hub_of: Callable[[Exception | None], Hub],
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    hub = hub_of(error)
    with pytest.raises(
        ValueError, match=f"path_or_id='{name}' is no local folder, and the hub could not be asked"
    ) as refusal:
        layerskip.load(name)
    assert str(error) in str(refusal.value)
    assert hub.asked == [(name, None)]


def test_a_model_that_the_hub_does_not_have_is_refused(hub_of: Callable[[Exception | None], Hub]) -> None:
    hub_of(not_found(RepositoryNotFoundError))
    with pytest.raises(
        ValueError, match="path_or_id='nobody/nothing' is neither a local folder nor a model on the hub"
    ):
        layerskip.load("nobody/nothing")


def test_a_revision_that_the_hub_does_not_have_is_refused_by_name(hub_of: Callable[[Exception | None], Hub]) -> None:
    hub = hub_of(not_found(RevisionNotFoundError))
    with pytest.raises(ValueError, match="nor a model on the hub with revision='v9'"):
        layerskip.load("nobody/nothing", revision="v9")
    assert hub.asked == [("nobody/nothing", "v9")]


@pytest.fixture
def cached_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a model that lies in the hub's local cache, as a download would have left it there."""
    snapshot = tmp_path / "hub" / "models--someone--mixed" / "snapshots" / ("0" * 40)
    kit.mixed().save_pretrained(snapshot)
    kit.word_tokenizer(kit.VOCAB).save_pretrained(snapshot)
    (tmp_path / "hub" / "models--someone--mixed" / "refs").mkdir()
    (tmp_path / "hub" / "models--someone--mixed" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return "someone/mixed"


def test_a_model_in_the_local_cache_of_the_hub_loads_while_the_hub_is_down(
    cached_id: str, hub_of: Callable[[Exception | None], Hub]
) -> None:
    """Nor is the hub asked again by anything else: with its retries that takes half a minute."""
    hub_of(ConnectionError("no network"))
    engine = layerskip.load(cached_id, exit_layer=2)
    assert engine.tokenizer is not None
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(result.sequences, kit.reference(kit.mixed(), kit.prompt_tensor()))


# Refused before weights are read


def refuse_to_read_weights(folder: Path) -> None:
    """Takes the weights away, so that whoever reaches for them fails in another way."""
    (folder / WEIGHTS).unlink()


def test_an_encoder_decoder_checkpoint_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = T5Config(vocab_size=97, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    refuse_to_read_weights(tmp_path)
    with pytest.raises(ValueError, match="model_type='t5' is an encoder-decoder model"):
        layerskip.load(tmp_path)


def test_an_unsupported_family_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    Starcoder2ForCausalLM(Starcoder2Config(vocab_size=97, num_hidden_layers=2, **sizes)).save_pretrained(tmp_path)
    refuse_to_read_weights(tmp_path)
    with pytest.raises(ValueError, match=r"model_type='starcoder2' is not supported; supported families: .*llama"):
        layerskip.load(tmp_path)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "nonsense"])
def test_an_unsupported_attn_implementation_is_refused_before_weights_are_read(
    folder: Path, implementation: str
) -> None:
    refuse_to_read_weights(folder)
    with pytest.raises(ValueError, match=f"attn_implementation='{implementation}'.*sdpa.*eager"):
        layerskip.load(folder, attn_implementation=implementation)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_before_weights_are_read(folder: Path, device: str) -> None:
    refuse_to_read_weights(folder)
    with pytest.raises(ValueError, match=f"device='{device}'"):
        layerskip.load(folder, device=device)


@pytest.mark.parametrize(
    ("device_map", "error", "message"),
    [
        ("nonsense", ValueError, r"device_map='nonsense' is unknown; allowed are 'auto'"),
        ("cpu", ValueError, r"device_map='cpu' is unknown.*the argument device"),
        (0, TypeError, r"device_map=0 is a int"),
        ({"": "cuda:99"}, ValueError, r"device_map\[''\]='cuda:99' is not available here"),
        ({}, ValueError, r"device_map=\{\} places nothing"),
    ],
)
def test_a_device_map_that_cannot_be_followed_is_refused_before_weights_are_read(
    folder: Path, device_map: Any, error: type[Exception], message: str
) -> None:
    refuse_to_read_weights(folder)
    with pytest.raises(error, match=message):
        layerskip.load(folder, device_map=device_map)


def test_a_device_map_beside_a_device_is_refused_before_weights_are_read(folder: Path) -> None:
    refuse_to_read_weights(folder)
    with pytest.raises(ValueError, match=r"device='cpu' and device_map='auto' both say where the model goes"):
        layerskip.load(folder, device="cpu", device_map="auto")


def test_a_device_map_for_adapters_is_refused_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(kit.mixed(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapters")
    refuse_to_read_weights(folder)
    with pytest.raises(ValueError, match=r"device_map='auto' is for whole models, but path_or_id='.*' holds adapters"):
        layerskip.load(tmp_path / "adapters", base=folder, device_map="auto")


def test_an_unknown_dtype_is_refused_before_weights_are_read(folder: Path) -> None:
    refuse_to_read_weights(folder)
    with pytest.raises(ValueError, match="dtype"):
        layerskip.load(folder, dtype="float33")


def test_a_revision_beside_a_local_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="revision='v2'"):
        layerskip.load(folder, revision="v2")


def test_a_checkpoint_with_code_of_its_own_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on the terminal whether to run it; no family that needs it is supported anyway."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    settings = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError):
        layerskip.load(tmp_path)
    assert not asked


@pytest.mark.parametrize("exit_layer", [0, 4])
def test_an_exit_layer_out_of_range_is_refused_at_loading(folder: Path, exit_layer: int) -> None:
    with pytest.raises(ValueError, match=f"exit_layer={exit_layer} is out of range; allowed are 1 to 3"):
        layerskip.load(folder, exit_layer=exit_layer)


# What the checkpoint says about its exits


def describe(folder: Path, metadata: Any) -> Path:
    """Writes `metadata` to the checkpoint's configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "layerskip": metadata}))
    return folder


def used(engine: layerskip.Engine, **arguments: Any) -> tuple[str, int | None, int | None]:
    """Returns strategy, exit layer and draft length of a call, as its statistics report them."""
    statistics = engine.generate(kit.prompt_tensor(), **SHORT, **arguments).statistics
    return statistics.strategy, statistics.exit_layer, statistics.num_draft_tokens


@pytest.mark.parametrize("metadata", [None, {"format": 1}, {"format": 1, "exit_layers": [1, 2], "recipe": {}}])
def test_without_an_exit_layer_speculation_is_refused_and_says_how_to_find_one(folder: Path, metadata: Any) -> None:
    engine = layerskip.load(folder if metadata is None else describe(folder, metadata))
    with kit.counted_layers(engine.model) as counts, pytest.raises(ValueError, match=r"exit_layer=1\.\.3") as refusal:
        engine.generate(kit.prompt_tensor(), **SHORT)
    assert "inference/compare_exits.py" in str(refusal.value)
    assert sum(counts) == 0
    assert used(engine, strategy="autoregressive") == ("autoregressive", None, None)


def test_a_checkpoint_that_was_trained_but_not_compared_names_its_exits_and_takes_one(folder: Path) -> None:
    """As training saves it."""
    model = layerskip.load(folder).model
    with saved_with(model.config, recipe_metadata([1, 3], {"method": "full"})):
        model.save_pretrained(folder)
    engine = layerskip.load(folder)
    assert engine.metadata.exit_layers == (1, 3) and not engine.metadata.compared
    with pytest.raises(
        ValueError, match=r"needs exit_layer=1\.\.3 \(trained are 1, 3\), and the checkpoint does not name"
    ):
        used(engine)
    assert used(engine, exit_layer=1) == ("self_speculative", 1, DEFAULT_NUM_DRAFT_TOKENS)
    result = engine.generate(kit.prompt_tensor(), exit_layer=3, max_new_tokens=24)
    assert torch.equal(result.sequences, kit.reference(kit.mixed(), kit.prompt_tensor()))


def test_early_exit_without_an_exit_layer_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"strategy='early_exit' needs exit_layer=1\.\.3"):
        layerskip.load(folder).generate(kit.prompt_tensor(), **SHORT, strategy="early_exit")


def test_where_no_exit_pays_decoding_is_autoregressive_and_the_statistics_say_so(folder: Path) -> None:
    engine = layerskip.load(describe(folder, {"format": 1, "exit_layer": None}))
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    assert result.statistics.strategy == "autoregressive"
    assert result.statistics.exit_layer is result.statistics.num_draft_tokens is None
    assert result.statistics.drafted == result.statistics.draft_tokens_processed == 0
    assert torch.equal(result.sequences, kit.reference(kit.mixed(), kit.prompt_tensor()))


def test_where_no_exit_pays_one_can_still_be_asked_for(folder: Path) -> None:
    describe(folder, {"format": 1, "exit_layer": None})
    assert used(layerskip.load(folder), exit_layer=2) == ("self_speculative", 2, DEFAULT_NUM_DRAFT_TOKENS)
    assert used(layerskip.load(folder, exit_layer=1)) == ("self_speculative", 1, DEFAULT_NUM_DRAFT_TOKENS)


def test_early_exit_where_no_exit_pays_needs_an_exit_layer(folder: Path) -> None:
    engine = layerskip.load(describe(folder, {"format": 1, "exit_layer": None}))
    with pytest.raises(ValueError, match="exit_layer"):
        used(engine, strategy="early_exit")


def test_the_checkpoints_recommendation_is_followed(folder: Path) -> None:
    describe(folder, {"format": 1, "exit_layer": 2, "num_draft_tokens": 3})
    assert used(layerskip.load(folder)) == ("self_speculative", 2, 3)


@pytest.mark.parametrize("metadata", [{"exit_layer": 2}, {"exit_layer": 2, "num_draft_tokens": None}])
def test_the_draft_length_is_4_where_nobody_names_one(folder: Path, metadata: dict[str, Any]) -> None:
    describe(folder, {"format": 1, **metadata})
    assert used(layerskip.load(folder)) == ("self_speculative", 2, 4)


def test_the_engine_overrides_the_checkpoint_and_the_call_overrides_both(folder: Path) -> None:
    describe(folder, {"format": 1, "exit_layer": 2, "num_draft_tokens": 3})
    engine = layerskip.load(folder, exit_layer=1, num_draft_tokens=5)
    assert used(engine) == ("self_speculative", 1, 5)
    assert used(engine, exit_layer=3) == ("self_speculative", 3, 5)
    assert used(engine, num_draft_tokens=2) == ("self_speculative", 1, 2)
    assert used(engine) == ("self_speculative", 1, 5)


def test_early_exit_takes_the_checkpoints_exit_layer(folder: Path) -> None:
    describe(folder, {"format": 1, "exit_layer": 2, "num_draft_tokens": 3})
    assert used(layerskip.load(folder), strategy="early_exit") == ("early_exit", 2, None)


@pytest.mark.parametrize("metadata", [{"format": 99, "exit_layer": 2}, {"exit_layer": 2}, {}, [2], "2"])
def test_metadata_of_an_unknown_format_is_refused(folder: Path, metadata: Any) -> None:
    with pytest.raises(ValueError, match=r"config\.json\['layerskip'\]=.* is not in format 1"):
        layerskip.load(describe(folder, metadata))


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"exit_layer": 4}, ValueError, "exit_layer=4 is out of range; allowed are 1 to 3"),
        ({"exit_layer": 0}, ValueError, "exit_layer=0 is out of range; allowed are 1 to 3"),
        ({"exit_layer": 2, "num_draft_tokens": 0}, ValueError, "num_draft_tokens=0 is out of range"),
    ],
)
def test_a_recommendation_that_does_not_fit_the_model_is_refused(
    folder: Path, metadata: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = layerskip.load(describe(folder, {"format": 1, **metadata}))
    with kit.counted_layers(engine.model) as counts, pytest.raises(error, match=message):
        used(engine)
    assert sum(counts) == 0


def test_a_recommendation_that_does_not_fit_may_be_overridden(folder: Path) -> None:
    describe(folder, {"format": 1, "exit_layer": 4})
    assert used(layerskip.load(folder), exit_layer=2) == ("self_speculative", 2, 4)


def test_metadata_survives_saving_by_transformers(folder: Path, tmp_path: Path) -> None:
    metadata = {"format": 1, "exit_layer": 2, "num_draft_tokens": 3, "recipe": {"epochs": 2}}
    layerskip.load(describe(folder, metadata)).model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["layerskip"] == metadata
    assert used(layerskip.load(tmp_path / "again")) == ("self_speculative", 2, 3)


def test_a_damaged_weight_file_is_refused_by_name(folder: Path) -> None:
    weights = folder / WEIGHTS
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"path_or_id=.*cannot be loaded"):
        layerskip.load(folder)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"exit_layer": "2"}, "exit_layer='2' is a str, not an integer"),
        ({"draft_vocab_size": "8"}, "draft_vocab_size='8' is a str, not an integer"),
        ({"num_draft_tokens": True}, "num_draft_tokens=True is a bool, not an integer"),
        ({"exit_layers": [1, 2.0]}, r"exit_layers\[1\]=2.0 is a float, not an integer"),
        ({"exit_layers": "1, 2"}, "exit_layers='1, 2' is a str, not a list"),
    ],
)
def test_metadata_that_are_no_numbers_are_refused_when_the_checkpoint_is_loaded(
    folder: Path, metadata: dict[str, Any], message: str
) -> None:
    refuse_to_read_weights(folder)
    with pytest.raises(ValueError, match=message):
        layerskip.load(describe(folder, {"format": 1, **metadata}))


# Draft token ids


@pytest.mark.parametrize(("stored", "size"), [(None, 3), (2, 2), (3, 3), (kit.VOCAB, None)])
def test_draft_token_ids_are_found_in_a_folder(folder: Path, stored: int | None, size: int | None) -> None:
    write_draft_token_ids(folder, torch.tensor([7, 3, 90]))
    describe(folder, {"format": 1, "exit_layer": 2, "draft_vocab_size": stored})
    engine = layerskip.load(folder)
    assert engine.draft_token_ids is not None and engine.draft_token_ids.tolist() == [7, 3, 90]
    plan = engine.plan("self_speculative", Wishes())
    assert plan == Plan("self_speculative", 2, 4, size)
    drafted = engine.drafted_token_ids(plan)
    expected = None if size is None else sorted([7, 3, 90][:size])
    assert expected == (None if drafted is None else drafted.tolist())
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(result.sequences, kit.reference(kit.mixed(), kit.prompt_tensor()))


def test_the_caller_says_how_many_of_them_to_draft_from(folder: Path) -> None:
    write_draft_token_ids(folder, torch.tensor([7, 3, 90]))
    assert layerskip.load(folder, draft_vocab_size=1).draft_vocab_size == 1
    with pytest.raises(ValueError, match=r"draft_vocab_size=4 is out of range; allowed are 1 to 3 .* and 97"):
        layerskip.load(folder, draft_vocab_size=4)


def test_without_draft_token_ids_the_full_head_alone_is_allowed(folder: Path) -> None:
    assert layerskip.load(folder, draft_vocab_size=kit.VOCAB).draft_token_ids is None
    with pytest.raises(ValueError, match=r"allowed is 97 .*a training recipe with `draft_vocab_size: 8192` writes"):
        layerskip.load(folder, draft_vocab_size=8)


def test_metadata_that_tell_of_more_draft_token_ids_than_there_are_is_refused(folder: Path) -> None:
    refuse_to_read_weights(folder)
    describe(folder, {"format": 1, "draft_vocab_size": 8})
    with pytest.raises(ValueError, match=r"draft_vocab_size=8, but there is no layerskip\.safetensors .*remove"):
        layerskip.load(folder)
    write_draft_token_ids(folder, torch.arange(7))
    with pytest.raises(ValueError, match=r"draft_vocab_size=8, but layerskip\.safetensors holds 7 token ids"):
        layerskip.load(folder)


def test_damaged_draft_token_ids_are_refused_before_weights_are_read(folder: Path) -> None:
    (folder / TENSORS_FILE).write_bytes(b"damaged")
    refuse_to_read_weights(folder)
    with pytest.raises(ValueError, match=r"layerskip\.safetensors cannot be read"):
        layerskip.load(folder)


def test_draft_token_ids_that_the_model_does_not_have_are_refused(folder: Path) -> None:
    write_draft_token_ids(folder, torch.tensor([kit.VOCAB]))
    refuse_to_read_weights(folder)
    with pytest.raises(ValueError, match=r"layerskip\.safetensors holds the token id 97; the model's .* is 0 to 96"):
        layerskip.load(folder)


@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize("has_ids", [True, False])
def test_draft_token_ids_of_a_model_on_the_hub(
    cached_id: str,
    has_ids: bool,
    reached: bool,
    monkeypatch: pytest.MonkeyPatch,
    hub_of: Callable[[Exception | None], Hub],
) -> None:
    """Reached, it says that the model is there; the files come from its local cache all the same."""
    hub_of(None if reached else ConnectionError("no network"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if has_ids:
        snapshots = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--someone--mixed" / "snapshots"
        write_draft_token_ids(snapshots / ("0" * 40), torch.tensor([7, 3, 90]))
    ids = layerskip.load(cached_id).draft_token_ids
    assert (None if ids is None else ids.tolist()) == ([7, 3, 90] if has_ids else None)
