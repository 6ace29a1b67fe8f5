"""Makes a task to train on: a voice assistant's commands, each answered by one line of JSON with its intent and slots.

    python training/voice_commands.py --split train --rows 4000 --seed 0 --out train.jsonl
    python training/voice_commands.py --split test --rows 200

The task is narrow and its answers are structured, as in TOPv2 (Chen et al., 2020), but everything is made up here, so
nothing is downloaded. Every line of the output is a row:

    {"prompt": [{"role": "system", "content": "Voice …"}, {"role": "user", "content": "wake me up at 7:30 am"}],
     "completion": "{\\"intent\\": \\"set_alarm\\", \\"slots\\": {\\"time\\": \\"7:30 am\\"}}",
     "guard": false}

Slot values are copied from the command as they were spoken; slots that a command does not mention are absent. `guard`
frees the row from a guard that holds a model to its former answers. The
splits share the intents, but neither a phrasing nor a value of an open slot: names, places, titles, messages, numbers
and times of validation and test never occur in train. The same split, rows and seed always give the same rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from layerskip.program import run_program

SPLITS = ("train", "validation", "test")
# All are made before any is written.
MOST_ROWS = 1_000_000
SYSTEM = "Voice command to JSON."


# --- Tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Intent:
    """An intent: its slots, in the order of the answer's keys, and its phrasings in each split.

    `{time}` in a phrasing is the slot `time`, filled from the pool `time`; `{date:weekday}` is the slot `date`, filled
    from the pool `weekday`. Two slots that a phrasing fills from the same pool get different values.
    """

    slots: tuple[str, ...]
    train: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]

    def phrasings(self, split: str) -> tuple[str, ...]:
        """Returns the phrasings of a split."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[split]


Pools = dict[str, tuple[str, ...]]


def read_tables(path: Path) -> tuple[dict[str, Intent], Pools, Pools, Pools]:
    """Returns the intents, and the closed, open and composed pools, of the file of tables."""
    tables = yaml.safe_load(path.read_text(encoding="utf-8"))
    intents = {
        name: Intent(**{field: tuple(values) for field, values in intent.items()})
        for name, intent in tables["intents"].items()
    }
    closed, opened, composed = (
        {pool: tuple(values) for pool, values in tables[kind].items()} for kind in ("closed", "open", "composed")
    )
    return intents, closed, opened, composed


INTENTS, CLOSED, OPEN, COMPOSED = read_tables(Path(__file__).with_suffix(".yaml"))


# --- Slot values -----------------------------------------------------------------------------------------------------

HOURS = "one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve"
MONTHS = "january, february, march, april, may, june, july, august, september, october, november, december"


def clock_times() -> Iterator[str]:
    """Yields the times of a day, every five minutes, as one says or reads them."""
    for half, hour, minute in itertools.product(("am", "pm"), range(1, 13), range(0, 60, 5)):
        yield f"{hour}:{minute:02d} {half}" if minute else f"{hour} {half}"
    for words, hour_name in itertools.product(("half past", "quarter past", "quarter to"), HOURS.split(", ")):
        yield f"{words} {hour_name}"


def durations() -> Iterator[str]:
    """Yields durations from five seconds to twelve hours."""
    yield from (f"{seconds} seconds" for seconds in range(5, 100, 5))
    yield from (f"{minutes} minutes" for minutes in range(2, 91))
    yield from (f"{hours} hours" for hours in range(2, 13))
    for hours, minutes in itertools.product(("1 hour", "2 hours", "3 hours"), range(5, 60, 5)):
        yield f"{hours} and {minutes} minutes"


def calendar_days() -> Iterator[str]:
    """Yields the days that every month has, such as `march 3rd`."""
    for month, day in itertools.product(MONTHS.split(", "), range(1, 29)):
        suffix = "th" if 11 <= day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        yield f"{month} {day}{suffix}"


# Open pools of numbers, dates and times.
GENERATED: dict[str, tuple[str, ...]] = {
    "time": tuple(clock_times()),
    "duration": tuple(durations()),
    "calendar_day": tuple(calendar_days()),
    "percent": tuple(f"{number} percent" for number in range(1, 101)),
    "temperature": tuple(f"{number} degrees" for number in (*range(10, 90), *(n + 0.5 for n in range(14, 29)))),
    "amount": (*map(str, range(2, 400)), *map(str, range(400, 5000, 50)), *(f"{n}.5" for n in range(1, 60))),
    "house_number": tuple(map(str, range(1, 100))),
}


# --- Rows ------------------------------------------------------------------------------------------------------------

SLOT = re.compile(r"\{(\w+)(?::(\w+))?\}")


def share(values: Sequence[str], split: str) -> tuple[str, ...]:
    """Returns the values of an open pool that belong to a split: 70 % to train and 15 % to each of the others.

    The order of their checksums decides, which is as good as chance and stays the same everywhere.
    """
    ranked = sorted(set(values), key=lambda value: (zlib.crc32(value.encode()), value))
    first, second = round(0.7 * len(ranked)), round(0.85 * len(ranked))
    parts = {"train": ranked[:first], "validation": ranked[first:second], "test": ranked[second:]}
    return tuple(parts[split])


def slots_of(phrasing: str) -> list[tuple[str, str]]:
    """Returns the slots of a phrasing in their order, each with its pool."""
    return [(slot, pool or slot) for slot, pool in SLOT.findall(phrasing)]


def fill(phrasing: str, values: list[str]) -> str:
    """Returns the phrasing with its slots replaced by `values` in their order."""
    remaining = iter(values)
    return SLOT.sub(lambda match: next(remaining), phrasing)


