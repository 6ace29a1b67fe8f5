"""Measuring costs: which rounds run and what they leave, medians by hand, and a table under a clock that is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine
from layerskip.comparison import latency
from layerskip.comparison.latency import RejectingChoice, measure_costs, timed_rounds
from layerskip.decoding.cost import CostTable
from layerskip.decoding.exit_head import Candidates, ExitHead
from layerskip.decoding.loop import DecodeLoop
from layerskip.decoding.rows import DecodeSettings
from layerskip.decoding.stopping import Stops
from layerskip.model.cache import SharedCache
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel
from tests import kit

EXITS = [1, 2, 3]
LONGEST = 5
SOME_IDS = torch.arange(0, kit.VOCAB, 3)
# Exits that are right and wrong, long and short, and plain steps between them.
CELLS = [(2, 5), (1, 3), (4, 0), (3, 0), (2, 1), (3, 2), (4, 0), (1, 0), (1, 5)]
# A layer of the early or of the late ones, or the head, and how many tokens pass it.
Calls = list[tuple[str, int]]


@contextmanager
def called(model: PreTrainedModel) -> Iterator[Calls]:
    """Notes every call of a layer, counted from 1, and of the head, with its tokens."""
    calls: Calls = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, inputs: calls.append((name, inputs[0].shape[0] * inputs[0].shape[1]))

    layers = [(str(index), layer) for index, layer in enumerate(kit.layers_of(model), 1)]
    handles = [part.register_forward_pre_hook(note(name)) for name, part in [*layers, ("head", model.lm_head)]]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def loop_of(model: PreTrainedModel, draft_token_ids: torch.Tensor | None = None) -> DecodeLoop:
    """Returns a loop that can run all `CELLS`."""
    settings = DecodeSettings(kit.NUM_LAYERS, kit.NUM_LAYERS, 0, Stops(24))
    return DecodeLoop(
        LayeredModel(model), [kit.PROMPT], settings, choice=RejectingChoice(), draft_token_ids=draft_token_ids
    )


# Rounds of which no draft is accepted


def test_no_draft_is_accepted_and_the_token_after_the_last_one_follows() -> None:
    scores = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4], [1, 5, 9]]), 10).float()
    assert RejectingChoice().verify(scores, [[3, 1], [2]], [[], []]) == ([0, 0], [3, 1])
    assert RejectingChoice().draft(scores[:, 0])[0].tolist() == [3, 1]


@pytest.mark.parametrize("build", [kit.l4, kit.mixed, kit.identical])
def test_whatever_rounds_run_the_tokens_are_those_of_plain_decoding(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    loop = loop_of(model)
    assert len(list(timed_rounds(loop, CELLS))) == len(CELLS)
    assert loop.rows[0].tokens == kit.without_cache(model, kit.PROMPT, len(CELLS) + 1)
    assert loop.rows[0].tally.outcomes.total() == len(CELLS)
    assert {accepted for _, accepted in loop.rows[0].tally.outcomes} == {0}


def test_a_round_runs_its_drafts_through_the_early_layers_and_one_verification_through_the_late_ones() -> None:
    model = kit.identical()
    with called(model) as calls:
        rounds = timed_rounds(loop_of(model), CELLS)
        for cell, (exit_layer, drafts) in enumerate(CELLS):
            if cell:
                calls.clear()
            next(rounds)
            if not cell:
                assert calls[: kit.NUM_LAYERS] == [(str(layer), len(kit.PROMPT)) for layer in range(1, 5)]
                # The head reads the prompt's last position alone.
                del calls[: kit.NUM_LAYERS + 1]
            early = [(str(layer), 1) for layer in range(1, exit_layer + 1)]
            late = [(str(layer), drafts + 1) for layer in range(exit_layer + 1, kit.NUM_LAYERS + 1)]
            assert calls == [*[*early, ("head", 1)] * drafts, *early, *late, ("head", drafts + 1)]


def test_drafts_alone_are_chosen_from_the_draft_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kit.mixed()
    chosen: list[int] = []
    intact = ExitHead.candidates

    def noting(head: ExitHead, *arguments: Any, **options: Any) -> Candidates:
        candidates = intact(head, *arguments, **options)
        chosen.extend(candidates.tokens)
        return candidates

    monkeypatch.setattr(ExitHead, "candidates", noting)
    with called(model) as calls:
        loop = loop_of(model, SOME_IDS)
        list(timed_rounds(loop, CELLS))
    assert len(chosen) == sum(drafts for _, drafts in CELLS) and set(chosen) <= set(SOME_IDS.tolist())
    assert [width for name, width in calls if name == "head"] == [1, *(drafts + 1 for _, drafts in CELLS)]
    plain = kit.without_cache(model, kit.PROMPT, len(CELLS) + 1)
    assert loop.rows[0].tokens == plain and not set(plain) <= set(SOME_IDS.tolist())


# The table


class Clock:
    """A clock that stands still but for what is added to it."""

    def __init__(self) -> None:
        self.units = 0

    def perf_counter(self) -> float:
        """Returns a time of which differences are exact."""
        return self.units / 1024


def layer_units(layer: int, width: int) -> int:
    """What a layer, counted from 1, takes for some tokens; not in proportion, so that no two verifications that add up
    to as many tokens are alike."""
    return 3 + 2 * layer + width + width // 3


def head_units(width: int) -> int:
    return 7 + 2 * width


ROLL_BACK = 5
DRAFT_HEAD = 3


@contextmanager
def known_times(model: PreTrainedModel) -> Iterator[Clock]:
    """Puts a clock under loop and measurement that only layers, heads and the roll-back move; every further row of a
    pass adds a unit to each of its layers and heads."""
    clock = Clock()

    def add(units: Callable[[int], int]) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            clock.units += units(inputs[0].shape[1]) + inputs[0].shape[0] - 1

        return hook

    def moving(intact: Callable[..., Any], units: int) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            clock.units += units
            return intact(*arguments)

        return call

    handles = [model.lm_head.register_forward_pre_hook(add(head_units))]
    for index, layer in enumerate(kit.layers_of(model), 1):
        handles.append(layer.register_forward_pre_hook(add(lambda width, index=index: layer_units(index, width))))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("loop", "chain_rounds", "tree_rounds"):
            patch.setattr(f"layerskip.decoding.{module}.time", clock)
        patch.setattr("layerskip.comparison.latency.time", clock)
        patch.setattr(SharedCache, "rollback", moving(SharedCache.rollback, ROLL_BACK))
        patch.setattr(DraftHead, "logits", moving(DraftHead.logits, DRAFT_HEAD))
        yield clock
    for handle in handles:
        handle.remove()


def table_by_hand(draft_head: int, measured_on: Any, rows: int = 1) -> CostTable:
    """Returns the table that the known times amount to."""

    def layers(first: int, last: int, width: int) -> int:
        return sum(layer_units(layer, width) + rows - 1 for layer in range(first, last + 1))

    def early(exit_layer: int) -> int:
        return layers(1, exit_layer, 1)

    def head(width: int) -> int:
        return head_units(width) + rows - 1

    def verification(exit_layer: int, drafts: int) -> float:
        late = layers(exit_layer + 1, kit.NUM_LAYERS, drafts + 1)
        return (early(exit_layer) + late + head(drafts + 1) + ROLL_BACK) / 1024

    return CostTable(
        exit_layers=tuple(EXITS),
        draft_steps=tuple((early(exit_layer) + draft_head) / 1024 for exit_layer in EXITS),
        verifications=tuple(
            tuple(verification(exit_layer, drafts) for drafts in range(LONGEST + 1)) for exit_layer in EXITS
        ),
        autoregressive_step=(early(kit.NUM_LAYERS) + head(1) + ROLL_BACK) / 1024,
        head=head(1) / 1024,
        draft_head=draft_head / 1024,
        measured_on=measured_on,
        rows=rows,
    )


@pytest.mark.parametrize("build", [kit.l4, kit.identical])
def test_under_known_times_the_table_is_the_one_by_hand(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    with known_times(model):
        table = measure_costs(Engine(model), EXITS, LONGEST, kit.PROMPT, 2)
    assert table == table_by_hand(head_units(1), table.measured_on)


@pytest.mark.parametrize("build", [kit.l4, kit.identical])
def test_rows_decode_together_and_a_table_says_how_many(build: Callable[[], PreTrainedModel]) -> None:
    """Rounds of rows that accept as they like would have other widths, and rows that end fewer rows."""
    model = build()
    with known_times(model):
        table = measure_costs(Engine(model), EXITS, LONGEST, kit.PROMPT, 2, rows=3)
    assert table == table_by_hand(head_units(1) + 2, table.measured_on, rows=3)
    assert table.measured_on["context"] == len(kit.PROMPT)


def test_a_single_token_is_context_enough() -> None:
    model = kit.mixed()
    with known_times(model):
        table = measure_costs(Engine(model), EXITS, LONGEST, kit.PROMPT[:1], 1, rows=2)
    assert table == table_by_hand(head_units(1) + 1, table.measured_on, rows=2)
    assert table.measured_on["context"] == 1


def test_a_draft_vocabulary_makes_the_draft_steps_cheaper_alone() -> None:
    model = kit.mixed()
    with known_times(model):
        table = measure_costs(Engine(model, draft_token_ids=SOME_IDS), EXITS, LONGEST, kit.PROMPT, 1)
    assert table == table_by_hand(DRAFT_HEAD, table.measured_on)
    assert table.measured_on["draft_vocab_size"] == len(SOME_IDS)


def test_the_table_says_what_it_was_measured_on_and_goes_through_json() -> None:
    table = measure_costs(Engine(kit.mixed()), [2, 3], 2, kit.PROMPT, 1)
    assert table.exit_layers == (2, 3) and table.max_num_draft_tokens == 2
    found = {name: table.measured_on[name] for name in ("device", "dtype", "attn_implementation", "context", "repeats")}
    assert found == {
        "device": "cpu",
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "context": len(kit.PROMPT),
        "repeats": 1,
    }
    assert table.measured_on["draft_vocab_size"] is None
    assert CostTable.read(json.loads(json.dumps(table.to_dict())), "here") == table


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Replaces rounds by recorded ones: 1000 times as slow in the first pass, then 1, 2 and 30 times; notes the cells
    of each pass."""
    seen: list[list[tuple[int, int]]] = []

    def recorded(loop: DecodeLoop, cells: Sequence[tuple[int, int]]) -> Iterator[dict[str, float]]:
        factor = [1000, 1, 2, 30][len(seen)]
        seen.append(list(cells))
        for exit_layer, drafts in cells:
            draft = drafts * exit_layer if drafts else 0.25
            seconds = {"draft": draft, "verify": 10 * exit_layer + drafts, "other": 0.5}
            yield {phase: factor * value for phase, value in seconds.items()}

    monkeypatch.setattr(latency, "timed_rounds", recorded)
    monkeypatch.setattr(latency, "ROUNDS_PER_TEXT", 64)
    return seen


