r"""Measures every lever of self-speculative decoding, alone and together, against what its costs predict.

    python inference/compare_levers.py --model PATH_OR_ID --prompts rows.jsonl
    python inference/compare_levers.py --model PATH_OR_ID --prompts rows.jsonl --exit-layers 2,3,4 \
      --static-exit-layer 3 --static-num-draft-tokens 4 --category-rows 8 --top-k --output-dir runs/levers

Levers: `autoregressive` (always first: what the others are compared with) is plain decoding. `static` drafts γ tokens
from one exit; `adaptive` ends a draft where one more no longer pays; `ngrams` drafts behind copied spans, which the
exit checks, and `trusted` takes them as they stand; `auto` chooses exit and length before every round; `all` is auto,
adaptive and ngrams, `all-trusted` auto, adaptive and trusted, `adaptive+ngrams` these two; `tree-8` drafts trees of 8
nodes, for each size of --tree-nodes. With --compile there are `compiled-autoregressive` and `compiled-static`. All
decode greedily, and emit plain decoding's tokens.

1. The cost of a draft and of a verification of every width is measured on this machine, behind the prompt of median
   length; adaptive and auto decide by these costs, and by what the checkpoint's own table expects of its exits.
2. All levers answer each prompt in turn. `predicted` is the speed over plain decoding that follows from the rounds that
   a lever ran and these costs, `measured` what it was: the median over repeats, and the lowest and the highest.
   Compiled rounds cost something else and have no prediction. The other columns: accepted drafts over drafted ones; V,
   drafts that were verified in a round; and rounds by exit, of which those of the last layer are plain steps.
3. With --top-k, how often each exit has the right token among its first 1, 2, 4 or 8 choices, and what chains (k = 1)
   and full trees of so many children would give by the same costs.

The tables are printed after every repeat; the last line is JSON with everything, the costs too, which DIR gets as
levers.json. Answers that differ from plain decoding's are audited for near ties, as in benchmark.py. A lever that fails
is reported and the others go on; Ctrl-C ends with what there is so far.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from layerskip.comparison.answer_audit import AnswerAudit, audit_answers
from layerskip.comparison.arms import Arm, engine_arm
from layerskip.comparison.batches import Batch, first_rows, make_batches
from layerskip.comparison.benchmark import Measurement, Sample, category_ratios, summarise, timed, warm_up
from layerskip.comparison.latency import measure_costs, rounds_length
from layerskip.comparison.levers import (
    BASELINE,
    LeverFigures,
    LeverSettings,
    best_trees,
    costs_table,
    lever_names,
    lever_options,
    levers_table,
    needs_exit,
    top_k_rates,
    top_k_table,
)
from layerskip.comparison.machine import describe_machine
from layerskip.comparison.table import format_table
from layerskip.decoding.cost import CostTable
from layerskip.decoding.engine import Engine
from layerskip.decoding.plan import DEFAULT_NUM_DRAFT_TOKENS, MAX_TREE_NODES, Wishes, check_exit_layer
from layerskip.files import write_text
from layerskip.program import check_least, load_engine, read_numbers, run_program
from layerskip.prompt_file import prompt_rows

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class State:
    """What a comparison has so far, which is reported when it is interrupted.

    Attributes:
        arms: one for each lever, plain decoding first.
        categories: of each prompt.
        costs: what rounds cost.
        samples: timed runs.
        failed: what was wrong with an arm, by label, as of `audits`.
        audits: of answers, once all are there.
        top_k: {E: {k: rate}}, where that is asked for.
    """

    arms: list[Arm]
    categories: list[str | None]
    costs: CostTable
    samples: list[Sample] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    audits: dict[str, AnswerAudit] = field(default_factory=dict)
    top_k: dict[int, dict[int, float]] = field(default_factory=dict)

    @property
    def sound(self) -> list[Arm]:
        """The arms that have not failed.

        Raises:
            ValueError: plain decoding has.
        """
        if BASELINE in self.failed:
            raise ValueError(f"{BASELINE}, which all others are compared with, failed: {self.failed[BASELINE]}")
        return [arm for arm in self.arms if arm.label not in self.failed]

    def measurements(self) -> list[Measurement]:
        """Returns what was measured of the arms that have not failed; errors are as of `summarise`."""
        return summarise(self.sound, self.samples)

    def figures(self, num_layers: int) -> list[LeverFigures]:
        """Returns the figures of the same levers; L is the model's."""
        return [LeverFigures.of(each, self.costs, num_layers) for each in self.measurements()]


