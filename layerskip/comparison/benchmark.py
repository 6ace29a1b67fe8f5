"""Measuring ways to generate against each other: the same prompts, the same number of tokens, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from layerskip.decoding.engine import Engine
from layerskip.model.layered import LayeredModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Run:
    """One generation: its new tokens, and the seconds up to the first of them and after it."""

    token_ids: list[int]
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Arm:
    """A way to generate: a name, and a function from prompt ids `(1, tokens)` and a number of new tokens to a `Run`."""

    name: str
    generate: Callable[[torch.Tensor, int], Run]


@dataclass(frozen=True)
class Measurement:
    """What was measured for one arm.

    Attributes:
        name: the arm's.
        tokens_per_second: after the first token, the median over repeats of all prompts together.
        lowest, highest: the same, slowest and fastest repeat.
        ratio: its speed over the first arm's: the median of the ratios of each repeat, since both drift together.
        prefill_seconds: time to the first token, median over prompts and repeats.
        layer_tokens: layers × tokens that were executed for one pass over all prompts, prefill included.
        same_as_first: prompts for which every token is the first arm's.
    """

    name: str
    tokens_per_second: float
    lowest: float
    highest: float
    ratio: float
    prefill_seconds: float
    layer_tokens: int
    same_as_first: int


class TokenClock:
    """A transformers streamer that notes when tokens arrive; its first `put` is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Notes the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


def transformers_arm(name: str, model: PreTrainedModel, **options: Any) -> Arm:
    """Returns the arm that calls `model.generate` greedily with these options and without an end-of-sequence token."""

    def generate(ids: torch.Tensor, max_new_tokens: int) -> Run:
        clock = TokenClock()
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": max_new_tokens}
        begin = time.perf_counter()
        run: Any = model.generate
        sequences = run(ids, attention_mask=torch.ones_like(ids), streamer=clock, **settings, **options)
        end = time.perf_counter()
        first = clock.times[1]
        return Run(sequences[0, ids.shape[1] :].tolist(), first - begin, end - first)

    return Arm(name, generate)


def engine_arm(name: str, engine: Engine, **options: Any) -> Arm:
    """Returns the arm that calls `Engine.generate` with these options and without an end-of-sequence token."""

    def generate(ids: torch.Tensor, max_new_tokens: int) -> Run:
        result = engine.generate(ids, max_new_tokens=max_new_tokens, eos_token_id=None, **options)
        seconds = result.statistics.seconds
        decode = sum(spent for phase, spent in seconds.items() if phase != "prefill")
        return Run(result.sequences[0, ids.shape[1] :].tolist(), seconds["prefill"], decode)

    return Arm(name, generate)


def measure(
    model: PreTrainedModel, arms: Sequence[Arm], prompts: Sequence[torch.Tensor], max_new_tokens: int, repeats: int
) -> Iterator[list[Measurement]]:
    """Runs all arms on all prompts, interleaved, and yields the measurements so far after every repeat.

    One pass that is not timed comes first: it warms everything up, counts the layers' work and compares tokens.
    """
    work, tokens = [], []
    for arm in arms:
        with layer_tokens(model) as counted:
            tokens.append([arm.generate(ids, max_new_tokens).token_ids for ids in prompts])
        work.append(counted[0])
    same = [sum(ours == first for ours, first in zip(mine, tokens[0], strict=True)) for mine in tokens]
    speeds: list[list[float]] = [[] for _ in arms]
    prefills: list[list[float]] = [[] for _ in arms]
    for _ in range(repeats):
        seconds = [0.0] * len(arms)
        for ids in prompts:
            for index, arm in enumerate(arms):
                run = arm.generate(ids, max_new_tokens)
                seconds[index] += run.decode_seconds
                prefills[index].append(run.prefill_seconds)
        for index, spent in enumerate(seconds):
            speeds[index].append(len(prompts) * (max_new_tokens - 1) / spent)
        yield [
            Measurement(
                name=arm.name,
                tokens_per_second=statistics.median(speeds[index]),
                lowest=min(speeds[index]),
                highest=max(speeds[index]),
                ratio=statistics.median(mine / first for mine, first in zip(speeds[index], speeds[0], strict=True)),
                prefill_seconds=statistics.median(prefills[index]),
                layer_tokens=work[index],
                same_as_first=same[index],
            )
            for index, arm in enumerate(arms)
        ]


@contextmanager
def layer_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """Counts layers × tokens that `model` executes while the block runs, into the one entry of the list."""
    total = [0]

    def count(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        total[0] += arguments[0].shape[0] * arguments[0].shape[1]

    handles = [layer.register_forward_pre_hook(count) for layer in LayeredModel(model).layers]
    try:
        yield total
    finally:
        for handle in handles:
            handle.remove()


def share_outside_modules(engine: Engine, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> float:
    """Returns which share of the rounds' time is spent outside the calls of embedding, layers, norm and head.

    Hooks time those calls, which lengthens what is outside a little.
    """
    layered = engine.layered
    inside = [0.0]
    begun = [0.0]

    def begin(module: torch.nn.Module, arguments: Any) -> None:
        begun[0] = time.perf_counter()

    def end(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        inside[0] += time.perf_counter() - begun[0]

    handles = []
    for module in (layered.embedding, *layered.layers, layered.norm, layered.head):
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        events = engine.stream(ids, max_new_tokens=max_new_tokens, eos_token_id=None, **options)
        next(events)
        inside[0] = 0.0
        *_, last = events
    finally:
        for handle in handles:
            handle.remove()
    if last.result is None:
        raise RuntimeError("the stream ended without a result.")
    seconds = last.result.statistics.seconds
    return 1 - inside[0] / sum(spent for phase, spent in seconds.items() if phase != "prefill")
