"""Adapters on a base with quantised weights are trained with exits; the weights themselves are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from layerskip import Engine
from layerskip.training.finetune import finetune
from layerskip.training.recipe import recipe_of
from tests import kit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in 4 bits and a few rows of text."""
    root = tmp_path_factory.mktemp("quantized")
    kit.mixed().save_pretrained(root / "plain")
    bits4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(root / "plain", quantization_config=bits4).save_pretrained(root / "model")
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    tokenizer.add_special_tokens({"eos_token": "w1", "pad_token": "w1"})
    tokenizer.save_pretrained(root / "model")
    texts = [" ".join(f"w{start + offset}" for offset in range(8)) for start in range(2, 10)]
    (root / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root


def run(folder: Path, output: Path, **changes: Any) -> dict[str, float]:
    written = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl")},
        "output_dir": str(output),
        "exits": {"exit_layers": [2], "curriculum": "fixed", "weights": "equal"},
        "trainer": {"max_steps": 2, "learning_rate": 0.05, "use_cpu": True, "dataloader_pin_memory": False},
        **changes,
    }
    return finetune(recipe_of(written))


def test_adapters_are_trained_on_it_and_run_around_it(folder: Path, tmp_path: Path) -> None:
    metrics = run(folder, tmp_path / "run", method="lora", lora={"rank": 4, "merge": False})
    assert torch.isfinite(torch.tensor(metrics["train_loss"]))
    weights = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert all(weight.abs().max() > 0 for name, weight in weights.items() if "lora_B" in name)
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    before = kit.reference(base, kit.prompt_tensor(), 16)
    adapted: Any = PeftModel.from_pretrained(base, tmp_path / "run").eval()
    found = Engine(adapted, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=16, do_sample=False)
    assert torch.equal(found.sequences, kit.reference(adapted, kit.prompt_tensor(), 16))
    assert not torch.equal(found.sequences, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "full"}, "purely quantized"),
        ({"method": "lora", "lora": {"rank": 4, "merge": True}}, "lora.merge=true cannot merge"),
    ],
)
def test_what_quantised_weights_cannot_take_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(folder, tmp_path / "run", **changes)
    assert not (tmp_path / "run" / "config.json").exists()
