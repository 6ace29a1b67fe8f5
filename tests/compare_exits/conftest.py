"""Tiny saved models and prompts for compare_exits.py, and ways to run it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from layerskip.comparison import compare
from tests.comparison.test_compare import (
    CATEGORIES,
    PROMPTS,
    know_times,
)
from tests.test_evaluate import Runner, save_model


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, run: Runner) -> Runner:
    """Runs the program with costs that are known, real runs that are as fast as plain decoding, and no pictures."""
    know_times(monkeypatch)
    monkeypatch.setattr(compare, "draw", lambda *arguments: [])
    return run


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MIX, whose checkpoint says nothing about exits."""
    folder = tmp_path_factory.mktemp("untrained")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": prompt, "category": category} for prompt, category in zip(PROMPTS, CATEGORIES, strict=True)]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def model(untrained: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, that can be written into."""
    return shutil.copytree(untrained, tmp_path / "model")


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model may be loaded."""

    def unexpected(*arguments: Any, **options: Any) -> None:
        raise AssertionError("no model may be loaded")

    monkeypatch.setattr("layerskip.decoding.load.load", unexpected)
