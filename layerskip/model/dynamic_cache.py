"""Between transformers' DynamicCache, as `generate` fills and returns it, and the layout of the shared cache.

`generate` pads a batch on the left, and all rows share columns: the tokens of row r stand in columns `starts[r]` and
following. In the shared cache slot i of a row holds its position i, so a row is its columns moved left by `starts[r]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from layerskip.model.cache import Layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WHAT_TO_DO = "pass a transformers DynamicCache, such as generate returns by default, or none"


def is_empty(cache: object) -> bool:
    """Returns whether no layer of a DynamicCache holds states, as before a first call.

    Raises:
        TypeError, ValueError: a kind of cache that `read_dynamic_cache` refuses.
    """
    return not any(layer.get_seq_length() for layer in _layers_of(cache))


def read_dynamic_cache(cache: object, starts: Sequence[int], num_layers: int) -> Layers:
    """Returns the states of a filled DynamicCache as `SharedCache.restore` takes them; the cache does not change.

    Row r has `max(0, cache.get_seq_length() − starts[r])` of them. A sliding layer past its window holds its last
    columns only; the slots before are zeros, which no token behind the last column sees.

    Args:
        cache: what `generate` or a forward pass has filled.
        starts: the column of each row's first token; a row whose tokens begin behind the cache has none in it.
        num_layers: of the model.

    Returns:
        Keys and values of each layer, `(rows, heads, slots, head size)`, as many slots as the longest row has states;
        views of the cache's tensors where it holds them so, new tensors elsewhere. Read them, write nothing to them.

    Raises:
        TypeError: something else than a DynamicCache with full-attention and sliding-window layers (a static,
            quantized or encoder-decoder cache, a subclass, tuples).
        ValueError: a cache that is offloaded or has no states, other layers or rows than the model and `starts`, or
            layers of different lengths.
    """
    layers = _layers_of(cache)
    if len(layers) != num_layers:
        raise ValueError(f"cache has {len(layers)} layers, but the model {num_layers}; pass a cache of this model.")
    columns = layers[0].get_seq_length()
    if columns == 0 or any(layer.get_seq_length() != columns for layer in layers):
        lengths = [layer.get_seq_length() for layer in layers]
        raise ValueError(f"the layers of cache hold {lengths} tokens; all must hold the same number, at least one.")
    for index, layer in enumerate(layers, start=1):
        if layer.keys.shape[0] != len(starts):
            raise ValueError(
                f"layer {index} of cache holds {layer.keys.shape[0]} rows, but the input has {len(starts)}; pass one "
                "row of input for each row of the cache."
            )
    if any(start < 0 for start in starts):
        raise ValueError(f"starts={tuple(starts)}: the first column of a row is at least 0.")
    within = [min(start, columns) for start in starts]
    return tuple(
        (_moved_left(layer.keys.detach(), within, columns), _moved_left(layer.values.detach(), within, columns))
        for layer in layers
    )


def write_dynamic_cache(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    lengths: Sequence[int],
    starts: Sequence[int],
    columns: int,
    config: PreTrainedConfig,
) -> DynamicCache:
    """Returns a DynamicCache in the layout of `generate`: slot i of row r in column `starts[r] + i` of `columns`.

    The columns before a row's start and behind its end are zeros, which are the attention mask's to hide. Sliding
    layers keep what they would keep of a forward pass. All tensors are new.

    Args:
        layers: keys and values of each layer of the model, `(rows, heads, slots, head size)`.
        lengths: how many slots of each row count.
        starts: the column of each row's first token.
        columns: how many columns the cache holds: all that `generate` has processed, so as a rule one less than the
            sequences it returns.
        config: of the model, which says which layers slide.

    Raises:
        ValueError: layers that are not those of `config`, or rows that do not fit into the columns.
    """
    if not len(lengths) == len(starts) == layers[0][0].shape[0]:
        raise ValueError(
            f"layers holds {layers[0][0].shape[0]} rows, lengths {len(lengths)} and starts {len(starts)}; give one for "
            "each row."
        )
    if any(start < 0 or start + length > columns for start, length in zip(starts, lengths, strict=True)):
        raise ValueError(f"starts={tuple(starts)} with lengths={tuple(lengths)} do not fit into columns={columns}.")
    cache = DynamicCache(config=config)
    if len(layers) != len(cache.layers):
        raise ValueError(f"layers holds {len(layers)} layers, but config has {len(cache.layers)}.")
    for index, (keys, values) in enumerate(layers):
        key_states = _moved_right(keys, lengths, starts, columns)
        value_states = _moved_right(values, lengths, starts, columns)
        # Stored in two steps, or a sliding layer would keep a view of all columns alive.
        for step in (slice(0, columns - 1), slice(columns - 1, columns)):
            cache.update(key_states[:, :, step], value_states[:, :, step], index)
    return cache


def _layers_of(cache: object) -> list[Any]:
    """Returns the layers of a DynamicCache of which every kind of layer is known.

    Raises:
        TypeError: another kind of cache or layer.
        ValueError: an offloaded cache.
    """
    # Subclasses keep states in ways of their own.
    if type(cache) is not DynamicCache:
        raise TypeError(f"cache is a {type(cache).__name__}; {WHAT_TO_DO}.")
    if cache.offloading:
        raise ValueError(f"cache is a DynamicCache with offloading=True, which is not supported; {WHAT_TO_DO}.")
    for index, layer in enumerate(cache.layers, start=1):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise TypeError(
                f"layer {index} of cache is a {type(layer).__name__}; supported are DynamicLayer and "
                f"DynamicSlidingWindowLayer; {WHAT_TO_DO}."
            )
    return list(cache.layers)


def _moved_left(states: torch.Tensor, starts: Sequence[int], columns: int) -> torch.Tensor:
    """Returns the last columns of a batch, `(rows, heads, held, head size)`, with row r moved left by `starts[r]`.

    Returns:
        `(rows, heads, slots, head size)`, up to the last slot of the longest row.
    """
    first = columns - states.shape[2]
    if first <= min(starts) == max(starts):
        return states[:, :, starts[0] - first :]
    moved = states.new_zeros((*states.shape[:2], columns - min(starts), states.shape[3]))
    for row, start in enumerate(starts):
        begin = max(first, start)
        moved[row, :, begin - start : columns - start] = states[row, :, begin - first :]
    return moved


def _moved_right(states: torch.Tensor, lengths: Sequence[int], starts: Sequence[int], columns: int) -> torch.Tensor:
    """Returns the first `lengths[r]` slots of each row in columns `starts[r]` and following, zeros elsewhere."""
    moved = states.new_zeros((*states.shape[:2], columns, states.shape[3]))
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        moved[row, :, start : start + length] = states[row, :, :length]
    return moved
