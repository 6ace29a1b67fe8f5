r"""Measures a checkpoint: what its exits draft on its own answers, perplexity on a text, and answers to questions.

    python inference/evaluate.py --model PATH_OR_ID --data rows.jsonl
    python inference/evaluate.py --model demo --data rows.jsonl --rows 100 --exit-layers 2,4 --num-draft-tokens 4,8
    python inference/evaluate.py --model demo --text book.txt --exit-layers 2,4 --compare-with demo-base
    python inference/evaluate.py --model demo --questions gsm8k.jsonl --last-rows 200 --answers answers.jsonl \
        --compare-with demo-base
    python inference/evaluate.py --model demo --questions gsm8k.jsonl --strategy early_exit --exit-layers 8,16,24

--data: the checkpoint's own greedy answers. A row has `prompt` (a string or a list of messages), and perhaps
`completion` (what it should be answered with), `finish_reason` ("length" for a completion that does not end) and
`category`. One more pass over prompts and answers gives each exit's choices, from which rounds are replayed for every
draft length:

- agreement: share of the answers' tokens, each first one left out, that the exit would have drafted;
- acceptance_by_position: of the i-th draft, for the largest draft length;
- mean_acceptance_length: tokens per round, for each draft length;
- loss, perplexity: of the completions, which end with EOS if they do end; exact: answers that equal their completion.

With --draft-vocab-sizes exits are also measured with their choice restricted to the first of the checkpoint's
draft_token_ids, or, where it has none, to the special tokens and the lowest ids; `coverage` is the share of the
answers' tokens among these.

--text: loss and perplexity of the last layer and of exits. A .txt file is one text, a .jsonl file has one in each
`text`. Windows of --window tokens begin every --stride tokens and predict what no window before them holds, so that
each token but a text's first counts once, with at least window − stride tokens before it once windows have moved.

--questions: greedy answers against references. A row has a prompt (`prompt`, `messages`, `question` or `turns`) and in
`answer`, `reference` or `completion` a string or a list of strings, of which any counts. What stands behind #### is
meant where it is written; else, where the reference is a number, the last number of the answer; else the whole text.
Numbers compare as numbers ($1,000.00 = 1000), other texts letter by letter, but for blanks at the ends and a closing
full stop. --strategy early_exit answers from each exit alone, which is where accuracy varies from exit to exit;
self_speculative answers as all layers do, since its drafts are verified, and says how many answers are the same.

With --compare-with a second checkpoint gets the same texts and questions, and differences (--model minus the other)
come with a 95 % interval by paired bootstrap. Of these two modes an interrupted run reports what it has, and ends with
status 130; --answers holds every scored answer, and --resume goes on from it.

A string prompt goes through the chat template where the tokenizer has one. Where rows have categories, the figures are
also given for each. The last line on standard output is JSON with everything.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from layerskip.comparison.accuracy import Extraction, Question, arms_of, compiled, read_questions
from layerskip.comparison.answer_log import answer_log
from layerskip.comparison.evaluate_arguments import check_arguments, draft_lengths, taken
from layerskip.comparison.evaluate_report import print_questions, print_text, questions_report, text_report
from layerskip.comparison.evaluation import Evaluation, Row, evaluate
from layerskip.comparison.own_report import answers_file, print_summary, write_answers
from layerskip.comparison.perplexity import read_documents
from layerskip.comparison.side_by_side import Asked, Findings, Prepared, measure, prepare
from layerskip.decoding.engine import Engine
from layerskip.decoding.plan import STRATEGIES, check_exit_layer
from layerskip.files import whole_lines
from layerskip.program import answering_tokenizer, load_engine, read_numbers, run_program
from layerskip.prompt_file import as_chat, prompt_rows
from layerskip.training.draft_vocabulary import draft_vocabulary, kept_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments; those that were left out are `None`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder, a hub id, demo or demo-base")
    parser.add_argument("--data", type=Path, metavar="FILE", help="a .jsonl file of rows to draft on")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a .txt or .jsonl file for perplexity")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="a .jsonl file of questions with references")
    parser.add_argument("--compare-with", metavar="MODEL", help="a second checkpoint, for --text and --questions")
    parser.add_argument("--exit-layers", help="exit layers, such as 2,3,4; by default those that were trained")
    parser.add_argument("--num-draft-tokens", help="draft lengths (--data: 2,4,6,8,12; self_speculative: 4)")
    parser.add_argument("--rows", type=int, help="at most how many rows, from the first on; by default all")
    parser.add_argument("--last-rows", type=int, help="at most how many rows, the last ones")
    parser.add_argument("--max-new-tokens", type=int, help="of an answer (default 128)")
    parser.add_argument("--batch-size", type=int, help="rows or windows that pass together (default 16)")
    parser.add_argument("--draft-vocab-sizes", help="also measure drafts from so many ids, such as 2048,8192")
    parser.add_argument("--window", type=int, help="of a text, in tokens (default 1024, or the model's positions)")
    parser.add_argument("--stride", type=int, help="from window to window, in tokens (default half a window)")
    parser.add_argument("--strategy", choices=STRATEGIES, help="how questions are answered (default autoregressive)")
    parser.add_argument("--instruction", metavar="TEXT", help="a line to put behind every question")
    parser.add_argument("--answer-pattern", metavar="REGEX", help="what an answer says: last match, or its group 1")
    parser.add_argument("--reference-pattern", metavar="REGEX", help="what a reference says, likewise")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="a .jsonl file to write the answers to")
    parser.add_argument("--resume", action="store_true", default=None, help="go on from what is in --answers")
    parser.add_argument("--seed", type=int, help="of the bootstrap (default 0)")
    parser.add_argument("--dtype", default="float32", help="auto, bfloat16, float16 or float32 (default)")
    parser.add_argument("--device", help="cpu, cuda, …; by default CUDA where there is a device")
    return parser.parse_args()


# --- What is asked for ------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a .jsonl file.

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
    return rows


def choose_exit_layers(arguments: argparse.Namespace, engine: Engine) -> list[int]:
    """Returns the exits to measure: the given ones, else those that the checkpoint says were trained.

    A text alone needs none: it is then read by the last layer only.

    Raises:
        ValueError: no list of exits of the model, or exits are needed, none given and none named by the checkpoint.
    """
    text, needed = arguments.exit_layers, arguments.data is not None or arguments.strategy != "autoregressive"
    exit_layers = sorted(engine.metadata.exit_layers) if text is None else read_numbers("--exit-layers", text)
    if needed and not exit_layers:
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


# --- What is done -----------------------------------------------------------------------------------------------------


def evaluate_data(
    arguments: argparse.Namespace, engine: Engine, rows: Sequence[Row], exit_layers: Sequence[int]
) -> Evaluation:
    """Returns the checkpoint's own answers to some rows, measured."""
    tokenizer = answering_tokenizer(engine, arguments.model)
    asked = as_chat([row.prompt for row in rows], tokenizer)
    return evaluate(
        engine,
        [replace(row, prompt=prompt) for row, prompt in zip(rows, asked, strict=True)],
        exit_layers,
        draft_vocabularies(arguments.draft_vocab_sizes, engine, tokenizer),
        draft_lengths(arguments, "data"),
        arguments.max_new_tokens,
        arguments.batch_size,
    )