def test_the_table_holds_medians_of_the_timed_passes(passes: list[list[tuple[int, int]]]) -> None:
    table = measure_costs(Engine(kit.mixed()), [1, 3], 2, kit.PROMPT, 3)
    assert table.draft_steps == (2.0, 6.0)
    # The draft phase of a round without drafts belongs to its verification, and what follows to every one.
    assert table.verifications == ((21.5, 23.0, 25.0), (61.5, 63.0, 65.0))
    assert table.autoregressive_step == 81.5


def test_every_pass_runs_all_cells_in_an_order_of_its_own(passes: list[list[tuple[int, int]]]) -> None:
    measure_costs(Engine(kit.mixed()), EXITS, 3, kit.PROMPT, 3)
    cells = [(exit_layer, drafts) for exit_layer in EXITS for drafts in range(4)]
    assert [sorted(each) for each in passes] == [sorted(cells + [(4, 0)] * latency.PLAIN_STEPS)] * 4
    assert len({tuple(each) for each in passes}) == 4


@pytest.mark.parametrize("rows", [1, 3])
def test_long_passes_begin_anew_behind_the_context(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "ROUNDS_PER_TEXT", 4)
    model = kit.mixed()
    texts: list[tuple[int, list[int], list[list[int]]]] = []

    def noted(loop: DecodeLoop, cells: Sequence[tuple[int, int]]) -> Iterator[dict[str, float]]:
        held = list(loop.cache.shared_layers[-1].lengths)
        yield from timed_rounds(loop, cells)
        texts.append((len(cells), held, [row.tokens for row in loop.rows]))

    monkeypatch.setattr(latency, "timed_rounds", noted)
    with called(model) as calls:
        measure_costs(Engine(model), [2], LONGEST, kit.PROMPT, 1, rows=rows)
    # A pass has 6 rounds of the exit and 5 plain steps; two passes are run.
    assert [rounds for rounds, _, _ in texts] == [4, 4, 3] * 2
    for rounds, held, tokens in texts:
        assert held == [len(kit.PROMPT) - 1] * rows
        assert tokens == [kit.without_cache(model, kit.PROMPT, rounds + 1)] * rows
    # What all texts begin with passes the layers once, for one row.
    assert next(width for name, width in calls if name == "1") == len(kit.PROMPT) - 1
    assert sum(width == len(kit.PROMPT) - 1 for name, width in calls if name == "1") == 1


