"""Rounds of one row as compiled graphs, and the graphs that an engine keeps from call to call."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from layerskip.decoding.compiled import CompiledRounds, CompiledSettings
from layerskip.decoding.rounds import Outcome, Verdict
from layerskip.decoding.rows import DecodeSettings, Row
from layerskip.model.layered import LayeredModel

# A graph holds a cache of its own. Few kinds of calls alternate in one process.
MOST_GRAPHS = 8


class GraphRounds:
    """Runs each round as one graph: γ drafts and their verification, or a step of plain decoding."""

    def __init__(self, compiled: CompiledRounds, settings: DecodeSettings) -> None:
        """Makes ready for the rounds of one call.

        Args:
            compiled: reset for it.
            settings: of the call.
        """
        self.compiled = compiled
        self.settings = settings

    def run(self, rows: Sequence[Row]) -> Outcome:
        """Drafts and verifies; see `Rounds`. A graph does not tell when drafting ends, so that it takes no time here.

        Every round processes γ drafts; those that its budget has no room for, or that follow an EOS token, are dead.
        """
        begin = time.perf_counter()
        (row,) = rows
        graph = self.compiled.settings
        outcome = self.compiled.round(row.tokens[-1], row.committed - 1, self.settings.room(row))
        processed = graph.num_draft_tokens
        row.tally.early_layer_tokens += processed + 1
        row.tally.draft_tokens_processed += processed
        if graph.depth == self.compiled.model.num_layers:
            row.tally.late_layer_tokens += processed + 1
        accepted = outcome.drafts[: outcome.accepted]
        target = outcome.targets[outcome.accepted]
        verdict = Verdict(len(outcome.drafts), processed, accepted, target, range(len(accepted) + 1))
        return Outcome(graph.exit_layer, processed, [verdict], None, begin)


class GraphPool:
    """Graphs that no call uses at the moment, the latest first."""

    def __init__(self) -> None:
        """Starts without any."""
        self._free: list[CompiledRounds] = []
        # Several threads may decode with one engine.
        self._lock = threading.Lock()

    def take(self, model: LayeredModel, settings: CompiledSettings) -> CompiledRounds:
        """Returns graphs for a call, which are its own until `give`; new ones where none fit.

        Raises:
            ValueError: a head of which no rows can be taken for drafts.
        """
        with self._lock:
            for place, graphs in enumerate(self._free):
                if graphs.fits(model, settings):
                    return self._free.pop(place)
        return CompiledRounds(model, settings)

    def give(self, graphs: CompiledRounds) -> None:
        """Takes back the graphs of a call that has ended."""
        with self._lock:
            self._free = [graphs, *self._free][:MOST_GRAPHS]