# --- What is asked for ------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="a local folder, a hub id, demo or demo-base")
    add("--prompts", required=True, type=Path, metavar="FILE", help="a .txt or .jsonl file, as of benchmark.py")
    add("--levers", help="such as static,adaptive,tree-8; by default all")
    add("--exit-layers", help="exits for auto, such as 2,3,4; by default those that were trained, else the static one")
    add("--num-draft-tokens", type=int, default=8, help="longest draft of adaptive and auto (default 8)")
    add("--static-exit-layer", type=int, metavar="E", help="by default the checkpoint's recommended one")
    add("--static-num-draft-tokens", type=int, metavar="γ", help="likewise")
    add("--tree-nodes", default="8,16", help="sizes of trees (default 8,16)")
    add("--tree-depth", type=int, default=DEFAULT_NUM_DRAFT_TOKENS, help="how deep they are at most (default 4)")
    add("--compile", action="store_true", help="measure compiled rounds too")
    add("--top-k", action="store_true", help="look for the right token among each exit's first choices")
    add("--draft-vocab-size", type=int, help="how many token ids to draft from; see Engine")
    add("--rows", type=int, metavar="N", help="at most how many prompts, from the first on")
    add("--category-rows", type=int, metavar="N", help="at most how many prompts of each category")
    add("--stop-at-eos", action="store_true", help="let answers end with an end-of-sequence token")
    add("--max-new-tokens", type=int, default=64, help="default 64")
    add("--repeats", type=int, default=3, help="timed passes over all prompts (default 3)")
    add("--cost-repeats", type=int, default=5, help="passes over all costs (default 5)")
    add("--dtype", default="auto", help="auto (default), bfloat16, float16 or float32")
    add("--device", help="cpu, cuda, …; by default CUDA where there is a device")
    add("--output-dir", type=Path, metavar="DIR", help="where levers.json goes")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> tuple[list[str], tuple[int, ...]]:
    """Returns the levers to measure, plain decoding first, and the sizes of trees.

    Raises:
        ValueError: what can be seen to be wrong without a model, by name.
    """
    ones = ("num_draft_tokens", "static_num_draft_tokens", "tree_depth", "rows", "category_rows")
    least = dict.fromkeys((*ones, "repeats", "cost_repeats"), 1)
    check_least(arguments, {**least, "max_new_tokens": 2})
    if arguments.exit_layers is not None:
        read_numbers("--exit-layers", arguments.exit_layers)
    nodes = read_numbers("--tree-nodes", arguments.tree_nodes)
    if not 1 <= nodes[0] <= nodes[-1] <= MAX_TREE_NODES:
        raise ValueError(f"--tree-nodes {arguments.tree_nodes} is out of range; allowed are 1 to {MAX_TREE_NODES}.")
    known = lever_names(nodes, arguments.compile)
    given = known if arguments.levers is None else [name.strip() for name in arguments.levers.split(",")]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"--levers {unknown[0]!r} is unknown; allowed are {', '.join(known)}.")
    folder = arguments.output_dir
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"--output-dir {folder} is a file; choose a folder.")
    return [name for name in known if name in (BASELINE, *given)], tuple(nodes)


