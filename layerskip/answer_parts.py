"""A .jsonl file of answers that several ranks make: each adds to a part of its own, and in the end parts are merged.

As long as answers are missing, the folder OUTPUT.parts stands beside the file OUTPUT. In it settings.json says what the
run was begun with, and the lines of rank-R.jsonl are {"index", "answer"}, with the index of the prompt from 0. Whatever
a rank has written there stays when it or another one fails, and any number of ranks can go on from it. OUTPUT itself
appears whole, in the order of the prompts, and the parts go.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from layerskip.files import add_lines, drop_unfinished_line, whole_lines, write_text
from layerskip.prompt_file import Prompt, json_rows

# By the index of their prompt.
Answers = dict[int, dict[str, Any]]


class AnswerParts:
    """The parts of a file of answers.

    Attributes:
        output: the file.
        prompts: what is answered in it.
        folder: where the parts are until all prompts are answered.
    """

    def __init__(self, output: Path, prompts: Sequence[Prompt]) -> None:
        self.output = output
        self.prompts = list(prompts)
        self.folder = output.with_name(f"{output.name}.parts")
        self._settings = self.folder / "settings.json"
        self._lock = self.folder / "lock"

    def check_place(self, *, resume: bool) -> bool:
        """Checks that answers can be written here; returns whether they are there already.

        A finished file does not say with which settings it was made. It is left as it is, and what is left of the parts
        that it was merged from goes.

        Args:
            resume: whether what an earlier run has left may be gone on with.

        Raises:
            OSError: the file is there and cannot be read.
            ValueError: a file of another kind or in a folder that cannot be written into, without `resume` answers or
                parts that are there already, with it a file that does not hold the answers to just these prompts.
        """
        if self.output.suffix.lower() != ".jsonl":
            raise ValueError(f"--output {self.output} ends with {self.output.suffix!r}; allowed is .jsonl.")
        if not os.access(self.output.parent, os.W_OK):
            raise ValueError(
                f"--output {self.output}: the folder {self.output.parent} is not there or cannot be written into; make "
                "it first, or choose another file."
            )
        if self.output.is_dir() or self.folder.is_file():
            kind = f"{self.output} is a folder" if self.output.is_dir() else f"{self.folder} is a file"
            raise ValueError(f"--output: {kind}; choose another file.")
        remains = {self.output: "is there already"} if self.output.exists() else {}
        if self._parts():
            remains[self.folder] = "holds answers of an interrupted run"
        for path, what in remains.items():
            if not resume:
                raise ValueError(f"--output: {path} {what}; go on with --resume, or choose another file.")
        if not self.output.exists():
            return False
        finished = [row.get("prompt") for _, row in json_rows(self.output.read_bytes(), f"--output {self.output}")]
        if finished != self.prompts:
            raise ValueError(f"--output {self.output} holds something else than answers to --prompts; choose another.")
        self._discard()
        return True

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Checks that the run whose parts are there, if any are, was begun with these settings, perhaps among others.

        Raises:
            ValueError: it was begun with others, which the message names, or nobody knows with which.
        """
        if not self._parts():
            return
        try:
            stored = json.loads(self._settings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            stored = error
        if not isinstance(stored, dict):
            raise ValueError(
                f"--output: {self._settings}, which says what the answers beside it were begun with, cannot be read "
                f"({stored!r}); remove {self.folder}, or choose another file."
            )
        changed = [name for name, value in settings.items() if stored.get(name) != value]
        if changed:
            raise ValueError(
                f"--output: {self.folder} holds answers of a run with other settings ({', '.join(changed)} differ); go "
                "on with those it was begun with, or choose another file."
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other runs out while the block runs; for one rank.

        Raises:
            ValueError: another run is in.
        """
        self.folder.mkdir(exist_ok=True)
        lock = FileLock(self._lock, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(
                f"--output: another run is writing into {self.folder}; wait for its end, or choose another file."
            ) from None
        try:
            yield
        finally:
            if not self._parts():
                self._discard()
            lock.release()

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Makes the parts ready to be added to; for one rank, before others add anything."""
        write_text(self._settings, json.dumps(settings, indent=2) + "\n")
        for part in self._parts():
            drop_unfinished_line(part)

    def add(self, rank: int, answers: Answers) -> None:
        """Adds answers to the part of a rank."""
        lines = [{"index": index, "answer": answer} for index, answer in answers.items()]
        add_lines(self.folder / f"rank-{rank}.jsonl", [json.dumps(line, ensure_ascii=False) for line in lines])

    def answers(self) -> Answers:
        """Returns what is there: all that ranks of this run and of earlier ones have written.

        Raises:
            OSError: a part cannot be read.
            ValueError: a line that no rank has written; it names file and line.
        """
        found: Answers = {}
        for part in self._parts():
            for where, line in json_rows(whole_lines(part), str(part)):
                index: Any = line.get("index")
                answer = line.get("answer")
                is_place = type(index) is int and 0 <= index < len(self.prompts)
                if not is_place or not isinstance(answer, dict) or answer.get("prompt") != self.prompts[index]:
                    raise ValueError(f"{where} is no answer of this run; remove it, or choose another --output.")
                found[index] = answer
        return found

    def merge(self) -> Answers:
        """Writes the file and removes the parts; for one rank, when all have added what they had to.

        Returns:
            All answers, one to each prompt.
        """
        answers = self.answers()
        lines = [json.dumps(answers[index], ensure_ascii=False) + "\n" for index in range(len(self.prompts))]
        write_text(self.output, "".join(lines))
        self._discard()
        return answers

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob("rank-*.jsonl"))

    def _discard(self) -> None:
        """Removes what runs have written into the folder, and the folder where nothing else is in it."""
        # Settings go last, so that parts are never without them.
        for path in (*self._parts(), self._settings, self._lock):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()
