"""Finds out which exit layer and draft length pay on your prompts and this machine, and why.

    python inference/compare_exits.py --model PATH_OR_ID --prompts prompts.jsonl --output-dir runs/exits
    python inference/compare_exits.py --model PATH --prompts prompts.jsonl --exit-layers 2,4,8 --output-dir DIR --save

1. All layers answer the prompts greedily, and one more pass over the answers reads every exit: perplexity, agreement of
   its first choice with the last layer's, expected acceptance Σ min(p, q) at --temperature, and at which layer each
   token is decided for good. Penalties and the like in generation_config.json are left out: a replay cannot see them.
2. The cost of a draft and of a verification of every width is measured on this machine with rounds of the engine.
3. Greedy rounds are replayed for every exit and draft length from which choices were right, and their exact counts
   times the costs predict the speed over plain decoding.
4. The best cell, its neighbours and the next best ones are run for real, beside plain decoding.

DIR gets exits.json (everything), exits.csv (a row for each exit and γ), quality.png, decided.png, tokens.png,
heatmap.png and predicted.png. Ctrl-C keeps what is done, and --resume goes on. --save writes the recommendation and the
costs into the checkpoint, where `layerskip.load` finds them; where no exit is faster than plain decoding, it writes
that, and generation is then autoregressive. Prompts: a .txt file, one a line, or a .jsonl file whose rows have
`prompt`, `messages`, `question`, `turns` (of which the first is asked) or `text`, and perhaps a `category`. The last
line on standard output is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

from layerskip.comparison.batches import first_rows, token_rows
from layerskip.comparison.compare import Comparison, ComparisonSettings
from layerskip.comparison.comparison_folder import holds_comparison
from layerskip.comparison.exit_report import categories_table, exits_table, measured_table
from layerskip.comparison.plots import require_matplotlib
from layerskip.decoding.engine import Engine
from layerskip.decoding.plan import check_exit_layer
from layerskip.program import check_least, load_engine, read_numbers, run_program, writable_checkpoint
from layerskip.prompt_file import as_chat, prompt_rows

ROOT = Path(__file__).resolve().parents[1]
# What is recommended has to be faster in each of them.
SAVED_REPEATS = 3
# Below it fp32 no longer holds the scaled logits.
LEAST_TEMPERATURE = 0.01


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder, a hub id, demo or demo-base")
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE", help="a .txt or .jsonl file")
    parser.add_argument("--output-dir", required=True, type=Path, metavar="DIR", help="where everything goes")
    parser.add_argument("--exit-layers", help="such as 2,4,8, or all; by default those that were trained, else all")
    parser.add_argument("--max-num-draft-tokens", type=int, default=12, help="longest draft (default 12)")
    parser.add_argument("--draft-vocab-size", type=int, help="how many token ids to draft from; see Engine")
    parser.add_argument("--rows", type=int, help="at most how many prompts, from the first on; default all")
    parser.add_argument("--category-rows", type=int, help="at most how many prompts of each category")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer (default 64)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts that are answered together (default 8)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the expected acceptance (default 1)")
    parser.add_argument("--run-cells", type=int, default=6, help="how many cells to run for real (default 6)")
    parser.add_argument("--run-rows", type=int, default=12, help="on how many of the prompts (default 12)")
    parser.add_argument("--repeats", type=int, default=3, help="passes over these (default 3)")
    parser.add_argument("--cost-repeats", type=int, default=7, help="passes over all costs (default 7)")
    parser.add_argument("--dtype", default="auto", help="auto (default), bfloat16, float16 or float32")
    parser.add_argument("--device", help="cpu, cuda, …; by default CUDA where there is a device")
    parser.add_argument("--save", action="store_true", help="write the recommendation and costs into the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted comparison in DIR")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Checks what can be checked without a model; raises ValueError by name."""
    counts = ("max_num_draft_tokens", "rows", "category_rows", "batch_size", "run_cells", "run_rows")
    # Fewer than three new tokens leave no room for a draft.
    check_least(arguments, {**dict.fromkeys((*counts, "repeats", "cost_repeats"), 1), "max_new_tokens": 3})
    if arguments.exit_layers not in (None, "all"):
        read_numbers("--exit-layers", arguments.exit_layers)
    if arguments.save and arguments.repeats < SAVED_REPEATS:
        raise ValueError(
            f"--save with --repeats {arguments.repeats} would store what may be noise; pass {SAVED_REPEATS} or more."
        )
    if not LEAST_TEMPERATURE <= arguments.temperature < float("inf"):
        raise ValueError(f"--temperature {arguments.temperature} is out of range; pass {LEAST_TEMPERATURE} or more.")


def choose_exit_layers(text: str | None, engine: Engine) -> tuple[int, ...]:
    """Returns the exits to compare: those given, else those that were trained, else all; raises ValueError."""
    num_layers = engine.layered.num_layers
    trained = sorted(set(engine.metadata.exit_layers))
    if text == "all" or (text is None and not trained):
        check_exit_layer(1, num_layers)
        return tuple(range(1, num_layers))
    exit_layers = trained if text is None else read_numbers("--exit-layers", text)
    for exit_layer in exit_layers:
        check_exit_layer(exit_layer, num_layers)
    return tuple(exit_layers)


def settings_of(arguments: argparse.Namespace) -> ComparisonSettings:
    """Returns the settings that the command line gives."""
    return ComparisonSettings(**{each.name: getattr(arguments, each.name) for each in fields(ComparisonSettings)})


def run() -> None:
    """Compares, printing a table after every step and one line of JSON at the end."""
    arguments = parse_arguments()
    check_arguments(arguments)
    require_matplotlib()
    holds_comparison(arguments.output_dir, resume=arguments.resume)
    checkpoint = writable_checkpoint(arguments.model, ROOT) if arguments.save else None
    rows = first_rows(prompt_rows(arguments.prompts), arguments.rows, arguments.category_rows)
    engine = load_engine(
        arguments.model,
        ROOT,
        draft_vocab_size=arguments.draft_vocab_size,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    # Names the file and line of a prompt that this model cannot take.
    token_rows(rows, engine)
    comparison = Comparison.open(
        engine,
        as_chat([row.prompt for row in rows], engine.tokenizer),
        [row.category for row in rows],
        choose_exit_layers(arguments.exit_layers, engine),
        settings_of(arguments),
        arguments.output_dir,
        {"model": arguments.model, "prompts_file": str(arguments.prompts)},
        resume=arguments.resume,
    )
    if comparison.about["left_out"]:
        print(f"left out of the checkpoint's generation config: {comparison.about['left_out']}", file=sys.stderr)
    try:
        comparison.read_exits()
        print("\n" + exits_table(comparison.found), flush=True)
        comparison.measure_costs()
        recommendation = comparison.run_cells()
        comparison.write()
        comparison.draw()
    except KeyboardInterrupt:
        print(f"\ninterrupted; {arguments.output_dir} keeps what is done, and --resume goes on", file=sys.stderr)
        comparison.write()
        comparison.draw()
        raise
    for table in (exits_table, categories_table, measured_table):
        if text := table(comparison.found):
            print("\n" + text)
    print(f"\n{recommendation.reason[0].upper()}{recommendation.reason[1:]}")
    if checkpoint is not None:
        comparison.save(checkpoint)
        print(f"The recommendation and the costs stand in {checkpoint} now.")
    print(json.dumps({"output_dir": str(arguments.output_dir), **asdict(recommendation)}))


if __name__ == "__main__":
    run_program(run)
