"""What every exit and draft length would give: replayed rounds times measured costs, and which of them to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerskip.comparison.replay import replay
from layerskip.decoding.cost import CostTable


@dataclass(frozen=True)
class Cell:
    """An exit and a draft length, and what they are predicted to give.

    Attributes:
        exit_layer: E.
        num_draft_tokens: γ.
        tokens_per_round: the mean acceptance length of the replayed rounds.
        draft_acceptance_rate: accepted over drafted, likewise; `None` where nothing was drafted. Where an exit drafts
            EOS behind a wrong draft, the engine drafts fewer than a replay counts, and both this and `predicted` are a
            little low.
        predicted: speed over plain decoding.
    """

    exit_layer: int
    num_draft_tokens: int
    tokens_per_round: float
    draft_acceptance_rate: float | None
    predicted: float

    @property
    def place(self) -> tuple[int, int]:
        """E and γ."""
        return self.exit_layer, self.num_draft_tokens


@dataclass(frozen=True)
class MeasuredCell:
    """A cell that was run for real.

    Attributes:
        cell: what was predicted.
        measured: speed over plain decoding in the same run, the median over repeats.
        lowest, highest: the same, of the slowest and the fastest repeat.
        tokens_per_round: of the real rounds.
        same_as_plain: answers whose every token is plain decoding's.
        answers: how many answers there are.
    """

    cell: Cell
    measured: float
    lowest: float
    highest: float
    tokens_per_round: float
    same_as_plain: int
    answers: int

    @property
    def error(self) -> float:
        """The relative error of the prediction: predicted over measured, minus 1."""
        return self.cell.predicted / self.measured - 1


def predict(matches: Mapping[int, Sequence[Sequence[bool]]], costs: CostTable, max_new_tokens: int) -> list[Cell]:
    """Returns a cell for each exit and each γ from 1 to the table's most, exit by exit; none without a round.

    Args:
        matches: of each exit, those of each answer, as `replay` takes them.
        costs: what rounds of these exits cost.
        max_new_tokens: the budget of every answer.
    """
    cells = []
    for exit_layer, rows in matches.items():
        for drafts in range(1, costs.max_num_draft_tokens + 1):
            counted = replay(rows, drafts, max_new_tokens)
            if counted.mean_acceptance_length is None:
                continue
            rounds: Counter[int] = Counter()
            for tally in counted.tallies:
                for (drafted, _), count in tally.outcomes.items():
                    rounds[drafted] += count
            tokens = counted.emitted - len(rows)
            cells.append(
                Cell(
                    exit_layer,
                    drafts,
                    counted.mean_acceptance_length,
                    counted.draft_acceptance_rate,
                    costs.speed_up(exit_layer, rounds, tokens),
                )
            )
    return cells


def best_cell(cells: Sequence[Cell]) -> Cell:
    """Returns the cell of the highest predicted speed; of equal ones the lowest exit and the shortest drafts."""
    return max(cells, key=lambda cell: (cell.predicted, -cell.exit_layer, -cell.num_draft_tokens))


def cells_to_run(cells: Sequence[Cell], count: int) -> list[Cell]:
    """Returns the best cell, its neighbours, and the next best ones, at most `count`, in the order of the cells.

    Neighbours differ by one in γ, or are the next lower or higher exit; the better ones come first.
    """
    best = best_cell(cells)
    exits = sorted({cell.exit_layer for cell in cells})
    row = exits.index(best.exit_layer)
    beside = {(best.exit_layer, best.num_draft_tokens + step) for step in (-1, 1)}
    beside |= {(exits[place], best.num_draft_tokens) for place in (row - 1, row + 1) if 0 <= place < len(exits)}
    ranked = sorted(cells, key=lambda cell: (cell != best, cell.place not in beside, -cell.predicted, cell.place))
    chosen = {cell.place for cell in ranked[:count]}
    return [cell for cell in cells if cell.place in chosen]
