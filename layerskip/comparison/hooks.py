"""Hooks on a model's modules that count what it executes and time what passes inside them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from layerskip.model.layered import LayeredModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    positions = [] if layered.position_embedding is None else [layered.position_embedding]
    for module in (layered.embedding, *positions, *layered.layers, layered.norm, layered.head):
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield total
    finally:
        for handle in handles:
            handle.remove()