def prepare_second(arguments: argparse.Namespace, asked: Asked, first: Prepared) -> Prepared:
    """Returns what is asked as the second checkpoint takes it, so that what it cannot do is told before the work.

    It is loaded onto the CPU for this, since the first one holds the device.

    Raises:
        ValueError: as `prepare`, or another tokenizer than the first one's on the texts.
    """
    engine = load_engine(arguments.compare_with, ROOT, dtype="auto", device="cpu")
    try:
        found = prepare(engine, arguments.compare_with, asked)
    except ValueError as error:
        raise ValueError(f"--compare-with {arguments.compare_with}: {error}") from error
    if found.windows != first.windows:
        raise ValueError(
            f"--compare-with {arguments.compare_with} makes other tokens of --text than --model {arguments.model}, so "
            "that losses of a token cannot be compared; measure each on its own."
        )
    return found


def release() -> None:
    """Gives the memory of models that nobody holds back to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def read_inputs(arguments: argparse.Namespace, extraction: Extraction) -> tuple[list[Row], list[str], list[Question]]:
    """Returns the rows, texts and questions that are asked for; nothing for what is not.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file holds something else; it names file and line.
    """
    rows = [] if arguments.data is None else taken(read_rows(arguments.data), arguments)
    documents = [] if arguments.text is None else read_documents(arguments.text)
    if arguments.questions is None:
        return rows, documents, []
    questions = read_questions(arguments.questions, extraction, arguments.instruction)
    return rows, documents, taken(questions, arguments)


def run() -> None:
    """Reads what is asked for, measures, and reports."""
    arguments = parse_arguments()
    check_arguments(arguments)
    extraction = Extraction(
        compiled("--answer-pattern", arguments.answer_pattern),
        compiled("--reference-pattern", arguments.reference_pattern),
    )
    rows, documents, questions = read_inputs(arguments, extraction)
    settings = {"max_new_tokens": arguments.max_new_tokens, "dtype": arguments.dtype}
    earlier = whole_lines(arguments.answers) if arguments.resume else b""
    with ExitStack() as files:
        file = files.enter_context(answers_file(arguments.answers if rows else None))
        log = files.enter_context(answer_log(arguments.answers if questions else None, questions, extraction, settings))
        engine = load_engine(arguments.model, ROOT, dtype=arguments.dtype, device=arguments.device)
        exit_layers = choose_exit_layers(arguments, engine)
        asked = Asked(
            documents=documents,
            window=arguments.window,
            stride=arguments.stride,
            questions=questions,
            extraction=extraction,
            exit_layers=exit_layers if documents else (),
            arms=arms_of(arguments.strategy, exit_layers, draft_lengths(arguments, "questions")) if questions else (),
            max_new_tokens=arguments.max_new_tokens,
            batch_size=arguments.batch_size,
        )
        models = {arguments.model: prepare(engine, arguments.model, asked)}
        if arguments.compare_with is not None:
            models[arguments.compare_with] = prepare_second(arguments, asked, models[arguments.model])
        log.weights = {name: made.weights for name, made in models.items()}
        log.take_back(earlier, str(arguments.answers), dict.fromkeys(models, asked.arms))
        report: dict[str, Any] = {"model": arguments.model, "dtype": arguments.dtype}
        if rows:
            report |= report_data(arguments, evaluate_data(arguments, engine, rows, exit_layers), file)
        findings, complete = Findings(log), False
        try:
            measure(engine, arguments.model, models[arguments.model], asked, findings)
            # Two models need not fit at once.
            del engine
            release()
            if arguments.compare_with is not None:
                second = load_engine(arguments.compare_with, ROOT, dtype=arguments.dtype, device=arguments.device)
                measure(second, arguments.compare_with, models[arguments.compare_with], asked, findings)
            complete = True
        except KeyboardInterrupt:
            print("interrupted; what follows is what there is so far.", file=sys.stderr)
    report |= report_findings(arguments, asked, models, findings)
    versions = {name: version(name) for name in ("layerskip", "transformers", "torch")}
    print(json.dumps({**report, "complete": complete, "versions": versions}), flush=True)
    if not complete:
        raise KeyboardInterrupt


# --- What comes out ---------------------------------------------------------------------------------------------------


def report_data(arguments: argparse.Namespace, evaluation: Evaluation, file: TextIO | None) -> dict[str, Any]:
    """Prints the figures of --data, writes the answers where there is a file, and returns what JSON says."""
    if file is not None:
        write_answers(file, evaluation)
    summary, categories = evaluation.summary(), evaluation.by_category()
    print_summary("All rows", summary, evaluation.num_draft_tokens)
    for category, figures in categories.items():
        print_summary(category, figures, evaluation.num_draft_tokens)
    settings = {"data": str(arguments.data), "max_new_tokens": arguments.max_new_tokens}
    return {**settings, **summary, "categories": categories}


def report_findings(
    arguments: argparse.Namespace, asked: Asked, models: Mapping[str, Prepared], findings: Findings
) -> dict[str, Any]:
    """Prints the figures of --text and --questions, and returns what JSON says under these names."""
    report: dict[str, Any] = {}
    if asked.documents:
        first = models[arguments.model]
        found = text_report(findings.texts, arguments.seed)
        print_text(found)
        settings = {"file": str(arguments.text), "documents": len(asked.documents)}
        report["text"] = {**settings, "window": first.window, "stride": first.stride, **found}
    if asked.questions:
        found = questions_report(asked.questions, findings.log.answers, list(models), asked.arms, arguments.seed)
        print_questions(found)
        names = ("max_new_tokens", "instruction", "answer_pattern", "reference_pattern", "seed")
        settings = {"file": str(arguments.questions), **{name: vars(arguments)[name] for name in names}}
        report["questions"] = {**settings, **found}
    return report


if __name__ == "__main__":
    run_program(run)
