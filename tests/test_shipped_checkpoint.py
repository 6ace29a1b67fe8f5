"""The adapters that are shipped: what stands in their folder, and that they change no token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import layerskip
from layerskip import demo
from layerskip.model.adapters import AdapterFolder
from layerskip.model.draft_head import read_draft_token_ids
from layerskip.model.loading import load_model

FOLDER = Path(__file__).parents[1] / "inference" / "checkpoints" / "smollm2-135m-commands"
EOS = 2


def stored() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "layerskip.json").read_text(encoding="utf-8")))


def test_the_tensors_are_small_and_in_half_precision() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.safetensors")) <= 20e6
    with safe_open(FOLDER / "adapter_model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118


def test_nothing_tells_where_it_was_made() -> None:
    for path in FOLDER.iterdir():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        assert not re.search(r"[\"' (]/(home|root|tmp|work|mnt|var|Users)/|[A-Z]:\\\\", text), path.name


def test_it_knows_its_exit_its_draft_length_and_its_draft_tokens() -> None:
    found, ids = stored(), read_draft_token_ids(FOLDER)
    assert found["exit_layer"] in found["exit_layers"] and found["num_draft_tokens"] >= 1
    assert ids is not None and EOS in ids[: found["draft_vocab_size"]]
    assert AdapterFolder.read(FOLDER).base == "demo-base"


def test_its_card_names_base_data_recipe_and_licence() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for said in ("SmolLM2-135M-Instruct", "4-bit", "Apache-2.0", "smollm2-135m-commands.yaml", "voice_commands.py"):
        assert said in card, said


PROMPTS = (demo.COMMANDS[1], [{"role": "user", "content": demo.PROMPTS[2]}])


@pytest.mark.slow
@pytest.mark.parametrize("merged", [True, False])
def test_its_tokens_are_those_of_its_own_full_model(merged: bool) -> None:
    """In fp32, with the trimmed head and without, and with the adapters merged or standing apart."""
    if merged:
        engine = demo.load(FOLDER, dtype="float32")
    else:
        base, tokenizer = load_model(
            demo.fetch(), device="cpu", dtype="float32", attn_implementation=None, revision=None
        )
        apart = AdapterFolder.read(FOLDER, demo.fetch()).attach_to(base).get_base_model()
        found = stored()
        engine = layerskip.Engine(
            apart.eval(),
            tokenizer,
            exit_layer=found["exit_layer"],
            num_draft_tokens=found["num_draft_tokens"],
            draft_vocab_size=found["draft_vocab_size"],
            draft_token_ids=read_draft_token_ids(FOLDER),
        )
    for prompt in PROMPTS:
        ids = engine.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt").input_ids
        plain = engine.model.generate(ids, max_new_tokens=48, do_sample=False)
        for size in (None, 512, engine.layered.vocab_size):
            fast = engine.generate(prompt, max_new_tokens=48, do_sample=False, draft_vocab_size=size)
            assert torch.equal(fast.sequences, plain), size
        assert fast.statistics.accepted > 0
