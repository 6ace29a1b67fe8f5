"""What an answer says, when it is right, and answering from the whole model, with drafts and from one exit alone."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip import Engine
from layerskip.comparison.accuracy import (
    AUTOREGRESSIVE,
    Answering,
    Extraction,
    Question,
    accuracy,
    answer_questions,
    arms_of,
    as_number,
    compiled,
    is_same,
    read_questions,
)
from tests import kit

PROMPTS = ["w44 w3", "w1 w5 w9", "w2", "w30 w31 w32 w33"]
BUDGET = 6


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1000", 1000),
        ("1,000", 1000),
        ("$1,000.00", 1000),
        (" -5. ", -5),
        ("−5", -5),
        ("-$5", -5),
        ("+.5", Decimal("0.5")),
        ("12,34", None),
        ("1,0000", None),
        ("5 apples", None),
        ("1/2", None),
        ("", None),
        (".", None),
    ],
)
def test_numbers(text: str, number: int | None) -> None:
    assert as_number(text) == number


@given(st.integers(-(10**12), 10**12))
def test_a_number_is_the_same_in_every_spelling(number: int) -> None:
    for spelling in (f"{number:,}", f"{number}.00", f" {number}.", f"{number:+,}"):
        assert is_same(spelling, str(number))
        assert not is_same(spelling, str(number + 1))


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        (" Paris.\n", "Paris", True),
        ("paris", "Paris", False),
        ("Paris, France", "Paris", False),
        ("10", "10 apples", False),
        ("07", "7", True),
    ],
)
def test_texts_are_the_same_letter_by_letter(answer: str, reference: str, same: bool) -> None:
    assert is_same(answer, reference) is same


@pytest.mark.parametrize(
    ("answer", "reference", "said"),
    [
        ("48+24 = 72.\n#### 72", "72", "72"),
        ("#### 5\n#### 72 clips\nQuestion: 9?", "72", "72"),
        ("####\n72", "72", "72"),
        ("#### $1,200 in all", "1200", "$1,200"),
        ("#### none at all", "72", "none at all"),
        ("She has 7-4 = 3 of 10, or -3.", "72", "-3"),
        ("It is 10-3", "7", "3"),
        ("It costs $1,234.50.", "7", "$1,234.50"),
        ("no number", "72", "no number"),
        ("#### blue sky", "blue", "blue sky"),
        (" It is 5 blue. ", "blue", "It is 5 blue."),
        (" ", "72", None),
    ],
)
def test_what_an_answer_says_without_a_pattern(answer: str, reference: str, said: str | None) -> None:
    assert Extraction().answer(answer, [reference]) == said


def test_the_last_match_of_a_pattern_counts_and_its_group_where_it_has_one() -> None:
    whole = Extraction(answer_pattern=re.compile(r"\d+"))
    grouped = Extraction(answer_pattern=re.compile(r"answer is (\w+)|none"))
    assert whole.answer("3 and 14", ["x"]) == "14"
    assert grouped.answer("answer is A, no: answer is B, none", ["x"]) == "B"
    assert grouped.answer("#### C", ["C"]) is None


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_references_are_read_from_any_of_their_columns(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "answer": "3+4\n#### 7 "},
        {"prompt": "a", "reference": ["x", "y"], "completion": "z", "category": "c"},
        {"messages": [{"role": "user", "content": "a"}], "completion": " z "},
    ]
    found = read_questions(write(tmp_path, rows), Extraction(), "End with ####.")
    assert [question.references for question in found] == [("7",), ("x", "y"), ("z",)]
    assert [question.category for question in found] == [None, "c", None]
    assert found[0].prompt == "a\nEnd with ####."
    assert found[2].prompt == [{"role": "user", "content": "a\nEnd with ####."}]
    assert [found[1].is_right(said) for said in ("x", "y.", "z", None)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("row", "pattern", "message"),
    [
        ({}, None, "has prompt, but no reference; it stands in answer, reference or completion"),
        ({"answer": 7}, None, "answer is neither a string nor a list of strings"),
        ({"answer": []}, None, "answer is neither a string nor a list of strings"),
        ({"reference": "7 #### "}, None, "reference holds nothing to compare with"),
        ({"answer": "none"}, r"\d+", r"--reference-pattern '\\d+' finds nothing in answer, 'none'"),
    ],
)
def test_a_row_without_a_reference_is_named(
    row: dict[str, Any], pattern: str | None, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": "a", **row}])
    with pytest.raises(ValueError, match=re.escape(f"line 2 of {path}")) as caught:
        read_questions(path, Extraction(reference_pattern=compiled("--reference-pattern", pattern)))
    assert message in str(caught.value)


def test_a_pattern_that_does_not_compile_is_named() -> None:
    with pytest.raises(ValueError, match=re.escape("--answer-pattern '(' is no regular expression")):
        compiled("--answer-pattern", "(")


def engine_of(model: Any) -> Engine:
    model.generation_config.pad_token_id = 0
    return Engine(model, kit.word_tokenizer(kit.VOCAB))


def own_text(model: Any, prompt: str) -> str:
    tokens = kit.without_cache(model, [int(word[1:]) for word in prompt.split()], BUDGET)
    return " ".join(f"w{token}" for token in tokens)


@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_accuracy_varies_by_exit_alone_and_not_with_drafts(grade: str) -> None:
    """The references are exit 2's own answers: right from that exit, and from all layers only as far as they agree."""
    model = kit.graded("llama", grade)
    short = kit.truncated(model, 2)
    questions = [Question("", prompt, (own_text(short, prompt),)) for prompt in PROMPTS]
    engine = engine_of(model)
    found = {}
    for arm in (*arms_of("early_exit", [1, 2], []), *arms_of("self_speculative", [1, 2], [3])[1:]):
        batches = answer_questions(engine, questions, PROMPTS, arm, Extraction(), max_new_tokens=BUDGET, batch_size=3)
        answers = {index: answer for batch in batches for index, answer in batch.items()}
        assert sorted(answers) == list(range(len(PROMPTS)))
        found[arm] = answers
    whole = [own_text(model, prompt) for prompt in PROMPTS]
    expected = sum(text == question.references[0] for text, question in zip(whole, questions, strict=True))
    assert accuracy(found[AUTOREGRESSIVE])["correct"] == expected
    assert expected == {"none": 0, "all": len(PROMPTS)}.get(grade, expected)
    assert accuracy(found[Answering("early_exit", 2)])["accuracy"] == 1.0
    assert accuracy(found[Answering("early_exit", 1)])["accuracy"] == 0.0
    for exit_layer in (1, 2):
        drafted = found[Answering("self_speculative", exit_layer, 3)]
        assert [drafted[index].text for index in range(len(PROMPTS))] == whole


def test_what_is_done_is_left_out_and_long_prompts_come_first() -> None:
    questions = [Question("", prompt, ("w1",)) for prompt in PROMPTS]
    engine = engine_of(kit.mixed())
    batches = answer_questions(
        engine, questions, PROMPTS, AUTOREGRESSIVE, Extraction(), max_new_tokens=2, batch_size=2, done={1}
    )
    assert [list(batch) for batch in batches] == [[3, 0], [2]]


def test_no_answers_have_no_accuracy() -> None:
    assert accuracy({}) == {"answered": 0, "correct": 0, "accuracy": None, "finished": 0}
