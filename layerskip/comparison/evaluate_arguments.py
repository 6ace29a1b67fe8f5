"""What evaluate.py checks on its command line before any work."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeVar

from layerskip.decoding.plan import check_num_draft_tokens
from layerskip.program import check_least, read_numbers

MODES = ("data", "text", "questions")
DEFAULTS = {"strategy": "autoregressive", "max_new_tokens": 128, "batch_size": 16, "seed": 0}
DRAFT_LENGTHS = {"data": "2,4,6,8,12", "questions": "4"}
Item = TypeVar("Item")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Checks what can be checked without a model, and fills in defaults; raises ValueError by name."""
    if all(vars(arguments)[mode] is None for mode in MODES):
        raise ValueError("nothing is asked for; pass --data, --text or --questions, or several of them.")
    check_uses(arguments)
    check_least(arguments, {"rows": 1, "last_rows": 1, "max_new_tokens": 1, "batch_size": 1, "seed": 0})
    if arguments.rows is not None and arguments.last_rows is not None:
        raise ValueError("--rows takes the first rows and --last-rows the last ones; pass one of them.")
    if arguments.compare_with is not None and Path(arguments.compare_with) == Path(arguments.model):
        raise ValueError(f"--compare-with {arguments.compare_with} is --model itself; name another checkpoint.")
    check_answers(arguments)
    for mode in DRAFT_LENGTHS:
        draft_lengths(arguments, mode)
    for name, value in DEFAULTS.items():
        if vars(arguments)[name] is None:
            setattr(arguments, name, value)


def flag(name: str) -> str:
    """Returns the flag of an argument."""
    return "--" + name.replace("_", "-")


def check_uses(arguments: argparse.Namespace) -> None:
    """Checks that every flag has a use in what is asked for; raises ValueError by name."""
    data, text, questions = (vars(arguments)[mode] is not None for mode in MODES)
    drafting = questions and arguments.strategy == "self_speculative"
    exits = questions and arguments.strategy not in (None, "autoregressive")
    answering = (data or questions, "--data or --questions")
    uses = {
        "exit_layers": (data or text or exits, "--data, --text, or --questions with another --strategy"),
        "num_draft_tokens": (data or drafting, "--data, or --questions with --strategy self_speculative"),
        **dict.fromkeys(("rows", "last_rows", "max_new_tokens", "answers"), answering),
        "draft_vocab_sizes": (data, "--data"),
        **dict.fromkeys(("window", "stride"), (text, "--text")),
        **dict.fromkeys(("strategy", "instruction", "answer_pattern", "reference_pattern"), (questions, "--questions")),
        "compare_with": (text or questions, "--text or --questions"),
        "resume": (questions and arguments.answers is not None, "--questions and --answers"),
        "seed": (arguments.compare_with is not None, "--compare-with"),
    }
    for name, (useful, companions) in uses.items():
        if vars(arguments)[name] is not None and not useful:
            raise ValueError(f"{flag(name)} has no use here; it goes with {companions}.")


def check_answers(arguments: argparse.Namespace) -> None:
    """Checks that the file of --answers can be a new one, or one to go on from; raises ValueError by name."""
    path = arguments.answers
    if path is None:
        return
    if arguments.data is not None and arguments.questions is not None:
        raise ValueError(f"--answers {path} would hold those to --data and to --questions; measure one at a time.")
    if not path.parent.is_dir():
        raise ValueError(f"--answers {path}: its folder is not there; make it first.")
    if path.exists() and not arguments.resume:
        more = "" if arguments.questions is None else ", or go on from it with --resume"
        raise ValueError(f"--answers {path} is there already; choose another file{more}.")


def taken(rows: list[Item], arguments: argparse.Namespace) -> list[Item]:
    """Returns the rows that --rows or --last-rows takes; all by default."""
    return rows[: arguments.rows] if arguments.last_rows is None else rows[-arguments.last_rows :]


def draft_lengths(arguments: argparse.Namespace, mode: str) -> list[int]:
    """Returns the draft lengths of a mode, rising; raises ValueError by name."""
    given = arguments.num_draft_tokens
    found = read_numbers("--num-draft-tokens", DRAFT_LENGTHS[mode] if given is None else given)
    for drafts in found:
        check_num_draft_tokens(drafts)
    return found
