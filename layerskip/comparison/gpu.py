"""What a device gives on models without trained weights: whether every lever is exact, and how fast rounds are."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from layerskip.comparison.arms import Arm, compiled_arm, engine_arm, transformers_arm
from layerskip.comparison.batches import Batch
from layerskip.comparison.latency import measure_costs
from layerskip.comparison.levers import BASELINE, LeverSettings, lever_options
from layerskip.comparison.memory import module_bytes, peak_bytes
from layerskip.comparison.scaling import some_tokens
from layerskip.comparison.time_limit import Task
from layerskip.decoding.cost import CostTable
from layerskip.decoding.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TREE_NODES = 16
REPEATS = 3


@dataclass(frozen=True)
class Shape:
    """A model to measure without its weights, since what rounds take does not depend on them.

    Attributes:
        sizes: of its `LlamaConfig`.
        dtype: of its weights.
        exit_layers: whose eager costs are measured.
        max_num_draft_tokens: the longest of these rounds.
        compiled_exit_layer: E of compiled rounds.
        compiled_num_draft_tokens: their draft lengths γ, a graph for each.
        context: tokens of the prompt.
        new_tokens: of every answer.
        cost_repeats: passes over all costs.
    """

    sizes: dict[str, Any]
    dtype: torch.dtype
    exit_layers: tuple[int, ...]
    max_num_draft_tokens: int
    compiled_exit_layer: int
    compiled_num_draft_tokens: tuple[int, ...]
    context: int
    new_tokens: int
    cost_repeats: int


SHAPES = {
    "llama-3.2-1b": Shape(
        sizes={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "tie_word_embeddings": True,
        },
        dtype=torch.bfloat16,
        exit_layers=(2, 4, 8),
        max_num_draft_tokens=16,
        compiled_exit_layer=4,
        compiled_num_draft_tokens=(4, 8),
        context=128,
        new_tokens=128,
        cost_repeats=5,
    ),
    # For trying a program.
    "tiny": Shape(
        sizes={
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        dtype=torch.float32,
        exit_layers=(1, 2),
        max_num_draft_tokens=3,
        compiled_exit_layer=2,
        compiled_num_draft_tokens=(1, 2),
        context=8,
        new_tokens=8,
        cost_repeats=1,
    ),
}


def random_llama(sizes: dict[str, Any], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a Llama with random weights, always the same on one kind of device, in eval mode; made on the device."""
    torch.manual_seed(0)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(LlamaConfig(**{**sizes, **special}), dtype=dtype)
    return model.eval()


# --- Exactness --------------------------------------------------------------------------------------------------------


