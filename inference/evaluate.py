"""Measures a checkpoint on its own greedy answers: how often an exit's choice is the model's own, and what that gives.

    python inference/evaluate.py --model PATH_OR_ID --data rows.jsonl
    python inference/evaluate.py --model demo --data rows.jsonl --rows 100 --exit-layers 2,4 --num-draft-tokens 4,8

A row has `prompt` (a string or a list of messages), and perhaps `completion` (what it should be answered with) and
`category`; a string goes through the chat template where the tokenizer has one. All layers answer greedily. One more
pass over prompts and answers gives each exit's choices, from which rounds are replayed for every draft length:

- agreement: share of the answers' tokens, each first one left out, that the exit would have drafted;
- acceptance_by_position: of the i-th draft, for the largest draft length;
- mean_acceptance_length: tokens per round, for each draft length;
- loss, perplexity: of the completions, which end with EOS; exact: answers that equal their completion.

With --draft-vocab-sizes exits are also measured with their choice restricted to the first of the checkpoint's
draft_token_ids, or, where it has none, to the special tokens and the lowest ids; `coverage` is the share of the
answers' tokens among these. Where rows have categories, the figures are also given for each. The last line on standard
output is JSON with everything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from layerskip.comparison.own_answers import OwnAnswer, ReferenceSums, coverage, own_answers, reference_sums
from layerskip.comparison.replay import replay
from layerskip.comparison.table import format_table
from layerskip.decoding.engine import Engine
from layerskip.decoding.plan import check_exit_layer, check_num_draft_tokens
from layerskip.program import as_chat, load_engine, run_program
from layerskip.prompt_file import Prompt, json_rows, prompts_of
from layerskip.training.draft_vocabulary import draft_vocabulary


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder, a hub id, demo or demo-base")
    parser.add_argument("--data", required=True, type=Path, metavar="FILE", help="a .jsonl file of rows")
    parser.add_argument("--exit-layers", help="exit layers, such as 2,3,4; by default those that were trained")
    parser.add_argument("--num-draft-tokens", default="2,4,6,8,12", help="draft lengths (default 2,4,6,8,12)")
    parser.add_argument("--rows", type=int, help="at most how many rows, from the first on; by default all")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer (default 128)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows that pass together (default 16)")
    parser.add_argument("--draft-vocab-sizes", help="also measure drafts from so many ids, such as 2048,8192")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="a .jsonl file to write the answers to")
    parser.add_argument("--dtype", default="float32", help="auto, bfloat16, float16 or float32 (default)")
    parser.add_argument("--device", help="cpu, cuda, …; by default CUDA where there is a device")
    return parser.parse_args()


# --- What is asked for ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of the data, its prompt as it stands there."""

    prompt: Prompt
    completion: str | None
    category: str | None


