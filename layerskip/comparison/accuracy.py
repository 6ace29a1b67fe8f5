"""Answers to questions that have a reference: asking, extracting what was meant, and comparing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from layerskip.comparison.own_answers import answer
from layerskip.decoding.engine import Engine
from layerskip.prompt_file import Prompt, PromptRow, prompt_rows

MARK = "####"
REFERENCES = ("answer", "reference", "completion")
# A sign that stands behind a word or a number is a hyphen or a minus between two numbers.
NUMBER = re.compile(
    r"(?:(?<![\w)])[-+−])?[$€£]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
)


# --- What was meant, and whether it is right --------------------------------------------------------------------------


def as_number(text: str) -> Decimal | None:
    """Returns the number that a text is, or `None` for any other text.

    A sign, a currency sign before it, commas between thousands, blanks around it and a closing full stop are allowed:
    1,000 and $1000.0 are the same number.
    """
    written = without_end(text)
    if NUMBER.fullmatch(written) is None:
        return None
    return Decimal(re.sub(r"[,$€£+]", "", written).replace("−", "-"))


def without_end(text: str) -> str:
    """Returns a text without blanks at its ends and without one closing full stop."""
    return text.strip().removesuffix(".").strip()


def is_same(answer: str, reference: str) -> bool:
    """Whether two extracted texts mean the same: as numbers where both are, else letter by letter.

    Blanks at the ends and one closing full stop do not count; upper and lower case do.
    """
    numbers = as_number(answer), as_number(reference)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return without_end(answer) == without_end(reference)


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Returns the last match of a pattern, its group 1 where it has groups; `None` without one that is not blank."""
    group = 1 if pattern.groups else 0
    found = [match[group] for match in pattern.finditer(text) if match[group] and match[group].strip()]
    return found[-1] if found else None


@dataclass(frozen=True)
class Extraction:
    """How the answer is found in what was written.

    Attributes:
        answer_pattern: found in the model's answer; `None` for the rule of `answer`.
        reference_pattern: found in the reference; `None` for the rule of `reference`.
    """

    answer_pattern: re.Pattern[str] | None = None
    reference_pattern: re.Pattern[str] | None = None

    def reference(self, text: str) -> str | None:
        """Returns what a reference says: the last match of its pattern.

        Without a pattern it is the text behind the last ####, or the whole text where there is none. `None` where that
        is nothing but blanks.
        """
        if self.reference_pattern is not None:
            return last_match(self.reference_pattern, text)
        return text.rpartition(MARK)[2].strip() or None

    def answer(self, text: str, references: Sequence[str]) -> str | None:
        """Returns what an answer says: the last match of its pattern, `None` without one.

        Without a pattern it is the rest of the line behind the last ####. Where a reference is a number, and that rest
        is none, it is the first number in it (18 of "#### 18 dollars"), and in an answer without #### the last number.
        Else it is the whole answer.

        Args:
            text: the answer.
            references: what the references say.
        """
        if self.answer_pattern is not None:
            return last_match(self.answer_pattern, text)
        _, mark, behind = text.rpartition(MARK)
        said = behind.strip().partition("\n")[0].strip() if mark else text.strip()
        if said and as_number(said) is None and any(as_number(reference) is not None for reference in references):
            numbers = NUMBER.findall(said)
            if numbers:
                said = numbers[0] if mark else numbers[-1]
        return said or None


def compiled(flag: str, pattern: str | None) -> re.Pattern[str] | None:
    """Returns the pattern of a flag, `None` without one; raises ValueError by name where it does not compile."""
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{flag} {pattern!r} is no regular expression: {error}.") from error


