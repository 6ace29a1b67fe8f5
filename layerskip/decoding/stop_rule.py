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


def pays(tokens: float, marginal_seconds: float, rate: float) -> bool:
    """Whether steps that bring so many tokens on average bring more than their time does elsewhere (renewal reward).

    Args:
        tokens: of a single step, the chance of its token.
        marginal_seconds: what the steps take. Measured costs can fall by noise; such steps always pay.
        rate: tokens per second without the steps.
    """
    return marginal_seconds <= 0 or tokens > marginal_seconds * rate


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

    def goes_on(self, exit_layer: int, drafts: int, chance: float, following: float = 0.0) -> bool:
        """Whether the round drafts one more token; never beyond the longest round of the table.

        It does where some number of further tokens pays, not the next one alone: a verification of two tokens may cost
        much more than one of a single token, and one of nine hardly more than that.

        Args:
            exit_layer: E, or `COPIED`, which takes no draft steps.
            drafts: how many tokens the round has drafted.
            chance: that all of them and the next one are accepted.
            following: that one behind these is accepted, if all before it are; 0 looks at the next token alone.

        Raises:
            ValueError: an exit that was not measured.
        """
        # What copies cost beyond verification hardly depends on the exit.
        is_copied = exit_layer == COPIED
        place = self._table.exit_layers[0] if is_copied else exit_layer
        now = self._table.seconds(place, 0, drafts)
        gained = 0.0
        for more in range(1, self._table.max_num_draft_tokens - drafts + 1):
            gained += chance * following ** (more - 1)
            steps = 0 if is_copied else more
            if pays(gained, self._table.seconds(place, steps, drafts + more) - now, self.rate):
                return True
        return False

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
