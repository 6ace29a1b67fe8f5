"""Generates text with any supported model from the command line.

    python inference/generate.py --model demo --exit-layer 24 --chat --prompt "Name three rivers."
    python inference/generate.py --model PATH_OR_ID --prompts prompts.txt --json

Without --json the text appears as it is accepted, one prompt after the other. With --json every prompt gives one line:
{"prompt", "text", "token_ids", "finish_reason", "statistics"}. `--model demo` fetches SmolLM2-135M-Instruct, a
dequantised 4-bit copy. `--exit-layer` may be left out where the checkpoint names one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import layerskip
from layerskip import demo


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder, a hub id, or demo")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="a text file with one prompt a line")
    parser.add_argument(
        "--chat", action="store_true", help="send each prompt as a user message through the chat template"
    )
    parser.add_argument("--strategy", default="self_speculative", help="self_speculative, autoregressive or early_exit")
    parser.add_argument("--exit-layer", type=int, help="E: layers that a draft runs, counted from 1")
    parser.add_argument("--num-draft-tokens", type=int, help="at most how many tokens a round drafts (default 4)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default 128")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--device", help="cpu, cuda, …; by default CUDA where there is a device")
    parser.add_argument("--json", action="store_true", help="one JSON line per prompt on standard output")
    return parser.parse_args()


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Returns the prompts of the command line or file; raises ValueError for a file without any."""
    if arguments.prompt is not None:
        return list(arguments.prompt)
    lines = [line for line in arguments.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts {arguments.prompts} holds no prompt; write one a line.")
    return lines


def run(arguments: argparse.Namespace) -> None:
    """Loads the model and answers every prompt."""
    prompts = read_prompts(arguments)
    path = demo.fetch() if arguments.model == "demo" else arguments.model
    engine = layerskip.load(path, dtype=arguments.dtype, device=arguments.device)
    options: dict[str, Any] = {
        "strategy": arguments.strategy,
        "exit_layer": arguments.exit_layer,
        "num_draft_tokens": arguments.num_draft_tokens,
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": False,
    }
    for prompt in prompts:
        shown: Any = [{"role": "user", "content": prompt}] if arguments.chat else prompt
        result = None
        for event in engine.stream(shown, **options):
            if not arguments.json:
                print(event.text, end="", flush=True)
            result = event.result
        if arguments.json and result is not None:
            emitted = result.statistics.emitted
            answer = {
                "prompt": prompt,
                "text": result.texts and result.texts[0],
                "token_ids": result.sequences[0, -emitted:].tolist(),
                "finish_reason": result.finish_reasons[0],
                "statistics": result.statistics.to_dict(),
            }
            print(json.dumps(answer), flush=True)
        else:
            print("\n")


def main() -> None:
    """Runs the program; mistakes of the user end it with status 2 and one line that says what to do."""
    try:
        run(parse_arguments())
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
