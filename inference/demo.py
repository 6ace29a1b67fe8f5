"""Shows self-speculative decoding on a real model: every answer twice, then speeds and acceptance.

    python inference/demo.py
    python inference/demo.py --train-minutes 10
    python inference/demo.py --model PATH_OR_ID --exit-layer 8 --num-draft-tokens 4

Without --model it fetches SmolLM2-135M-Instruct once (about 90 MB), a dequantised 4-bit (Q4_1) copy, and puts the
checkout's adapters on top, which were trained to draft voice commands as JSON; `demo-base` leaves them out. Commands
and general prompts are answered by all layers first, then self-speculatively, where a terminal shows in green the
tokens that were drafted and accepted. --train-minutes trains adapters on commands alone first and shows
what came out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

import layerskip
from layerskip import demo
from layerskip.comparison.audit import first_difference
from layerskip.comparison.table import format_table
from layerskip.decoding.plan import check_exit_layer, check_num_draft_tokens
from layerskip.model.adapters import AdapterFolder
from layerskip.model.loading import DTYPES
from layerskip.program import (
    GREEN,
    RESET,
    add_color,
    difference_folder,
    load_engine,
    run_program,
    show_stream,
    use_color,
)
from layerskip.prompt_file import Prompt, as_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_RECIPE = ROOT / "configs" / "smollm2-135m-commands.yaml"
# The exit of a checkpoint that names none: four fifths of its layers, where an untrained model begins to agree.
UNTRAINED_EXIT = 0.8
# Enough to see the speed, few enough for a slow machine.
GENERAL_PROMPTS = demo.PROMPTS[:3]
TRAINING_ROWS = 12000


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a local folder, a hub id, demo-base or demo (default)")
    parser.add_argument("--exit-layer", type=int, help="E: layers that a draft runs, counted from 1")
    parser.add_argument("--num-draft-tokens", type=int, help="at most how many tokens a round drafts")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer (default 64)")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES), help="of the weights (default auto)")
    add_color(parser)
    parser.add_argument(
        "--train-minutes", type=float, metavar="M", help="train adapters on demo-base for so long first"
    )
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="keep the run of --train-minutes in this folder")
    parser.add_argument(
        "--recipe",
        type=Path,
        metavar="RECIPE.yaml",
        help="what --train-minutes follows (default configs/smollm2-135m-commands.yaml), a recipe for adapters on "
        "demo-base; the demo replaces its data.train (by voice commands that it writes), data.eval (by none), "
        "output_dir, max_minutes and trainer.save_strategy (by no)",
    )
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Checks what can be known before any work; raises ValueError by name."""
    if arguments.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {arguments.max_new_tokens} is out of range; it must be at least 1.")
    minutes = arguments.train_minutes
    if minutes is None:
        for flag, given in (("--output-dir", arguments.output_dir), ("--recipe", arguments.recipe)):
            if given is not None:
                raise ValueError(f"{flag} {given} is for a run of --train-minutes; leave it out.")
        return
    if not 0 < minutes < float("inf"):
        raise ValueError(f"--train-minutes {minutes:g} is out of range; give a number of minutes above 0.")
    if arguments.model != "demo":
        raise ValueError(
            f"--model {arguments.model} and --train-minutes do not go together, since the recipe names the model; "
            "leave one of them out."
        )
    if arguments.recipe is not None and not arguments.recipe.is_file():
        raise ValueError(f"--recipe {arguments.recipe} is no file; give a recipe, such as one of configs/.")
    if arguments.output_dir is not None and arguments.output_dir.exists():
        raise ValueError(f"--output-dir {arguments.output_dir} is there already; choose a folder that is not.")


# --- The model -------------------------------------------------------------------------------------------------------


def load(arguments: argparse.Namespace) -> layerskip.Engine:
    """Returns an engine for the chosen model, saying what it is and which exit it will use."""
    is_trained = arguments.train_minutes is not None
    if not is_trained:
        say_loading(arguments.model)
    options = {
        "dtype": arguments.dtype,
        "exit_layer": arguments.exit_layer,
        "num_draft_tokens": arguments.num_draft_tokens,
    }
    engine = trained_engine(arguments, options) if is_trained else load_engine(arguments.model, ROOT, **options)
    if engine.exit_layer is None and not engine.metadata.compared:
        num_layers = engine.layered.num_layers
        check_exit_layer(1, num_layers)
        engine.exit_layer = min(round(UNTRAINED_EXIT * num_layers), num_layers - 1)
        print(f"The checkpoint names no exit layer: it was not trained for early exits. Using {engine.exit_layer}.")
    return engine


def say_loading(model: str) -> None:
    """Prints what is going to be loaded."""
    names = {"demo": f"{demo.DESCRIPTION} with the checkout's adapters", "demo-base": demo.DESCRIPTION}
    print(f"Loading {names.get(model, model)}", flush=True)


