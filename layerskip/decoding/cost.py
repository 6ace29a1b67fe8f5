"""What rounds cost: latencies measured on one machine, and the speed-up that follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

# What tables lack that were stored before it was measured.
OPTIONAL = ("rows", "acceptance")


@dataclass(frozen=True)
class CostTable:
    """Latencies in seconds, of `rows` rows that decode together, measured once and frozen since.

    A round in which each row processes d drafts takes d draft steps and a verification of d + 1 tokens of each row. All
    latencies are of whole passes, whatever the number of rows in them.

    Attributes:
        exit_layers: the exits E that were measured, in rising order.
        draft_steps: of each exit: one token of each row through layers 1..E and the draft head, their choice read.
        verifications: of each exit, by width 1, 2, …: the last token of each row through layers 1..E, then `width` exit
            states of each through layers E+1..L and the full head, accepting, and rolling the cache back. As many
            widths for every exit.
        autoregressive_step: a step of plain decoding: one token of each row through all layers and the full head, and
            what is beside.
        head: the full head over one token of each row, their choice read.
        draft_head: the head that drafts are chosen with, likewise.
        measured_on: what it was measured on, by name: machine, device, type, tokens in the cache of each row.
        rows: how many rows were decoded together.
        acceptance: of each exit, how often a draft was accepted where the exits were compared: what is expected of it
            before a call has shown more. Empty where nobody says.
    """

    exit_layers: tuple[int, ...]
    draft_steps: tuple[float, ...]
    verifications: tuple[tuple[float, ...], ...]
    autoregressive_step: float
    head: float
    draft_head: float
    measured_on: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 1
    acceptance: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Checks that the parts fit each other.

        Raises:
            ValueError: exits that do not rise, lists of different lengths, a latency that is no positive number, or
                less than one row.
        """
        for name, values in (("exit_layers", self.exit_layers), ("rows", (self.rows,))):
            if not isinstance(values, tuple) or any(isinstance(value, bool | float | str) for value in values):
                raise ValueError(f"{name}={values!r} must be integers, and exit_layers a tuple of them.")
        rising = all(low < high for low, high in zip(self.exit_layers, self.exit_layers[1:], strict=False))
        if not self.exit_layers or self.exit_layers[0] < 1 or not rising:
            raise ValueError(f"exit_layers={list(self.exit_layers)} must be one or more layers from 1 on, rising.")
        widths = {len(row) for row in self.verifications}
        counts = {len(self.exit_layers), len(self.draft_steps), len(self.verifications)}
        if len(counts) > 1 or len(widths) > 1 or 0 in widths:
            raise ValueError(
                f"{len(self.exit_layers)} exit_layers have {len(self.draft_steps)} draft_steps and "
                f"{len(self.verifications)} verifications of {sorted(widths)} widths; each exit needs one draft step "
                "and as many widths as the others."
            )
        latencies = [*self.draft_steps, *(seconds for row in self.verifications for seconds in row)]
        latencies += [self.autoregressive_step, self.head, self.draft_head]
        if not all(math.isfinite(seconds) and seconds > 0 for seconds in latencies):
            raise ValueError("latencies must be positive numbers of seconds; measure them anew.")
        if self.rows < 1:
            raise ValueError(f"rows={self.rows} is out of range; allowed are integers from 1 on.")
        is_known = len(self.acceptance) in (0, len(self.exit_layers))
        if not is_known or not all(0 <= rate <= 1 for rate in self.acceptance):
            raise ValueError(
                f"acceptance={list(self.acceptance)} must be one rate of 0 to 1 for each of "
                f"{len(self.exit_layers)} exit_layers, or nothing."
            )

    @property
    def max_num_draft_tokens(self) -> int:
        """The most drafts in a round whose cost is known."""
        return len(self.verifications[0]) - 1

    def c(self, exit_layer: int) -> float:
        """Returns a draft step over an autoregressive step."""
        return self.draft_steps[self._place(exit_layer)] / self.autoregressive_step

    def seconds(self, exit_layer: int, steps: int, verified: int) -> float:
        """Returns what a round of all rows takes by its parts.

        Args:
            exit_layer: E.
            steps: how often the early layers ran, beside the once that verification needs; once for each draft, unless
                several were copied or are branches of a tree.
            verified: how many drafts of each row passed the late layers.

        Raises:
            ValueError: an exit or a number of drafts that was not measured.
        """
        place = self._place(exit_layer)
        if not 0 <= verified <= self.max_num_draft_tokens:
            raise ValueError(f"drafts={verified} were not measured; measured are 0 to {self.max_num_draft_tokens}.")
        return steps * self.draft_steps[place] + self.verifications[place][verified]

    def plain_seconds(self, verified: int) -> float:
        """Returns what a round without an exit takes: a step of plain decoding, or all layers over copied drafts.

        The latter is taken for a verification with the lowest exit, which leaves out a few layers of each copied token.

        Args:
            verified: how many drafts of each row were copied.

        Raises:
            ValueError: a number of drafts that was not measured.
        """
        return self.seconds(self.exit_layers[0], 0, verified) if verified else self.autoregressive_step

    def round_seconds(self, exit_layer: int, drafts: int) -> float:
        """Returns what a round takes in which each row drafts one token after the other; errors are as of `seconds`."""
        return self.seconds(exit_layer, drafts, drafts)

    def verify_cost(self, exit_layer: int, drafts: int) -> float:
        """Returns a verification of this many drafts over an autoregressive step; errors are as of `round_seconds`."""
        return self.seconds(exit_layer, 0, drafts) / self.autoregressive_step

    def speed_up(self, exit_layer: int, rounds: Mapping[int, int], tokens: int) -> float:
        """Returns the speed of some rounds over plain decoding of the same tokens, whose steps give `rows` each.

        Args:
            exit_layer: of the rounds.
            rounds: how many rounds processed how many drafts, {drafts: rounds}; at least one round.
            tokens: that they emitted, those of all rows.

        Raises:
            ValueError: an exit or a number of drafts that was not measured, or no rounds.
        """
        seconds = sum(count * self.round_seconds(exit_layer, drafts) for drafts, count in rounds.items())
        if not seconds:
            raise ValueError("rounds holds none, and without rounds there is no speed.")
        return tokens / self.rows * self.autoregressive_step / seconds

    def expecting(self, known: CostTable | None) -> CostTable:
        """Returns the same costs with the `acceptance` that another table of the same exits knows, if it does."""
        rates = {} if known is None else dict(zip(known.exit_layers, known.acceptance, strict=False))
        if not rates.keys() >= set(self.exit_layers):
            return self
        return replace(self, acceptance=tuple(rates[layer] for layer in self.exit_layers))

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as `json.dumps` takes it and `read` reads it."""
        return asdict(self)

    @classmethod
    def read(cls, stored: Any, where: str) -> CostTable:
        """Returns a table that was stored as JSON; where it does not say `rows`, it is of one row.

        Args:
            stored: what the JSON holds.
            where: how messages call the place it stands in.

        Raises:
            ValueError: something is missing, of another type, or does not fit the rest.
        """
        names = [each.name for each in fields(cls)]
        if not isinstance(stored, Mapping) or {*stored, *OPTIONAL} != set(names):
            found = sorted(stored) if isinstance(stored, Mapping) else stored
            raise ValueError(f"{where} has {found!r}, where a table of costs has {', '.join(names)}; measure it anew.")
        try:
            return cls(
                exit_layers=tuple(_integer(layer, "layer") for layer in stored["exit_layers"]),
                draft_steps=tuple(_number(seconds) for seconds in stored["draft_steps"]),
                verifications=tuple(tuple(_number(seconds) for seconds in row) for row in stored["verifications"]),
                autoregressive_step=_number(stored["autoregressive_step"]),
                head=_number(stored["head"]),
                draft_head=_number(stored["draft_head"]),
                measured_on=_conditions(stored["measured_on"]),
                rows=_integer(stored.get("rows", 1), "number of rows"),
                acceptance=tuple(_number(rate) for rate in stored.get("acceptance", ())),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{where}: {error}") from error

    def _place(self, exit_layer: int) -> int:
        if exit_layer not in self.exit_layers:
            raise ValueError(f"exit_layer={exit_layer} was not measured; measured are {list(self.exit_layers)}.")
        return self.exit_layers.index(exit_layer)


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Returns how many tokens a round emits on average: the sum of acceptance^i, i = 0..γ.

    Args:
        acceptance: α, the probability that a draft is accepted if those before it are.
        num_draft_tokens: γ, what the round drafts.
    """
    return math.fsum(acceptance**count for count in range(num_draft_tokens + 1))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is a {type(value).__name__}, not a number of seconds; measure it anew.")
    return float(value)


def _conditions(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"measured_on={value!r} is a {type(value).__name__}, not an object; measure it anew.")
    return dict(value)


def _integer(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is a {type(value).__name__}, not a {what}; measure it anew.")
    return value
