"""The one key-value cache that drafting and verification share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from layerskip.model.placement import Placement


class SharedCacheLayer(CacheLayerMixin):
    """Keys and values of one layer: `(rows, heads, capacity, head size)`, where slot i of a row holds its position i.

    The buffers are allocated with the first keys and never move. `lengths` says, per row, how many slots count; what
    lies behind is left over from rejected drafts or padding and is overwritten before anything can attend to it.
    """

    is_croppable = True

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.rows = rows
        self.capacity = capacity
        self.lengths: tuple[int, ...] = (0,) * rows
        self.placement: Placement | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the buffers in the shape, type and place of the first keys and values."""
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros((self.rows, states.shape[1], self.capacity, states.shape[3]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores `(rows, heads, width, head size)` states where the current placement says.

        Returns:
            Views of the slots that the attention of this pass reads, `(rows, heads, view, head size)`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        placement = self.placement
        if placement is None or self.keys is None or self.values is None:
            raise RuntimeError("SharedCache.place() must say where the states belong before layers run.")
        rows = key_states.shape[0]
        self.lengths = placement.ends + self.lengths[rows:]
        return _store(self.keys[:rows], key_states, placement), _store(self.values[:rows], value_states, placement)

    def swap(self, first: int, second: int) -> None:
        """Exchanges two rows."""
        lengths = list(self.lengths)
        lengths[first], lengths[second] = lengths[second], lengths[first]
        self.lengths = tuple(lengths)
        for buffer in (self.keys, self.values):
            if buffer is not None:
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


def _store(buffer: torch.Tensor, states: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Writes states into their slots of a buffer and returns the view of it that attention reads."""
    if placement.start is None:
        rows = torch.arange(states.shape[0], device=states.device).unsqueeze(1)
        buffer[rows, :, placement.positions] = states.transpose(1, 2)
    else:
        buffer[:, :, placement.start : placement.start + placement.width] = states
    return buffer[:, :, : placement.view]


class SharedCache(Cache):
    """A cache for all layers of a batch, one per generation call.

    Rows have lengths of their own; rolling back sets lengths and moves nothing. Inside a round the early layers may
    stand at other lengths than the late ones. Rows `0 .. rows − 1` passed to the layers are always the first ones of
    the buffers, so that finished rows, swapped to the end, cost nothing.
    """

    def __init__(self, num_layers: int, rows: int, capacity: int) -> None:
        """Makes an empty cache of `num_layers` layers for `rows` sequences of at most `capacity` tokens each."""
        self.shared_layers = [SharedCacheLayer(rows, capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.shared_layers))
        self.capacity = capacity

    def place(self, start: int, stop: int, placement: Placement) -> None:
        """Says where the states that layers `start + 1 .. stop` are about to store belong."""
        for layer in self.shared_layers[start:stop]:
            layer.placement = placement

    def rollback(self, lengths: Sequence[int]) -> None:
        """Cuts the first `len(lengths)` rows of every layer to `lengths`; a length never grows by it.

        Raises:
            ValueError: a layer holds fewer tokens than it is to be cut to.
        """
        wanted = tuple(lengths)
        for index, layer in enumerate(self.shared_layers):
            if any(have < want for have, want in zip(layer.lengths, wanted, strict=False)):
                raise ValueError(f"lengths={wanted} exceed what layer {index + 1} holds: {layer.lengths}.")
            layer.lengths = wanted + layer.lengths[len(wanted) :]

    def swap(self, first: int, second: int) -> None:
        """Exchanges two rows in every layer."""
        for layer in self.shared_layers:
            layer.swap(first, second)
