"""Whole runs of tiny models, from a recipe to a checkpoint that loads anywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import layerskip
from layerskip.training.finetune import finetune
from layerskip.training.models import add_adapters
from layerskip.training.recipe import LoraSettings, Recipe, recipe_of
from tests import kit
from tests.test_programs import run as run_program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a few rows of text."""
    root = tmp_path_factory.mktemp("finetune")
    kit.l4().save_pretrained(root / "model")
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    tokenizer.add_special_tokens({"eos_token": "w1", "pad_token": "w1"})
    tokenizer.save_pretrained(root / "model")
    texts = [" ".join(f"w{(start + offset) % 80 + 2}" for offset in range(4 + start % 6)) for start in range(24)]
    (root / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root


def written(folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "eval_rows": 4},
        "output_dir": str(output),
        "exits": {"exit_layers": [1, 2, 3], "curriculum": "rotational", "rotation": 3, "weights": "equal"},
        "dropout": {"p_max": 0.3},
        "trainer": {
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "save_steps": 1,
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        },
        **changes,
    }


def recipe(folder: Path, output: Path, **changes: Any) -> Recipe:
    return recipe_of(written(folder, output, **changes))


def test_the_program_trains_from_the_command_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe file and a change of it; the last line is JSON, the output loads without this project."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(written(folder, tmp_path / "run")), encoding="utf-8")
    changes = ["trainer.max_steps=3", "trainer.logging_steps=1"]
    assert run_program(monkeypatch, "training/finetune.py", str(path), *changes) == 0
    shown = capsys.readouterr().out
    metrics = json.loads(shown.splitlines()[-1])
    assert metrics["output_dir"] == str(tmp_path / "run")
    assert {"train_loss", "eval_loss", "eval_perplexity", "eval_agreement_exit_2"} <= set(metrics)
    assert "agreement_exit_2" in shown
    for name in [name for name in sys.modules if name.split(".")[0] == "layerskip"]:
        monkeypatch.setitem(sys.modules, name, None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    AutoTokenizer.from_pretrained(tmp_path / "run")
    assert type(model) is LlamaForCausalLM
    assert model.config.use_cache is True and model.config.layerskip["exit_layers"] == [1, 2, 3]


def test_the_help_documents_every_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(monkeypatch, "training/finetune.py", "--help") == 0
    text = capsys.readouterr().out
    for key in ("exit_layers:", "p_max:", "completion_only:", "targets:", "from_config:", "trainer:"):
        assert key in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("exits.rotation=9", "rotation=9 is out of range"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl"),
        ("model=./nowhere", "there is no such folder"),
        ("epochs=3", "epochs is no key of a recipe"),
    ],
)
def test_mistakes_end_the_program_with_one_line(
    folder: Path,
    tmp_path: Path,
    change: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(written(folder, tmp_path / "run")), encoding="utf-8")
    assert run_program(monkeypatch, "training/finetune.py", str(path), change) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert message in error.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def merged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters, which are merged at its end."""
    output = tmp_path_factory.mktemp("merged")
    finetune(recipe(folder, output, method="lora", lora={"rank": 4, "alpha": 64}))
    return output


def test_merged_adapters_make_a_plain_checkpoint(folder: Path, merged: Path) -> None:
    before, after = load_file(folder / "model" / "model.safetensors"), load_file(merged / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed and all(".layers." in key and "norm" not in key for key in changed)
    assert layerskip.load(merged, exit_layer=2).generate("w5 w6", max_new_tokens=3).statistics.emitted == 3


def test_adapters_alone_load_on_their_base(folder: Path, merged: Path, tmp_path: Path) -> None:
    """The folder has no whole weights, and gives the tokens of the same run saved merged."""
    finetune(recipe(folder, tmp_path, method="lora", lora={"rank": 4, "alpha": 64, "merge": False}))
    assert not (tmp_path / "model.safetensors").exists()
    stored = json.loads((tmp_path / "layerskip.json").read_text())
    assert stored["exit_layers"] == [1, 2, 3]
    found = [
        layerskip.load(output, exit_layer=2, dtype="float32").generate("w5 w6 w7", max_new_tokens=16)
        for output in (merged, tmp_path)
    ]
    assert torch.equal(found[0].sequences, found[1].sequences)


def lora_run(folder: Path, output: Path, lora: dict[str, Any], **changes: Any) -> dict[str, float]:
    """Trains adapters alone, in fp32, without dropout, and returns the metrics."""
    settings = {"method": "lora", "lora": {"merge": False, **lora}, "dropout": {"p_max": 0.0}, **changes}
    return finetune(recipe(folder, output, **settings))


def test_ranks_and_alphas_follow_patterns(folder: Path, tmp_path: Path) -> None:
    low = r"layers\.[0-1]\..*"
    patterns = {"rank": 2, "alpha": 4, "rank_pattern": {low: 6}, "alpha_pattern": {low: 24}}
    lora_run(folder, tmp_path / "run", patterns)
    ranks = {
        int(name.split(".layers.")[1][0]): len(weight)
        for name, weight in load_file(tmp_path / "run" / "adapter_model.safetensors").items()
        if name.endswith("q_proj.lora_A.weight")
    }
    assert ranks == {0: 6, 1: 6, 2: 2, 3: 2}
    model = kit.l4()
    adapted = add_adapters(model, LoraSettings(**patterns))
    with pytest.raises(ValueError, match=r"pattern 'layrs.0', which is the end of no adapted module's name"):
        add_adapters(kit.l4(), LoraSettings(rank_pattern={"layrs.0": 4}))
    scales = [layer.self_attn.q_proj.scaling["default"] for layer in kit.layers_of(adapted.get_base_model())]
    assert scales == [4.0, 4.0, 2.0, 2.0]


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of trained adapters, and their loss."""
    output = tmp_path_factory.mktemp("adapters")
    return output, lora_run(folder, output, {"rank": 3, "alpha": 48})["eval_loss"]


