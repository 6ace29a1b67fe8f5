"""When another draft pays: what it may bring against what its time would bring elsewhere."""

from __future__ import annotations

from collections import defaultdict

from layerskip.decoding.calibration import Calibration
from layerskip.decoding.cost import CostTable

# Tokens of plain decoding that count as decoded before the call: the first rounds, good or bad, do not set the rate
# alone, and after some tens of tokens nothing of them is left.
PRIOR_TOKENS = 4
# In place of an exit: drafts that are copied from the text, for which no layer has to run.
COPIED = 0


def pays(chance: float, marginal_seconds: float, rate: float) -> bool:
    """Whether a step that brings one token with this chance brings more than its time does elsewhere (renewal reward).

    Args:
        chance: of the token, in [0, 1].
        marginal_seconds: what the step takes. Measured costs can fall by noise; such a step always pays.
        rate: tokens per second without the step.
    """
    return marginal_seconds <= 0 or chance > marginal_seconds * rate


class StopRule:
    """Ends the drafting of a round where the next draft would not pay; one for each generation call.

    Everything follows from the frozen table and from what was observed: the same rounds end in the same places.
    """

    def __init__(self, table: CostTable) -> None:
        """Starts at the rate of plain decoding.

        Args:
            table: what rounds cost, on the machine that decodes.
        """
        self._table = table
        self._calibrations: defaultdict[int, Calibration] = defaultdict(Calibration)
        self._tokens = float(PRIOR_TOKENS)
        self._seconds = PRIOR_TOKENS * table.autoregressive_step

    @property
    def rate(self) -> float:
        """Tokens per second so far, by the table; never less than plain decoding's, which is always to be had."""
        return max(self._tokens / self._seconds, 1 / self._table.autoregressive_step)

    def chance(self, exit_layer: int, confidence: float) -> float:
        """Returns how likely a draft of this exit, or `COPIED`, is to be accepted, if those before it are."""
        return self._calibrations[exit_layer].probability(confidence)

    def goes_on(self, exit_layer: int, drafts: int, chance: float) -> bool:
        """Whether the round drafts one more token; never beyond the longest round of the table.

        Args:
            exit_layer: E, or `COPIED`, which takes no draft steps.
            drafts: how many tokens the round has drafted.
            chance: that all of them and the next one are accepted.

        Raises:
            ValueError: an exit that was not measured.
        """
        if drafts >= self._table.max_num_draft_tokens:
            return False
        # What copies cost beyond verification hardly depends on the exit.
        place, steps = (self._table.exit_layers[0], 0) if exit_layer == COPIED else (exit_layer, 1)
        seconds = self._table.seconds(place, steps, drafts + 1) - self._table.seconds(place, 0, drafts)
        return pays(chance, seconds, self.rate)

    def observe(self, exit_layer: int, confidence: float, accepted: float) -> None:
        """Learns from a draft, or from a candidate that was left out, before which every draft was accepted.

        Args:
            exit_layer: E, or `COPIED`.
            confidence: the exit's largest softmax probability, or that of the copy.
            accepted: 1.0 or 0.0, or the probability that it is accepted.
        """
        self._calibrations[exit_layer].observe(confidence, accepted)

    def book(self, seconds: float, tokens: float) -> None:
        """Counts a finished round: what it took by the table, and the tokens it emitted (of several rows the mean)."""
        self._seconds += seconds
        self._tokens += tokens