def trained_engine(arguments: argparse.Namespace, options: dict[str, Any]) -> layerskip.Engine:
    """Trains adapters as the recipe says and returns an engine for them, with the checkout's exit and draft length.

    Raises:
        ValueError: a recipe for another model, that does not save adapters or that does not train the exit, a number
            out of range, or the checkout's adapters are needed for these numbers and missing or damaged.
        ChildProcessError: one of the two programs failed; it has said why.
    """
    from layerskip.training.recipe import read_recipe

    path = DEFAULT_RECIPE if arguments.recipe is None else arguments.recipe
    recipe = read_recipe(path)
    if recipe.model != "demo-base":
        raise ValueError(f"--recipe {path} has model: {recipe.model}; --train-minutes trains demo-base, so write that.")
    if recipe.lora is None or recipe.lora.merge:
        raise ValueError(f"--recipe {path} does not save adapters; it needs method: lora and merge: false.")
    if options["exit_layer"] is None or options["num_draft_tokens"] is None:
        stored = AdapterFolder.read(difference_folder(ROOT), base=demo.MODEL_NAME).metadata or {}
        for name in ("exit_layer", "num_draft_tokens"):
            options[name] = options[name] if options[name] is not None else stored.get(name)
    num_layers = AutoConfig.from_pretrained(demo.fetch()).num_hidden_layers
    check_exit_layer(options["exit_layer"], num_layers)
    check_num_draft_tokens(options["num_draft_tokens"])
    trained = recipe.exits.layers(num_layers)
    if options["exit_layer"] not in trained:
        raise ValueError(
            f"exit_layer={options['exit_layer']} is not trained by --recipe {path}; pass as --exit-layer one of "
            f"{', '.join(map(str, trained))}, or change exits.exit_layers."
        )
    with tempfile.TemporaryDirectory(prefix="layerskip-demo-") as temporary:
        rows = Path(temporary, "commands-train.jsonl")
        output = arguments.output_dir or Path(temporary, "run")
        print(f"Writing {TRAINING_ROWS} voice commands", flush=True)
        run_step("training/voice_commands.py", "--split", "train", "--rows", str(TRAINING_ROWS), "--out", str(rows))
        print(f"Training for at most {arguments.train_minutes:g} minutes", flush=True)
        replaced = {
            "data.train": str(rows),
            "data.eval": None,
            "output_dir": str(output),
            "max_minutes": arguments.train_minutes,
            "trainer.save_strategy": "no",
        }
        # As JSON, which is YAML: a path may hold what YAML takes for something else.
        run_step("training/finetune.py", str(path), *(f"{key}={json.dumps(value)}" for key, value in replaced.items()))
        print(f"Loading {demo.DESCRIPTION} with the adapters just trained", flush=True)
        return demo.load(output, **options)


def run_step(program: str, *arguments: str) -> None:
    """Runs a program of the checkout, whose output is the user's; raises ChildProcessError when it fails."""
    status = subprocess.run([sys.executable, str(ROOT / program), *arguments], check=False).returncode
    if status != 0:
        raise ChildProcessError(f"{program} ended with status {status}; what it said stands above.")


# --- Answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """The statistics of both answers to one prompt, and whether their tokens are the same: "yes", or why not."""

    autoregressive: layerskip.Statistics
    self_speculative: layerskip.Statistics
    identical: str


@dataclass(frozen=True)
class Answerer:
    """Shows a model's answers.

    Attributes:
        engine: the model.
        tokenizer: its own.
        options: of every call.
        color: whether accepted drafts are green.
    """

    engine: layerskip.Engine
    tokenizer: PreTrainedTokenizerBase
    options: dict[str, Any]
    color: bool

    def both(self, prompt: Prompt) -> Answers:
        """Shows the answers of both strategies to one prompt and returns what they were."""
        plain, fast = self.show(prompt, "autoregressive"), self.show(prompt, "self_speculative")
        identical = self.compare(prompt, plain.new_token_ids[0], fast.new_token_ids[0])
        return Answers(plain.statistics, fast.statistics, identical)

    def show(self, prompt: Prompt, strategy: str) -> layerskip.GenerationResult:
        """Prints the answer to one prompt as it is settled and the speed below it, and returns its result."""
        result = self._streamed(prompt, strategy)
        figures = result.statistics
        speed = figures.decode_tokens_per_second
        line = f"{strategy}: " + ("a single token" if speed is None else f"{speed:.1f} tokens/s")
        if figures.drafted:
            line += f", {figures.accepted} of {figures.drafted} drafts accepted"
        print(f"\n    ({line})\n", flush=True)
        return result

    def _streamed(self, prompt: Prompt, strategy: str) -> layerskip.GenerationResult:
        """Prints an answer as it is settled and returns its result, which the last event carries."""
        return show_stream(self.engine.stream(prompt, strategy=strategy, **self.options), self.tokenizer, self.color)

    def compare(self, prompt: Prompt, plain: list[int], speculative: list[int]) -> str:
        """Returns whether the tokens of both strategies are the same, and if not, whether rounding explains it."""
        difference = None
        if plain != speculative:
            again: Any = self.engine.generate(prompt, strategy="autoregressive", output_logits=True, **self.options)
            difference = first_difference(plain, speculative, torch.cat(again.logits), self.engine.model.dtype)
        if difference is None:
            return "yes"
        kind = "a near tie, settled by rounding" if difference.is_near_tie else "NOT explained by rounding"
        return (
            f"no: token {difference.position + 1} is {kind} (gap {difference.gap:.3g}, one unit {difference.unit:.3g})"
        )


