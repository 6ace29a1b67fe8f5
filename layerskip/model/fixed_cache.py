"""The shared cache at fixed addresses, written to at positions that only the device knows, as compiled graphs need it.

Prefill fills it as any `SharedCache`. A compiled pass reads all of its slots at any length and hides by a mask those
that do not count, so that neither shapes nor addresses ever change.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from layerskip.model.cache import SharedCache, SharedCacheLayer


class FixedCacheLayer(SharedCacheLayer):
    """Keys and values of one layer in buffers that outlast a call: `(1, heads, capacity, head size)`."""

    def __init__(self, capacity: int) -> None:
        super().__init__(1, capacity)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Takes the buffers of the calls before; allocates them for the first one, or where the states are others."""
        if not (self._has_room_for(self.keys, key_states) and self._has_room_for(self.values, value_states)):
            super().lazy_initialization(key_states, value_states)
            # CUDA graphs copy what they read, unless they know that it stays where it is.
            torch._dynamo.mark_static_address(self.keys)
            torch._dynamo.mark_static_address(self.values)
        self.is_initialized = True

    def reset(self) -> None:
        """Empties the layer for the next call, which fills the same buffers."""
        # Whatever stood there is read, if hidden: a NaN of an earlier call would spoil this one.
        super().reset()
        self.lengths = (0,) * self.rows
        self.is_initialized = False

    def _buffer(self, states: torch.Tensor) -> torch.Tensor:
        # Prefill runs in inference mode, whose tensors nothing outside of it may write to; compiled passes are outside.
        with torch.inference_mode(False):
            shape = (self.rows, states.shape[1], self.capacity, states.shape[3])
            return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def _has_room_for(self, buffer: torch.Tensor | None, states: torch.Tensor) -> bool:
        if buffer is None:
            return False
        held, new = (buffer.shape[1], buffer.shape[3]), (states.shape[1], states.shape[3])
        return (held, buffer.dtype, buffer.device) == (new, states.dtype, states.device)


class FixedCache(SharedCache):
    """A `SharedCache` of one row that serves one call after the other; `reset` stands between them."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        """Makes an empty cache of `num_layers` layers for a sequence of at most `capacity` tokens."""
        super().__init__(num_layers, 1, capacity)
        self.shared_layers = [FixedCacheLayer(capacity) for _ in range(num_layers)]
        self.layers = list(self.shared_layers)

    def at(self, positions: torch.Tensor) -> PlacedCache:
        """Returns what layers take for one pass of tokens at `positions`, `(width,)`; prefill must have come before."""
        return PlacedCache(self.shared_layers, positions)

    def set_length(self, length: int) -> None:
        """Says how many slots count, since compiled passes do not; `rollback` may then cut them."""
        for layer in self.shared_layers:
            layer.lengths = (length,)


class PlacedCache(Cache):
    """The buffers of a `FixedCache` for one pass, made and dropped within the graph."""

    def __init__(self, layers: list[SharedCacheLayer], positions: torch.Tensor) -> None:
        """Takes `layers` as they are; `positions`, `(width,)`, say where the pass stores its states."""
        super().__init__(layers=list(layers))
        self.shared_layers = layers
        self.positions = positions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the states of one layer, `(1, heads, width, head size)`; layers call this.

        Returns:
            The whole buffers, `(1, heads, capacity, head size)`.
        """
        layer = self.shared_layers[layer_idx]
        layer.keys.index_copy_(2, self.positions, key_states)
        layer.values.index_copy_(2, self.positions, value_states)
        return layer.keys, layer.values


def fixed_mask(positions: torch.Tensor, capacity: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns the additive mask of a pass that reads all slots.

    A token at position p sees the slots s with p − window < s ≤ p, as in `masks.attention_mask`.

    Args:
        positions: of the tokens, `(width,)`.
        window: how many positions a token sees, itself included; `None` for all.
        dtype: of the queries.

    Returns:
        `(1, 1, width, capacity)`: 0 where a slot is seen, the lowest finite value elsewhere.
    """
    positions = positions.unsqueeze(-1)
    slots = torch.arange(capacity, device=positions.device)
    hidden = slots > positions
    if window is not None:
        hidden = hidden | (slots <= positions - window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill(hidden, torch.finfo(dtype).min)[None, None]
