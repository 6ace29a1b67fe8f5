"""The general prompts that are committed: enough, varied, and held out by template."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "training"
FILES = {"train": "general_prompts.jsonl", "test": "general_prompts_test.jsonl"}
CATEGORIES = {"chat", "code", "maths", "rewrite", "extract"}


def rows(split: str) -> list[dict[str, str]]:
    lines = (FOLDER / FILES[split]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_there_are_enough_of_every_category() -> None:
    counts = Counter(row["category"] for row in rows("train"))
    assert counts.keys() == CATEGORIES and sum(counts.values()) >= 1000 and min(counts.values()) >= 150
    assert {row["category"] for row in rows("test")} == CATEGORIES


@pytest.mark.parametrize("split", FILES)
def test_a_row_is_a_prompt_with_its_category_and_template(split: str) -> None:
    for row in rows(split):
        assert row.keys() == {"category", "template", "prompt"}
        assert row["prompt"] == row["prompt"].strip() and len(row["prompt"].split()) >= 3


def test_no_template_has_more_than_twenty() -> None:
    counts = Counter(row["template"] for split in FILES for row in rows(split))
    assert max(counts.values()) <= 20


def test_no_prompt_occurs_twice() -> None:
    prompts = [" ".join(row["prompt"].lower().split()) for split in FILES for row in rows(split)]
    assert len(set(prompts)) == len(prompts)


def test_the_splits_share_no_template() -> None:
    train, test = ({row["template"] for row in rows(split)} for split in FILES)
    assert train.isdisjoint(test)
