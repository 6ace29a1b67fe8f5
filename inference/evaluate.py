"""Measures a checkpoint on its own greedy answers: how often an exit's choice is the model's own, and what that gives.

    python inference/evaluate.py --model PATH_OR_ID --data rows.jsonl
    python inference/evaluate.py --model demo --data rows.jsonl --rows 100 --exit-layers 2,4 --num-draft-tokens 4,8

A row has `prompt` (a string or a list of messages), and perhaps `completion` (what it should be answered with),
`finish_reason` ("length" for a completion that does not end) and `category`; a string goes through the chat template
where the tokenizer has one. All layers answer greedily. One more pass over prompts and answers gives each exit's
choices, from which rounds are replayed for every draft length:

- agreement: share of the answers' tokens, each first one left out, that the exit would have drafted;
- acceptance_by_position: of the i-th draft, for the largest draft length;
- mean_acceptance_length: tokens per round, for each draft length;
- loss, perplexity: of the completions, which end with EOS if they do end; exact: answers that equal their completion.

With --draft-vocab-sizes exits are also measured with their choice restricted to the first of the checkpoint's
draft_token_ids, or, where it has none, to the special tokens and the lowest ids; `coverage` is the share of the
answers' tokens among these. Where rows have categories, the figures are also given for each. The last line on standard
output is JSON with everything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from layerskip.comparison.evaluation import Evaluation, Row, evaluate
from layerskip.comparison.table import format_table
from layerskip.decoding.engine import Engine
from layerskip.decoding.plan import check_exit_layer, check_num_draft_tokens
from layerskip.program import answering_tokenizer, as_chat, load_engine, read_numbers, run_program
from layerskip.prompt_file import prompt_rows
from layerskip.training.draft_vocabulary import draft_vocabulary, kept_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[1]


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


def read_rows(path: Path, limit: int | None) -> list[Row]:
    """Returns the rows of a .jsonl file, at most `limit`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is of another kind or holds no rows, or a row has no prompt, or parts of another type.
    """
    if path.suffix.lower() != ".jsonl":
        raise ValueError(f"--data {path} ends with {path.suffix!r}; allowed is .jsonl.")
    rows = []
    for row in prompt_rows(path):
        given = {name: row.columns.get(name) for name in ("completion", "finish_reason")}
        for name, value in given.items():
            if not isinstance(value, str | None):
                raise ValueError(f"{row.where}: {name} is not a string.")
        rows.append(Row(row.where, row.prompt, category=row.category, **given))
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


def draft_vocabularies(
    text: str | None, engine: Engine, tokenizer: PreTrainedTokenizerBase
) -> dict[int | None, torch.Tensor | None]:
    """Returns the draft vocabularies by size, `(ids,)` each; first `None`, for all ids.

    Raises:
        ValueError: no list of sizes, or one out of range.
    """
    if text is None:
        return {None: None}
    sizes, ids = read_numbers("--draft-vocab-sizes", text), engine.draft_token_ids
    if ids is None:
        vocab_size = engine.layered.vocab_size
        ids = draft_vocabulary([], vocab_size, kept_token_ids(engine.model, tokenizer), vocab_size)
    for size in sizes:
        if not 1 <= size <= len(ids):
            raise ValueError(f"--draft-vocab-sizes {size} is out of range; allowed are 1 to {len(ids)}, all there are.")
    return {None: None, **{size: ids[:size] for size in sizes}}


# --- What comes out ---------------------------------------------------------------------------------------------------


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


def run() -> None:
    """Reads the rows, answers them, and reports."""
    arguments = parse_arguments()
    check_arguments(arguments)
    num_draft_tokens = read_numbers("--num-draft-tokens", arguments.num_draft_tokens)
    for drafts in num_draft_tokens:
        check_num_draft_tokens(drafts)
    rows = read_rows(arguments.data, arguments.rows)
    with answers_file(arguments.answers) as file:
        engine = load_engine(arguments.model, ROOT, dtype=arguments.dtype, device=arguments.device)
        tokenizer = answering_tokenizer(engine, arguments.model)
        exit_layers = choose_exit_layers(arguments.exit_layers, engine)
        vocabularies = draft_vocabularies(arguments.draft_vocab_sizes, engine, tokenizer)
        asked = as_chat([row.prompt for row in rows], tokenizer)
        evaluation = evaluate(
            engine,
            [replace(row, prompt=prompt) for row, prompt in zip(rows, asked, strict=True)],
            exit_layers,
            vocabularies,
            num_draft_tokens,
            arguments.max_new_tokens,
            arguments.batch_size,
        )
        if file is not None:
            write_answers(file, evaluation)
    summary, categories = evaluation.summary(), evaluation.by_category()
    print_summary("All rows", summary, num_draft_tokens)
    for category, figures in categories.items():
        print_summary(category, figures, num_draft_tokens)
    settings = {
        "model": arguments.model,
        "data": str(arguments.data),
        "dtype": arguments.dtype,
        "max_new_tokens": arguments.max_new_tokens,
    }
    print(json.dumps({**settings, **summary, "categories": categories}))


if __name__ == "__main__":
    run_program(run)