@cache
def pool_values(pool: str, split: str) -> tuple[str, ...]:
    """Returns the values of a pool that may be used in a split, each once."""
    if pool in CLOSED:
        return CLOSED[pool]
    made: list[str] = []
    for pattern in COMPOSED.get(pool, ()):
        parts = [pool_values(part, split) for _, part in slots_of(pattern)]
        made += [fill(pattern, list(values)) for values in itertools.product(*parts)]
    # A value may be in several pools; a split has none that a split before it has in any.
    earlier = taken(SPLITS[: SPLITS.index(split)])
    values = made if pool in COMPOSED else share(open_pool(pool), split)
    return tuple(value for value in dict.fromkeys(values) if value.lower() not in earlier)


def open_pool(pool: str) -> tuple[str, ...]:
    """Returns the values of an open pool, of all splits."""
    return GENERATED[pool] if pool in GENERATED else OPEN[pool]


@cache
def taken(splits: tuple[str, ...]) -> frozenset[str]:
    """Returns every value that some open pool has in one of `splits`, in lower case."""
    pools = (*GENERATED, *OPEN)
    return frozenset(value.lower() for pool in pools for split in splits for value in share(open_pool(pool), split))


@dataclass(frozen=True)
class Phrasing:
    """One phrasing of an intent in a split. Its commands are numbered from 0 to `count` - 1."""

    intent: str
    text: str
    split: str

    @property
    def count(self) -> int:
        """In how many ways the slots can be filled."""
        total, pools = 1, [pool for _, pool in slots_of(self.text)]
        for position, pool in enumerate(pools):
            total *= len(pool_values(pool, self.split)) - pools[:position].count(pool)
        return total

    def command(self, number: int) -> tuple[str, dict[str, str]]:
        """Returns a command and its slots, in the order of the answer's keys."""
        values: dict[str, str] = {}
        taken: dict[str, list[str]] = {}
        for slot, pool in slots_of(self.text):
            choices = pool_values(pool, self.split)
            if pool in taken:
                choices = tuple(value for value in choices if value not in taken[pool])
            number, choice = divmod(number, len(choices))
            values[slot] = choices[choice]
            taken.setdefault(pool, []).append(choices[choice])
        ordered = {slot: values[slot] for slot in INTENTS[self.intent].slots if slot in values}
        return fill(self.text, list(values.values())), ordered


def phrasings(split: str) -> list[Phrasing]:
    """Returns the phrasings of all intents in a split.

    Raises:
        ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown; the splits are {', '.join(SPLITS)}.")
    return [Phrasing(intent, text, split) for intent in INTENTS for text in INTENTS[intent].phrasings(split)]


def as_row(command: str, intent: str, slots: dict[str, str]) -> dict[str, Any]:
    """Returns a command and its answer as a row of messages."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": command}]
    answer = json.dumps({"intent": intent, "slots": slots}, ensure_ascii=False)
    return {"prompt": messages, "completion": answer, "guard": False}


def generate(split: str, rows: int, seed: int) -> list[dict[str, Any]]:
    """Returns `rows` rows of a split, no command twice.

    Every row draws an intent, then one of its phrasings, then the values, each with equal chances among those of which
    something is left. So the few commands of intents without slots are used up early in a large set.

    Raises:
        ValueError: there is no such split, or it has fewer rows.
    """
    todo: dict[str, list[Phrasing]] = {}
    for phrasing in phrasings(split):
        todo.setdefault(phrasing.intent, []).append(phrasing)
    possible = sum(phrasing.count for group in todo.values() for phrasing in group)
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"rows={rows} is out of range; allowed are 1 to {MOST_ROWS}.")
    if rows > possible:
        raise ValueError(f"rows={rows} is out of range; split {split!r} has at most {possible} unique rows.")
    # A text as seed tells -1 from 1 and keeps the splits apart.
    draw = random.Random(f"{split} {seed}")
    used: dict[Phrasing, set[int]] = {phrasing: set() for group in todo.values() for phrasing in group}
    made: dict[str, dict[str, Any]] = {}
    while len(made) < rows:
        if not todo:
            raise ValueError(f"rows={rows} is out of range; split {split!r} has at most {len(made)} unique rows.")
        intent = draw.choice(list(todo))
        phrasing = draw.choice(todo[intent])
        number = draw.randrange(phrasing.count)
        if number in used[phrasing]:
            continue
        used[phrasing].add(number)
        if len(used[phrasing]) == phrasing.count:
            todo[intent].remove(phrasing)
            if not todo[intent]:
                del todo[intent]
        command, slots = phrasing.command(number)
        made.setdefault(command, as_row(command, intent, slots))
    return list(made.values())


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", required=True, help="train, validation or test")
    parser.add_argument("--rows", type=int, required=True, help="how many rows to write")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other rows (default 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write them; default standard output")
    parser.add_argument("--plain", action="store_true", help="write each prompt as the bare command, not as messages")
    return parser.parse_args()


def run() -> None:
    """Writes the rows, one a line."""
    arguments = parse_arguments()
    if arguments.out is not None and not arguments.out.parent.is_dir():
        raise ValueError(f"--out {arguments.out}: the folder {arguments.out.parent} is not there; make it first.")
    rows = generate(arguments.split, arguments.rows, arguments.seed)
    if arguments.plain:
        rows = [{**row, "prompt": row["prompt"][-1]["content"]} for row in rows]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if arguments.out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_program(run)