# --- Questions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question and what counts as right.

    Attributes:
        where: what messages call it.
        prompt: a string or a list of messages, instruction included.
        references: what the references say, extracted; any one counts.
        category: what kind of question it is, or `None`.
    """

    where: str
    prompt: Prompt
    references: tuple[str, ...]
    category: str | None = None

    def is_right(self, said: str | None) -> bool:
        """Whether an extracted answer is one of the references."""
        return said is not None and any(is_same(said, reference) for reference in self.references)


def read_questions(path: Path, extraction: Extraction, instruction: str | None = None) -> list[Question]:
    """Returns the questions of a .jsonl file.

    A row has a prompt as `prompt_rows` reads it and, in `answer`, `reference` or `completion`, the first of these that
    it has, a string or a list of strings of which any counts. `instruction` is put on a line of its own behind each
    prompt, in messages behind the last one.

    Raises:
        OSError: the file cannot be read.
        ValueError: a file of another kind or without rows, or a row without a prompt or a reference, or with a
            reference in which nothing is found; it names file and line.
    """
    if path.suffix.lower() != ".jsonl":
        raise ValueError(f"--questions {path} ends with {path.suffix!r}; allowed is .jsonl.")
    return [
        Question(row.where, _instructed(row.prompt, instruction), _references_of(row, extraction), row.category)
        for row in prompt_rows(path)
    ]


def _references_of(row: PromptRow, extraction: Extraction) -> tuple[str, ...]:
    name = next((name for name in REFERENCES if row.columns.get(name) is not None), None)
    if name is None:
        raise ValueError(
            f"{row.where} has {', '.join(row.columns)}, but no reference; it stands in {', '.join(REFERENCES[:-1])} or "
            f"{REFERENCES[-1]}."
        )
    value = row.columns[name]
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given or not all(isinstance(text, str) for text in given):
        raise ValueError(f"{row.where}: {name} is neither a string nor a list of strings.")
    extracted = []
    for text in given:
        said = extraction.reference(text)
        if said is None and extraction.reference_pattern is not None:
            pattern = extraction.reference_pattern.pattern
            raise ValueError(f"{row.where}: --reference-pattern {pattern!r} finds nothing in {name}, {text!r}.")
        if said is None:
            raise ValueError(f"{row.where}: {name} holds nothing to compare with, {text!r}.")
        extracted.append(said)
    return tuple(extracted)


def _instructed(prompt: Prompt, instruction: str | None) -> Prompt:
    if instruction is None:
        return prompt
    if isinstance(prompt, str):
        return f"{prompt}\n{instruction}"
    *before, last = prompt
    return [*before, {**last, "content": f"{last['content']}\n{instruction}"}]


# --- Answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answering:
    """A way to answer.

    Attributes:
        strategy: "autoregressive", "early_exit" or "self_speculative".
        exit_layer: E, counted from 1; `None` for autoregressive.
        num_draft_tokens: γ; `None` unless self-speculative.
    """

    strategy: str
    exit_layer: int | None = None
    num_draft_tokens: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What JSON says of it."""
        return {
            "strategy": self.strategy,
            "exit_layer": self.exit_layer,
            "num_draft_tokens": self.num_draft_tokens,
        }


AUTOREGRESSIVE = Answering("autoregressive")


def arms_of(strategy: str, exit_layers: Sequence[int], num_draft_tokens: Sequence[int]) -> list[Answering]:
    """Returns the arms of a strategy: first the whole model, then each exit, or each exit and draft length."""
    if strategy == "early_exit":
        return [AUTOREGRESSIVE, *(Answering(strategy, exit_layer) for exit_layer in exit_layers)]
    if strategy == "self_speculative":
        grid = [Answering(strategy, exit_layer, drafts) for exit_layer in exit_layers for drafts in num_draft_tokens]
        return [AUTOREGRESSIVE, *grid]
    return [AUTOREGRESSIVE]


@dataclass(frozen=True)
class Answered:
    """An answer, scored.

    Attributes:
        text: what was written, without special tokens.
        token_ids: the same as tokens, the EOS token that ended it included.
        finish_reason: "stop" (an EOS token) or "length".
        extracted: what it says; `None` where the pattern finds nothing.
        correct: whether that is one of the references.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    extracted: str | None
    correct: bool


def answer_questions(
    engine: Engine,
    questions: Sequence[Question],
    prompts: Sequence[Prompt],
    arm: Answering,
    extraction: Extraction,
    *,
    max_new_tokens: int,
    batch_size: int,
    done: Collection[int] = (),
) -> Iterator[dict[int, Answered]]:
    """Answers questions greedily and yields each batch's scored answers by index, the longest prompts first.

    A progress bar on standard error counts questions.

    Args:
        engine: the model, with a tokenizer; its EOS tokens end answers.
        questions: at least one.
        prompts: how each is put to this model: a string, tokenised as it stands, or a list of messages.
        arm: with which layers.
        extraction: how what an answer says is found in it.
        max_new_tokens: the budget of every answer.
        batch_size: questions that are answered together; those of like length are.
        done: indices of questions that are left out.

    Raises:
        TypeError, ValueError: what `Engine.generate` refuses.
    """
    for batch in answer(engine, list(prompts), max_new_tokens, batch_size, done=done, **arm.settings):
        yield {
            made.index: score(questions[made.index], made.text or "", made.token_ids, made.finish_reason, extraction)
            for made in batch
        }


def score(question: Question, text: str, token_ids: list[int], finish_reason: str, how: Extraction) -> Answered:
    """Returns an answer with what it says and whether that is right."""
    said = how.answer(text, question.references)
    return Answered(text, token_ids, finish_reason, said, question.is_right(said))


def accuracy(answers: Mapping[int, Answered], indices: Collection[int] | None = None) -> dict[str, Any]:
    """Returns `answered`, `correct`, `accuracy` (`None` without answers) and `finished` (ended with EOS).

    Args:
        answers: by index of their question.
        indices: which questions; all by default.
    """
    chosen = [answer for index, answer in answers.items() if indices is None or index in indices]
    correct = sum(answer.correct for answer in chosen)
    return {
        "answered": len(chosen),
        "correct": correct,
        "accuracy": correct / len(chosen) if chosen else None,
        "finished": sum(answer.finish_reason == "stop" for answer in chosen),
    }