def test_the_model_stays_as_it_is() -> None:
    model = kit.mixed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    measure_costs(Engine(model, draft_token_ids=SOME_IDS), EXITS, 2, kit.PROMPT, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.to_dict() == config
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "repeats=0"),
        ({"rows": 0}, "rows=0"),
        ({"exit_layers": [1, 4]}, "exit_layer=4"),
        ({"max_num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"context": [1] * 60}, "has only 64 positions"),
        # Found a fault: refused only once everything was measured.
        ({"exit_layers": [2, 1]}, "exit_layers"),
        ({"exit_layers": [2, 2]}, "exit_layers"),
        # Found a fault: an IndexError that names nothing.
        ({"exit_layers": []}, "exit_layers"),
        # Found a fault: a RuntimeError out of the embedding.
        ({"context": []}, "context"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused_before_any_layer_runs(changes: dict[str, Any], message: str) -> None:
    model = kit.build(kit.gpt2_config())
    arguments = {"exit_layers": EXITS, "max_num_draft_tokens": 4, "context": kit.PROMPT, "repeats": 1}
    with kit.counted_layers(model) as counts, pytest.raises(ValueError, match=message):
        measure_costs(Engine(model), **{**arguments, **changes})
    assert counts == [0] * kit.NUM_LAYERS


def test_learned_positions_that_suffice_are_measured() -> None:
    """A control of the refusal above."""
    table = measure_costs(Engine(kit.build(kit.gpt2_config())), EXITS, 4, kit.PROMPT, 1)
    assert table.exit_layers == tuple(EXITS)


def test_train_mode_is_refused() -> None:
    model = kit.mixed().train()
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        measure_costs(Engine(model), EXITS, 2, kit.PROMPT, 1)
    assert model.training
