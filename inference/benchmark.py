r"""Measures ways to generate with one model against each other: the engine's own, and those of transformers.

    python inference/benchmark.py --model PATH_OR_ID --prompts rows.jsonl
    python inference/benchmark.py --model PATH_OR_ID --exit-layers 4,8 --num-draft-tokens 2,4,8 --tune 8 \
      --methods self_speculative,hf_generate,hf_early_exit,hf_prompt_lookup,hf_compiled
    python inference/benchmark.py --model demo --prompts rows.jsonl --category-rows 4 --stop-at-eos --plot speed.png

Methods: `autoregressive` (always first: what the others are compared with) and `self_speculative` are the engine's.
`hf_generate` is plain `generate`; `hf_early_exit` its `assistant_early_exit`; `hf_prompt_lookup` drafts what followed
the same words before; `hf_compiled` has a static cache and compiled steps; `hf_assistant` drafts with
--assistant-model. Exits and draft lengths span a grid, of which each cell is measured; with --tune N each method first
runs all of its cells on N of the prompts, spread over their categories, and only its fastest is measured, on all. All
can draw tokens (--temperature).

Everything is warmed up on the same prompts. Then all arms answer each prompt in turn, with the same number of tokens
unless --stop-at-eos lets answers end as they do in use. Speeds are medians over repeats, without the time to the first
token, which is `prefill_seconds`; below a `ratio` of 1 an arm is slower than `autoregressive`. `same_as_first` counts
the answers that are `autoregressive`'s token by token. Counted in the warm-up: `layer_tokens`, layers × tokens for each
emitted token; `weight_bytes` and `cache_bytes`, the most keys and values alive at once; `peak_bytes` of a CUDA device;
`compile_seconds`; `outside_share`, of the time outside the calls of embedding, layers, norm and head. In steps of
plain decoding, `c` is what a draft costs, and `verify_cost` all the rest of a round. The table is printed after every
repeat, without empty columns and with 10⁶ bytes as MB; the last line is JSON with everything. Where greedy answers
differ from `autoregressive`'s, both say whether its logits had a near tie there, which rounding decides in bf16 and
fp16. A method that fails is reported in both; Ctrl-C ends with what there is so far.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip import demo
from layerskip.comparison import arms as ways
from layerskip.comparison.answer_audit import AnswerAudit, audit_answers
from layerskip.comparison.arms import Arm
from layerskip.comparison.batches import Batch, first_rows, make_batches, spread
from layerskip.comparison.benchmark import Measurement, Sample, category_ratios, summarise, timed, tune, warm_up
from layerskip.comparison.hooks import Counts
from layerskip.comparison.machine import describe_machine
from layerskip.comparison.plots import benchmark_bars, require_matplotlib
from layerskip.comparison.table import format_table
from layerskip.decoding.engine import Engine
from layerskip.decoding.plan import DEFAULT_NUM_DRAFT_TOKENS, check_exit_layer, check_num_draft_tokens
from layerskip.program import check_least, load_engine, read_numbers, run_program
from layerskip.prompt_file import PromptRow, prompt_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "autoregressive"
WITH_EXIT = ("self_speculative", "hf_early_exit")
# transformers' assisted generation takes one prompt at a time.
ONE_BY_ONE = ("hf_early_exit", "hf_prompt_lookup", "hf_assistant")
DRAFTING = ("self_speculative", *ONE_BY_ONE)
METHODS = (BASELINE, "hf_generate", "self_speculative", "hf_compiled", *ONE_BY_ONE)
# Of the table: figures by name, and what they are divided by.
COLUMNS = {
    "tokens/s": ("decode_tokens_per_second", 1),
    **{name: (name, 1) for name in ("lowest", "highest", "ratio")},
    "prefill_ms": ("prefill_seconds", 1e-3),
    **{name: (name, 1) for name in ("same_as_first", "answers", "draft_acceptance_rate")},
    "tokens_per_round": ("mean_acceptance_length", 1),
    "layer_tokens": ("layer_tokens", 1),
    **{f"{name}_MB": (f"{name}_bytes", 1e6) for name in ("weight", "cache", "peak")},
    **{name: (name, 1) for name in ("compile_seconds", "c", "verify_cost", "outside_share")},
}


@dataclass
class State:
    """What a benchmark has so far, which is reported when it is interrupted.

    Attributes:
        prompts: how many there are.
        arms: all that are measured, the baseline first.
        categories: of each batch.
        tuning: tokens per second of the cells that were tried; by label, as what follows.
        counts: of the warm-up.
        samples: timed runs.
        failed: what was wrong with an arm.
        audits: of greedy answers, once all are there.
    """

    prompts: int
    arms: list[Arm]
    categories: list[str | None]
    tuning: dict[str, float] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    audits: dict[str, AnswerAudit] = field(default_factory=dict)

    @property
    def sound(self) -> list[Arm]:
        """The arms that have not failed.

        Raises:
            ValueError: the baseline has.
        """
        if BASELINE in self.failed:
            raise ValueError(f"{BASELINE}, which all others are compared with, failed: {self.failed[BASELINE]}")
        return [arm for arm in self.arms if arm.label not in self.failed]

    def figures(self, compare: bool) -> list[Measurement]:
        """Returns the figures of the arms that have not failed; arguments and errors are as of `summarise`."""
        return summarise(self.sound, self.samples, counts=self.counts, compare=compare)


# --- What is asked for ------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo", help="a local folder, a hub id, demo-base or demo (default)")
    add("--methods", default=",".join(METHODS[:3]), help="default autoregressive,hf_generate,self_speculative")
    add("--exit-layers", help="such as 6,12,18; by default the checkpoint's recommended one")
    add("--num-draft-tokens", help="most drafts of a round, such as 4,8; by default the checkpoint's, else 4")
    add("--tune", type=int, metavar="N", help="choose each method's exit and draft length on N of the prompts")
    add("--draft-vocab-size", type=int, help="how many token ids to draft from; see Engine")
    add("--assistant-model", help="for hf_assistant: a second model with the same vocabulary")
    add("--prompts", type=Path, metavar="FILE", help=".txt or .jsonl, see above; by default a few built-in ones")
    add("--rows", type=int, metavar="N", help="at most how many prompts, from the first on")
    add("--category-rows", type=int, metavar="N", help="at most how many prompts of each category")
    add("--batch-size", type=int, default=1, help="prompts of one category that are answered together (default 1)")
    add("--temperature", type=float, help="draw tokens at this temperature (default: the best token)")
    add("--stop-at-eos", action="store_true", help="let answers end with an end-of-sequence token")
    add("--max-new-tokens", type=int, default=128, help="default 128")
    add("--repeats", type=int, default=3, help="timed passes over all prompts (default 3)")
    add("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    add("--device", help="cpu, cuda, …; by default CUDA where there is a device")
    add("--plot", type=Path, metavar="FILE.png", help="draw the ratios as bars; needs matplotlib")
    return parser.parse_args()


def read_methods(text: str) -> list[str]:
    """Returns the methods to measure, the baseline first; raises ValueError for unknown ones."""
    given = [name.strip() for name in text.split(",")]
    unknown = [name for name in given if name not in METHODS]
    if unknown:
        raise ValueError(f"--methods {unknown[0]!r} is unknown; allowed are {', '.join(METHODS)}.")
    return list(dict.fromkeys([BASELINE, *given]))


def check_arguments(arguments: argparse.Namespace, methods: Sequence[str]) -> None:
    """Checks what can be checked without a model; raises ValueError and ImportError by name."""
    counts = ("rows", "category_rows", "tune", "batch_size", "repeats")
    check_least(arguments, {**dict.fromkeys(counts, 1), "max_new_tokens": 2})
    if arguments.temperature is not None and not 0 < arguments.temperature < math.inf:
        raise ValueError(f"--temperature {arguments.temperature} is out of range; without it the best token is taken.")
    users = {
        "exit_layers": WITH_EXIT,
        "num_draft_tokens": DRAFTING,
        "tune": DRAFTING,
        "draft_vocab_size": ("self_speculative",),
        "assistant_model": ("hf_assistant",),
    }
    for name, using in users.items():
        if vars(arguments)[name] is not None and not set(using) & set(methods):
            raise ValueError(f"--{name.replace('_', '-')} is for {', '.join(using)}, none of which is in --methods.")
    if "hf_assistant" in methods and arguments.assistant_model is None:
        raise ValueError("--methods hf_assistant needs --assistant-model, a second model that drafts.")
    alone = [name for name in methods if name in ONE_BY_ONE]
    if alone and arguments.batch_size > 1:
        raise ValueError(f"--batch-size {arguments.batch_size}, but {', '.join(alone)} answers one prompt at a time.")
    if arguments.plot is not None:
        require_matplotlib()
        if arguments.plot.suffix.lower() != ".png" or not arguments.plot.parent.is_dir():
            raise ValueError(
                f"--plot {arguments.plot} is to be a .png file in a folder that is there; make that first."
            )


def load_assistant(name: str, engine: Engine) -> PreTrainedModel:
    """Returns the model that drafts, in the type and on the device of the other one.

    Raises:
        ValueError: its vocabulary is another one.
    """
    assistant = load_engine(name, ROOT, dtype=engine.model.dtype, device=engine.layered.device)
    sizes = assistant.layered.vocab_size, engine.layered.vocab_size
    tokenizers = [each.tokenizer.get_vocab() for each in (assistant, engine) if each.tokenizer is not None]
    if sizes[0] != sizes[1] or any(vocabulary != tokenizers[0] for vocabulary in tokenizers):
        raise ValueError(
            f"--assistant-model {name} has another vocabulary ({sizes[0]} ids) than --model ({sizes[1]} ids), so that "
            "its drafts would have to be translated: transformers does that where `generate` is given tokenizer and "
            "assistant_tokenizer, which is not measured here; take a model with the same tokenizer."
        )
    return assistant.model


def choose_grid(arguments: argparse.Namespace, methods: Sequence[str], engine: Engine) -> tuple[list[int], list[int]]:
    """Returns the exits and the draft lengths to measure, which the checkpoint fills in.

    Raises:
        ValueError: no list of exits of the model or of draft lengths, or no exit where one is needed.
    """
    recommended, drafts = engine.metadata.exit_layer, engine.metadata.num_draft_tokens
    exit_layers = [] if recommended is None else [recommended]
    num_draft_tokens = [DEFAULT_NUM_DRAFT_TOKENS if drafts is None else drafts]
    if arguments.exit_layers is not None:
        exit_layers = read_numbers("--exit-layers", arguments.exit_layers)
    if arguments.num_draft_tokens is not None:
        num_draft_tokens = read_numbers("--num-draft-tokens", arguments.num_draft_tokens)
    needing = [name for name in methods if name in WITH_EXIT]
    if needing and not exit_layers:
        why = "the checkpoint says that none pays" if engine.metadata.compared else "the checkpoint recommends none"
        raise ValueError(f"{', '.join(needing)} needs --exit-layers, such as 4,8: {why}.")
    for exit_layer in exit_layers:
        check_exit_layer(exit_layer, engine.layered.num_layers)
    for count in num_draft_tokens:
        check_num_draft_tokens(count)
    if arguments.tune is not None and len(num_draft_tokens) == 1 and (not needing or len(exit_layers) == 1):
        raise ValueError(f"--tune {arguments.tune} has nothing to choose from; pass several exits or draft lengths.")
    return exit_layers, num_draft_tokens


def build_arms(
    arguments: argparse.Namespace, methods: Sequence[str], engine: Engine, batches: Sequence[Batch]
) -> list[Arm]:
    """Returns the arms of all methods, in their order; raises ValueError for what they need and do not have."""
    exit_layers, num_draft_tokens = choose_grid(arguments, methods, engine)
    cells = [(exit_layer, drafts) for exit_layer in exit_layers for drafts in num_draft_tokens]
    how: dict[str, Any] = {"stop_at_eos": arguments.stop_at_eos, "temperature": arguments.temperature}
    model, longest = engine.model, max(batch.ids.shape[1] for batch in batches) + arguments.max_new_tokens
    made = {
        BASELINE: [ways.engine_arm(BASELINE, engine, strategy=BASELINE, **how)],
        "hf_generate": [ways.transformers_arm("hf_generate", model, **how)],
        "self_speculative": [
            ways.engine_arm("self_speculative", engine, exit_layer=exit_layer, num_draft_tokens=drafts, **how)
            for exit_layer, drafts in cells
        ],
        "hf_compiled": [ways.compiled_arm(model, longest, **how)],
        "hf_early_exit": [ways.early_exit_arm(model, exit_layer, drafts, **how) for exit_layer, drafts in cells],
        "hf_prompt_lookup": [ways.prompt_lookup_arm(model, drafts, **how) for drafts in num_draft_tokens],
    }
    if "hf_assistant" in methods:
        assistant = load_assistant(arguments.assistant_model, engine)
        made["hf_assistant"] = [ways.assistant_arm(model, assistant, drafts, **how) for drafts in num_draft_tokens]
    return [arm for name in methods for arm in made[name]]


# --- What comes out ---------------------------------------------------------------------------------------------------


def measure(state: State, arguments: argparse.Namespace, engine: Engine, batches: Sequence[Batch]) -> None:
    """Tunes, warms up and times into `state`, and prints the tables after every repeat but the last."""
    budget, failed = arguments.max_new_tokens, state.failed
    if arguments.tune is not None:
        few = math.ceil(arguments.tune / arguments.batch_size)
        chosen = [batches[index] for index in spread(state.categories, few)]
        state.arms, state.tuning = tune(state.arms, chosen, budget, failed=failed)
    state.counts = warm_up(state.arms, batches, budget, failed=failed)
    for sample in timed(state.sound, batches, budget, arguments.repeats, failed=failed):
        if state.samples and sample.repeat > state.samples[-1].repeat:
            print_tables(state, state.figures(arguments.temperature is None))
        state.samples.append(sample)
    if arguments.temperature is None:
        how = {} if arguments.stop_at_eos else {"eos_token_id": None}
        state.audits = audit_answers(engine, BASELINE, state.samples, batches, budget, pad_token_id=0, **how)


def print_tables(state: State, measurements: Sequence[Measurement]) -> None:
    """Prints the figures, the ratios of each category where there are several, and what failed."""
    rows = [asdict(measurement) for measurement in measurements]
    header = [column for column in COLUMNS if any(_cell(row, column) is not None for row in rows)]
    cells = [[row["label"], *(_cell(row, column) for column in header)] for row in rows]
    print("\n" + format_table(["arm", *header], cells))
    ratios = category_ratios(state.sound, state.samples, state.categories)
    if len(ratios) > 1:
        table = [[row["label"], *(ratio[row["label"]] for ratio in ratios.values())] for row in rows]
        print("\n" + format_table(["ratio", *ratios], table))
    for label, reason in state.failed.items():
        print(f"{label}  failed: {reason}")
    for label, audit in state.audits.items():
        if audit.differing:
            print(f"{label}  differs in {audit.differing} answers, at near ties in {audit.near_ties} of them")
    sys.stdout.flush()


def _cell(row: dict[str, Any], column: str) -> Any:
    name, unit = COLUMNS[column]
    return row[name] if row[name] is None or unit == 1 else row[name] / unit


def report(state: State, arguments: argparse.Namespace, engine: Engine, complete: bool) -> list[Measurement]:
    """Prints the tables and the line of JSON, and returns the figures; none where it was interrupted too early."""
    try:
        measurements = state.figures(arguments.temperature is None)
    except ValueError:
        if complete:
            raise
        measurements = []
    print_tables(state, measurements)
    summary = {
        "complete": complete,
        **describe_machine(engine.model),
        "settings": vars(arguments),
        "prompts": state.prompts,
        "arms": [asdict(measurement) for measurement in measurements],
        "categories": category_ratios(state.sound, state.samples, state.categories),
        "tuning": state.tuning,
        "failed": state.failed,
        "audits": {label: asdict(audit) for label, audit in state.audits.items()},
    }
    print(json.dumps(summary, default=str))
    return measurements


def run() -> None:
    """Measures, printing the tables after every repeat and one line of JSON at the end."""
    arguments = parse_arguments()
    methods = read_methods(arguments.methods)
    check_arguments(arguments, methods)
    built_in = [PromptRow(prompt, prompt) for prompt in demo.PROMPTS]
    given = built_in if arguments.prompts is None else prompt_rows(arguments.prompts)
    rows = first_rows(given, arguments.rows, arguments.category_rows)
    loading = {name: vars(arguments)[name] for name in ("draft_vocab_size", "dtype", "device")}
    engine = load_engine(arguments.model, ROOT, **loading)
    if arguments.stop_at_eos and engine.model.generation_config.eos_token_id is None:
        raise ValueError("--stop-at-eos needs eos_token_id in the model's generation_config.json, and there is none.")
    batches, categories = make_batches(rows, engine, arguments.batch_size)
    state = State(len(rows), build_arms(arguments, methods, engine, batches), categories)
    try:
        measure(state, arguments, engine, batches)
    except KeyboardInterrupt:
        report(state, arguments, engine, complete=False)
        raise
    measurements = report(state, arguments, engine, complete=True)
    if arguments.plot is not None:
        benchmark_bars(measurements, arguments.plot)


if __name__ == "__main__":
    run_program(run)
