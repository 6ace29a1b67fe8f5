"""Measures within some minutes what matters for self-speculative decoding on a GPU: exactness, speeds, costs.

    pip install --no-deps --no-build-isolation -e .
    TQDM_DISABLE=1 python inference/benchmark_gpu.py --output gpu.json
    python inference/benchmark_gpu.py --device cpu --shape tiny --minutes 1 --steps exactness,eager --output try.json

A machine without a network needs, beside this checkout: a wheel of transformers >= 5.24 where it has an older one
(`pip install --no-deps transformers-*.whl`), and for the steps on a checkpoint the demo's base model, the folder
smollm2-135m-instruct of your cache directory, with LAYERSKIP_CACHE naming the folder that it stands in (without it
these two steps are left out; --download fetches it), and peft. TQDM_DISABLE=1 keeps progress bars out of a log.

The steps, in this order, or those of --steps:
- `exactness`, `exactness-compiled`: whether the greedy tokens of every lever are those of plain decoding, one by one,
  on a small random model in fp32.
- `checkpoint`, `checkpoint-compiled`: on --model and its prompts (voice commands, or --prompts) what rounds cost, the
  exit and draft length that are best by these costs, and then every lever in turn on each prompt: tokens/s, `ratio` to
  plain decoding (compiled levers to compiled plain decoding), and acceptance.
- `compiled`: on a model of --shape with random weights, plain decoding and rounds of several draft lengths as compiled
  graphs, and what they would give at assumed acceptances.
- `eager`: plain decoding by the engine, and by transformers.
- `costs`: drafts and verifications of every width, eager, and what follows from them likewise.
- `hf-compiled`: transformers' own compiled decoding with a static cache.

The time limit is looked at between measurements: what it leaves out is told as "not reached". FILE gets everything as
JSON and is written anew after every measurement, so that it is whole whenever the machine ends the program. Times are
taken up to when tokens have been read from the device. `first_call_seconds` is what the first call took longer than a
later one, above all compiling; `peak_MB` what all tensors took at most, `loaded_MB` of it being there before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from layerskip import demo
from layerskip.comparison.checkpoint_levers import COMPILED, EAGER, CheckpointRun, CheckpointSettings
from layerskip.comparison.gpu import SHAPES, Exactness, Shape, ShapeRun
from layerskip.comparison.gpu_report import (
    EXACTNESS,
    LEVERS,
    SPEEDS,
    compiled_predictions,
    costs_report,
    eager_predictions,
    eager_table,
    figures_table,
    findings_table,
    predictions_table,
)
from layerskip.comparison.machine import processor
from layerskip.comparison.time_limit import (
    CUT_SHORT,
    DONE,
    NOT_REACHED,
    Finding,
    LeftOut,
    Task,
    TimeLimit,
    run_tasks,
)
from layerskip.decoding.cost import CostTable
from layerskip.decoding.engine import Engine
from layerskip.files import write_text
from layerskip.program import load_engine, run_program
from layerskip.prompt_file import PromptRow, prompt_rows

ROOT = Path(__file__).resolve().parents[1]
STEPS = (
    *("exactness", "exactness-compiled", "checkpoint", "checkpoint-compiled"),
    *("compiled", "eager", "costs", "hf-compiled"),
)
COMMANDS = 10
Found = dict[str, dict[str, Finding]]


# --- What is asked for ------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", required=True, type=Path, metavar="FILE", help="the JSON file")
    add("--minutes", type=float, default=7.0, help="time limit (default 7)")
    add("--steps", default=",".join(STEPS), help="such as compiled,costs; by default all")
    add("--device", default="cuda", help="cuda (default), cuda:1, …; cpu for trying the program")
    add("--shape", choices=SHAPES, default="llama-3.2-1b", help="of the model with random weights")
    add("--model", default="demo", help="a local folder, a hub id, demo-base or demo (default)")
    add("--prompts", type=Path, metavar="FILE", help=f".txt or .jsonl; by default {COMMANDS} voice commands")
    add("--download", action="store_true", help="fetch --model where it is not on this machine")
    return parser.parse_args()


def read_steps(text: str) -> list[str]:
    """Returns the steps that are asked for, in the order of `STEPS`; raises ValueError for unknown ones."""
    given = [name.strip() for name in text.split(",")]
    unknown = [name for name in given if name not in STEPS]
    if unknown:
        raise ValueError(f"--steps {unknown[0]!r} is unknown; allowed are {', '.join(STEPS)}.")
    return [name for name in STEPS if name in given]


def read_device(text: str) -> torch.device:
    """Returns the device; raises ValueError where it is none of this machine's, or of another kind."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"--device {text!r} is no device; pass cuda, cuda:1 or cpu.") from None
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"--device {text} is not supported here; pass cuda, or cpu for trying the program.")
    devices = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= devices:
        raise ValueError(
            f"--device {text} needs a CUDA device, and torch finds {devices or 'none'} here; run it on a machine with "
            "a GPU, or pass --device cpu for trying the program."
        )
    return device


