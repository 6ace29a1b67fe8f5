"""Generates text with any supported model from the command line.

    python inference/generate.py --model demo --chat --prompt "Name three rivers."
    python inference/generate.py --model demo --chat --prompt "Tell me a story." --temperature 0.8 --top-p 0.95 --seed 1
    python inference/generate.py --model PATH_OR_ID --prompts prompts.txt --json
    accelerate launch --num_processes 8 inference/generate.py --model PATH_OR_ID --prompts rows.jsonl --output out.jsonl

Without --json the text appears as it is accepted, one prompt after the other, on a terminal with accepted drafts in
green. Decoding is greedy unless --temperature is given. With --json every prompt gives one line:
{"prompt", "text", "token_ids", "finish_reason", "statistics"}. `--model demo` fetches SmolLM2-135M-Instruct, a
dequantised 4-bit copy, and puts the checkout's adapters on top, which were trained to draft voice commands as JSON;
`demo-base` leaves them out. `--exit-layer` may be left out where the checkpoint names one. `--exit-layer auto` and
`--draft-stop adaptive` go by what compare_exits.py --save has measured.

--output puts the lines of --json into a file, in the order of the prompts. Each rank of `accelerate launch` answers a
share, the longest prompts first, on the GPU of its number or, where there is none, on the CPU (for several ranks there
launch with --multi_gpu all the same); with --device all ranks take that device. Until the file is written as a whole,
answers are kept in the folder OUTPUT.parts, batch by batch. A run that was interrupted, or of which a rank failed, goes
on with --resume and the same prompts, model and options; the number of ranks, --batch-size and --device may change. A
finished file is left as it is. The last line on standard output is a JSON object:

    {"answers", "already_there", "tokens", "seconds", "tokens_per_second", "ranks"}

`answers` were made by this run, of so many `tokens`; `seconds` passed from when all ranks were ready.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from layerskip.answer_parts import AnswerParts, Answers
from layerskip.comparison.machine import fingerprint
from layerskip.decoding.plan import AUTO, COPY_NGRAMS, DRAFT_STOPS, NAMES
from layerskip.decoding.prompts import longest_first, read_prompts
from layerskip.program import add_color, check_least, load_engine, run_program, show_stream, use_color
from layerskip.prompt_file import Prompt, PromptRow, as_chat, prompt_rows, prompts_of

if TYPE_CHECKING:
    from layerskip.decoding.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
# Of a torch.Generator.
HIGHEST_SEED = 2**64 - 1
# How long a rank that is done waits for the others; the libraries' own limits are minutes.
PATIENCE = timedelta(days=7)


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder, a hub id, demo or demo-base")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a .txt file with one prompt a line, or a .jsonl file whose rows have prompt, messages or text",
    )
    parser.add_argument(
        "--chat", action="store_true", help="send each prompt as a user message through the chat template"
    )
    parser.add_argument("--strategy", default="self_speculative", help="self_speculative, autoregressive or early_exit")
    parser.add_argument(
        "--exit-layer",
        type=exit_layer,
        metavar="E",
        help="layers that a draft runs, counted from 1; auto chooses among those that the cost table knows",
    )
    parser.add_argument("--num-draft-tokens", type=int, help="at most how many tokens a round drafts (default 4)")
    parser.add_argument("--draft-vocab-size", type=int, help="draft from so many of the checkpoint's draft token ids")
    parser.add_argument("--draft-stop", choices=DRAFT_STOPS, help="end drafts where one more no longer pays: adaptive")
    parser.add_argument("--copy-ngrams", choices=COPY_NGRAMS, help="copy what followed the last few tokens before")
    parser.add_argument("--tree-nodes", type=int, help="draft a tree of so many likely tokens instead of a chain")
    parser.add_argument("--compile", action="store_true", default=None, help="compile rounds; takes a minute at first")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default 128")
    parser.add_argument("--temperature", type=float, help="draw tokens at this temperature (default: the best token)")
    parser.add_argument("--top-k", type=int, help="draw from the k best tokens")
    parser.add_argument("--top-p", type=float, help="draw from the best tokens that hold this probability together")
    parser.add_argument("--min-p", type=float, help="draw from tokens with this share of the best one's probability")
    parser.add_argument("--seed", type=int, help="draw the same again; every prompt begins with it")
    parser.add_argument("--stop", action="append", help="end the answer with this string; may be given several times")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--device", help="cpu, cuda, …; by default CUDA where there is a device")
    add_color(parser)
    parser.add_argument("--json", action="store_true", help="one JSON line per prompt on standard output")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a .jsonl file for the answers to --prompts")
    parser.add_argument("--resume", action="store_true", help="go on with what is there of --output, if anything is")
    parser.add_argument("--batch-size", type=int, default=1, help="of --json and --output (default 1)")
    return parser.parse_args()


def exit_layer(value: str) -> int | str:
    """Returns what `--exit-layer` means.

    Raises:
        ArgumentTypeError: neither a whole number nor auto.
    """
    try:
        return value if value == AUTO else int(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is neither a number of layers, from 1 on, nor {AUTO}") from error


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings for how tokens are chosen.

    Raises:
        ValueError: one that needs a temperature and has none, or one that is out of range; it names the flag.
    """
    temperature = arguments.temperature
    # Written so that NaN is out of range as well.
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ValueError(f"--temperature {temperature:g} is out of range; pass one above 0, or none to draw nothing.")
    if arguments.top_k is not None and arguments.top_k < 1:
        raise ValueError(f"--top-k {arguments.top_k} is out of range; pass a number of tokens from 1 on.")
    for flag, share in (("--top-p", arguments.top_p), ("--min-p", arguments.min_p)):
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"{flag} {share:g} is out of range; pass a probability of at most 1.")
    if arguments.seed is not None and not 0 <= arguments.seed <= HIGHEST_SEED:
        raise ValueError(f"--seed {arguments.seed} is out of range; pass a number from 0 to {HIGHEST_SEED}.")
    narrowing = {name: vars(arguments)[name] for name in ("top_k", "top_p", "min_p")}
    given = {name: value for name, value in narrowing.items() if value is not None}
    if temperature is not None:
        return {"do_sample": True, "temperature": temperature, **given}
    for name, value in (given | {"seed": arguments.seed}).items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value} is for drawing tokens; pass --temperature as well.")
    return {"do_sample": False}


