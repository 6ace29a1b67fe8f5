"""Fine-tunes a causal language model so that its early layers can draft.

    python training/finetune.py configs/smollm2-135m-lora.yaml
    python training/finetune.py configs/smollm2-135m-full.yaml trainer.max_steps=100 output_dir=runs/try
    accelerate launch --num_processes 8 training/finetune.py configs/llama3.2-1b-continual.yaml

A recipe is a YAML file; `key=value` changes a key of it, dotted where it is nested. A run that was interrupted goes on
with `resume=true`. The last line of the output is a JSON object with the metrics.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math

from layerskip.program import model_path, run_program


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments; the help has every key of a recipe."""
    from layerskip.training.recipe import SETTINGS

    keys = "\n\n".join(f"{settings.__name__}\n{inspect.getdoc(settings)}" for settings in SETTINGS)
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"Keys of a recipe:\n\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE.yaml")
    parser.add_argument("changes", nargs="*", metavar="key=value")
    return parser.parse_args()


def run() -> None:
    """Reads the recipe, trains, and reports."""
    from accelerate import PartialState

    from layerskip.training.finetune import finetune
    from layerskip.training.recipe import read_recipe

    arguments = parse_arguments()
    recipe = read_recipe(arguments.recipe, arguments.changes)
    metrics = finetune(recipe, model_path(recipe.model) if isinstance(recipe.model, str) else None)
    if PartialState().is_main_process:
        # JSON has no infinity, which the perplexity of an untrained exit may be.
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        print(json.dumps({"output_dir": recipe.output_dir, **finite}))


if __name__ == "__main__":
    run_program(run)
