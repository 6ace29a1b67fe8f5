"""A .jsonl file of scored answers that grows batch by batch, and from which an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from layerskip.comparison.accuracy import Answered, Answering, Extraction, Question, score
from layerskip.files import drop_unfinished_line
from layerskip.prompt_file import json_rows

# By model and arm the answers, by index of their question.
Answers = dict[tuple[str, Answering], dict[int, Answered]]


class AnswerLog:
    """Answers as they come in, kept and, where there is a file, written to it.

    A line of the file has `model`, `strategy`, `exit_layer`, `num_draft_tokens`, `max_new_tokens`, `dtype`, `weights`,
    `question` (its index, counted from 0), `prompt`, `references` (what they say), `category`, `answer`, `token_ids`,
    `finish_reason`, `extracted` and `correct`.

    Attributes:
        answers: all of them, those of an earlier run included.
        weights: a hash of each model's weights, which lines say as well.
    """

    def __init__(
        self, questions: Sequence[Question], extraction: Extraction, settings: Mapping[str, Any], file: TextIO | None
    ) -> None:
        """Begins without answers.

        Args:
            questions: what is asked.
            extraction: how answers are read.
            settings: what every line says: `max_new_tokens` and `dtype`.
            file: open for writing; `None` for none.
        """
        self.answers: Answers = {}
        self.weights: dict[str, str] = {}
        self._questions = questions
        self._extraction = extraction
        self._settings = dict(settings)
        self._file = file

    def of(self, model: str, arm: Answering) -> dict[int, Answered]:
        """Returns the answers of a model with an arm, by index of their question."""
        return self.answers.setdefault((model, arm), {})

    def add(self, model: str, arm: Answering, batch: Mapping[int, Answered]) -> None:
        """Takes in a batch; its lines are in the file when this returns."""
        self.of(model, arm).update(batch)
        if self._file is not None:
            # As one piece, so that an interruption leaves whole lines.
            lines = [json.dumps(self._line(model, arm, *item), ensure_ascii=False) + "\n" for item in batch.items()]
            self._file.write("".join(lines))
            self._file.flush()

    def _line(self, model: str, arm: Answering, index: int, answered: Answered) -> dict[str, Any]:
        question = self._questions[index]
        return {
            "model": model,
            **arm.settings,
            **self._settings,
            "weights": self.weights.get(model),
            "question": index,
            "prompt": question.prompt,
            "references": list(question.references),
            "category": question.category,
            "answer": answered.text,
            "token_ids": answered.token_ids,
            "finish_reason": answered.finish_reason,
            "extracted": answered.extracted,
            "correct": answered.correct,
        }

    def take_back(self, content: bytes, name: str, asked: Mapping[str, Sequence[Answering]]) -> None:
        """Takes in the answers that an earlier run has written, without writing them again.

        Args:
            content: the file's whole lines.
            name: what messages call it.
            asked: the arms of each model in this run.

        Raises:
            ValueError: a line that this run, with its settings, questions and patterns, would not have written.
        """
        for where, line in json_rows(content, name):
            index = line.get("question")
            arm = Answering(str(line.get("strategy")), line.get("exit_layer"), line.get("num_draft_tokens"))
            if arm not in asked.get(str(line.get("model")), ()):
                said = {part: line.get(part) for part in ("model", *arm.settings)}
                raise ValueError(f"{where} is of {said}, which this run does not ask; {CHOOSE}")
            if not isinstance(index, int) or not 0 <= index < len(self._questions):
                raise ValueError(
                    f"{where} answers question {index}, and this run asks {len(self._questions)}; {CHOOSE}"
                )
            try:
                given = (str(line["answer"]), list(line["token_ids"]), str(line["finish_reason"]))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{where} is no answer as this program writes it; {CHOOSE}") from error
            answered = score(self._questions[index], *given, self._extraction)
            for part, value in self._line(line["model"], arm, index, answered).items():
                if line.get(part) != value:
                    raise ValueError(f"{where} has {part} {line.get(part)!r}, and this run {value!r}; {CHOOSE}")
            self.of(line["model"], arm)[index] = answered


CHOOSE = "go on with the settings it was begun with, or choose another file for --answers."


@contextmanager
def answer_log(
    path: Path | None,
    questions: Sequence[Question],
    extraction: Extraction,
    settings: Mapping[str, Any],
) -> Iterator[AnswerLog]:
    """Opens the log of a run, to whose file lines are added; whoever resumes calls `take_back` first.

    Arguments are those of `AnswerLog`; `path` is the file's, `None` for none. A new file without a line is removed.

    Raises:
        OSError: the file cannot be written to.
    """
    if path is None:
        yield AnswerLog(questions, extraction, settings, None)
        return
    drop_unfinished_line(path)
    is_new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        try:
            yield AnswerLog(questions, extraction, settings, file)
        finally:
            if is_new and not file.tell():
                path.unlink()
