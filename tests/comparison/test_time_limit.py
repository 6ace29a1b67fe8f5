"""Measurements under a time limit: what is done, cut short, failed, left out and not reached, under a known clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from layerskip.comparison.time_limit import LeftOut, Part, Task, TimeLimit, run_tasks


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float, figures: dict[str, Any] | None = None) -> Callable[[], dict[str, Any]]:
        """Returns a measurement that takes some seconds."""

        def measure() -> dict[str, Any]:
            self.now += seconds
            return figures or {}

        return measure

    def parts(self, *seconds: float) -> Callable[[], Iterator[Part]]:
        """Returns a measurement in parts, each of which takes some seconds."""

        def measure() -> Iterator[Part]:
            for count, each in enumerate(seconds, 1):
                self.now += each
                yield Part({"parts": count}, count == len(seconds))

        return measure


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_begins_after_the_limit_is_not_reached(clock: Clock) -> None:
    tasks = [Task.once(name, clock.taking(40, {"name": name})) for name in ("first", "second", "third")]
    found = list(run_tasks(tasks, TimeLimit(1, clock)))
    assert [(each.name, each.status, each.seconds) for each in found] == [
        ("first", "done", 40),
        ("second", "done", 40),
        ("third", "not reached", 0),
    ]
    assert [each.figures for each in found] == [{"name": "first"}, {"name": "second"}, {}]


def test_a_measurement_in_parts_keeps_those_before_the_limit(clock: Clock) -> None:
    found = list(run_tasks([Task("parts", clock.parts(40, 30, 50))], TimeLimit(1, clock)))
    assert [(each.status, each.seconds, each.figures) for each in found] == [
        ("cut short", 40, {"parts": 1}),
        ("cut short", 70, {"parts": 2}),
    ]


def test_a_last_part_behind_the_limit_is_whole(clock: Clock) -> None:
    *_, last = run_tasks([Task("parts", clock.parts(40, 30))], TimeLimit(1, clock))
    assert (last.status, last.figures) == ("done", {"parts": 2})


def test_a_failure_is_told_and_does_not_stop_the_rest(clock: Clock) -> None:
    def failing() -> Iterator[Part]:
        yield Part({"kept": 1}, is_whole=False)
        raise RuntimeError("no memory\nand a long trace")

    def missing() -> dict[str, Any]:
        raise LeftOut("no model here")

    tasks = [Task("failing", failing), Task.once("missing", missing), Task.once("last", clock.taking(1))]
    found = {each.name: each for each in run_tasks(tasks, TimeLimit(1, clock))}
    assert [each.status for each in found.values()] == ["failed", "left out", "done"]
    assert (found["failing"].reason, found["failing"].figures) == ("RuntimeError: no memory", {"kept": 1})
    assert found["missing"].reason == "no model here"


def test_an_interruption_goes_on_to_the_caller(clock: Clock) -> None:
    def interrupted() -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_tasks([Task.once("interrupted", interrupted)], TimeLimit(1, clock)))
