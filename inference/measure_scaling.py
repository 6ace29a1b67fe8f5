r"""Measures what a token costs by context and batch size, and finds out where drafting stops paying.

    python inference/measure_scaling.py --model PATH_OR_ID --output-dir runs/scaling --acceptance 0.85
    python inference/measure_scaling.py --model demo --exit-layers 2,4 --contexts 128,1024 --batch-sizes 1,8 \
      --output-dir DIR --cache-bytes

For every context and batch size the cost of a draft and of a verification of every width is measured on this machine
with rounds of the engine, behind the same context in every row. From these follows what a token costs at a given
acceptance, the chance that a draft is accepted behind an accepted one: a step of plain decoding gives a token for each
row, a round of γ drafts 1 + α + … + α^γ for each row on average. The draft length is the one that makes a token
cheapest, and `chosen γ` what a controller that knows these costs decodes with: 0, plain decoding, where no length pays.
Acceptance is what the model and its texts make of it, and is not measured here: exits.json and the statistics of
`generate` have it.

DIR gets scaling.json (everything), scaling.csv (a row for each context, batch size, exit and acceptance) and
scaling.png. The first two are there from the first table on, and Ctrl-C keeps what is done. --cache-bytes adds the size
of the shared cache beside that of transformers' DynamicCache at the longest context. The last line on standard output
is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip.comparison.batches import token_rows
from layerskip.comparison.machine import describe_machine
from layerskip.comparison.memory import CacheSizes, cache_sizes
from layerskip.comparison.plots import require_matplotlib
from layerskip.comparison.scaling import (
    ScalingPoint,
    check_scaling,
    measure_scaling,
    repeated,
    scaling_points,
    some_tokens,
)
from layerskip.comparison.scaling_plot import cost_by_context
from layerskip.comparison.scaling_report import cache_table, limits, limits_table, points_table, write_scaling
from layerskip.decoding.cost import CostTable
from layerskip.decoding.engine import Engine
from layerskip.program import check_least, load_engine, read_numbers, run_program
from layerskip.prompt_file import PromptRow, prompt_rows

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Grid:
    """What is measured, and at which rates it is looked at, each in rising order."""

    contexts: list[int]
    batch_sizes: list[int]
    acceptances: list[float]


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder, a hub id, demo or demo-base")
    parser.add_argument("--output-dir", required=True, type=Path, metavar="DIR", help="where everything goes")
    parser.add_argument("--contexts", default="128,512,1024,2048,4096", help="tokens in the cache, such as 128,4096")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16", help="rows that decode together, such as 1,8")
    parser.add_argument("--acceptance", default="0.5,0.7,0.9", help="α from 0 to 1, such as 0.5,0.85")
    parser.add_argument("--exit-layers", help="such as 2,4; by default the one that the checkpoint recommends")
    parser.add_argument("--max-num-draft-tokens", type=int, default=12, help="longest draft (default 12)")
    parser.add_argument("--draft-vocab-size", type=int, help="how many token ids to draft from; see Engine")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a .txt or .jsonl file, whose text fills contexts")
    parser.add_argument("--cost-repeats", type=int, default=7, help="passes over all costs (default 7)")
    parser.add_argument("--cache-bytes", action="store_true", help="also compare the sizes of caches")
    parser.add_argument("--dtype", default="auto", help="auto (default), bfloat16, float16 or float32")
    parser.add_argument("--device", help="cpu, cuda, …; by default CUDA where there is a device")
    return parser.parse_args()


def read_grid(arguments: argparse.Namespace) -> Grid:
    """Returns the grid that the command line gives; raises ValueError by flag for what cannot be in one."""
    # A cache has to hold a step behind a prompt where its size is asked for.
    contexts = read_counts("--contexts", arguments.contexts, 2 if arguments.cache_bytes else 1)
    return Grid(contexts, read_counts("--batch-sizes", arguments.batch_sizes, 1), read_rates(arguments.acceptance))


def read_counts(flag: str, text: str, least: int) -> list[int]:
    """Returns the different numbers of a list, in rising order; raises ValueError by flag for one below `least`."""
    counts = read_numbers(flag, text)
    if counts[0] < least:
        raise ValueError(f"{flag} {text} has {counts[0]}, which is out of range; allowed are integers from {least} on.")
    return counts


def read_rates(text: str) -> list[float]:
    """Returns the different rates of a list, in rising order; raises ValueError for what is none."""
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--acceptance {text!r} is not a list of rates such as 0.5,0.85.") from None
    if not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"--acceptance {text} is out of range; allowed are rates from 0 to 1.")
    return rates


def check_folder(path: Path) -> None:
    """Checks that a folder is empty or missing; raises ValueError."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output-dir {path} is a file; choose another folder.")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"--output-dir {path} is not empty; choose another folder.")


