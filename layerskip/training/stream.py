"""Streamed training rows that never end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


class Endless(IterableDataset[Any]):
    """A stream that begins anew, in another order, when it has been read.

    Trainer does not know how long a stream is: it would take the rest of an accumulation window for the next one's, and
    skip the wrong rows on resuming after the first pass.
    """

    def __init__(self, rows: Any) -> None:
        """Wraps a `datasets.IterableDataset`."""
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        """Yields rows, pass after pass."""
        for epoch in itertools.count():
            self._rows.set_epoch(epoch)
            empty = True
            for row in self._rows:
                empty = False
                yield row
            if empty:
                # As in a worker of the data loader for which there is no shard.
                return