def choose_settings(
    arguments: argparse.Namespace, levers: Sequence[str], tree_nodes: tuple[int, ...], engine: Engine
) -> tuple[LeverSettings, list[int]]:
    """Returns what the levers are run with, and the exits whose costs they need.

    Raises:
        ValueError: no exit or draft length where one is needed, or none that the model has.
    """
    metadata, exit_layer, drafts = engine.metadata, arguments.static_exit_layer, arguments.static_num_draft_tokens
    if exit_layer is None:
        exit_layer = metadata.exit_layer
        drafts = metadata.num_draft_tokens if drafts is None else drafts
    needing = [name for name in levers if needs_exit(name)]
    if needing and (exit_layer is None or drafts is None):
        why = "the checkpoint recommends none"
        if metadata.compared and metadata.exit_layer is None:
            why = "the checkpoint says that none pays"
        raise ValueError(
            f"{', '.join(needing)} needs --static-exit-layer and --static-num-draft-tokens, such as 4 and 3: {why}."
        )
    exits = list(metadata.exit_layers)
    if arguments.exit_layers is not None:
        exits = read_numbers("--exit-layers", arguments.exit_layers)
    exits = sorted({*exits, *(() if exit_layer is None else (exit_layer,))})
    if not exits:
        raise ValueError("--exit-layers is needed, such as 2,3,4: the checkpoint does not say which were trained.")
    for each in exits:
        check_exit_layer(each, engine.layered.num_layers)
    settings = LeverSettings(
        exit_layer, drafts, arguments.num_draft_tokens, tree_nodes, arguments.tree_depth, arguments.compile
    )
    return settings, exits


# --- What is measured -------------------------------------------------------------------------------------------------


