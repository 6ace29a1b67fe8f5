"""Hooks on a model's modules that count what it executes and time what passes inside them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from layerskip.comparison.arms import Arm
from layerskip.comparison.batches import Batch
from layerskip.comparison.memory import cache_bytes, peak_bytes, weight_bytes
from layerskip.model.layered import LayeredModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARM_UP_BATCHES = 3


@dataclass(frozen=True)
class Counts:
    """What is counted for one arm while it warms up.

    Attributes:
        layer_tokens: layers × tokens that the model executes for each token that is emitted, prefill included. An
            assistant's layers are not among them.
        weight_bytes: parameters and buffers of the model, copied rows of its head, and those of an assistant.
        cache_bytes: the most keys and values that were alive at once.
        peak_bytes: the highest mark of memory on a CUDA device, with everything that is loaded; `None` elsewhere.
        outside_share: share of the time after the first token that is spent outside the calls of embedding, layers,
            norm and head, on the first prompt; `None` where prefill cannot be told from a first round, for a compiled
            model, and with a draft vocabulary, whose rows of the head are multiplied outside its module.
        compile_seconds: what the first call took longer than a later one on the same prompt; `None` where nothing is
            compiled.
    """

    layer_tokens: float | None = None
    weight_bytes: int | None = None
    cache_bytes: int | None = None
    peak_bytes: int | None = None
    outside_share: float | None = None
    compile_seconds: float | None = None


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


@contextmanager
def module_seconds(model: PreTrainedModel) -> Iterator[list[float]]:
    """Adds up the time inside the embedding, layers, norm and head of `model`, into the one entry of the list."""
    total = [0.0]
    begun = [0.0]

    def begin(module: torch.nn.Module, arguments: Any) -> None:
        begun[0] = time.perf_counter()

    def end(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        total[0] += time.perf_counter() - begun[0]

    layered = LayeredModel(model)
    handles = []
    for module in (*layered.ends, *layered.layers):
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield total
    finally:
        for handle in handles:
            handle.remove()


def share_outside_modules(model: PreTrainedModel, arm: Arm, batch: Batch, max_new_tokens: int) -> float | None:
    """Returns which share of the time after the first token an arm spends outside the model's modules.

    The hooks that time the modules lengthen what is outside a little. What a call for one token spends inside them is
    taken for the prefill's part; `None` where an arm's first tokens come from a round as well, which transformers does
    not tell apart, or none follow.
    """
    with module_seconds(model) as seconds:
        arm.generate(batch, 1)
    prefill = seconds[0]
    with module_seconds(model) as seconds:
        run = arm.generate(batch, max_new_tokens)
    begins_with_a_round = run.rounds is None and arm.num_draft_tokens is not None
    if begins_with_a_round or not run.decoded:
        return None
    return 1 - (seconds[0] - prefill) / run.decode_seconds


def warm_up_batches(batches: Sequence[Batch]) -> list[Batch]:
    """Returns the first batches, and the first one of every number of rows, with padding and without."""
    chosen = {(len(batch.ids), bool(batch.mask.all())): index for index, batch in reversed(list(enumerate(batches)))}
    return [batches[index] for index in sorted({*range(min(WARM_UP_BATCHES, len(batches))), *chosen.values()})]


def counts_of(arm: Arm, batches: Sequence[Batch], max_new_tokens: int) -> Counts:
    """Runs an arm once on the first prompts and once more on all, with hooks, and returns what they count.

    An arm that hooks would break up runs on all prompts without them as well; its counterpart is counted.

    """
    with peak_bytes(batches[0].ids.device) as peak:
        first = arm.generate(batches[0], max_new_tokens)
        compile_seconds = None
        if arm.counted is not None:
            later, *_ = (arm.generate(batch, max_new_tokens) for batch in batches)
            compile_seconds = first.seconds - later.seconds
        layers, cache, runs = 0, 0, []
        for batch in batches:
            with _counting(arm) as (work, most):
                runs.append((arm.counted or arm.generate)(batch, max_new_tokens))
            layers, cache = layers + work[0], max(cache, most[0])
    if arm.model is None:
        return Counts()
    is_told = arm.draft_vocab_size is None and arm.counted is None
    return Counts(
        layer_tokens=layers / sum(len(answer) for run in runs for answer in run.token_ids),
        weight_bytes=weight_bytes(arm),
        cache_bytes=cache,
        peak_bytes=peak[0],
        outside_share=share_outside_modules(arm.model, arm, batches[0], max_new_tokens) if is_told else None,
        compile_seconds=compile_seconds,
    )


@contextmanager
def _counting(arm: Arm) -> Iterator[tuple[list[int], list[int]]]:
    """Counts layers × tokens of an arm's model, and the bytes of its caches; of an arm without a model, nothing."""
    if arm.model is None:
        yield [0], [0]
        return
    models = [arm.model] if arm.assistant is None else [arm.model, arm.assistant]
    with layer_tokens(arm.model) as work, cache_bytes(*models) as most:
        yield work, most
