"""What the tests of rounds that decide as they go share: tables of costs, combinations of options, and recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import CostTable, Engine
from layerskip.decoding.drafting import Draft, Drafting
from layerskip.decoding.passes import Passes
from layerskip.decoding.rows import Row
from layerskip.model.placement import Placement
from tests import kit

LONGEST = 6


def gpu_like(num_layers: int = kit.NUM_LAYERS, longest: int = LONGEST) -> CostTable:
    """Costs in plain steps where reading weights is what takes time: short draft steps, and flat verifications."""
    exits = tuple(range(1, num_layers))
    verification = tuple(1.0 + 0.01 * width for width in range(longest + 1))
    steps = tuple(0.4 * layer / num_layers for layer in exits)
    return CostTable(exits, steps, (verification,) * len(exits), 1.0, 0.05, 0.01)


def cpu_like(num_layers: int = kit.NUM_LAYERS, longest: int = LONGEST) -> CostTable:
    """Costs in plain steps where every token takes its part, in drafts and in verifications."""
    exits = tuple(range(1, num_layers))
    verifications = []
    for layer in exits:
        late = 1 - layer / num_layers
        verifications.append(tuple(1.0 + 0.5 * late * width for width in range(longest + 1)))
    steps = tuple(0.05 + 0.95 * layer / num_layers for layer in exits)
    return CostTable(exits, steps, tuple(verifications), 1.0, 0.05, 0.02)


TABLES = {"gpu": gpu_like(), "cpu": cpu_like()}
EXITS = (kit.EXIT_LAYER, "auto")
STOPS = ("static", "adaptive")
COPIES = ("off", "checked", "trusted")
COMBINATIONS: list[dict[str, Any]] = [
    {"exit_layer": exit_layer, "draft_stop": stop, "copy_ngrams": copies}
    for exit_layer in EXITS
    for stop in STOPS
    for copies in COPIES
]
"""Every way to combine the options that go together; the first is the one that has none of them."""


def name_of(options: dict[str, Any]) -> str:
    """Returns what a combination is called."""
    return "-".join(map(str, options.values()))


def engine_of(model: PreTrainedModel, options: dict[str, Any], table: str = "gpu", **more: Any) -> Engine:
    """Returns an engine with such options and with a table by name."""
    return Engine(model, cost_table=TABLES[table], **options, **more)


def padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows padded on the left, and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def looping(model: PreTrainedModel) -> PreTrainedModel:
    """Takes attention out of a model: each token follows from the one before, so that greedy output soon repeats."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("o_proj.weight"):
                parameter.zero_()
    return model


@dataclass(frozen=True)
class Drafted:
    """A round's drafts: of which rows, behind which new tokens of each, with which exit, and all else."""

    rows: tuple[int, ...]
    before: list[tuple[int, ...]]
    exit_layer: int
    tokens: list[tuple[int, ...]]
    draft: Draft


@contextmanager
def early_passes() -> Iterator[list[int]]:
    """Counts passes that begin at the first layer while the block runs, prefill included; the count is its length."""
    seen: list[int] = []
    intact = Passes.run

    def counting(
        passes: Passes, rows: Sequence[Row], hidden: torch.Tensor, start: int, stop: int, placement: Placement
    ) -> torch.Tensor:
        if start == 0:
            seen.append(placement.width)
        return intact(passes, rows, hidden, start, stop, placement)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Passes, "run", counting)
        yield seen


@contextmanager
def recorded_drafts() -> Iterator[list[Drafted]]:
    """Records every round while the block runs."""
    seen: list[Drafted] = []
    intact = Drafting.draft

    def recording(drafting: Drafting, rows: Sequence[Row], limits: Sequence[int], exit_layer: int, *rest: Any) -> Draft:
        draft = intact(drafting, rows, limits, exit_layer, *rest)
        befores = [tuple(row.tokens) for row in rows]
        indices = tuple(row.index for row in rows)
        seen.append(Drafted(indices, befores, exit_layer, [tuple(tokens) for tokens in draft.tokens], draft))
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafting, "draft", recording)
        yield seen


# What tests with combinations share

NEW = 24
REPEATS = [5, 9, 33, 7, 52, 18, 5, 9, 33, 7, 52, 44, 3, 5, 9, 33]
PROMPTS = [REPEATS, kit.PROMPT[:6], [8, 20, 8]]
BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "l4": kit.l4,
    "mixed": kit.mixed,
    "identical": kit.identical,
    "rejected": lambda: kit.rejected("llama"),
    "looping": lambda: looping(kit.mixed()),
    **{f"gemma2 {grade}": lambda grade=grade: kit.graded("gemma2", grade) for grade in ("none", "some", "all")},
}
NEW_COMBINATIONS = COMBINATIONS[1:]
"""All but the one that decodes as it always has."""


@cache
def model_of(name: str) -> PreTrainedModel:
    """A model that tests share, so that none may change it."""
    return BUILDERS[name]()


@cache
def plain(name: str, prompt: tuple[int, ...], max_new_tokens: int = NEW, **arguments: Any) -> list[int]:
    """The new tokens of greedy `generate`; `arguments` are of things that can be compared."""
    ids = kit.prompt_tensor(list(prompt))
    said = kit.reference(model_of(name), ids, max_new_tokens, attention_mask=torch.ones_like(ids), **arguments)
    return said[0, len(prompt) :].tolist()


def combined(all_of_them: bool) -> pytest.MarkDecorator:
    """Returns what runs a test with combinations and tables; tables are no matter where nothing is decided by cost."""
    cases = [(options, table) for options in NEW_COMBINATIONS for table in TABLES]
    cases = [case for case in cases if case[1] == "gpu" or "auto" in case[0].values() or "adaptive" in case[0].values()]
    named = {f"{name_of(options)}-{table}": (options, table) for options, table in cases}
    chosen = named if all_of_them else SOME
    return pytest.mark.parametrize(("options", "table"), [pytest.param(*named[name], id=name) for name in chosen])


SOME = ("2-static-checked-gpu", "2-adaptive-trusted-cpu", "auto-static-trusted-gpu", "auto-adaptive-checked-gpu")
"""Every option is in two of these."""
combinations, some_combinations = combined(True), combined(False)