def read_numbers(flag: str, text: str) -> list[int]:
    """Returns the different numbers of a list such as 2,4, in rising order; raises ValueError for anything else."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"{flag} {text!r} is not a list of numbers such as 2,4.") from None


def read_rows(path: Path, limit: int | None) -> list[Row]:
    """Returns the rows of a .jsonl file, at most `limit`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is of another kind or holds no rows, or a row has no prompt, or parts of another type.
    """
    if path.suffix.lower() != ".jsonl":
        raise ValueError(f"--data {path} ends with {path.suffix!r}; allowed is .jsonl.")
    prompts = prompts_of(path)
    rows = []
    for prompt, (where, found) in zip(prompts, json_rows(path.read_bytes(), str(path)), strict=True):
        for name in ("completion", "category"):
            if not isinstance(found.get(name), str | None):
                raise ValueError(f"{where}: {name} is not a string.")
        rows.append(Row(prompt, found.get("completion"), found.get("category")))
    return rows[:limit]


def check_arguments(arguments: argparse.Namespace) -> None:
    """Checks what can be checked without a model; raises ValueError by name."""
    for flag, value in (
        ("--rows", arguments.rows),
        ("--max-new-tokens", arguments.max_new_tokens),
        ("--batch-size", arguments.batch_size),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{flag} {value} is out of range; allowed are integers from 1 on.")
    if arguments.answers is not None:
        if not arguments.answers.parent.is_dir():
            raise ValueError(f"--answers {arguments.answers}: its folder is not there; make it first.")
        if arguments.answers.exists():
            raise ValueError(f"--answers {arguments.answers} is there already; choose another file.")


def choose_exit_layers(text: str | None, engine: Engine) -> list[int]:
    """Returns the exits to measure: the given ones, else those that the checkpoint says were trained.

    Raises:
        ValueError: no list of exits of the model, or none given and none named by the checkpoint.
    """
    exit_layers = sorted(engine.metadata.exit_layers) if text is None else read_numbers("--exit-layers", text)
    if not exit_layers:
        raise ValueError("the checkpoint does not say which exits were trained; pass --exit-layers, such as 2,4.")
    for exit_layer in exit_layers:
        check_exit_layer(exit_layer, engine.layered.num_layers)
    return exit_layers


def draft_vocabularies(text: str | None, engine: Engine) -> dict[int | None, torch.Tensor | None]:
    """Returns the draft vocabularies by size, `(ids,)` each; first `None`, for all ids.

    Raises:
        ValueError: no list of sizes, or one out of range.
    """
    if text is None:
        return {None: None}
    sizes, ids, vocab_size = (
        read_numbers("--draft-vocab-sizes", text),
        engine.draft_token_ids,
        engine.layered.vocab_size,
    )
    if ids is None:
        tokenizer: Any = engine.tokenizer
        ends = engine.model.generation_config.eos_token_id
        kept = [*(ends if isinstance(ends, list) else [ends]), *tokenizer.all_special_ids]
        ids = draft_vocabulary([], vocab_size, kept, vocab_size)
    for size in sizes:
        if not 1 <= size <= len(ids):
            raise ValueError(f"--draft-vocab-sizes {size} is out of range; allowed are 1 to {len(ids)}, all there are.")
    return {None: None, **{size: ids[:size] for size in sizes}}


# --- What comes out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """Rows with their answers, and how they are summed up.

    Attributes:
        rows: the data.
        answers: one for each row.
        references: losses on the rows that have a completion, in their order; `None` where none has.
        exit_layers: the exits.
        vocabularies: as from `draft_vocabularies`, in the order of the answers' matches.
        num_draft_tokens: draft lengths, in rising order.
        max_new_tokens: the budget of the answers.
    """

    rows: list[Row]
    answers: list[OwnAnswer]
    references: ReferenceSums | None
    exit_layers: list[int]
    vocabularies: dict[int | None, torch.Tensor | None]
    num_draft_tokens: list[int]
    max_new_tokens: int

    def is_exact(self, index: int) -> bool | None:
        """Returns whether a row's answer is its completion, but for blanks at its ends; `None` without a completion."""
        completion = self.rows[index].completion
        return None if completion is None else completion.strip() == (self.answers[index].text or "").strip()

    def summary(self, indices: Sequence[int]) -> dict[str, Any]:
        """Returns the figures of some rows, as JSON takes them."""
        answers = [self.answers[index] for index in indices]
        with_completion = [index for index, row in enumerate(self.rows) if row.completion is not None]
        chosen = set(indices)
        places = [place for place, index in enumerate(with_completion) if index in chosen]
        losses = self.references.metrics(places) if self.references is not None and places else {}
        return {
            "rows": len(answers),
            "new_tokens": sum(len(answer.token_ids) for answer in answers),
            "finished": sum(answer.finish_reason == "stop" for answer in answers),
            "completions": len(places),
            "exact": sum(bool(self.is_exact(index)) for index in indices) if places else None,
            "loss": losses.get("loss"),
            "perplexity": losses.get("perplexity"),
            "exits": [
                self._exit(answers, exit_layer, column, size, ids, losses)
                for column, (size, ids) in enumerate(self.vocabularies.items())
                for exit_layer in self.exit_layers
            ],
        }

    def _exit(
        self,
        answers: Sequence[OwnAnswer],
        exit_layer: int,
        column: int,
        size: int | None,
        ids: torch.Tensor | None,
        losses: dict[str, float],
    ) -> dict[str, Any]:
        rows = [answer.matches[exit_layer][column] for answer in answers]
        flags = [flag for row in rows for flag in row]
        replays = [replay(rows, drafts, self.max_new_tokens) for drafts in self.num_draft_tokens]
        whole = ids is None
        return {
            "exit_layer": exit_layer,
            "draft_vocab_size": size,
            "coverage": None if ids is None else coverage(answers, ids),
            "agreement": sum(flags) / len(flags) if flags else None,
            "loss": losses.get(f"loss_exit_{exit_layer}") if whole else None,
            "perplexity": losses.get(f"perplexity_exit_{exit_layer}") if whole else None,
            "mean_acceptance_length": {str(made.num_draft_tokens): made.mean_acceptance_length for made in replays},
            "draft_acceptance_rate": {str(made.num_draft_tokens): made.draft_acceptance_rate for made in replays},
            "acceptance_by_position": list(replays[-1].acceptance_by_position),
        }


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


