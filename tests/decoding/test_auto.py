"""The exit that is chosen between rounds: what it costs where no exit helps, and what it brings where one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import CostTable, Engine
from layerskip.decoding.exit_controller import best_round
from tests import kit
from tests.decoding.levers_kit import cpu_like, gpu_like

LONG = 256
ALLOWED_SHARE = 0.03
"""Of the work of plain decoding: what "auto" may add where no exit helps."""
UNTRAINED: dict[str, Callable[[], PreTrainedModel]] = {
    "l4": kit.l4,
    "rejected": lambda: kit.rejected("llama"),
    "eight layers": lambda: kit.l4(5, num_hidden_layers=8),
}
TABLES: dict[str, Callable[[int], CostTable]] = {"gpu": gpu_like, "cpu": cpu_like}


@dataclass
class Work:
    """Tokens through each layer, and rows through the head."""

    layers: list[int]
    head: int = 0


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[Work]:
    """Counts work by hooks while the block runs."""
    work = Work([0] * model.config.num_hidden_layers)

    def count_layer(index: int) -> Any:
        def hook(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            work.layers[index] += arguments[0].shape[0] * arguments[0].shape[1]

        return hook

    def count_head(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        work.head += arguments[0].numel() // arguments[0].shape[-1]

    hooked = [*((layer, count_layer(index)) for index, layer in enumerate(kit.layers_of(model)))]
    hooked.append((model.get_output_embeddings(), count_head))
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooked]
    try:
        yield work
    finally:
        for handle in handles:
            handle.remove()


@cache
def untrained(name: str) -> tuple[PreTrainedModel, torch.Tensor]:
    """Returns a model and what plain decoding says, having checked its work; tests share both."""
    model = UNTRAINED[name]()
    with counted(model) as plain:
        expected = Engine(model).generate(kit.prompt_tensor(), max_new_tokens=LONG, strategy="autoregressive")
    assert plain == Work([len(kit.PROMPT) + LONG - 1] * model.config.num_hidden_layers, LONG)
    return model, expected.sequences


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", UNTRAINED)
def test_an_untrained_model_costs_next_to_nothing_more(name: str, table: str) -> None:
    """By the table, rows of the head for scoring included; where no exit is ever right also by the layers' tokens."""
    model, expected = untrained(name)
    layers = model.config.num_hidden_layers
    costs = TABLES[table](layers)
    engine = Engine(model, exit_layer="auto", cost_table=costs)
    with counted(model) as auto:
        result = engine.generate(kit.prompt_tensor(), max_new_tokens=LONG)
    assert torch.equal(result.sequences, expected)
    passed = sum(auto.layers) / layers - (len(kit.PROMPT) + LONG - 1)
    rows = auto.head - LONG
    assert rows > 0
    (tally,) = result.statistics.tallies
    seconds, in_rounds = 0.0, 0
    for (exit_layer, steps, verified), rounds in tally.work.items():
        is_plain = exit_layer == layers
        cost = costs.autoregressive_step if is_plain else costs.seconds(exit_layer, steps, verified)
        seconds += rounds * cost
        in_rounds += rounds * (steps + verified + 1)
    # Rows of the head that no round accounts for are those of scoring; prefill has one of its own.
    seconds += (auto.head - 1 - in_rounds) * costs.draft_head
    found = {"steps": seconds - (LONG - 1), "passed": passed, "rows": rows, "exits": result.statistics.rounds_by_exit}
    assert seconds - (LONG - 1) <= ALLOWED_SHARE * LONG, found
    if name == "rejected":
        assert passed + rows * costs.draft_head / costs.autoregressive_step <= ALLOWED_SHARE * LONG, found


@cache
def answer(table: str) -> list[int]:
    """Returns how many tokens each round behind token 64 emits on a model of which exit 2 is always right."""
    engine = Engine(kit.identical(), exit_layer="auto", cost_table=TABLES[table](kit.NUM_LAYERS))
    emitted, rounds = 0, []
    for event in engine.stream(kit.prompt_tensor(), max_new_tokens=LONG):
        if emitted >= 64:
            rounds.append(len(event.token_ids))
        emitted += len(event.token_ids)
    return rounds


@pytest.mark.parametrize("table", TABLES)
def test_a_right_exit_is_soon_used_as_far_as_it_pays(table: str) -> None:
    costs = TABLES[table](kit.NUM_LAYERS)
    # The best setting there is: exit 1 agrees by chance, exits 2 and 3 always.
    exit_layer, drafts = best_round(costs, {1: 0.0, 2: 1.0, 3: 1.0}, costs.max_num_draft_tokens)
    assert exit_layer == 2
    # The budget cuts the last one.
    rounds = answer(table)[:-1]
    assert sum(rounds) / len(rounds) >= 0.9 * (drafts + 1), rounds


def test_plain_rounds_are_rounds_of_the_last_layer() -> None:
    model = kit.rejected("llama")
    engine = Engine(model, exit_layer="auto", cost_table=gpu_like())
    statistics = engine.generate(kit.prompt_tensor(), max_new_tokens=40).statistics
    assert statistics.exit_layer == "auto"
    assert statistics.rounds_by_exit[kit.NUM_LAYERS] > 30
    assert sum(statistics.rounds_by_exit.values()) == statistics.rounds


def test_only_exits_of_the_table_are_chosen() -> None:
    costs = CostTable((3,), (0.3,), ((1.0,) * 6,), 1.0, 0.05, 0.01)
    statistics = (
        Engine(kit.identical(), exit_layer="auto", cost_table=costs)
        .generate(kit.prompt_tensor(), max_new_tokens=60)
        .statistics
    )
    assert set(statistics.rounds_by_exit) <= {3, kit.NUM_LAYERS}
    assert statistics.rounds_by_exit[3] > 5


def test_a_length_of_the_call_is_a_limit() -> None:
    engine = Engine(kit.identical(), exit_layer="auto", cost_table=gpu_like())
    statistics = engine.generate(kit.prompt_tensor(), max_new_tokens=60, num_draft_tokens=2).statistics
    assert max(statistics.acceptance_histogram) == 2
