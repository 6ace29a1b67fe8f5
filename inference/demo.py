"""Shows self-speculative decoding on a real model: text as it is accepted, then speeds, acceptance and work.

    python inference/demo.py
    python inference/demo.py --model PATH_OR_ID --exit-layer 8 --num-draft-tokens 4

Without --model it fetches SmolLM2-135M-Instruct once (about 90 MB): a dequantised 4-bit (Q4_1) copy, which was not
trained for early exits. Both strategies answer every prompt in
turn, and their tokens are compared.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import layerskip
from layerskip import demo
from layerskip.comparison.audit import first_difference
from layerskip.comparison.table import format_table
from layerskip.decoding.plan import check_exit_layer
from layerskip.program import as_chat, model_path, run_program

# The exit of a checkpoint that names none: four fifths of its layers, where an untrained model begins to agree.
UNTRAINED_EXIT = 0.8
COLUMNS = (
    "strategy",
    "exit_layer",
    "num_draft_tokens",
    "tokens/s",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "early_layer_tokens",
    "late_layer_tokens",
)


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
    engine = layerskip.load(
        model_path(arguments.model),
        dtype=arguments.dtype,
        exit_layer=arguments.exit_layer,
        num_draft_tokens=arguments.num_draft_tokens,
    )
    if engine.exit_layer is None and not engine.metadata.compared:
        num_layers = engine.layered.num_layers
        check_exit_layer(1, num_layers)
        engine.exit_layer = min(round(UNTRAINED_EXIT * num_layers), num_layers - 1)
        print(f"The checkpoint names no exit layer: it was not trained for early exits. Using {engine.exit_layer}.")
    return engine


def show(engine: layerskip.Engine, prompt: Any, options: dict[str, Any]) -> layerskip.GenerationResult:
    """Prints the answer to one prompt as it is accepted, and returns its result."""
    result = None
    for event in engine.stream(prompt, **options):
        print(event.text, end="", flush=True)
        result = event.result
    print("\n", flush=True)
    if result is None:
        raise RuntimeError("the stream ended without a result.")
    return result


def compare_tokens(
    engine: layerskip.Engine, prompt: Any, plain: list[int], speculative: list[int], options: dict[str, Any]
) -> str:
    """Returns whether the tokens of both strategies are the same, and if not, whether rounding explains it."""
    if plain == speculative:
        return "yes"
    logits = engine.generate(prompt, strategy="autoregressive", output_logits=True, **options).logits
    if logits is None:
        raise RuntimeError("generate returned no logits.")
    difference = first_difference(plain, speculative, torch.cat(logits), engine.model.dtype)
    if difference is None:
        raise RuntimeError("two runs of the same strategy gave different tokens.")
    kind = "a near tie, settled by rounding" if difference.is_near_tie else "NOT explained by rounding"
    return f"no: token {difference.position + 1} is {kind} (gap {difference.gap:.3g}, one unit {difference.unit:.3g})"


def run() -> None:
    """Answers the built-in prompts with both strategies and prints the comparison."""
    arguments = parse_arguments()
    engine = load(arguments)
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    prompts = as_chat(demo.PROMPTS, engine.tokenizer)
    results: dict[str, list[layerskip.Statistics]] = {"autoregressive": [], "self_speculative": []}
    for strategy in results:
        engine.generate(prompts[0], strategy=strategy, max_new_tokens=8, do_sample=False)
    same = []
    for number, (text, prompt) in enumerate(zip(demo.PROMPTS, prompts, strict=True), start=1):
        print(f"[{number}/{len(prompts)}] {text}\n")
        speculative = show(engine, prompt, options)
        plain = engine.generate(prompt, strategy="autoregressive", **options)
        results["self_speculative"].append(speculative.statistics)
        results["autoregressive"].append(plain.statistics)
        tokens = [result.sequences[0, -result.statistics.emitted :].tolist() for result in (plain, speculative)]
        same.append(compare_tokens(engine, prompt, tokens[0], tokens[1], options))
    print_summary(results, same)


def print_summary(results: dict[str, list[layerskip.Statistics]], same: list[str]) -> None:
    """Prints one line for each strategy, over all prompts together, and what became of the tokens."""
    rows: list[list[object]] = []
    speeds = {}
    for strategy, runs in results.items():
        decoded = sum(run.emitted - 1 for run in runs)
        seconds = sum(sum(run.seconds.values()) - run.seconds["prefill"] for run in runs)
        rounds, drafted = sum(run.rounds for run in runs), sum(run.drafted for run in runs)
        speeds[strategy] = decoded / seconds if seconds else None
        rows.append(
            [
                strategy,
                runs[0].exit_layer,
                runs[0].num_draft_tokens,
                speeds[strategy],
                sum(run.accepted for run in runs) / drafted if drafted else None,
                decoded / rounds if rounds else None,
                sum(run.early_layer_tokens for run in runs),
                sum(run.late_layer_tokens for run in runs),
            ]
        )
    print(format_table(COLUMNS, rows))
    plain, fast = speeds["autoregressive"], speeds["self_speculative"]
    if plain and fast:
        print(f"\nSelf-speculation ran at {fast / plain:.2f}x the speed of autoregressive decoding.")
    print(f"Identical tokens: {same.count('yes')} of {len(same)} prompts.")
    for number, outcome in enumerate(same, start=1):
        if outcome != "yes":
            print(f"  prompt {number}: {outcome}")


if __name__ == "__main__":
    run_program(run)