EXACT_SIZES = {**SHAPES["tiny"].sizes, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
EXACT_SETTINGS = LeverSettings(2, 4, longest=TREE_NODES, tree_nodes=(TREE_NODES,), compile=True)


class Exactness:
    """Whether each lever's greedy tokens are those of plain decoding, on a small model in fp32.

    Its late layers add little to what the early ones give, so that the exit is sometimes right and sometimes wrong, and
    its prompt repeats itself, so that there is something to copy.
    """

    def __init__(self, device: torch.device, new_tokens: int = 64) -> None:
        """Makes nothing yet.

        Args:
            device: where the model is to be.
            new_tokens: of every answer.
        """
        self.device = device
        self.new_tokens = new_tokens

    @cached_property
    def engine(self) -> Engine:
        """The model, with costs at which drafts pay, whatever they take: the tokens are what matters here."""
        model = random_llama(EXACT_SIZES, self.device, torch.float32)
        with torch.no_grad():
            # Else greedy answers repeat one token.
            model.get_output_embeddings().weight.mul_(8.0)
            for layer in model.model.layers[2:]:
                layer.self_attn.o_proj.weight.mul_(0.15)
                layer.mlp.down_proj.weight.mul_(0.15)
        flat = tuple(1 + 0.01 * width for width in range(TREE_NODES + 1))
        return Engine(model, cost_table=CostTable((2, 4), (0.05, 0.1), (flat, flat), 1.0, 0.05, 0.05))

    @cached_property
    def batch(self) -> Batch:
        """One prompt, twice over."""
        return Batch.of([some_tokens(EXACT_SIZES["vocab_size"])[:12] * 2], self.device)

    @cached_property
    def expected(self) -> list[int]:
        """The tokens of plain decoding, eager."""
        (tokens,) = self.arm(BASELINE).generate(self.batch, self.new_tokens).token_ids
        return tokens

    def arm(self, name: str) -> Arm:
        """Returns the arm of a lever, or of `hf_generate`."""
        if name == "hf_generate":
            return transformers_arm(name, self.engine.model)
        return engine_arm(name, self.engine, **lever_options(EXACT_SETTINGS)[name])

    def check(self, name: str) -> dict[str, Any]:
        """Returns whether an arm's tokens are the same, where they first are not, and what it counted."""
        run = self.arm(name).generate(self.batch, self.new_tokens)
        (tokens,) = run.token_ids
        different = (place for place, pair in enumerate(zip(tokens, self.expected, strict=True)) if len({*pair}) > 1)
        rounds = run.rounds
        return {
            "same": tokens == self.expected,
            "first_difference": next(different, None),
            "tokens": len(tokens),
            "rounds": None if rounds is None else rounds.rounds,
            "drafted": None if rounds is None else rounds.drafted,
            "accepted": None if rounds is None else rounds.accepted,
        }

    def tasks(self) -> dict[str, list[Task]]:
        """Returns a measurement for each lever, by step: eager ones, and compiled ones."""

        def task(name: str) -> Task:
            return Task.once(name, lambda: self.check(name))

        names = [name for name in lever_options(EXACT_SETTINGS) if name != BASELINE]
        compiled = [name for name in names if name.startswith("compiled")]
        eager = ["hf_generate", *(name for name in names if name not in compiled)]
        return {"exactness": list(map(task, eager)), "exactness-compiled": list(map(task, compiled))}


# --- Speeds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """How fast a way to generate is on one prompt; medians over runs behind a first one.

    Attributes:
        tokens_per_second: after the first token.
        lowest, highest: the same, of the slowest and the fastest run.
        rounds_per_second: rounds, of plain decoding steps; `None` where the engine does not count them.
        tokens_per_round: likewise, of all runs.
        prefill_seconds: up to the first token.
        first_call_seconds: what the first call took longer than a later one: compiling, and what a device loads.
        weight_bytes: of the model.
        loaded_bytes: what tensors took on a CUDA device before the first call; `None` elsewhere.
        peak_bytes: the most that they took during all calls, likewise.
    """

    tokens_per_second: float
    lowest: float
    highest: float
    rounds_per_second: float | None
    tokens_per_round: float | None
    prefill_seconds: float
    first_call_seconds: float
    weight_bytes: int | None
    loaded_bytes: int | None
    peak_bytes: int | None


def measure_speed(arm: Arm, batch: Batch, max_new_tokens: int, repeats: int) -> Speed:
    """Returns how fast an arm answers one prompt.

    The times are those of the arm: up to when tokens are read, behind which the device has nothing left to do.

    Args:
        arm: what generates.
        batch: the prompt.
        max_new_tokens: of each answer, which does not end before; at least 2.
        repeats: runs that are timed, at least 1.
    """
    device = batch.ids.device
    is_cuda = device.type == "cuda"
    loaded = torch.cuda.memory_allocated(device) if is_cuda else None
    with peak_bytes(device) as peak:
        if is_cuda:
            # What was loaded before is not to be waited for in the first run.
            torch.cuda.synchronize(device)
        first, *runs = (arm.generate(batch, max_new_tokens) for _ in range(repeats + 1))
    speeds = [run.decoded / run.decode_seconds for run in runs]
    counted = [(run.rounds.rounds, run.decoded, run.decode_seconds) for run in runs if run.rounds is not None]
    rounds = sum(count for count, _, _ in counted)
    return Speed(
        tokens_per_second=statistics.median(speeds),
        lowest=min(speeds),
        highest=max(speeds),
        rounds_per_second=statistics.median(count / seconds for count, _, seconds in counted) if rounds else None,
        tokens_per_round=sum(decoded for _, decoded, _ in counted) / rounds if rounds else None,
        prefill_seconds=statistics.median(run.prefill_seconds for run in runs),
        first_call_seconds=first.seconds - statistics.median(run.seconds for run in runs),
        weight_bytes=None if arm.model is None else module_bytes(arm.model),
        loaded_bytes=loaded,
        peak_bytes=peak[0],
    )


class ShapeRun:
    """What is measured with a model of some shape."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        """Makes nothing yet."""
        self.shape = shape
        self.device = device

    @cached_property
    def engine(self) -> Engine:
        """The model."""
        return Engine(random_llama(self.shape.sizes, self.device, self.shape.dtype))

    @cached_property
    def batch(self) -> Batch:
        """The prompt."""
        return Batch.of([some_tokens(self.shape.sizes["vocab_size"])[: self.shape.context]], self.device)

    def costs(self) -> dict[str, Any]:
        """Returns the table of eager costs."""
        shape = self.shape
        context = self.batch.ids[0].tolist()
        table = measure_costs(self.engine, shape.exit_layers, shape.max_num_draft_tokens, context, shape.cost_repeats)
        return {"cost_table": table.to_dict()}

    def arms(self) -> dict[str, dict[str, Callable[[], Arm]]]:
        """Returns what makes each arm whose speed is measured, by step and by name."""
        shape = self.shape

        def compiled(**options: Any) -> Arm:
            return engine_arm("compiled", self.engine, compile=True, **options)

        def drafting(drafts: int) -> Callable[[], Arm]:
            return lambda: compiled(exit_layer=shape.compiled_exit_layer, num_draft_tokens=drafts)

        rounds = {compiled_name(shape, drafts): drafting(drafts) for drafts in shape.compiled_num_draft_tokens}
        return {
            "compiled": {"compiled-autoregressive": lambda: compiled(strategy=BASELINE), **rounds},
            "eager": {
                BASELINE: lambda: engine_arm(BASELINE, self.engine, strategy=BASELINE),
                "hf_generate": lambda: transformers_arm("hf_generate", self.engine.model),
            },
            "hf-compiled": {
                "hf_compiled": lambda: compiled_arm(self.engine.model, shape.context + shape.new_tokens),
            },
        }

    def tasks(self) -> dict[str, list[Task]]:
        """Returns the measurements by step, the most valuable ones first."""

        def task(name: str, make: Callable[[], Arm]) -> Task:
            new_tokens = self.shape.new_tokens
            return Task.once(name, lambda: asdict(measure_speed(make(), self.batch, new_tokens, REPEATS)))

        steps = {step: [task(*each) for each in arms.items()] for step, arms in self.arms().items()}
        last = steps.pop("hf-compiled")
        return {**steps, "costs": [Task.once("costs", self.costs)], "hf-compiled": last}


def compiled_name(shape: Shape, drafts: int) -> str:
    """Returns what compiled rounds of a draft length are called."""
    return f"compiled E={shape.compiled_exit_layer} γ={drafts}"