def test_adapters_are_trained_further(folder: Path, adapters: tuple[Path, float], tmp_path: Path) -> None:
    """With a learning rate of 0 they come out as they went in; else they begin where they were."""
    first, loss = adapters
    before = load_file(first / "adapter_model.safetensors")
    further = {"continue_from": str(first)}
    still = {**written(folder, tmp_path)["trainer"], "learning_rate": 0.0}
    unchanged = lora_run(folder, tmp_path / "still", further, trainer=still)
    for name, weight in load_file(tmp_path / "still" / "adapter_model.safetensors").items():
        assert torch.equal(weight, before[name]), name
    changed = lora_run(folder, tmp_path / "moved", further)
    after = load_file(tmp_path / "moved" / "adapter_model.safetensors")
    stored = json.loads((tmp_path / "moved" / "layerskip.json").read_text())["recipe"]["lora"]
    assert (stored["rank"], stored["alpha"]) == (3, 48)
    assert after.keys() == before.keys() and any(not torch.equal(after[name], before[name]) for name in after)
    assert unchanged["eval_loss"] == pytest.approx(loss, abs=1e-6) and changed["eval_loss"] != loss


def test_adapters_of_another_model_are_not_trained_further(adapters: tuple[Path, float]) -> None:
    other = kit.build(kit.llama_config(hidden_size=64))
    with pytest.raises(ValueError, match=r"adapters in .*adapters.* do not fit"):
        add_adapters(other, LoraSettings(continue_from=str(adapters[0])))


def test_a_folder_without_adapters_is_not_trained_further(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"continue_from=.*model' holds no adapters"):
        add_adapters(kit.l4(), LoraSettings(continue_from=str(folder / "model")))


def test_draft_tokens_are_counted_and_stored(folder: Path, tmp_path: Path) -> None:
    finetune(recipe(folder, tmp_path / "run", draft_vocab_size=10))
    stored = load_file(tmp_path / "run" / "layerskip.safetensors")["draft_token_ids"]
    assert len(stored) == 10 and 1 in stored[:2]  # EOS, beside the unknown token
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["layerskip"]["draft_vocab_size"] == 10
    engine = layerskip.load(tmp_path / "run", exit_layer=2, dtype="float32")
    whole = engine.generate("w5 w6 w7", max_new_tokens=16, draft_vocab_size=kit.VOCAB)
    assert torch.equal(engine.generate("w5 w6 w7", max_new_tokens=16).sequences, whole.sequences)


