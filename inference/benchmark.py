"""Measures self-speculation at several exits against autoregressive decoding and transformers' own `generate`.

    python inference/benchmark.py --model demo --exit-layers 6,12,18,24,28
    python inference/benchmark.py --model PATH_OR_ID --exit-layers 4,8 --num-draft-tokens 4,8 --dtype float32
    python inference/benchmark.py --model PATH_OR_ID --exit-layers 4 --prompts rows.jsonl --stop-at-eos

    python inference/benchmark.py --model demo --exit-layers 3 --temperature 0.6 --batch-size 4

All arms answer the same prompts in turns, greedily unless --temperature is given, each with the same number of tokens
unless --stop-at-eos lets answers end as they do in use. Times are medians over repeats, the time to the first token is
kept apart, and `same_as_first` counts the answers that are those of plain decoding, token by token (`null` where tokens
are drawn). The table is printed after every repeat; the last line of output is JSON. `layer_tokens` counts layers ×
tokens that really ran, by hooks; `outside_share` is the share of time spent outside the calls of embedding, layers,
norm and head, `null` with a `draft_vocab_size`, which is `null` for the full head. In steps of plain decoding, `c` is
what a draft costs and `verify_cost` what verification costs in a round; `predicted` is the speed-up that these two
give: tokens per round / (verify_cost + drafts per round · c). They are `null` in batches, whose rows share their steps.
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
from layerskip.comparison.benchmark import Arm, Batch, Measurement, engine_arm, measure, transformers_arm
from layerskip.comparison.table import format_table
from layerskip.decoding.plan import check_num_draft_tokens
from layerskip.decoding.prompts import read_prompts
from layerskip.program import as_chat, load_engine, read_numbers, run_program
from layerskip.prompt_file import prompts_of

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a local folder, a hub id, demo-base or demo (default)")
    parser.add_argument("--exit-layers", required=True, help="exit layers to measure, such as 6,12,18")
    parser.add_argument(
        "--num-draft-tokens", default="4", help="at most how many tokens a round drafts, such as 4,8 (default 4)"
    )
    parser.add_argument("--draft-vocab-size", type=int, help="how many token ids to draft from; see Engine")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a .txt file, one prompt a line, or a .jsonl file of rows with prompts; by default a few built-in ones",
    )
    parser.add_argument("--batch-size", type=int, default=1, help="prompts that are answered together (default 1)")
    parser.add_argument("--temperature", type=float, help="draw tokens at this temperature (default: the best token)")
    parser.add_argument("--stop-at-eos", action="store_true", help="let answers end with an end-of-sequence token")
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


def build_arms(
    engine: layerskip.Engine, arguments: argparse.Namespace, exit_layers: list[int], num_draft_tokens: list[int]
) -> list[Arm]:
    """Returns the arms; the first is what all others are compared with."""
    shared = {"stop_at_eos": arguments.stop_at_eos, "temperature": arguments.temperature}
    speculative = [
        engine_arm("self_speculative", engine, exit_layer=exit_layer, num_draft_tokens=drafts, **shared)
        for exit_layer in exit_layers
        for drafts in num_draft_tokens
    ]
    arms = [
        engine_arm("autoregressive", engine, strategy="autoregressive", **shared),
        transformers_arm("hf_generate", engine.model, **shared),
        *speculative,
    ]
    if arguments.hf_early_exit:
        arms += [
            transformers_arm("hf_early_exit", engine.model, arm, assistant_early_exit=arm.exit_layer, **shared)
            for arm in speculative
        ]
    return arms


def run() -> None:
    """Measures, printing the table after every repeat and one line of JSON at the end."""
    arguments = parse_arguments()
    exit_layers = read_numbers("--exit-layers", arguments.exit_layers)
    num_draft_tokens = read_numbers("--num-draft-tokens", arguments.num_draft_tokens)
    for drafts in num_draft_tokens:
        check_num_draft_tokens(drafts)
    if arguments.batch_size < 1:
        raise ValueError(f"--batch-size {arguments.batch_size} is out of range; it must be at least 1.")
    if arguments.hf_early_exit and arguments.batch_size > 1:
        raise ValueError("--hf-early-exit answers one prompt at a time; leave --batch-size out.")
    given = list(demo.PROMPTS) if arguments.prompts is None else prompts_of(arguments.prompts)
    engine = load_engine(
        arguments.model,
        ROOT,
        draft_vocab_size=arguments.draft_vocab_size,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    rows = read_prompts(as_chat(given, engine.tokenizer), engine.tokenizer, None, engine.layered.vocab_size).rows
    size = arguments.batch_size
    prompts = [Batch.of(rows[start : start + size], engine.layered.device) for start in range(0, len(rows), size)]
    if arguments.stop_at_eos and engine.model.generation_config.eos_token_id is None:
        raise ValueError("--stop-at-eos needs eos_token_id in the model's generation_config.json, and there is none.")
    arms = build_arms(engine, arguments, exit_layers, num_draft_tokens)
    measurements: list[Measurement] = []
    for measurements in measure(
        engine.model,
        arms,
        prompts,
        arguments.max_new_tokens,
        arguments.repeats,
        compare=arguments.temperature is None,
    ):
        header = [field.name for field in fields(Measurement)]
        print(
            "\n" + format_table(header, [list(asdict(measurement).values()) for measurement in measurements]),
            flush=True,
        )
    summary = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "device": str(engine.layered.device),
        "dtype": str(engine.model.dtype),
        "prompts": len(rows),
        "batch_size": size,
        "temperature": arguments.temperature,
        "max_new_tokens": arguments.max_new_tokens,
        "stop_at_eos": arguments.stop_at_eos,
        "repeats": arguments.repeats,
        "arms": [asdict(measurement) for measurement in measurements],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    run_program(run)
