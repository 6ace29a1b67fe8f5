"""What a token costs by tokens in the cache and by rows: measured rounds, and what each strategy makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerskip.comparison.latency import measure_costs, rounds_length
from layerskip.decoding.cost import CostTable, expected_tokens
from layerskip.decoding.engine import Engine
from layerskip.decoding.plan import check_exit_layer, check_num_draft_tokens


@dataclass(frozen=True)
class ScalingPoint:
    """What a token costs behind some context, in a batch of some rows, at some acceptance.

    Attributes:
        context: tokens of each row that stand in the cache.
        rows: that decode together.
        exit_layer: E.
        acceptance: α, the chance that a draft is accepted behind an accepted one.
        autoregressive_seconds: for each token of plain decoding, those of all rows counted.
        self_speculative_seconds: likewise with drafts, at the draft length that makes it least.
        num_draft_tokens: γ, that draft length, at least 1.
    """

    context: int
    rows: int
    exit_layer: int
    acceptance: float
    autoregressive_seconds: float
    self_speculative_seconds: float
    num_draft_tokens: int

    @property
    def speed_up(self) -> float:
        """The speed of drafting over that of plain decoding."""
        return self.autoregressive_seconds / self.self_speculative_seconds

    @property
    def pays(self) -> bool:
        """Whether drafting is faster."""
        return self.speed_up > 1

    @property
    def chosen_num_draft_tokens(self) -> int:
        """What a controller that knows these costs decodes with: γ, or 0, plain decoding, where no draft pays."""
        return self.num_draft_tokens if self.pays else 0

    def to_dict(self) -> dict[str, Any]:
        """Returns what is stored and what follows from it, by name, as JSON takes it."""
        return {
            **asdict(self),
            "speed_up": self.speed_up,
            "chosen_num_draft_tokens": self.chosen_num_draft_tokens,
        }


def round_seconds_per_token(costs: CostTable, exit_layer: int, drafts: int, acceptance: float) -> float:
    """Returns what a token costs in rounds of this many drafts.

    Each row of a batch advances by its own count and waits for none, so that a round gives `rows` times what a row
    emits on average. Rows that have ended are not counted in: a batch is as full as it was measured.

    Raises:
        ValueError: an exit or a number of drafts that was not measured.
    """
    return costs.round_seconds(exit_layer, drafts) / (costs.rows * expected_tokens(acceptance, drafts))


def scaling_points(costs: CostTable, context: int, acceptances: Sequence[float]) -> list[ScalingPoint]:
    """Returns a point for each exit of a table and each acceptance; of draft lengths that cost as much the shortest.

    Args:
        costs: measured with at least one draft.
        context: tokens that stood in the cache.
        acceptances: from 0 to 1.
    """
    plain = costs.autoregressive_step / costs.rows
    points = []
    for exit_layer, acceptance in itertools.product(costs.exit_layers, acceptances):
        seconds = {
            drafts: round_seconds_per_token(costs, exit_layer, drafts, acceptance)
            for drafts in range(1, costs.max_num_draft_tokens + 1)
        }
        best = min(seconds, key=lambda drafts: seconds[drafts])
        points.append(ScalingPoint(context, costs.rows, exit_layer, acceptance, plain, seconds[best], best))
    return points


def pays_up_to(points: Sequence[ScalingPoint]) -> int | None:
    """Returns the most rows up to which drafting pays at all numbers of rows that were measured; `None` at none.

    Args:
        points: of one context, exit and acceptance.
    """
    by_rows = sorted(points, key=lambda point: point.rows)
    paying = list(itertools.takewhile(lambda point: point.pays, by_rows))
    return paying[-1].rows if paying else None


def repeated(tokens: Sequence[int], length: int) -> list[int]:
    """Returns the first `length` of some tokens, at least one, that begin anew where they end."""
    return list(itertools.islice(itertools.cycle(tokens), length))


def some_tokens(vocab_size: int) -> list[int]:
    """Returns token ids for where no text is given: what rounds take does not depend on which tokens there are."""
    return [(7 + 31 * place) % vocab_size for place in range(min(vocab_size, 997))]


def check_scaling(
    engine: Engine, exit_layers: Sequence[int], max_num_draft_tokens: int, contexts: Sequence[int]
) -> None:
    """Checks that a model can be measured so; runs no layer.

    Raises:
        ValueError: an exit that it does not have, or a context that is too long for it, by name.
    """
    for exit_layer in exit_layers:
        check_exit_layer(exit_layer, engine.layered.num_layers)
    check_num_draft_tokens(max_num_draft_tokens)
    for context in contexts:
        try:
            engine.layered.check_length(context + rounds_length(max_num_draft_tokens), [context])
        except ValueError as error:
            raise ValueError(
                f"context {context} with the {rounds_length(max_num_draft_tokens)} tokens of rounds behind it is too "
                f"long for this model; pass shorter ones: {error}"
            ) from error


def measure_scaling(
    engine: Engine,
    exit_layers: Sequence[int],
    max_num_draft_tokens: int,
    tokens: Sequence[int],
    contexts: Sequence[int],
    batch_sizes: Sequence[int],
    repeats: int,
) -> Iterator[tuple[int, CostTable]]:
    """Yields each context with a table for each batch size behind it; a progress bar for each counts rounds.

    Args:
        tokens: what contexts are made of, as `repeated` takes them.
        contexts: numbers of tokens.
        batch_sizes: numbers of rows.

    The others, and what is raised, are as of `measure_costs`.
    """
    for context, rows in itertools.product(contexts, batch_sizes):
        text = repeated(tokens, context)
        yield context, measure_costs(engine, exit_layers, max_num_draft_tokens, text, repeats, rows=rows)
