"""How likely drafts of an exit are to be accepted, learned while decoding."""

from __future__ import annotations

from bisect import bisect_right

# Finer towards 1: trained exits are mostly sure of what they draft, and whether a long run of drafts pays turns on the
# difference between 0.9 and 0.99.
EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)
# Enough that one lucky or unlucky draft does not decide for its bin, little enough that five drafts outweigh it.
PRIOR_WEIGHT = 2.0


class Calibration:
    """How likely drafts of an exit are to be accepted, by the exit's confidence; learned while decoding.

    The confidence is the exit's largest softmax probability. Confidences between two edges share what was observed;
    what is expected before anything was observed is the confidence itself.
    """

    def __init__(self) -> None:
        """Starts without observations."""
        self._accepted = [0.0] * (len(EDGES) + 1)
        self._observed = [0] * (len(EDGES) + 1)

    def probability(self, confidence: float) -> float:
        """Returns how likely a draft of this confidence is to be accepted, in [0, 1]."""
        place = bisect_right(EDGES, confidence)
        # Rounding can lift a softmax above 1.
        expected = PRIOR_WEIGHT * min(confidence, 1.0)
        return (self._accepted[place] + expected) / (self._observed[place] + PRIOR_WEIGHT)

    def observe(self, confidence: float, accepted: float) -> None:
        """Learns from a draft that the full model has judged.

        Args:
            confidence: of the draft.
            accepted: 1.0 or 0.0, or the probability that the draft is accepted, in [0, 1].
        """
        place = bisect_right(EDGES, confidence)
        self._accepted[place] += accepted
        self._observed[place] += 1