def begin(
    arguments: argparse.Namespace, levers: Sequence[str], settings: LeverSettings, exits: Sequence[int], engine: Engine
) -> tuple[Engine, list[Batch], State]:
    """Measures what rounds cost; returns an engine that decides by that, the prompts, and what there is so far.

    Raises:
        ValueError: prompts that cannot be read, or are too long for the model.
    """
    rows = first_rows(prompt_rows(arguments.prompts), arguments.rows, arguments.category_rows)
    batches, categories = make_batches(rows, engine, 1)
    prompts: list[list[int]] = sorted((batch.ids[0].tolist() for batch in batches), key=len)
    context = prompts[len(prompts) // 2]
    trees = [nodes for nodes in settings.tree_nodes if f"tree-{nodes}" in levers]
    widest = max(settings.longest, settings.num_draft_tokens or 0, *trees)
    engine.layered.check_length(len(prompts[-1]) + arguments.max_new_tokens, list(map(len, prompts)))
    engine.layered.check_length(len(context) + rounds_length(widest), [len(context)])
    costs = measure_costs(engine, exits, widest, context, arguments.cost_repeats)
    deciding = Engine(
        engine.model,
        engine.tokenizer,
        draft_vocab_size=engine.draft_vocab_size,
        draft_token_ids=engine.draft_token_ids,
        cost_table=costs.expecting(engine.cost_table),
    )
    options = lever_options(settings)
    arms = [engine_arm(name, deciding, stop_at_eos=arguments.stop_at_eos, **options[name]) for name in levers]
    return deciding, batches, State(arms, categories, costs)


def measure(state: State, arguments: argparse.Namespace, engine: Engine, batches: Sequence[Batch]) -> None:
    """Warms up, times and audits into `state`, and prints the tables after every repeat but the last."""
    budget, failed = arguments.max_new_tokens, state.failed
    warm_up(state.arms, batches, budget, failed=failed)
    for sample in timed(state.sound, batches, budget, arguments.repeats, failed=failed):
        if state.samples and sample.repeat > state.samples[-1].repeat:
            print_tables(state, state.figures(engine.layered.num_layers))
        state.samples.append(sample)
    how = {} if arguments.stop_at_eos else {"eos_token_id": None}
    state.audits = audit_answers(engine, BASELINE, state.samples, batches, budget, pad_token_id=0, **how)
    if arguments.top_k:
        answers = {each.batch: each.run.token_ids[0] for each in state.samples if each.arm == BASELINE}
        plan = engine.plan("self_speculative", Wishes(state.costs.exit_layers[0], 1))
        state.top_k = top_k_rates(
            engine.layered,
            [batches[index].ids[0].tolist() for index in answers],
            list(answers.values()),
            state.costs.exit_layers,
            engine.drafted_token_ids(plan),
        )


# --- What comes out ---------------------------------------------------------------------------------------------------


def print_tables(state: State, figures: Sequence[LeverFigures]) -> None:
    """Prints the figures, the ratios of each category where there are several, and what failed or differs."""
    print("\n" + levers_table(figures))
    ratios = category_ratios(state.sound, state.samples, state.categories)
    if ratios:
        table = [[each.lever, *(ratio[each.label] for ratio in ratios.values())] for each in figures]
        print("\n" + format_table(["measured", *ratios], table))
    for label, reason in state.failed.items():
        print(f"{label}  failed: {reason}")
    for label, audit in state.audits.items():
        if audit.differing:
            print(f"{label}  differs in {audit.differing} answers, at near ties in {audit.near_ties} of them")
    sys.stdout.flush()


def report(state: State, arguments: argparse.Namespace, engine: Engine, complete: bool) -> None:
    """Prints the tables and the line of JSON, and writes it; without figures where it was interrupted too early."""
    try:
        measurements = state.measurements()
    except ValueError:
        if complete:
            raise
        measurements = []
    num_layers, costs = engine.layered.num_layers, state.costs
    figures = [LeverFigures.of(each, costs, num_layers) for each in measurements]
    print_tables(state, figures)
    trees = best_trees(costs, state.top_k)
    if state.top_k:
        print("\n" + top_k_table(state.top_k, trees))
    summary = {
        "complete": complete,
        **describe_machine(engine.model),
        "settings": vars(arguments),
        "prompts": len(state.categories),
        "num_layers": num_layers,
        "levers": [asdict(each) for each in figures],
        "arms": [asdict(each) for each in measurements],
        "categories": category_ratios(state.sound, state.samples, state.categories),
        "costs": {
            str(exit_layer): {
                "c": costs.c(exit_layer),
                "verify_cost": [
                    costs.verify_cost(exit_layer, width) for width in range(costs.max_num_draft_tokens + 1)
                ],
            }
            for exit_layer in costs.exit_layers
        },
        "cost_table": costs.to_dict(),
        "top_k": state.top_k,
        "full_trees": [asdict(tree) for tree in trees],
        "failed": state.failed,
        "audits": {label: asdict(audit) for label, audit in state.audits.items()},
    }
    line = json.dumps(summary, default=str)
    if arguments.output_dir is not None:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        write_text(arguments.output_dir / "levers.json", line + "\n")
    print(line)


def run() -> None:
    """Measures, printing the tables after every repeat and one line of JSON at the end."""
    arguments = parse_arguments()
    levers, tree_nodes = check_arguments(arguments)
    loading = {name: vars(arguments)[name] for name in ("draft_vocab_size", "dtype", "device")}
    engine = load_engine(arguments.model, ROOT, **loading)
    if arguments.stop_at_eos and engine.model.generation_config.eos_token_id is None:
        raise ValueError("--stop-at-eos needs eos_token_id in the model's generation_config.json, and there is none.")
    settings, exits = choose_settings(arguments, levers, tree_nodes, engine)
    engine, batches, state = begin(arguments, levers, settings, exits, engine)
    print(costs_table(state.costs), flush=True)
    try:
        measure(state, arguments, engine, batches)
    except KeyboardInterrupt:
        report(state, arguments, engine, complete=False)
        raise
    report(state, arguments, engine, complete=True)


if __name__ == "__main__":
    run_program(run)