def write_answers(path: Path, evaluation: Evaluation) -> None:
    """Writes each row's prompt, completion and category, where it has them, with its answer."""
    with path.open("w", encoding="utf-8") as file:
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


def evaluate(arguments: argparse.Namespace, rows: list[Row], num_draft_tokens: list[int]) -> Evaluation:
    """Loads the model, checks what depends on it, and runs it.

    Raises:
        ValueError: a model without tokenizer or EOS token, numbers that do not fit it, or rows it cannot take.
    """
    engine = load_engine(arguments.model, dtype=arguments.dtype, device=arguments.device)
    if engine.tokenizer is None:
        raise ValueError(f"--model {arguments.model} has no tokenizer, without which no text can be read or written.")
    if engine.tokenizer.eos_token_id is None or engine.model.generation_config.eos_token_id is None:
        raise ValueError(
            f"--model {arguments.model} has no EOS token, with which an answer ends, in its tokenizer or in its "
            "generation_config.json; set eos_token or eos_token_id there."
        )
    exit_layers = choose_exit_layers(arguments.exit_layers, engine)
    vocabularies = draft_vocabularies(arguments.draft_vocab_sizes, engine)
    asked = [as_chat([row.prompt], engine.tokenizer)[0] if isinstance(row.prompt, str) else row.prompt for row in rows]
    wanted = [
        {"prompt": prompt, "completion": row.completion}
        for prompt, row in zip(asked, rows, strict=True)
        if row.completion is not None
    ]
    return Evaluation(
        rows=rows,
        # Losses first, since they take less time and tell about rows that are no good.
        references=reference_sums(engine, wanted, exit_layers, arguments.batch_size) if wanted else None,
        answers=own_answers(
            engine, asked, exit_layers, arguments.max_new_tokens, arguments.batch_size, list(vocabularies.values())
        ),
        exit_layers=exit_layers,
        vocabularies=vocabularies,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=arguments.max_new_tokens,
    )


def run() -> None:
    """Reads the rows, answers them, and reports."""
    arguments = parse_arguments()
    check_arguments(arguments)
    num_draft_tokens = read_numbers("--num-draft-tokens", arguments.num_draft_tokens)
    for drafts in num_draft_tokens:
        check_num_draft_tokens(drafts)
    rows = read_rows(arguments.data, arguments.rows)
    evaluation = evaluate(arguments, rows, num_draft_tokens)
    if arguments.answers is not None:
        write_answers(arguments.answers, evaluation)
    summary = evaluation.summary(range(len(rows)))
    print_summary("All rows", summary, num_draft_tokens)
    categories = {}
    for category in sorted({row.category for row in rows if row.category is not None}):
        indices = [index for index, row in enumerate(rows) if row.category == category]
        categories[category] = evaluation.summary(indices)
        print_summary(category, categories[category], num_draft_tokens)
    settings = {
        "model": arguments.model,
        "data": str(arguments.data),
        "dtype": arguments.dtype,
        "max_new_tokens": arguments.max_new_tokens,
    }
    print(json.dumps({**settings, **summary, "categories": categories}))


if __name__ == "__main__":
    run_program(run)
