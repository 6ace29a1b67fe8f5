"""Rounds of one row as compiled graphs, and the graphs that an engine keeps from call to call."""

from __future__ import annotations

import threading
import time
import weakref
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


class Loan:
    """Graphs that one call has for itself, until it is dropped or ends the loan.

    Attributes:
        graphs: they.
        is_over: whether others may have them.
    """

    def __init__(self, graphs: CompiledRounds) -> None:
        """Lends `graphs`."""
        self.graphs = graphs
        self.is_over = False


class GraphPool:
    """The graphs that were made so far, the latest used first, and who has them."""

    def __init__(self) -> None:
        """Starts without any."""
        self._graphs: list[tuple[CompiledRounds, weakref.ref[Loan]]] = []
        # Several threads may decode with one engine.
        self._lock = threading.Lock()

    def take(self, model: LayeredModel, settings: CompiledSettings) -> Loan:
        """Lends graphs for a call; new ones where none are free that fit.

        Raises:
            ValueError: a head of which no rows can be taken for drafts.
        """
        with self._lock:
            free = (graphs for graphs, loan in self._graphs if _is_over(loan()) and graphs.fits(model, settings))
            graphs = next(free, None)
            if graphs is not None:
                return self._lend(graphs)
        graphs = CompiledRounds(model, settings)
        with self._lock:
            return self._lend(graphs)

    def _lend(self, graphs: CompiledRounds) -> Loan:
        """Puts `graphs` first and notes who has them."""
        loan = Loan(graphs)
        others = [entry for entry in self._graphs if entry[0] is not graphs]
        self._graphs = [(graphs, weakref.ref(loan)), *others][:MOST_GRAPHS]
        return loan


def _is_over(loan: Loan | None) -> bool:
    return loan is None or loan.is_over
