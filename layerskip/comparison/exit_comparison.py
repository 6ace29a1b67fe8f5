"""What a comparison of exits has found so far: figures of each exit, predictions, real runs, and their advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from layerskip.comparison.benchmark import Measurement
from layerskip.comparison.comparison_folder import ReadAnswer
from layerskip.comparison.decided import decided_counts
from layerskip.comparison.prediction import Cell, MeasuredCell, predict
from layerskip.comparison.quality import ExitQuality, exit_quality
from layerskip.decoding.cost import CostTable

ALL = "all"
CSV_HEADER = (
    "exit_layer",
    "num_draft_tokens",
    "perplexity",
    "agreement",
    "expected_acceptance",
    "c",
    "verify_cost",
    "tokens_per_round",
    "draft_acceptance_rate",
    "predicted",
    "predicted_run",
    "measured",
    "lowest",
    "highest",
    "error",
)


@dataclass(frozen=True)
class Recommendation:
    """The setting that was fastest in real runs.

    Attributes:
        exit_layer, num_draft_tokens: E and γ; `None` where no exit pays.
        speed_up: what that cell, or where no exit pays the fastest one, gave over plain decoding.
        reason: in a sentence.
    """

    exit_layer: int | None
    num_draft_tokens: int | None
    speed_up: float
    reason: str


@dataclass(frozen=True)
class ExitComparison:
    """Answers with their categories, costs and real runs, as far as there are any.

    Attributes:
        exit_layers: the exits, in rising order.
        num_layers: L.
        max_new_tokens: the budget of an answer.
        categories: of all prompts; `None` where one has none.
        answers: so far, by the index of their prompt.
        costs: the table of costs, once it is measured.
        measured: the cells that were run for real, in their order.
    """

    exit_layers: tuple[int, ...]
    num_layers: int
    max_new_tokens: int
    categories: tuple[str | None, ...]
    answers: dict[int, ReadAnswer]
    costs: CostTable | None = None
    measured: tuple[MeasuredCell, ...] = ()

    @property
    def layers(self) -> list[int]:
        """The exits and L."""
        return [*self.exit_layers, self.num_layers]

    def groups(self) -> dict[str, list[ReadAnswer]]:
        """Returns all answers as `ALL`, then those of each category."""
        groups = {ALL: [self.answers[index] for index in sorted(self.answers)]}
        for index, category in enumerate(self.categories):
            if category is not None and index in self.answers:
                name = f"category {ALL}" if category == ALL else category
                groups.setdefault(name, []).append(self.answers[index])
        return groups

    def quality(self) -> dict[str, list[ExitQuality]]:
        """Returns the figures of each exit and the last layer, for each of `groups`."""
        return {
            name: exit_quality([answer.reading for answer in answers], self.exit_layers, self.num_layers)
            for name, answers in self.groups().items()
        }

    def decided(self) -> dict[str, dict[int, int]]:
        """Returns how many tokens are decided at each layer, for each of `groups`."""
        return {
            name: decided_counts([answer.reading for answer in answers], self.layers)
            for name, answers in self.groups().items()
        }

    def cells(self, indices: Sequence[int] | None = None) -> list[Cell]:
        """Returns the predictions on some prompts, by default all that were answered; none without costs."""
        if self.costs is None:
            return []
        chosen = sorted(self.answers) if indices is None else indices
        rows = [self.answers[index].reading.matches for index in chosen]
        matches = {exit_layer: [row[place] for row in rows] for place, exit_layer in enumerate(self.exit_layers)}
        return predict(matches, self.costs, self.max_new_tokens)

    def with_measured(self, cells: Sequence[Cell], measurements: Sequence[Measurement]) -> ExitComparison:
        """Returns the same with real runs.

        Args:
            cells: their predictions on the prompts of these runs.
            measurements: of the same cells in the same order, behind that of plain decoding.
        """
        found = tuple(
            MeasuredCell(
                cell=cell,
                measured=each.ratio,
                lowest=each.lowest_ratio,
                highest=each.highest_ratio,
                tokens_per_round=each.mean_acceptance_length or 1.0,
                same_as_plain=each.same_as_first or 0,
                answers=each.answers,
            )
            for cell, each in zip(cells, measurements[1:], strict=True)
        )
        return replace(self, measured=found)

    def recommendation(self, is_trained: bool) -> Recommendation:
        """Returns the fastest of the cells that pay; none where none does.

        A cell pays that was faster than plain decoding in every repeat, and was predicted to be: either alone may be
        noise.

        Args:
            is_trained: whether the checkpoint says that exits were trained.

        Raises:
            ValueError: none was run.
        """
        if not self.measured:
            raise ValueError("no cell was run for real, and predictions alone recommend none.")
        paying = [each for each in self.measured if each.lowest > 1 and each.cell.predicted > 1]
        best = max(paying or self.measured, key=lambda each: each.measured)
        speed = f"E={best.cell.exit_layer}, γ={best.cell.num_draft_tokens} runs at {best.measured:.2f} times"
        if paying:
            return Recommendation(*best.cell.place, best.measured, f"{speed} the speed of plain decoding.")
        advice = "its exits were never trained: fine-tune first (training/finetune.py)"
        if is_trained:
            advice = "train its exits further, or compare on prompts like those they were trained on"
        return Recommendation(
            None,
            None,
            best.measured,
            f"no exit pays here: {advice}. None of those that were run was faster than plain decoding in every pass "
            f"and predicted to be; {speed} its speed.",
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns everything that was found, as `json.dumps` takes it."""
        return {
            "num_layers": self.num_layers,
            "prompts": len(self.categories),
            "answered": len(self.answers),
            "new_tokens": sum(len(answer.token_ids) for answer in self.answers.values()),
            "quality": {name: [_as_json(each) for each in exits] for name, exits in self.quality().items()},
            "decided": self.decided(),
            "cost_table": None if self.costs is None else self.costs.to_dict(),
            "cells": [asdict(cell) for cell in self.cells()],
            "measured": [{**asdict(each), "error": each.error} for each in self.measured],
        }

    def csv_rows(self) -> list[list[Any]]:
        """Returns a row of `CSV_HEADER` for each exit and γ; before costs are measured, one for each exit.

        `predicted` is about all prompts, `predicted_run` and what follows about those that were run for real.
        """
        exits = {each.exit_layer: each for each in self.quality()[ALL]}
        real = {each.cell.place: each for each in self.measured}
        rows: list[list[Any]] = []
        for cell in self.cells():
            quality, run = exits[cell.exit_layer], real.get(cell.place)
            rows.append([*cell.place, quality.perplexity, quality.agreement, quality.expected_acceptance])
            rows[-1] += self._costs_of(cell)
            rows[-1] += [cell.tokens_per_round, cell.draft_acceptance_rate, cell.predicted]
            real_run = run and [run.cell.predicted, run.measured, run.lowest, run.highest, run.error]
            rows[-1] += real_run or [None] * 5
        if not rows:
            blank = [None] * (len(CSV_HEADER) - 5)
            for layer in self.exit_layers if exits else ():
                each = exits[layer]
                rows.append([layer, None, each.perplexity, each.agreement, each.expected_acceptance, *blank])
        return rows

    def _costs_of(self, cell: Cell) -> list[float | None]:
        """Returns what a draft and the verification of a full round cost, in steps of plain decoding."""
        if self.costs is None:
            return [None, None]
        return [self.costs.c(cell.exit_layer), self.costs.verify_cost(*cell.place)]


def _as_json(quality: ExitQuality) -> dict[str, Any]:
    """Returns the figures of an exit as JSON has them, where no number is infinite."""
    parts = asdict(quality)
    for part in (parts, *parts["by_position"]):
        part["perplexity"] = part["perplexity"] if math.isfinite(part["perplexity"]) else None
    return parts