def test_training_ends_when_its_time_is_over(folder: Path, tmp_path: Path) -> None:
    """A limit that one step passes: one step is taken, and the model is saved."""
    trainer = {**written(folder, tmp_path)["trainer"], "max_steps": 10_000, "save_strategy": "no", "logging_steps": 1}
    metrics = finetune(recipe(folder, tmp_path / "run", max_minutes=1e-6, trainer=trainer))
    assert metrics["epoch"] == pytest.approx(0.2)
    assert layerskip.load(tmp_path / "run", exit_layer=2).generate("w5", max_new_tokens=2).statistics.emitted == 2


def test_a_run_that_ended_by_its_time_is_not_trained_again(folder: Path, tmp_path: Path) -> None:
    """An interrupted one goes on, for the whole time again."""
    finetune(recipe(folder, tmp_path / "run", max_minutes=1e-6))
    again = recipe(folder, tmp_path / "run", max_minutes=1e-6, resume=True)
    with pytest.raises(ValueError, match=r"holds a run that ended when its time was over; to train further begin a"):
        finetune(again)
    (tmp_path / "run" / "config.json").unlink()
    assert finetune(again)["epoch"] == pytest.approx(0.4)


def test_training_from_scratch(folder: Path, tmp_path: Path) -> None:
    scratch = {"from_config": kit.llama_config().to_diff_dict(), "tokenizer": str(folder / "model")}
    run = recipe(folder, tmp_path / "run", model=scratch, dropout={"p_max": 0.3, "schedule": "exponential"})
    finetune(run)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert loaded.config.num_hidden_layers == 4
    assert AutoTokenizer.from_pretrained(tmp_path / "run").eos_token == "w1"


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(folder: Path, tmp_path: Path) -> None:
    scratch = {"from_config": kit.llama_config(vocab_size=50).to_diff_dict(), "tokenizer": str(folder / "model")}
    with pytest.raises(ValueError, match="the tokenizer has 97 tokens, but the model's vocab_size=50"):
        finetune(recipe(folder, tmp_path / "run", model=scratch))


def test_keys_that_a_configuration_does_not_know_are_refused(folder: Path, tmp_path: Path) -> None:
    scratch = {"from_config": {"model_type": "llama", "num_hiden_layers": 3}, "tokenizer": str(folder / "model")}
    with pytest.raises(ValueError, match=r"from_config has \['num_hiden_layers'\]"):
        finetune(recipe(folder, tmp_path / "run", model=scratch))


def test_adapters_alone_name_the_revision_of_their_base() -> None:
    adapted = add_adapters(kit.l4(), LoraSettings(), revision="v2")
    assert adapted.peft_config["default"].revision == "v2"


def test_a_run_saved_without_the_optimizer_is_not_continued(folder: Path, tmp_path: Path) -> None:
    trainer = {**written(folder, tmp_path)["trainer"], "save_only_model": True}
    with pytest.raises(ValueError, match="save_only_model=true"):
        recipe(folder, tmp_path / "run", trainer=trainer, resume=True)


def test_streaming_needs_no_length(folder: Path, tmp_path: Path) -> None:
    run = recipe(folder, tmp_path / "run", data={"train": str(folder / "rows.jsonl"), "streaming": True})
    metrics = finetune(run)
    assert metrics["train_loss"] > 0
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["layerskip"]
    assert stored["data"].startswith("streaming:")


def test_packed_rows_train_each_document_alone(folder: Path, tmp_path: Path) -> None:
    """One step over all rows, by SGD: packed and unpacked give the same weights."""
    trainer = {**written(folder, tmp_path)["trainer"], "max_steps": 1, "optim": "sgd", "learning_rate": 0.5}
    trainer |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 24}
    weights = []
    for packing in (False, True):
        data = {"train": str(folder / "rows.jsonl"), "packing": packing, "max_length": 32}
        run = recipe(folder, tmp_path / str(packing), data=data, trainer=trainer, dropout={})
        finetune(run)
        weights.append(load_file(tmp_path / str(packing) / "model.safetensors"))
    start = load_file(folder / "model" / "model.safetensors")
    assert any(not torch.equal(start[key], weights[0][key]) for key in start)
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, atol=1e-5, rtol=1e-4)


