"""What a run with adapters learned, as it is shipped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import layerskip
from layerskip.training import difference
from layerskip.training.difference import export_difference
from layerskip.training.finetune import finetune
from layerskip.training.recipe import recipe_of
from tests import kit
from tests.test_programs import run as run_program

IDS = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters and draft tokens, beside the folder of its base."""
    root = tmp_path_factory.mktemp("difference")
    kit.l4().save_pretrained(root / "base")
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    tokenizer.add_special_tokens({"eos_token": "w1", "pad_token": "w1"})
    tokenizer.save_pretrained(root / "base")
    texts = [" ".join(f"w{(start + offset) % 80 + 2}" for offset in range(6)) for start in range(8)]
    (root / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    trainer = {"max_steps": 2, "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    written = {
        "model": str(root / "base"),
        "data": {"train": str(root / "rows.jsonl")},
        "output_dir": str(root / "run"),
        "method": "lora",
        "lora": {"rank": 4, "alpha": 64, "merge": False},
        "exits": {"exit_layers": [1, 2], "weights": "equal"},
        "draft_vocab_size": IDS,
        "trainer": trainer,
    }
    finetune(recipe_of(written))
    return root / "run"


def export(run: Path, folder: Path, **changes: Any) -> int:
    return export_difference(
        run, folder, **{"base": "the-base", "exit_layer": 2, "num_draft_tokens": 3, "draft_vocab_size": 10, **changes}
    )


def test_the_export_is_the_run_in_half_precision(run: Path, tmp_path: Path) -> None:
    size = export(run, tmp_path / "out")
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (run, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, weight in after.items():
        assert weight.dtype == torch.float16
        torch.testing.assert_close(weight.float(), before[name], rtol=1e-3, atol=1e-6)
    assert size == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_the_export_knows_its_exit_and_draft_length(run: Path, tmp_path: Path) -> None:
    """It gives the tokens of its own full model, merged or not, with and without the trimmed head."""
    export(run, tmp_path / "out")
    engine = layerskip.load(tmp_path / "out", base=run.parent / "base", dtype="float32")
    found = engine.generate("w5 w6 w7", max_new_tokens=16)
    assert (found.statistics.exit_layer, found.statistics.num_draft_tokens) == (2, 3)
    assert engine.metadata.draft_vocab_size == 10 and len(engine.draft_token_ids) == IDS
    whole = engine.model.generate(
        engine.tokenizer("w5 w6 w7", return_tensors="pt").input_ids, max_new_tokens=16, do_sample=False
    )
    assert torch.equal(found.sequences, whole)
    full_head = engine.generate("w5 w6 w7", max_new_tokens=16, draft_vocab_size=kit.VOCAB)
    assert torch.equal(full_head.sequences, whole)


def test_names_of_the_machine_stay_behind(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    for name in ("adapter_config.json", "layerskip.json"):
        text = (tmp_path / "out" / name).read_text()
        assert str(run.parent) not in text, name
    stored = json.loads((tmp_path / "out" / "layerskip.json").read_text())
    assert stored["recipe"]["data"]["train"] == "rows.jsonl" and stored["recipe"]["model"] == "base"
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "the-base"
    assert str(run.parent) in (run / "layerskip.json").read_text()  # where it would have come from


def test_an_export_replaces_the_one_before_and_leaves_its_card(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("card")
    export(run, tmp_path / "out", exit_layer=1, draft_vocab_size=None)
    stored = json.loads((tmp_path / "out" / "layerskip.json").read_text())
    assert (stored["exit_layer"], stored["draft_vocab_size"]) == (1, IDS)
    assert (tmp_path / "out" / "README.md").read_text() == "card"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exit_layer": 3}, r"exit_layer=3 was not trained; allowed are 1, 2"),
        ({"num_draft_tokens": 0}, r"num_draft_tokens=0 is out of range"),
        ({"draft_vocab_size": 0}, rf"draft_vocab_size=0 is out of range; the run has {IDS}"),
        ({"draft_vocab_size": IDS + 1}, rf"draft_vocab_size={IDS + 1} is out of range; the run has {IDS}"),
    ],
)
def test_numbers_that_cannot_be_are_refused(run: Path, tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export(run, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_run_is_not_exported_onto_itself(run: Path) -> None:
    with pytest.raises(ValueError, match=r"is the run itself, whose adapters would be lost"):
        export(run, run)
    assert load_file(run / "adapter_model.safetensors")


def test_a_relative_path_that_exists_is_cut_as_well(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are no path here, such as those of the hub, stay whole."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.jsonl").write_text("")
    stored = json.loads((run / "layerskip.json").read_text())
    stored["recipe"] |= {"model": "owner/name", "data": {"train": ["mine/rows.jsonl", "/far/away.jsonl"]}}
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "layerskip.json").write_text(json.dumps(stored))
    export(tmp_path / "run", tmp_path / "out")
    recipe = json.loads((tmp_path / "out" / "layerskip.json").read_text())["recipe"]
    assert recipe["model"] == "owner/name" and recipe["data"]["train"] == ["rows.jsonl", "away.jsonl"]


def test_an_export_that_fails_leaves_the_one_before(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    export(run, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(difference, "write_draft_token_ids", full)
    with pytest.raises(OSError, match="No space left"):
        export(run, tmp_path / "out", exit_layer=1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_whole_model_is_not_exported_onto(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run.parent / "base", tmp_path / "whole")
    with pytest.raises(ValueError, match=r"whole' holds a whole model \(config.json\)"):
        export(run, tmp_path / "whole")
    assert not (tmp_path / "whole" / "adapter_config.json").exists()


def test_a_damaged_run_is_named(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    weights = tmp_path / "run" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"adapter_model.safetensors in run=.* is damaged"):
        export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "layerskip.json").unlink()
    with pytest.raises(ValueError, match=r"does not say which exits it trained"):
        export(tmp_path / "run", tmp_path / "out")


def test_a_whole_checkpoint_is_no_difference(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run=.*base' holds no adapters"):
        export(run.parent / "base", tmp_path / "out")


def test_the_program_exports(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(run), "--out", str(tmp_path / "out"), "--base", "b", "--exit-layer", "2", "--num-draft-tokens"]
    assert run_program(monkeypatch, "training/export_difference.py", *options, "4") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tensor_bytes"] > 0
    assert run_program(monkeypatch, "training/export_difference.py", *options, "0") == 2
    assert capsys.readouterr().err.startswith("error: num_draft_tokens=0")