def choose_exit_layers(text: str | None, engine: Engine) -> list[int]:
    """Returns the exits given, else the recommended one; raises ValueError where there is none."""
    if text is not None:
        return read_numbers("--exit-layers", text)
    if engine.metadata.exit_layer is None:
        raise ValueError(
            "the checkpoint recommends no exit; pass --exit-layers, or find out with inference/compare_exits.py --save."
        )
    return [engine.metadata.exit_layer]


def context_tokens(rows: Sequence[PromptRow], engine: Engine) -> list[int]:
    """Returns the tokens that contexts are made of: those of all prompts, or some of the vocabulary without any."""
    if not rows:
        return some_tokens(engine.layered.vocab_size)
    return [token for tokens in token_rows(rows, engine) for token in tokens]


def measure(
    engine: Engine, arguments: argparse.Namespace, grid: Grid, rows: Sequence[PromptRow]
) -> tuple[list[ScalingPoint], CacheSizes | None]:
    """Measures all contexts and batch sizes, writes what there is after each, and returns everything."""
    folder, longest = arguments.output_dir, arguments.max_num_draft_tokens
    exit_layers = choose_exit_layers(arguments.exit_layers, engine)
    check_scaling(engine, exit_layers, longest, grid.contexts)
    tokens = context_tokens(rows, engine)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = cache_sizes(engine.layered, repeated(tokens, grid.contexts[-1])) if arguments.cache_bytes else None
    points: list[ScalingPoint] = []
    tables: list[CostTable] = []
    about = {"settings": settings_of(arguments), "exit_layers": exit_layers, **describe_machine(engine.model)}
    try:
        for context, costs in measure_scaling(
            engine, exit_layers, longest, tokens, grid.contexts, grid.batch_sizes, arguments.cost_repeats
        ):
            tables.append(costs)
            points += scaling_points(costs, context, grid.acceptances)
            complete = len(tables) == len(grid.contexts) * len(grid.batch_sizes)
            write_scaling(folder, points, tables, sizes, {"complete": complete, **about})
    finally:
        if points:
            cost_by_context(points, folder / "scaling.png")
    return points, sizes


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the command line's arguments as JSON takes them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}


def run() -> None:
    """Measures, printing tables and one line of JSON at the end."""
    arguments = parse_arguments()
    check_least(arguments, {"max_num_draft_tokens": 1, "cost_repeats": 1})
    grid = read_grid(arguments)
    if arguments.exit_layers is not None:
        read_numbers("--exit-layers", arguments.exit_layers)
    require_matplotlib()
    check_folder(arguments.output_dir)
    rows = [] if arguments.prompts is None else prompt_rows(arguments.prompts)
    loading = {name: vars(arguments)[name] for name in ("draft_vocab_size", "dtype", "device")}
    engine = load_engine(arguments.model, ROOT, **loading)
    try:
        points, sizes = measure(engine, arguments, grid, rows)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {arguments.output_dir} keeps what is done", file=sys.stderr)
        raise
    print("\n" + points_table(points))
    print("\n" + limits_table(points))
    if sizes is not None:
        print("\n" + cache_table(sizes))
    print(json.dumps({"output_dir": str(arguments.output_dir), "limits": limits(points)}))


if __name__ == "__main__":
    run_program(run)