def prompts_by_kind(tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Prompt]]:
    """Returns the prompts of each kind; without a chat template, each as the bare text of its user."""
    commands: list[Prompt] = list(demo.COMMANDS)
    if tokenizer.chat_template is None:
        commands = [user_text(messages) for messages in commands]
    return {"commands": commands, "general": as_chat(GENERAL_PROMPTS, tokenizer)}


def user_text(prompt: Prompt) -> str:
    """Returns what the user says in a prompt."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def run() -> None:
    """Answers the built-in prompts of both kinds with both strategies and prints the comparison."""
    arguments = parse_arguments()
    check_arguments(arguments)
    color = use_color(arguments.color)
    engine = load(arguments)
    if engine.tokenizer is None:
        raise ValueError(f"--model {arguments.model} has no tokenizer, without which no prompt can be read.")
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    answerer = Answerer(engine, engine.tokenizer, options, color)
    prompts = prompts_by_kind(engine.tokenizer)
    for strategy in ("autoregressive", "self_speculative"):
        # The first call pays for what later ones find ready.
        engine.generate(prompts["commands"][0], strategy=strategy, max_new_tokens=8, do_sample=False)
    print("Each answer twice: by all layers for every token (autoregressive), then self-speculatively.")
    if color:
        print(f"{GREEN}Green{RESET}: drafted by the early layers and accepted by all.")
    print()
    answers: dict[str, list[Answers]] = {kind: [] for kind in prompts}
    for kind, of_kind in prompts.items():
        for number, prompt in enumerate(of_kind, start=1):
            print(f"[{kind} {number}/{len(of_kind)}] {user_text(prompt)}\n", flush=True)
            answers[kind].append(answerer.both(prompt))
    print_summary(answers)
    if arguments.output_dir is not None:
        print(f"\nThe trained adapters are in {arguments.output_dir}.")


# --- The closing table -----------------------------------------------------------------------------------------------


def print_summary(answers: dict[str, list[Answers]]) -> None:
    """Prints a column of figures for each kind of prompts, and every difference of tokens."""
    columns = {kind: summarized(of_kind) for kind, of_kind in answers.items()}
    names = next(iter(columns.values())).keys()
    print(format_table(["", *columns], [[name, *(column[name] for column in columns.values())] for name in names]))
    for kind, of_kind in answers.items():
        for number, both in enumerate(of_kind, start=1):
            if both.identical != "yes":
                print(f"  {kind} {number}: {both.identical}")


def summarized(answers: Sequence[Answers]) -> dict[str, object]:
    """Returns the figures of some prompts together, by the name of their line."""
    plain = layerskip.Statistics.total([both.autoregressive for both in answers])
    fast = layerskip.Statistics.total([both.self_speculative for both in answers])
    speeds = plain.decode_tokens_per_second, fast.decode_tokens_per_second
    return {
        "exit_layer": fast.exit_layer,
        "num_draft_tokens": fast.num_draft_tokens,
        "autoregressive tokens/s": speeds[0],
        "self_speculative tokens/s": speeds[1],
        "speed-up": speeds[1] / speeds[0] if speeds[0] and speeds[1] else None,
        "autoregressive early, late_layer_tokens": f"{plain.early_layer_tokens}, {plain.late_layer_tokens}",
        "self_speculative early, late_layer_tokens": f"{fast.early_layer_tokens}, {fast.late_layer_tokens}",
        "draft_acceptance_rate": fast.draft_acceptance_rate,
        "mean_acceptance_length": fast.mean_acceptance_length,
        "acceptance_by_position": " ".join(f"{rate:.2f}" for rate in fast.acceptance_by_position) or None,
        "identical answers": f"{sum(both.identical == 'yes' for both in answers)} of {len(answers)}",
    }


if __name__ == "__main__":
    run_program(run)
