"""Shows self-speculative decoding on a real model: text as it is accepted, then speeds, acceptance and work.

    python inference/demo.py
    python inference/demo.py --model PATH_OR_ID --exit-layer 8 --num-draft-tokens 4

Without --model it fetches SmolLM2-135M-Instruct once (about 90 MB): a dequantised 4-bit (Q4_1) copy, which was not
trained for early exits. Drafted and accepted tokens are green on a terminal. Both strategies answer every prompt in
turn, and their tokens are compared.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import layerskip
from layerskip import demo
from layerskip.comparison.audit import first_difference
from layerskip.comparison.table import format_table

GREEN, PLAIN = "\033[32m", "\033[0m"
# The exit of a checkpoint that names none: four fifths of its layers, where an untrained model begins to agree.
UNTRAINED_EXIT = 0.8


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a local folder, a hub id, or demo (default)")
    parser.add_argument("--exit-layer", type=int, help="E: layers that a draft runs, counted from 1")
    parser.add_argument("--num-draft-tokens", type=int, help="at most how many tokens a round drafts (default 4)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default 128")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    return parser.parse_args()


def load(arguments: argparse.Namespace) -> layerskip.Engine:
    """Returns an engine for the chosen model, saying what it is and which exit it will use."""
    if arguments.model == "demo":
        print(f"Model: {demo.DESCRIPTION}", flush=True)
        path: str = str(demo.fetch())
    else:
        path = arguments.model
    engine = layerskip.load(
        path, dtype=arguments.dtype, exit_layer=arguments.exit_layer, num_draft_tokens=arguments.num_draft_tokens
    )
    if engine.exit_layer is None and not engine.metadata.compared:
        engine.exit_layer = round(UNTRAINED_EXIT * engine.layered.num_layers)
        print(f"The checkpoint names no exit layer: it was not trained for early exits. Using {engine.exit_layer}.")
    return engine


def show(engine: layerskip.Engine, prompt: Any, options: dict[str, Any]) -> layerskip.GenerationResult:
    """Prints the answer to one prompt as it is accepted, and returns its result."""
    colours = sys.stdout.isatty()
    for event in engine.stream(prompt, **options):
        # A round's text is drafts and then the model's own token; their texts are told apart by tokens, not characters.
        coloured = colours and any(event.accepted)
        print(f"{GREEN}{event.text}{PLAIN}" if coloured else event.text, end="", flush=True)
        if event.result is not None:
            print("\n", flush=True)
            return event.result
    raise RuntimeError("the stream ended without a result.")