def check_arguments(arguments: argparse.Namespace) -> None:
    """Checks what the options for the output are given with.

    Raises:
        ValueError: some that do not go together, or one that is out of range.
    """
    check_least(arguments, {"batch_size": 1})
    size = arguments.batch_size
    if arguments.resume and arguments.output is None:
        raise ValueError("--resume goes on with what is there of --output; pass --output as well.")
    if size > 1 and not arguments.json and arguments.output is None:
        raise ValueError(f"--batch-size {size} is for --json and --output; text appears prompt by prompt.")
    if size > 1 and arguments.seed is not None:
        raise ValueError(
            f"--seed {arguments.seed} does not go with --batch-size {size}: the prompts of a batch draw from one "
            "generator, so that an answer would depend on those beside it. Leave out one of the two."
        )
    if arguments.output is None:
        return
    if arguments.prompts is None:
        raise ValueError(f"--output {arguments.output} is for the prompts of a file; pass --prompts.")
    if arguments.json or arguments.color != "auto":
        flag = "--json" if arguments.json else f"--color {arguments.color}"
        raise ValueError(f"{flag} is for standard output, and the answers go to --output; leave it out.")


def asked(engine: Engine, texts: list[Prompt], arguments: argparse.Namespace) -> list[Prompt]:
    """Returns the prompts as the model is asked them.

    Raises:
        ValueError: a chat template or a padding token is needed, and there is none.
    """
    if arguments.chat and (engine.tokenizer is None or engine.tokenizer.chat_template is None):
        raise ValueError("--chat needs a chat template, and the model's tokenizer has none; leave --chat out.")
    config = engine.model.generation_config
    if arguments.batch_size > 1 and config.pad_token_id is None and config.eos_token_id is None:
        raise ValueError(
            f"--batch-size {arguments.batch_size} needs a token that fills up rows, and the model's "
            "generation_config.json has neither pad_token_id nor eos_token_id; set one there, or leave it out."
        )
    return as_chat(texts, engine.tokenizer) if arguments.chat else texts


