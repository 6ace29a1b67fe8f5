"""Generates text with any supported model from the command line.

    python inference/generate.py --model demo --chat --prompt "Name three rivers."
    python inference/generate.py --model demo --chat --prompt "Tell me a story." --temperature 0.8 --top-p 0.95 --seed 1
    python inference/generate.py --model PATH_OR_ID --prompts prompts.txt --json

Without --json the text appears as it is accepted, one prompt after the other, on a terminal with accepted drafts in
green. Decoding is greedy unless --temperature is given. With --json every prompt gives one line:
{"prompt", "text", "token_ids", "finish_reason", "statistics"}. `--model demo` fetches SmolLM2-135M-Instruct, a
dequantised 4-bit copy, and puts the checkout's adapters on top, which were trained to draft voice commands as JSON;
`demo-base` leaves them out. `--exit-layer` may be left out where the checkpoint names one. `--exit-layer auto` and
`--draft-stop adaptive` go by what compare_exits.py --save has measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from layerskip.decoding.plan import AUTO, COPY_NGRAMS, DRAFT_STOPS, NAMES
from layerskip.program import add_color, load_engine, run_program, show_stream, use_color
from layerskip.prompt_file import as_chat, prompts_of

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


def run() -> None:
    """Loads the model and answers every prompt."""
    arguments = parse_arguments()
    sampling = sampling_options(arguments)
    texts: list[Any] = arguments.prompt or prompts_of(arguments.prompts)
    engine = load_engine(arguments.model, ROOT, dtype=arguments.dtype, device=arguments.device)
    if arguments.chat and (engine.tokenizer is None or engine.tokenizer.chat_template is None):
        raise ValueError("--chat needs a chat template, and the model's tokenizer has none; leave --chat out.")
    prompts = as_chat(texts, engine.tokenizer) if arguments.chat else texts
    options: dict[str, Any] = {
        "strategy": arguments.strategy,
        **{name: vars(arguments)[name] for name in NAMES},
        "max_new_tokens": arguments.max_new_tokens,
        "stop_strings": arguments.stop,
        **sampling,
    }
    for text, prompt in zip(texts, prompts, strict=True):
        if arguments.seed is not None:
            options["generator"] = torch.Generator().manual_seed(arguments.seed)
        if not arguments.json:
            show_stream(engine.stream(prompt, **options), engine.tokenizer, use_color(arguments.color))
            print("\n", flush=True)
        else:
            result = engine.generate(prompt, **options)
            answer = {
                "prompt": text,
                "text": None if result.texts is None else result.texts[0],
                "token_ids": result.new_token_ids[0],
                "finish_reason": result.finish_reasons[0],
                "statistics": result.statistics.to_dict(),
            }
            print(json.dumps(answer, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    run_program(run)
