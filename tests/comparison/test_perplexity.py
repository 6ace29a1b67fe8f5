"""Perplexity in windows, against a pass of a truncated model over every single prefix."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerskip import Engine
from layerskip.comparison.perplexity import TextSums, Window, read_documents, text_losses, window_size, windows_of
from layerskip.training.exit_settings import ExitSettings
from tests import kit

TEXT = " ".join(f"w{(token * 37 + 11) % kit.VOCAB}" for token in range(23))
TOKENIZER = kit.word_tokenizer(kit.VOCAB)


@given(st.integers(0, 60), st.integers(2, 20), st.data())
def test_every_token_but_the_first_is_predicted_once(length: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window - 1))
    ids = [token % kit.VOCAB for token in range(length)]
    windows = windows_of([" ".join(f"w{token}" for token in ids)], TOKENIZER, window, stride)
    predicted = [token for made in windows for token in made.input_ids[made.context :]]
    assert predicted == ids[1:]
    assert all(2 <= len(made.input_ids) <= window for made in windows)
    assert all(made.context >= window - stride for made in windows[1:])


def test_documents_have_windows_of_their_own_and_short_ones_none() -> None:
    found = windows_of(["w1 w2 w3 w4 w5", "w6", "", "w7 w8"], TOKENIZER, 4, 2)
    assert found == [Window(0, [1, 2, 3, 4], 1), Window(0, [3, 4, 5], 2), Window(3, [7, 8], 1)]


@torch.no_grad()
def brute_force(model: torch.nn.Module, windows: list[Window]) -> list[float]:
    """The summed loss of each window, one token and one pass at a time."""
    sums = []
    for window in windows:
        total = 0.0
        for place in range(window.context, len(window.input_ids)):
            logits = model(torch.tensor([window.input_ids[:place]]), use_cache=False).logits[0, -1]
            total -= float(torch.log_softmax(logits, -1)[window.input_ids[place]])
        sums.append(total)
    return sums


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_losses_are_those_of_models_that_end_at_the_exits(family: str) -> None:
    model = kit.build(kit.CONFIGS[family]())
    windows = windows_of([TEXT, "w3 w4 w5"], TOKENIZER, 8, 3)
    text = TextSums.empty(windows, (1, 3))
    for batch, sums in text_losses(Engine(model, TOKENIZER), windows, (1, 3), 3):
        text.sums.put(batch, sums)
    assert text.sums.tokens.sum() == 22 + 2
    assert text.sums.last == pytest.approx(np.array(brute_force(model, windows)), rel=1e-4)
    for column, exit_layer in enumerate((1, 3)):
        wanted = np.array(brute_force(kit.truncated(model, exit_layer), windows))
        assert text.sums.exits[:, column] == pytest.approx(wanted, rel=1e-4)
    assert text.sums.metrics()["loss"] == pytest.approx(sum(brute_force(model, windows)) / 24, rel=1e-4)


def test_an_exit_that_is_the_model_has_its_loss_and_always_agrees() -> None:
    windows = windows_of([TEXT], TOKENIZER, 8, 4)
    for _, sums in text_losses(Engine(kit.identical(), TOKENIZER), windows, (2,), len(windows)):
        assert sums.exits[:, 0] == pytest.approx(sums.last, rel=1e-6)
        assert (sums.agreements[:, 0] == sums.tokens).all()


def test_without_exits_the_last_layer_is_measured_alone() -> None:
    windows = windows_of([TEXT], TOKENIZER, 8, 4)
    ((_, sums),) = text_losses(Engine(kit.mixed(), TOKENIZER), windows, (), len(windows))
    assert sums.exits.shape == (len(windows), 0)
    assert list(sums.metrics()) == ["loss", "perplexity"]


def test_no_more_logits_are_held_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kit.mixed()
    rows: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].shape[0]))
    long = " ".join(["w5"] * 2000)
    windows = windows_of([long], TOKENIZER, 500, 250)
    for _ in text_losses(Engine(model, TOKENIZER), windows, (1, 2), 8):
        pass
    assert max(rows) <= ExitSettings().logit_rows
    assert sum(rows) == 3 * 1999


def test_items_are_documents_or_the_windows_of_a_single_one() -> None:
    windows = windows_of(["w1 w2 w3 w4 w5", "w7 w8"], TOKENIZER, 4, 2)
    text = TextSums.empty(windows, (2,))
    text.sums.tokens[:] = [3, 1, 1]
    text.sums.last[:] = [6.0, 2.0, 5.0]
    text.sums.exits[:, 0] = [9.0, 3.0, 7.0]
    tokens, losses = text.items([0, 1, 2])
    assert (tokens.tolist(), losses.tolist()) == ([4, 1], [[8.0, 12.0], [5.0, 7.0]])
    single = TextSums(windows[:2], text.sums)
    assert single.items([0, 1])[0].tolist() == [3, 1]


@pytest.mark.parametrize(
    ("window", "stride", "message"),
    [
        (1, None, "--window 1 is out of range; allowed are 2 to 64"),
        (65, None, "--window 65 is out of range"),
        (8, 8, "--stride 8 is out of range; allowed are 1 to 7"),
        (8, 0, "--stride 0 is out of range"),
    ],
)
def test_windows_that_cannot_be(window: int, stride: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        window_size(window, stride, 64)


def test_default_windows() -> None:
    assert window_size(None, None, 64) == (64, 32)
    assert window_size(None, None, 8192) == (1024, 512)
    assert window_size(2, None, 8192) == (2, 1)


def test_documents_of_files(tmp_path: Path) -> None:
    text, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_bytes("\ufeffä\r\n\nb".encode())
    rows.write_text(json.dumps({"prompt": "p", "text": "a\nb"}) + "\n\n" + json.dumps({"text": ""}), encoding="utf-8")
    assert read_documents(text) == ["ä\r\n\nb"]
    assert read_documents(rows) == ["a\nb", ""]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"a\n\xff", "line 2 of {path} is no UTF-8 text"),
        ("a.txt", b"", "{path} holds no text"),
        ("a.jsonl", b'{"text": "a"}\n{"prompt": "b"}', "line 2 of {path} has prompt, but no text that is a string"),
        ("a.jsonl", b'{"text": "a"}\n{', "line 2 of {path} cannot be read"),
        ("a.md", b"a", "{path} ends with '.md'"),
    ],
)
def test_bad_files_are_named_with_their_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message.format(path=path))):
        read_documents(path)
