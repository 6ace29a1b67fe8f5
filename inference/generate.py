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
finished file, which does not say what options it was made with, is left as it is. The last line on standard output is a
JSON object:

    {"answers", "already_there", "tokens", "seconds", "tokens_per_second", "ranks"}

`answers` were made by this run, of so many `tokens`; `seconds` passed from when all ranks were ready.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from layerskip.answer_parts import AnswerParts
from layerskip.decoding.plan import AUTO, COPY_NGRAMS, DRAFT_STOPS, NAMES
from layerskip.offline import Asking, answer_file
from layerskip.program import add_color, check_least, load_engine, run_program, show_stream, use_color
from layerskip.prompt_file import Prompt, prompt_rows, prompts_of

ROOT = Path(__file__).resolve().parents[1]
# Of a torch.Generator.
HIGHEST_SEED = 2**64 - 1


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


def print_answers(arguments: argparse.Namespace, asking: Asking) -> None:
    """Answers all prompts and prints text or, with --json, lines."""
    texts: list[Prompt] = arguments.prompt or prompts_of(arguments.prompts)
    engine = load_engine(arguments.model, ROOT, dtype=arguments.dtype, device=arguments.device)
    prompts = asking.prompts(engine, texts)
    for first in range(0, len(texts), asking.batch_size):
        batch = slice(first, first + asking.batch_size)
        if arguments.json:
            for line in asking.lines(engine, texts[batch], prompts[batch]):
                print(json.dumps(line, ensure_ascii=False), flush=True)
        else:
            show_stream(engine.stream(prompts[first], **asking.begun()), engine.tokenizer, use_color(arguments.color))
            print("\n", flush=True)


def write_answers(arguments: argparse.Namespace, asking: Asking) -> None:
    """Answers the prompts of a file into another one, and reports of it."""
    rows = prompt_rows(arguments.prompts)
    report = answer_file(
        lambda device: load_engine(arguments.model, ROOT, dtype=arguments.dtype, device=device),
        rows,
        AnswerParts(arguments.output, [row.prompt for row in rows]),
        asking,
        resume=arguments.resume,
        device=arguments.device,
        loading={"dtype": arguments.dtype},
        one_loads_first=arguments.model in ("demo", "demo-base"),
    )
    if report is None:
        return
    if not report.ranks:
        print(f"{arguments.output} is whole; with which model and options is not known.", file=sys.stderr)
    print(json.dumps(report.to_dict()))


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
    asking = Asking(options, arguments.chat, arguments.seed, arguments.batch_size)
    if arguments.output is None:
        print_answers(arguments, asking)
    else:
        write_answers(arguments, asking)


if __name__ == "__main__":
    run_program(run)
