"""The folder of a comparison of exits: what was done so far, so that an interrupted one goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from layerskip.comparison.arms import RoundCounts, Run
from layerskip.comparison.benchmark import Sample
from layerskip.comparison.quality import Reading
from layerskip.decoding.cost import CostTable
from layerskip.files import add_lines, drop_unfinished_line, whole_lines, write_text
from layerskip.prompt_file import json_rows

SETTINGS, ANSWERS, COSTS, TIMINGS = "settings.json", "answers.jsonl", "costs.json", "timings.jsonl"

Read = TypeVar("Read")


@dataclass(frozen=True)
class ReadAnswer:
    """A greedy answer of all layers, and what the exits make of it.

    Attributes:
        index: which prompt it answers.
        prompt_ids, token_ids: the prompt's tokens and the new ones.
        finish_reason: "stop" (an EOS token) or "length".
        reading: of the exits of the comparison, in their order.
    """

    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    reading: Reading


def holds_comparison(path: Path, *, resume: bool) -> bool:
    """Whether a folder holds a comparison to go on with; not so where it is empty or missing.

    Args:
        path: the folder.
        resume: whether a comparison that is there is to be gone on with.

    Raises:
        ValueError: it is a file, or holds something else, or a comparison that is not to be resumed.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output-dir {path} is a file; choose another folder.")
    if not path.is_dir() or not any(path.iterdir()):
        return False
    if not (path / SETTINGS).is_file():
        raise ValueError(f"--output-dir {path} is not empty and holds no comparison; choose another folder.")
    if not resume:
        raise ValueError(
            f"--output-dir {path} holds a comparison; go on with it by --resume, or choose another folder."
        )
    return True


class ComparisonFolder:
    """Files that grow line by line, each line whole."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        """Opens the folder, which is made where it is missing.

        Args:
            path: the folder.
            settings: of the comparison, as JSON takes them.
            resume: go on with the comparison that is there, if there is one.

        Raises:
            OSError: the folder cannot be made or written to.
            ValueError: as `holds_comparison`, or a comparison with other settings.
        """
        self.path = path
        wanted = json.loads(json.dumps(settings))
        if not holds_comparison(path, resume=resume):
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / SETTINGS, json.dumps(wanted, indent=2) + "\n")
            return
        stored = self._read(SETTINGS, dict)
        changed = sorted(name for name in stored | wanted if stored.get(name) != wanted.get(name))
        if changed:
            raise ValueError(
                f"--output-dir {path} holds a comparison with other settings ({', '.join(changed)} differ); go on with "
                f"what stands in its {SETTINGS}, or choose another folder."
            )
        for name in (ANSWERS, TIMINGS):
            drop_unfinished_line(path / name)

    def answers(self) -> dict[int, ReadAnswer]:
        """Returns the answers so far, by the index of their prompt; raises ValueError by line where one is damaged."""
        answers = self._lines(ANSWERS, lambda row: ReadAnswer(**{**row, "reading": Reading(**row["reading"])}))
        return {answer.index: answer for answer in answers}

    def add_answers(self, answers: Sequence[ReadAnswer]) -> None:
        """Adds the answers of a batch."""
        add_lines(self.path / ANSWERS, [json.dumps(asdict(answer)) for answer in answers])

    def costs(self) -> CostTable | None:
        """Returns the table of costs, where it has been measured."""
        if not (self.path / COSTS).is_file():
            return None
        return self._read(COSTS, lambda stored: CostTable.read(stored, str(self.path / COSTS)))

    def write_costs(self, costs: CostTable) -> None:
        """Writes the table of costs."""
        write_text(self.path / COSTS, json.dumps(costs.to_dict(), indent=2) + "\n")

    def samples(self) -> list[Sample]:
        """Returns the timed runs so far; raises ValueError by line where one is damaged."""
        return self._lines(TIMINGS, _sample)

    def add_sample(self, sample: Sample) -> None:
        """Adds a timed run."""
        add_lines(self.path / TIMINGS, [json.dumps(asdict(sample))])

    def _lines(self, name: str, read: Callable[[dict[str, Any]], Read]) -> list[Read]:
        path, found = self.path / name, []
        for where, row in json_rows(whole_lines(path), str(path)):
            try:
                found.append(read(row))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{where} is damaged ({error!r}); choose another --output-dir.") from error
        return found

    def _read(self, name: str, read: Callable[[Any], Read]) -> Read:
        try:
            return read(json.loads((self.path / name).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path / name} is damaged ({error}); choose another --output-dir.") from error


def _sample(row: dict[str, Any]) -> Sample:
    """Returns a timed run that was written as JSON."""
    run = row["run"]
    rounds = None if run["rounds"] is None else RoundCounts(**run["rounds"])
    return Sample(**{**row, "run": Run(**{**run, "rounds": rounds})})
