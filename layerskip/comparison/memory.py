"""How much memory ways to generate take: weights, keys and values, and the device's highest mark."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from layerskip.comparison.arms import Arm
from layerskip.decoding.loop import DecodeLoop
from layerskip.decoding.rows import DecodeSettings
from layerskip.decoding.stopping import Stops
from layerskip.model.families import SLIDING_ATTENTION
from layerskip.model.layered import LayeredModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def module_bytes(module: torch.nn.Module) -> int:
    """Returns the size of a module's parameters and buffers; what is shared, such as tied weights, counts once."""
    return storage_bytes([*module.parameters(), *module.buffers()])


def weight_bytes(arm: Arm) -> int:
    """Returns the size of everything an arm multiplies with: the model, the rows of a draft head, and an assistant."""
    models = [model for model in (arm.model, arm.assistant) if model is not None]
    return sum(map(module_bytes, models)) + arm.draft_head_bytes


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Returns the size of what some tensors keep alive: whole storages, each once, of which they may be views."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    # Not by address: offloaded weights have none.
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of keys and values that hold one row of some tokens.

    Attributes:
        context: the tokens.
        shared: of the shared cache, which has room for all tokens in every layer and for one more, where dead ones go.
        dynamic: of transformers' `DynamicCache` for the model's config, which cuts sliding layers to their window.
        num_layers: L.
        sliding_layers: layers with a sliding window.
    """

    context: int
    shared: int
    dynamic: int
    num_layers: int
    sliding_layers: int


@torch.inference_mode()
def cache_sizes(layered: LayeredModel, context: Sequence[int]) -> CacheSizes:
    """Lets both caches hold a text and returns their sizes, those of the tensors that they keep alive.

    The `DynamicCache` has made a step behind the prompt, since it lets go of what leaves a window with the next step.

    Args:
        layered: the model.
        context: token ids, at least two.

    Raises:
        ValueError: fewer, or more than the model can hold.
    """
    if len(context) < 2:
        raise ValueError(f"context has {len(context)} tokens; pass 2 or more, of which the last one is a step.")
    layered.check_length(len(context) + 1, [len(context) - 1])
    loop = DecodeLoop(layered, [list(context)], DecodeSettings(layered.num_layers, layered.num_layers, 0, Stops(1)))
    next(loop.blocks())
    dynamic = DynamicCache(config=layered.config)
    # The part below the head, since logits of all tokens would be large.
    body: Any = layered.model.base_model
    for part in (context[:-1], context[-1:]):
        body(torch.tensor([list(part)], device=layered.device), cache=dynamic, use_cache=True)
    return CacheSizes(
        context=len(context),
        shared=storage_bytes(_tensors(loop.cache)),
        dynamic=storage_bytes(_tensors(dynamic)),
        num_layers=layered.num_layers,
        sliding_layers=sum(kind == SLIDING_ATTENTION for kind in layered.layer_types),
    )


@contextmanager
def cache_bytes(*models: PreTrainedModel) -> Iterator[list[int]]:
    """Notes the most bytes of keys and values that are alive at once while the block runs, in the list's one entry.

    Every cache counts that a layer of one of the models has been given, until it is gone; looked at after each layer.
    """
    most = [0]
    caches: weakref.WeakSet[Cache] = weakref.WeakSet()

    def note(module: torch.nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        # GPT-2 passes the cache by place, the others by name.
        for value in (*arguments, *named.values()):
            if isinstance(value, Cache):
                caches.add(value)
        most[0] = max(most[0], storage_bytes([tensor for cache in caches for tensor in _tensors(cache)]))

    handles = [
        layer.register_forward_hook(note, with_kwargs=True) for model in models for layer in LayeredModel(model).layers
    ]
    try:
        yield most
    finally:
        for handle in handles:
            handle.remove()


def _tensors(cache: Cache) -> list[torch.Tensor]:
    """Returns the keys and values of the layers that have been filled."""
    layers: list[Any] = list(cache.layers)
    return [tensor for layer in layers if layer.is_initialized for tensor in (layer.keys, layer.values)]


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[list[int | None]]:
    """Notes the most bytes that all tensors on a CUDA device take while the block runs; `None` on others.

    The mark is the process's own: what else is loaded counts as well.
    """
    peak: list[int | None] = [None]
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    yield peak
    if is_cuda:
        peak[0] = torch.cuda.max_memory_allocated(device)
