"""Measures what the recipe costs beside plain fine-tuning by the same Trainer: time of a step and peak memory.

    python training/benchmark.py --model demo-base
    python training/benchmark.py --vocabulary 128256 --arms plain,four-exits --steps 3

Every arm runs in a process of its own, one after the other and `--repeats` times over, on random tokens; the first step
of each is not counted. Next to the measured ratio stands what counting predicts: a layer or head costs 2 operations a
weight and token forward and 4 backward, the head 2 more since its logits are made again. `--vocabulary` takes a
small random Llama with a vocabulary of that size instead of a model. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from layerskip.program import model_path, run_program


def arms(num_layers: int) -> dict[str, dict[str, Any]]:
    """Returns the settings of every arm, by name."""
    return {
        "plain": {"exits": {"exit_layers": ()}},
        "rotation-8": {"exits": {"curriculum": "rotational", "rotation": 8}},
        "rotation-L": {"exits": {"curriculum": "rotational", "rotation": num_layers}},
        "four-exits": {"exits": {"exit_layers": tuple(range(2, 6)), "weights": "equal"}},
        "dropout-0.5": {"exits": {"exit_layers": ()}, "p_max": 0.5},
    }


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", default="demo-base", help="a local folder, a hub id, or demo-base (default)")
    source.add_argument("--vocabulary", type=int, help="a small random Llama with so many tokens instead")
    parser.add_argument("--arms", default="plain,rotation-8,rotation-L,dropout-0.5", help=", ".join(arms(1)))
    parser.add_argument("--batch-size", type=int, default=8, help="rows a step (default 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a row (default 128)")
    parser.add_argument("--steps", type=int, default=8, help="counted steps a run (default 8)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm (default 3)")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_arm(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains one arm in this process and returns its step times in seconds, its peak memory in bytes, and counts."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback, TrainingArguments

    from layerskip.model.layered import LayeredModel
    from layerskip.training.clock import Clock
    from layerskip.training.data import Collator
    from layerskip.training.dropout_rates import depth_factor
    from layerskip.training.exit_settings import ExitSettings
    from layerskip.training.layer_dropout import DropoutSettings
    from layerskip.training.trainer import LayerSkipTrainer

    if arguments.vocabulary is None:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    else:
        widths: dict[str, Any] = {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
        }
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=arguments.vocabulary, **widths))
    layered = LayeredModel(model)
    settings = arms(layered.num_layers)[arguments.run]
    exits, p_max = ExitSettings(**settings["exits"]), settings.get("p_max", 0.0)

    begun: list[float] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **named: Any) -> None:
            begun.append(time.perf_counter())

        def on_step_end(self, *_: Any, **named: Any) -> None:
            begun[-1] = time.perf_counter() - begun[-1]

    rows = torch.randint(0, layered.vocab_size, (arguments.batch_size, arguments.tokens)).tolist()
    steps = arguments.steps + 1
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"per_device_train_batch_size": arguments.batch_size, "save_strategy": "no"}
        trainer = LayerSkipTrainer(
            model,
            TrainingArguments(folder, max_steps=steps, disable_tqdm=True, dataloader_pin_memory=False, **options),
            exits=exits,
            dropout=DropoutSettings(p_max=p_max),
            train_dataset=Dataset.from_list([{"input_ids": row, "labels": row} for row in rows]),
            data_collator=Collator(0),
            callbacks=[Timer()],
        )
        trainer.train()
    # Linux gives the peak in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    heads = [len(exits.weights_at(Clock(steps, step), layered.num_layers)) for step in range(1, steps)]
    dropped = [p_max * depth_factor(layer, layered.num_layers) for layer in range(1, layered.num_layers + 1)]
    return {
        "seconds": begun[1:],
        "peak_bytes": peak,
        "heads": statistics.mean(heads),
        "dropped_share": statistics.mean(dropped),
        "layer_weights": sum(weight.numel() for layer in layered.layers for weight in layer.parameters()),
        "head_weights": layered.head.weight.numel(),
    }


def predicted(result: dict[str, Any]) -> float:
    """Returns the operations of a step for each token, as the module's docstring counts them."""
    layers = 6 * result["layer_weights"] * (1 - result["dropped_share"])
    return float(layers + 8 * result["head_weights"] * result["heads"])


def report(results: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Prints a table of medians over runs and returns it."""
    table = {}
    print(f"{'arm':12} {'s a step':>9} {'spread':>13} {'ratio':>6} {'counted':>8} {'peak GB':>8} {'ratio':>6}")
    base = next(iter(results.values()))
    for name, runs in results.items():
        medians = [statistics.median(run["seconds"]) for run in runs]
        # Runs of one round lie side by side, so that the ratio is taken within rounds.
        ratios = [mine / statistics.median(plain["seconds"]) for mine, plain in zip(medians, base, strict=True)]
        peak = statistics.median(run["peak_bytes"] for run in runs)
        table[name] = {
            "seconds": statistics.median(medians),
            "lowest": min(medians),
            "highest": max(medians),
            "ratio": statistics.median(ratios),
            "counted_ratio": predicted(runs[0]) / predicted(base[0]),
            "peak_bytes": peak,
            "peak_ratio": peak / statistics.median(run["peak_bytes"] for run in base),
        }
        row = table[name]
        print(
            f"{name:12} {row['seconds']:9.2f} {row['lowest']:6.2f}-{row['highest']:6.2f} {row['ratio']:6.2f} "
            f"{row['counted_ratio']:8.2f} {peak / 1e9:8.2f} {row['peak_ratio']:6.2f}"
        )
    return table


def run() -> None:
    """Runs every arm in its own process, in rounds, and prints the table."""
    arguments = parse_arguments()
    if arguments.run is not None:
        print(json.dumps(run_arm(arguments)))
        return
    names = arguments.arms.split(",")
    unknown = sorted(set(names) - set(arms(1)))
    if unknown:
        raise ValueError(f"--arms has {unknown[0]!r}; known are {', '.join(arms(1))}.")
    if min(arguments.batch_size, arguments.steps, arguments.repeats) < 1 or arguments.tokens < 2:
        raise ValueError("--batch-size, --steps and --repeats must be at least 1, --tokens at least 2.")
    if arguments.vocabulary is None:
        source = ["--model", model_path(arguments.model)]
    else:
        source = ["--vocabulary", str(arguments.vocabulary)]
    numbers = [f"--{name}={vars(arguments)[name.replace('-', '_')]}" for name in ("batch-size", "tokens", "steps")]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(arguments.repeats):
        for name in names:
            print(f"round {number + 1} of {arguments.repeats}: {name}", file=sys.stderr)
            command = [sys.executable, str(Path(__file__)), *source, *numbers, "--run", name]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            results[name].append(json.loads(output.splitlines()[-1]))
    print(json.dumps(report(results)))


if __name__ == "__main__":
    run_program(run)
