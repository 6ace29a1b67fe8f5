"""Measures self-speculation at several exits against autoregressive decoding and transformers' own `generate`.

    python inference/benchmark.py --model demo --exit-layers 6,12,18,24,28
    python inference/benchmark.py --model PATH_OR_ID --exit-layers 4,8 --prompts prompts.txt --dtype float32

All arms answer the same prompts with the same number of tokens (end-of-sequence tokens are ignored), greedily, in
turns; times are medians over repeats, and the time to the first token is kept apart. The table is printed after every
repeat; the last line of output is JSON. `layer-tokens` counts layers × tokens that really ran, by hooks.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import layerskip
from layerskip import demo
from layerskip.comparison.benchmark import (
    Arm,
    Measurement,
    engine_arm,
    measure,
    share_outside_modules,
    transformers_arm,
)
from layerskip.comparison.table import format_table
from layerskip.decoding.prompts import read_prompts


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a local folder, a hub id, or demo (default)")
    parser.add_argument("--exit-layers", required=True, help="exit layers to measure, such as 6,12,18")
    parser.add_argument(
        "--num-draft-tokens", type=int, default=4, help="at most how many tokens a round drafts (default 4)"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one prompt a line; by default a few built-in ones"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default 128")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes over all prompts (default 3)")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--device", help="cpu, cuda, …; by default CUDA where there is a device")
    parser.add_argument(
        "--hf-early-exit",
        action="store_true",
        help="also measure transformers' assistant_early_exit, at the same exits and draft length",
    )
    return parser.parse_args()


def read_exit_layers(text: str) -> list[int]:
    """Returns the numbers of a list such as 6,12; raises ValueError for anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--exit-layers {text!r} is not a list of layer numbers such as 6,12,18.") from None


def encode_prompts(engine: layerskip.Engine, texts: list[str]) -> list[torch.Tensor]:
    """Returns each prompt as `(1, tokens)`, as a user message where the tokenizer has a chat template."""
    has_template = engine.tokenizer is not None and engine.tokenizer.chat_template is not None
    prompts = [[{"role": "user", "content": text}] for text in texts] if has_template else texts
    rows = read_prompts(prompts, engine.tokenizer, None, engine.layered.vocab_size).rows
    return [torch.tensor([row], device=engine.layered.device) for row in rows]


def build_arms(engine: layerskip.Engine, arguments: argparse.Namespace, exit_layers: list[int]) -> list[Arm]:
    """Returns the arms; the first is what all others are compared with."""
    arms = [
        engine_arm("autoregressive", engine, strategy="autoregressive", do_sample=False),
        transformers_arm("hf_generate", engine.model),
    ]
    drafts = arguments.num_draft_tokens
    for exit_layer in exit_layers:
        options = {"exit_layer": exit_layer, "num_draft_tokens": drafts, "do_sample": False}
        arms.append(engine_arm(f"self_speculative E={exit_layer} γ={drafts}", engine, **options))
    if arguments.hf_early_exit:
        # `generate` ignores num_assistant_tokens as an argument; it reads it from the generation config.
        engine.model.generation_config.num_assistant_tokens = drafts
        arms += [
            transformers_arm(f"hf_early_exit E={exit_layer} γ={drafts}", engine.model, assistant_early_exit=exit_layer)
            for exit_layer in exit_layers
        ]
    return arms


def run(arguments: argparse.Namespace) -> None:
    """Measures, printing the table after every repeat and one line of JSON at the end."""
    exit_layers = read_exit_layers(arguments.exit_layers)
    texts = list(demo.PROMPTS)
    if arguments.prompts is not None:
        texts = [line for line in arguments.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    path = demo.fetch() if arguments.model == "demo" else arguments.model
    engine = layerskip.load(path, dtype=arguments.dtype, device=arguments.device)
    prompts = encode_prompts(engine, texts)
    arms = build_arms(engine, arguments, exit_layers)
    print(f"Warming up: {len(arms)} arms, {len(prompts)} prompts, {arguments.max_new_tokens} tokens each", flush=True)
    measurements: list[Measurement] = []
    header = ("arm", "tokens/s", "lowest", "highest", "ratio", "first token s", "layer-tokens", "same tokens")
    for repeat, measurements in enumerate(
        measure(engine.model, arms, prompts, arguments.max_new_tokens, arguments.repeats), start=1
    ):
        print(f"\nAfter {repeat} of {arguments.repeats} repeats:")
        print(format_table(header, [list(asdict(measurement).values()) for measurement in measurements]), flush=True)
    outside = {
        exit_layer: share_outside_modules(
            engine,
            prompts[0],
            arguments.max_new_tokens,
            exit_layer=exit_layer,
            num_draft_tokens=arguments.num_draft_tokens,
            do_sample=False,
        )
        for exit_layer in exit_layers
    }
    print("\nShare of a round outside the calls of embedding, layers, norm and head:")
    print(", ".join(f"E={exit_layer}: {share:.1%}" for exit_layer, share in outside.items()))
    summary = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "device": str(engine.layered.device),
        "dtype": str(engine.model.dtype),
        "prompts": len(prompts),
        "max_new_tokens": arguments.max_new_tokens,
        "repeats": arguments.repeats,
        "arms": [asdict(measurement) for measurement in measurements],
        "share_outside_modules": outside,
    }
    print(json.dumps(summary))


def main() -> None:
    """Runs the program; mistakes of the user end it with status 2 and one line that says what to do."""
    try:
        run(parse_arguments())
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
