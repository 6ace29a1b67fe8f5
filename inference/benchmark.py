"""Measures self-speculation at several exits against autoregressive decoding and transformers' own `generate`.

    python inference/benchmark.py --model demo --exit-layers 6,12,18,24,28
    python inference/benchmark.py --model PATH_OR_ID --exit-layers 4,8 --prompts prompts.txt --dtype float32

All arms answer the same prompts with the same number of tokens (end-of-sequence tokens are ignored), greedily, in
turns; times are medians over repeats, and the time to the first token is kept apart. The table is printed after every
repeat; the last line of output is JSON. `layer_tokens` counts layers × tokens that really ran, by hooks;
`outside_share` is the share of time spent outside the calls of embedding, layers, norm and head.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, fields
from pathlib import Path

import torch

import layerskip
from layerskip import demo
from layerskip.comparison.benchmark import Arm, Measurement, engine_arm, measure, transformers_arm
from layerskip.comparison.table import format_table
from layerskip.decoding.plan import check_exit_layer, check_num_draft_tokens
from layerskip.decoding.prompts import read_prompts
from layerskip.program import as_chat, model_path, run_program
from layerskip.prompt_file import read_lines


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


def build_arms(engine: layerskip.Engine, arguments: argparse.Namespace, exit_layers: list[int]) -> list[Arm]:
    """Returns the arms; the first is what all others are compared with."""
    drafts = arguments.num_draft_tokens
    speculative = [
        engine_arm("self_speculative", engine, exit_layer=exit_layer, num_draft_tokens=drafts)
        for exit_layer in exit_layers
    ]
    arms = [
        engine_arm("autoregressive", engine, strategy="autoregressive"),
        transformers_arm("hf_generate", engine.model),
        *speculative,
    ]
    if arguments.hf_early_exit:
        # `generate` ignores num_assistant_tokens as an argument; it reads it from the model's generation config.
        engine.model.generation_config.num_assistant_tokens = drafts
        arms += [
            transformers_arm("hf_early_exit", engine.model, arm, assistant_early_exit=arm.exit_layer)
            for arm in speculative
        ]
    return arms


def run() -> None:
    """Measures, printing the table after every repeat and one line of JSON at the end."""
    arguments = parse_arguments()
    exit_layers = read_exit_layers(arguments.exit_layers)
    texts = list(demo.PROMPTS) if arguments.prompts is None else read_lines(arguments.prompts)
    engine = layerskip.load(model_path(arguments.model), dtype=arguments.dtype, device=arguments.device)
    rows = read_prompts(as_chat(texts, engine.tokenizer), engine.tokenizer, None, engine.layered.vocab_size).rows
    prompts = [torch.tensor([row], device=engine.layered.device) for row in rows]
    check_num_draft_tokens(arguments.num_draft_tokens)
    for exit_layer in exit_layers:
        check_exit_layer(exit_layer, engine.layered.num_layers)
    arms = build_arms(engine, arguments, exit_layers)
    measurements: list[Measurement] = []
    for measurements in measure(engine.model, arms, prompts, arguments.max_new_tokens, arguments.repeats):
        header = [field.name for field in fields(Measurement)]
        print(
            "\n" + format_table(header, [list(asdict(measurement).values()) for measurement in measurements]),
            flush=True,
        )
    summary = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "device": str(engine.layered.device),
        "dtype": str(engine.model.dtype),
        "prompts": len(prompts),
        "max_new_tokens": arguments.max_new_tokens,
        "repeats": arguments.repeats,
        "arms": [asdict(measurement) for measurement in measurements],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    run_program(run)