def check_arguments(arguments: argparse.Namespace) -> None:
    """Checks what is left; raises ValueError and OSError by name."""
    if not arguments.minutes > 0:
        raise ValueError(f"--minutes {arguments.minutes:g} is out of range; allowed are numbers above 0.")
    if arguments.output.is_dir() or not arguments.output.absolute().parent.is_dir():
        raise ValueError(f"--output {arguments.output} is to be a file in a folder that is there; make that first.")
    if arguments.prompts is not None:
        prompt_rows(arguments.prompts)


# --- The checkpoint ---------------------------------------------------------------------------------------------------


def is_here(model: str) -> bool:
    """Whether what `--model` names can be loaded without a network."""
    return demo.is_here() if model in ("demo", "demo-base") else Path(model).is_dir()


def load_checkpoint(arguments: argparse.Namespace, device: torch.device) -> tuple[Engine, list[PromptRow]]:
    """Returns an engine for the checkpoint, and its prompts; raises LeftOut where it would have to be fetched."""
    if not arguments.download and not is_here(arguments.model):
        raise LeftOut(f"--model {arguments.model} is not on this machine; bring it along, or pass --download")
    rows = voice_commands() if arguments.prompts is None else prompt_rows(arguments.prompts)
    return load_engine(arguments.model, ROOT, device=device), rows


def voice_commands() -> list[PromptRow]:
    """Returns some commands of the test split, which training has not seen; raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="layerskip-") as temporary:
        rows = Path(temporary, "commands.jsonl")
        options = ["--split", "test", "--rows", str(COMMANDS), "--out", str(rows)]
        program = str(ROOT / "training" / "voice_commands.py")
        subprocess.run([sys.executable, program, *options], check=True, stdout=subprocess.DEVNULL)
        return prompt_rows(rows)


# --- What is measured -------------------------------------------------------------------------------------------------


def plan_tasks(arguments: argparse.Namespace, device: torch.device) -> dict[str, list[Task]]:
    """Returns the measurements of every step; nothing is made yet."""
    checkpoint = CheckpointRun(partial(load_checkpoint, arguments, device), CheckpointSettings())
    eager = [
        Task.once("costs", checkpoint.measure_costs),
        Task("levers", partial(checkpoint.measure_levers, EAGER)),
    ]
    return {
        **Exactness(device).tasks(),
        "checkpoint": eager,
        "checkpoint-compiled": [Task("levers", partial(checkpoint.measure_levers, COMPILED))],
        **ShapeRun(SHAPES[arguments.shape], device).tasks(),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Returns what everything is measured on."""
    is_cuda = device.type == "cuda"
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if is_cuda else None,
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "cuda": torch.version.cuda,
        "versions": {name: version(name) for name in ("layerskip", "torch", "transformers")},
    }


# --- What comes out ---------------------------------------------------------------------------------------------------