def seeded(options: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """Returns the options of a call that begins with the seed."""
    return {**options} if seed is None else {**options, "generator": torch.Generator().manual_seed(seed)}


def answer(
    engine: Engine, texts: Sequence[Prompt], prompts: Sequence[Prompt], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Answers a batch of prompts and returns what a line of --json says of each.

    Args:
        engine: the model.
        texts, prompts: the prompts as they were given, and the same as the model is asked them.
        options: of `Engine.generate`.
    """
    result = engine.generate(list(prompts), **options)
    return [
        {
            "prompt": text,
            "text": None if result.texts is None else result.texts[row],
            "token_ids": result.new_token_ids[row],
            "finish_reason": result.finish_reasons[row],
            "statistics": (result.statistics if len(texts) == 1 else result.statistics.per_row[row]).to_dict(),
        }
        for row, text in enumerate(texts)
    ]


def print_answers(arguments: argparse.Namespace, options: Mapping[str, Any]) -> None:
    """Answers all prompts and prints text or, with --json, lines."""
    texts: list[Prompt] = arguments.prompt or prompts_of(arguments.prompts)
    engine = load_engine(arguments.model, ROOT, dtype=arguments.dtype, device=arguments.device)
    prompts = asked(engine, texts, arguments)
    for first in range(0, len(texts), arguments.batch_size):
        batch = slice(first, first + arguments.batch_size)
        begun = seeded(options, arguments.seed)
        if arguments.json:
            for line in answer(engine, texts[batch], prompts[batch], begun):
                print(json.dumps(line, ensure_ascii=False), flush=True)
        else:
            show_stream(engine.stream(prompts[first], **begun), engine.tokenizer, use_color(arguments.color))
            print("\n", flush=True)


# --- A file of answers -----------------------------------------------------------------------------------------------


@contextmanager
def named(rows: Sequence[PromptRow]) -> Iterator[None]:
    """Names the lines of prompts that cannot be answered."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} That was at {', '.join(row.where for row in rows)}.") from error


def longest_prompts_first(engine: Engine, rows: Sequence[PromptRow], prompts: Sequence[Prompt]) -> list[int]:
    """Returns the indices of the prompts, those of most tokens first.

    Raises:
        ValueError: one that cannot be asked, which it names.
    """
    tokens = []
    for row, prompt in zip(rows, prompts, strict=True):
        with named([row]):
            tokens += read_prompts([prompt], engine.tokenizer, None, engine.layered.vocab_size).rows
    return longest_first(tokens)


def answers_by_index(
    engine: Engine,
    rows: Sequence[PromptRow],
    prompts: Sequence[Prompt],
    indices: Sequence[int],
    options: Mapping[str, Any],
    arguments: argparse.Namespace,
) -> Iterator[Answers]:
    """Answers some of the prompts and yields the answers of each batch.

    Args:
        engine: the model.
        rows, prompts: the prompts of the file, and the same as the model is asked them.
        indices: which of them, in which order.
        options: of `Engine.generate`.
        arguments: the command line's, for the seed and the size of batches.

    Raises:
        ValueError: a prompt that cannot be answered, which it names.
    """
    for first in range(0, len(indices), arguments.batch_size):
        batch = indices[first : first + arguments.batch_size]
        chosen = [rows[index] for index in batch]
        with named(chosen):
            texts, given = [row.prompt for row in chosen], [prompts[index] for index in batch]
            made = answer(engine, texts, given, seeded(options, arguments.seed))
        yield dict(zip(batch, made, strict=True))


def write_answers(arguments: argparse.Namespace, rows: Sequence[PromptRow], options: Mapping[str, Any]) -> None:
    """Answers the prompts of a file, each rank its share, and writes the answers to --output, of which it reports."""
    from accelerate import PartialState

    texts = [row.prompt for row in rows]
    settings = {
        "prompts": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        **{name: vars(arguments)[name] for name in ("chat", "dtype", "seed")},
        **options,
    }
    parts = AnswerParts(arguments.output)
    parts.check_place(texts, resume=arguments.resume)
    parts.check_settings(settings)
    # Ranks only wait for each other: by gloo without CUDA, and where they may share a device.
    state = PartialState(cpu=arguments.device is not None or not torch.cuda.is_available(), timeout=PATIENCE)
    # The demo model is made once; others are loaded side by side.
    is_demo = arguments.model in ("demo", "demo-base")
    with state.main_process_first() if is_demo else nullcontext():
        device = arguments.device or state.device
        engine = load_engine(arguments.model, ROOT, dtype=arguments.dtype, device=device)
    settings["model"] = fingerprint(engine.model)
    parts.check_settings(settings)
    prompts = asked(engine, texts, arguments)
    done = parts.answers()
    left = [index for index in longest_prompts_first(engine, rows, prompts) if index not in done]
    # All have read what is there before anything is written.
    state.wait_for_everyone()
    if state.is_main_process:
        parts.begin(settings)
    state.wait_for_everyone()
    start = time.perf_counter()
    share = left[state.process_index :: state.num_processes]
    with tqdm(total=len(share), desc="Answering", unit="prompt", disable=not state.is_main_process) as bar:
        for answers in answers_by_index(engine, rows, prompts, share, options, arguments):
            parts.add(state.process_index, answers)
            bar.update(len(answers))
    state.wait_for_everyone()
    seconds = time.perf_counter() - start
    if state.is_main_process:
        merged = parts.merge(len(rows))
        tokens = sum(len(merged[index]["token_ids"]) for index in left)
        speed = tokens / seconds if tokens else None
        report = {"answers": len(left), "already_there": len(done), "tokens": tokens, "seconds": seconds}
        print(json.dumps({**report, "tokens_per_second": speed, "ranks": state.num_processes}))
    state.destroy_process_group()


def run() -> None:
    """Answers every prompt."""
    arguments = parse_arguments()
    sampling = sampling_options(arguments)
    check_arguments(arguments)
    options: dict[str, Any] = {
        "strategy": arguments.strategy,
        **{name: vars(arguments)[name] for name in NAMES},
        "max_new_tokens": arguments.max_new_tokens,
        "stop_strings": arguments.stop,
        **sampling,
    }
    if arguments.output is None:
        print_answers(arguments, options)
    else:
        write_answers(arguments, prompt_rows(arguments.prompts), options)


if __name__ == "__main__":
    run_program(run)
