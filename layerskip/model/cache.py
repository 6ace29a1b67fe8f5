"""The one key-value cache that drafting and verification share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from layerskip.model.placement import Placement

# Keys and values of each layer, `(rows, heads, slots, head size)`, where slot i of a row holds its position i.
Layers = tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True, eq=False)
class CachedTokens:
    """The keys and values of tokens that a call has processed, for a later call to go on from.

    Attributes:
        token_ids: of each row, the tokens whose states its first slots hold; what lies behind them does not count.
        layers: keys and values of each layer, as many slots as the longest row has tokens.
        model: whose states they are; a weak reference, so that a cache does not keep it. It cannot be pickled: a cache
            lives in the process that made it.
    """

    token_ids: tuple[tuple[int, ...], ...]
    layers: Layers = field(repr=False)
    model: weakref.ref[torch.nn.Module] = field(repr=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each row."""
        return tuple(len(row) for row in self.token_ids)

    @property
    def num_layers(self) -> int:
        """The number of layers whose states are held."""
        return len(self.layers)


class SharedCacheLayer(CacheLayerMixin):
    """Keys and values of one layer: `(rows, heads, capacity, head size)`, where slot i of a row holds its position i.

    Only the nodes of a draft tree hold other positions, until `compact` moves the accepted ones to theirs.

    The buffers are allocated with the first keys and never move. `lengths` says, per row, how many slots count; what
    lies behind is left over from rejected drafts or padding and is overwritten before anything can attend to it.
    """

    # transformers declares them optional, which they are until the first pass.
    keys: Any
    values: Any

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.rows = rows
        self.capacity = capacity
        self.lengths: tuple[int, ...] = (0,) * rows

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the buffers in the shape, type and place of the first keys and values."""
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros((self.rows, states.shape[1], self.capacity, states.shape[3]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, placement: Placement
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores `(rows, heads, width, head size)` states where `placement` says.

        Returns:
            Views of the slots that the attention of this pass reads, `(rows, heads, view, head size)`.

        Raises:
            ValueError: the states that were restored are of another shape or type, and so of another model.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        _check_kind(self.keys, key_states)
        self.lengths = placement.ends + self.lengths[len(placement.ends) :]
        return _store(self.keys, key_states, placement), _store(self.values, value_states, placement)

    def kept(self, order: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of the keys and values of the rows in `order`, cut to the longest of them."""
        rows, longest = list(order), max(self.lengths[row] for row in order)
        return self.keys[rows, :, :longest], self.values[rows, :, :longest]

    def restore(self, key_states: torch.Tensor, value_states: torch.Tensor, lengths: tuple[int, ...]) -> None:
        """Allocates the buffers and copies the first slots of all rows into them, up to the longest of `lengths`."""
        self.lazy_initialization(key_states, value_states)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            # Behind a shorter row's end this takes in what never counts, as a rollback would leave it.
            buffer[:, :, : max(lengths)] = states[:, :, : max(lengths)]
        self.lengths = lengths

    def move(self, rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies slot `sources[i]` of row `rows[i]` to slot `targets[i]`, all of them read before any is written."""
        device = self.keys.device
        rows, sources, targets = rows.to(device), sources.to(device), targets.to(device)
        for buffer in (self.keys, self.values):
            buffer[rows, :, targets] = buffer[rows, :, sources]

    def swap(self, first: int, second: int) -> None:
        """Exchanges two rows."""
        lengths = list(self.lengths)
        lengths[first], lengths[second] = lengths[second], lengths[first]
        self.lengths = tuple(lengths)
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                buffer[[first, second]] = buffer[[second, first]]

    def get_seq_length(self) -> int:
        """Returns the length of the longest row."""
        return max(self.lengths)

    def get_max_length(self) -> int:
        """Returns the number of slots of a row."""
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many slots a pass of `query_length` tokens reads, and the first of them."""
        return self.get_seq_length() + query_length, 0


def _check_kind(held: torch.Tensor, new: torch.Tensor) -> None:
    """Raises where restored states cannot be the model's own."""
    if (held.shape[1], held.shape[3], held.dtype, held.device) != (new.shape[1], new.shape[3], new.dtype, new.device):
        raise ValueError(
            f"cache holds keys of {held.shape[1]} heads of size {held.shape[3]} in {held.dtype} on {held.device}, but "
            f"the model makes {new.shape[1]} of size {new.shape[3]} in {new.dtype} on {new.device}; pass a cache of "
            "this model, or none."
        )


def _store(buffer: torch.Tensor, states: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Writes states into their slots of the first rows of a buffer and returns the view of it that attention reads."""
    rows = buffer.narrow(0, 0, states.shape[0])
    if placement.start is None:
        index = torch.arange(states.shape[0], device=states.device).unsqueeze(1)
        rows[index, :, placement.slots.to(states.device)] = states.transpose(1, 2)
    else:
        rows.narrow(2, placement.start, placement.width).copy_(states)
    return rows.narrow(2, 0, placement.view)


class SharedCache(Cache):
    """A cache for all layers of a batch, one per generation call.

    Rows have lengths of their own; rolling back sets lengths and moves nothing. Inside a round the early layers may
    stand at other lengths than the late ones. Rows `0 .. rows − 1` passed to the layers are always the first ones of
    the buffers, so that finished rows, swapped to the end, cost nothing.

    Attributes:
        placement: where the states that the layers are about to store belong; set before every pass.
    """

    def __init__(self, num_layers: int, rows: int, capacity: int) -> None:
        """Makes an empty cache of `num_layers` layers for `rows` sequences of at most `capacity` tokens each."""
        self.shared_layers = [SharedCacheLayer(rows, capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.shared_layers))
        self.placement: Placement | None = None

    @property
    def capacity(self) -> int:
        """The number of slots of a row."""
        return self.shared_layers[0].capacity

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the states of one layer at the current placement; layers call this.

        Returns:
            Views of the slots that the attention of this pass reads, `(rows, heads, view, head size)`.

        Raises:
            RuntimeError: no placement was set.
        """
        if self.placement is None:
            raise RuntimeError("SharedCache.placement must say where the states belong before layers run.")
        return self.shared_layers[layer_idx].update(key_states, value_states, self.placement)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Cuts the first `len(lengths)` rows of every layer to `lengths`.

        Raises:
            ValueError: more lengths than rows, or a length that is negative or beyond what a layer holds; nothing has
                changed then.
        """
        wanted = tuple(lengths)
        for index, layer in enumerate(self.shared_layers):
            held = layer.lengths[: len(wanted)]
            if len(held) < len(wanted) or any(not 0 <= want <= have for have, want in zip(held, wanted, strict=True)):
                raise ValueError(f"lengths={wanted} do not fit what layer {index + 1} holds: {layer.lengths}.")
        for layer in self.shared_layers:
            layer.lengths = wanted + layer.lengths[len(wanted) :]

    @torch.no_grad()
    def compact(self, starts: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        """Moves states of the first `len(starts)` rows of every layer forward: of row r those in `slots[r]`, in their
        order, to slots `starts[r]`, `starts[r] + 1` and so on. Lengths stay as they are; roll back afterwards.

        Raises:
            ValueError: not one list of slots for each start, more of them than rows, slots that do not ascend, or one
                that lies before its target or behind what a layer holds; nothing has changed then.
        """
        held = [min(layer.lengths[row] for layer in self.shared_layers) for row in range(self.shared_layers[0].rows)]
        if not len(starts) == len(slots) <= len(held):
            raise ValueError(
                f"starts is for {len(starts)} rows and slots for {len(slots)}; pass both for the same first rows of "
                f"{len(held)}."
            )
        moves = []
        for row, (start, sources) in enumerate(zip(starts, slots, strict=True)):
            bounds = [start - 1, *sources, held[row]]
            if start < 0 or any(after <= before for before, after in pairwise(bounds)):
                raise ValueError(
                    f"slots[{row}]={list(sources)} must ascend, none before starts[{row}]={start} and none behind the "
                    f"{held[row]} slots that the row holds."
                )
            moves += [(row, source, start + step) for step, source in enumerate(sources) if source != start + step]
        if moves:
            # One copy to the device, where all layers are on one.
            rows, origins, targets = torch.tensor(moves, device=self.shared_layers[0].keys.device).unbind(1)
            for layer in self.shared_layers:
                layer.move(rows, origins, targets)

    def swap(self, first: int, second: int) -> None:
        """Exchanges two rows in every layer."""
        for layer in self.shared_layers:
            layer.swap(first, second)

    def kept(self, order: Sequence[int]) -> Layers:
        """Returns the states of some rows after a round, for `restore` in a later call.

        They are copies, so that the buffers, which have room for the whole budget, can go.

        Args:
            order: the buffer rows to take, at least one, in the order to return them in.

        Returns:
            Keys and values of each layer, `(len(order), heads, slots, head size)`, as many slots as the longest of
            the rows has tokens.

        Raises:
            RuntimeError: nothing was stored yet.
        """
        if not self.is_initialized:
            raise RuntimeError("SharedCache.kept has nothing to return before all layers have stored states.")
        return tuple(layer.kept(order) for layer in self.shared_layers)

    @torch.no_grad()
    def restore(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], lengths: Sequence[int]) -> None:
        """Fills a cache that nothing was stored in with states of earlier tokens, so that a pass can go on behind them.

        The buffers are allocated once, with the full capacity, in the type and place of the states; these are copied.

        Args:
            layers: keys and values of each layer, `(rows, heads, slots, head size)`, where slot i of a row holds its
                position i.
            lengths: how many of the first slots of each row count. Fewer than are held is a common prefix.

        Raises:
            RuntimeError: something was stored before.
            ValueError: other layers or rows than the cache's, keys that do not fit their values, or a length that is
                negative, more than the states have slots, or more than the capacity; nothing has changed then.
        """
        wanted = tuple(lengths)
        if any(layer.is_initialized for layer in self.shared_layers):
            raise RuntimeError("SharedCache.restore fills a new cache only; this one holds states already.")
        if len(layers) != len(self.shared_layers):
            raise ValueError(
                f"layers holds the states of {len(layers)} layers; the cache has {len(self.shared_layers)}."
            )
        for index, (layer, (keys, values)) in enumerate(zip(self.shared_layers, layers, strict=True), start=1):
            if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
                raise ValueError(
                    f"the keys {tuple(keys.shape)} and values {tuple(values.shape)} of layer {index} do not fit; both "
                    "are (rows, heads, slots, head size)."
                )
            if not keys.shape[0] == len(wanted) == layer.rows:
                raise ValueError(
                    f"layer {index} holds the states of {keys.shape[0]} rows, and lengths={wanted} is for "
                    f"{len(wanted)}; the cache has {layer.rows} rows."
                )
            limit = min(keys.shape[2], layer.capacity)
            if any(not 0 <= length <= limit for length in wanted):
                raise ValueError(
                    f"lengths={wanted} must lie between 0 and {limit}: layer {index} brings {keys.shape[2]} slots, "
                    f"and the cache has room for {layer.capacity}."
                )
        for layer, (keys, values) in zip(self.shared_layers, layers, strict=True):
            layer.restore(keys, values, wanted)