def test_a_model_without_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    kit.l4().save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="has no tokenizer"):
        finetune(recipe(folder, tmp_path / "run", model=str(tmp_path / "bare")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("lm_head",), r"lora.targets=.*has the head or the embedding"),
        (("q_proj", "model.embed_tokens"), r"lora.targets=.*has the head or the embedding"),
        (("nothing",), r"lora.targets=.*cannot be adapted"),
    ],
)
def test_projections_that_cannot_be_adapted_are_refused(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add_adapters(kit.l4(tie_word_embeddings=True), LoraSettings(targets=targets))


def test_rows_longer_than_the_learned_positions_are_refused(folder: Path, tmp_path: Path) -> None:
    scratch = {"from_config": kit.gpt2_config().to_diff_dict(), "tokenizer": str(folder / "model")}
    with pytest.raises(ValueError, match=r"data.max_length=1024 is above the 64 positions"):
        finetune(recipe(folder, tmp_path / "run", model=scratch))


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    kit.l4(vocab_size=90).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="the tokenizer has 97 tokens, but the model's vocab_size=90"):
        finetune(recipe(folder, tmp_path / "run", model=str(tmp_path / "small")))


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"learning_rate": 1e30, "max_grad_norm": 0.0, "optim": "sgd"}, "training diverged"),
        ({"per_device_train_batch_size": 100, "dataloader_drop_last": True}, "no step was taken"),
        ({"report_to": "tensorboard"}, "trainer: .*ensor[Bb]oard"),
    ],
)
def test_runs_that_lead_to_nothing_say_so_and_save_nothing(
    folder: Path, tmp_path: Path, trainer: dict[str, Any], message: str
) -> None:
    options = {**written(folder, tmp_path)["trainer"], **trainer}
    with pytest.raises(ValueError, match=message):
        finetune(recipe(folder, tmp_path / "run", trainer=options))
    assert not (tmp_path / "run" / "config.json").exists()


def test_rows_that_do_not_count_are_counted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "w5 w6"}\n{"text": " "}\n{"text": "w7 w8"}\n')
    metrics = finetune(recipe(folder, tmp_path / "run", data={"train": str(tmp_path / "rows.jsonl")}))
    assert metrics["dropped_rows"] == 1


def test_a_run_is_not_continued_on_other_data(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "w5 w6"}\n{"text": "w7 w8"}\n')
    finetune(recipe(folder, tmp_path / "run", data={"train": str(data)}))
    data.write_text('{"text": "w5 w6"}\n{"text": "w7 w9"}\n')
    with pytest.raises(ValueError, match="holds a run on other data"):
        finetune(recipe(folder, tmp_path / "run", data={"train": str(data)}, resume=True))


def test_a_finished_run_without_checkpoints_is_not_trained_again(folder: Path, tmp_path: Path) -> None:
    trainer = {**written(folder, tmp_path)["trainer"], "save_strategy": "no"}
    finetune(recipe(folder, tmp_path / "run", trainer=trainer))
    with pytest.raises(ValueError, match="holds a finished run and no checkpoint"):
        finetune(recipe(folder, tmp_path / "run", trainer=trainer, resume=True))


def test_a_finished_run_that_is_resumed_ends_with_its_best_weights(folder: Path, tmp_path: Path) -> None:
    """The first checkpoint is made the best: a high loss counts as good."""
    trainer = {
        **written(folder, tmp_path)["trainer"],
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    finetune(recipe(folder, tmp_path / "run", trainer=trainer))
    best = load_file(tmp_path / "run" / "model.safetensors")
    first = load_file(tmp_path / "run" / "checkpoint-1" / "model.safetensors")
    assert all(torch.equal(best[name], first[name]) for name in first)
    finetune(recipe(folder, tmp_path / "run", trainer=trainer, resume=True))
    again = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(best[name], again[name]) for name in best)
