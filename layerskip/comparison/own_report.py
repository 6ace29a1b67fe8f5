"""What evaluate.py says about a checkpoint on its own answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from layerskip.comparison.evaluation import Evaluation
from layerskip.comparison.table import format_table


def print_summary(title: str, summary: dict[str, Any], num_draft_tokens: Sequence[int]) -> None:
    """Prints a group's figures as a few words and a table, in which γ=… is the mean acceptance length."""
    words = [f"{summary['rows']} answers, {summary['new_tokens']} tokens, {summary['finished']} ended with EOS"]
    if summary["completions"]:
        words.append(f"exact match {summary['exact']} of {summary['completions']}")
        words.append(f"last layer on completions: loss {summary['loss']:.4f}, perplexity {summary['perplexity']:.3f}")
    print(f"\n{title}: {'; '.join(words)}.")
    header = ["exit_layer", "draft_vocab_size", "coverage", "agreement", "loss"]
    header += [f"γ={drafts}" for drafts in num_draft_tokens]
    header += [f"acceptance_by_position (γ={num_draft_tokens[-1]})"]
    table = [
        [
            made["exit_layer"],
            "all" if made["draft_vocab_size"] is None else made["draft_vocab_size"],
            *(None if made[name] is None else f"{made[name]:.3f}" for name in ("coverage", "agreement", "loss")),
            *made["mean_acceptance_length"].values(),
            " ".join(f"{rate:.2f}" for rate in made["acceptance_by_position"]) or None,
        ]
        for made in summary["exits"]
    ]
    print(format_table(header, table), flush=True)


@contextmanager
def answers_file(path: Path | None) -> Iterator[TextIO | None]:
    """Opens the new file of --answers, and removes it where the block fails; `None` without one."""
    if path is None:
        yield None
        return
    with path.open("x", encoding="utf-8") as file:
        try:
            yield file
        except BaseException:
            path.unlink()
            raise


def write_answers(file: TextIO, evaluation: Evaluation) -> None:
    """Writes each row's prompt as it was asked, its completion and category, where it has them, with its answer."""
    for index, (row, answer) in enumerate(zip(evaluation.rows, evaluation.answers, strict=True)):
        fields = {
            "prompt": row.prompt,
            "completion": row.completion,
            "category": row.category,
            "answer": answer.text,
            "finish_reason": answer.finish_reason,
            "exact": evaluation.is_exact(index),
        }
        given = {name: value for name, value in fields.items() if value is not None}
        file.write(json.dumps(given, ensure_ascii=False) + "\n")
