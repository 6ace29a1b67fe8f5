"""Measurements under a time limit: one after the other, each kept as soon as it is there, what is left told by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

DONE, CUT_SHORT, FAILED, LEFT_OUT, NOT_REACHED = "done", "cut short", "failed", "left out", "not reached"


class LeftOut(Exception):
    """Raised by a measurement that has nothing to measure here; its text says why."""


@dataclass(frozen=True)
class Part:
    """What a measurement has found so far.

    Attributes:
        figures: by name, as JSON takes them.
        is_whole: whether nothing is to come.
    """

    figures: dict[str, Any]
    is_whole: bool = True


@dataclass(frozen=True)
class Task:
    """A measurement: its name, and a function that yields its parts, each holding all that came before."""

    name: str
    measure: Callable[[], Iterator[Part]]

    @classmethod
    def once(cls, name: str, measure: Callable[[], dict[str, Any]]) -> Task:
        """Returns a measurement that gives all of its figures at once."""

        def parts() -> Iterator[Part]:
            yield Part(measure())

        return cls(name, parts)


@dataclass(frozen=True)
class Finding:
    """What became of a measurement.

    Attributes:
        name: of the measurement.
        status: one of "done", "cut short" (by the time limit), "failed", "left out" and "not reached".
        seconds: what it took.
        figures: what it has found, until it was cut short or failed.
        reason: why it failed or was left out.
    """

    name: str
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None


class TimeLimit:
    """Minutes that run from here on."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts the clock, which counts seconds."""
        self._clock = clock
        self._begin = clock()
        self._end = self._begin + 60 * minutes

    @property
    def seconds(self) -> float:
        """How many seconds have passed."""
        return self._clock() - self._begin

    @property
    def is_over(self) -> bool:
        """Whether all of the minutes have passed."""
        return self._clock() >= self._end


def run_tasks(tasks: Sequence[Task], limit: TimeLimit) -> Iterator[Finding]:
    """Yields what becomes of each measurement, several times where it gives several parts; the last one stands.

    The limit is looked at between measurements and between their parts. One that raises is told as failed, and the
    others go on.
    """
    for task in tasks:
        if limit.is_over:
            yield Finding(task.name, NOT_REACHED)
        else:
            yield from _run(task, limit)


def _run(task: Task, limit: TimeLimit) -> Iterator[Finding]:
    begin, figures = limit.seconds, {}
    try:
        for part in task.measure():
            figures = part.figures
            # Whoever is killed before the next part has been cut short.
            yield Finding(task.name, DONE if part.is_whole else CUT_SHORT, limit.seconds - begin, figures)
            if part.is_whole or limit.is_over:
                return
    except LeftOut as error:
        yield Finding(task.name, LEFT_OUT, limit.seconds - begin, figures, str(error))
    except Exception as error:
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        yield Finding(task.name, FAILED, limit.seconds - begin, figures, reason)