def predictions(shape: Shape, found: Found) -> dict[str, Any]:
    """Returns what follows from the figures of the shape, as far as they are there."""
    costs = found.get("costs", {}).get("costs")
    has_costs = costs is not None and costs.status == DONE
    return {
        "compiled": compiled_predictions(shape, found.get("compiled", {})),
        "eager": eager_predictions(shape, table_of(costs)) if has_costs and costs is not None else [],
    }


def table_of(finding: Finding) -> CostTable:
    """Returns the table of costs in a finding."""
    return CostTable.read(finding.figures["cost_table"], "the finding")


def write(path: Path, about: dict[str, Any], found: Found, shape: Shape) -> None:
    """Writes everything that was found so far, whole."""
    unfinished = (NOT_REACHED, CUT_SHORT)
    summary = {
        "complete": not any(each.status in unfinished for step in found.values() for each in step.values()),
        **about,
        "steps": {step: {name: asdict(each) for name, each in findings.items()} for step, findings in found.items()},
        "predicted": predictions(shape, found),
    }
    write_text(path, json.dumps(summary, indent=1, default=str) + "\n")


def tables(step: str, found: Found, shape: Shape) -> list[str]:
    """Returns the tables of a step."""
    findings = list(found[step].values())
    if step.startswith("exactness"):
        return [findings_table(findings, EXACTNESS)]
    if step.startswith("checkpoint"):
        return [table for each in findings for table in checkpoint_tables(each)]
    following = predictions(shape, found)
    if step == "costs":
        done = [each for each in findings if each.status == DONE]
        return [text for each in done for text in (costs_report(table_of(each)), eager_table(following["eager"]))]
    speeds = findings_table(findings, SPEEDS)
    return [speeds, predictions_table(shape, following["compiled"])] if step == "compiled" else [speeds]


def checkpoint_tables(finding: Finding) -> list[str]:
    """Returns the tables of one finding on the checkpoint, none where it has no figures."""
    if not finding.figures:
        return []
    if finding.name == "costs":
        best, agreement = finding.figures["best_cell"], finding.figures["agreement"]
        told = " ".join(f"E={layer}: {rate:.2f}" for layer, rate in agreement.items())
        cell = (
            f"best by these costs: E={best['exit_layer']} γ={best['num_draft_tokens']}, {best['predicted']:.2f} times"
        )
        return [f"{costs_report(table_of(finding))}\nagreement with the model: {told}\n{cell}"]
    failed = [f"{label}  failed: {reason}" for label, reason in finding.figures["failed"].items()]
    rows = [(lever["name"], lever) for lever in finding.figures["levers"]]
    return ["\n".join([figures_table(rows, LEVERS), *failed])]


def show(step: str, findings: Sequence[Finding], texts: Sequence[str]) -> None:
    """Prints the tables of a step, and what is not done."""
    for text in texts:
        if text:
            print(f"\n{step}\n{text}")
    for each in findings:
        if each.status != DONE:
            print(f"{step}/{each.name}: {each.status}" + ("" if each.reason is None else f", {each.reason}"))
    sys.stdout.flush()


def run() -> None:
    """Measures, printing a table for each step, and writes the file after every measurement."""
    arguments = parse_arguments()
    check_arguments(arguments)
    steps, device = read_steps(arguments.steps), read_device(arguments.device)
    limit, shape = TimeLimit(arguments.minutes), SHAPES[arguments.shape]
    about = {"machine": machine(device), "settings": vars(arguments)}
    planned = plan_tasks(arguments, device)
    found: Found = {step: {task.name: Finding(task.name, NOT_REACHED) for task in planned[step]} for step in steps}
    for step in steps:
        for finding in run_tasks(planned[step], limit):
            found[step][finding.name] = finding
            write(arguments.output, about, found, shape)
        show(step, list(found[step].values()), tables(step, found, shape))
        print(f"{limit.seconds:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(run)
