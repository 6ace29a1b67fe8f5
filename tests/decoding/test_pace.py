"""What rounds teach the exit controller and the stop rule, what they are booked at, and what is scored for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from layerskip import Engine
from layerskip.decoding.choice import GreedyChoice
from layerskip.decoding.drafting import Draft, RowDraft
from layerskip.decoding.exit_controller import ExitController
from layerskip.decoding.exit_head import ExitHead
from layerskip.decoding.ngrams import Copy
from layerskip.decoding.pace import Pace, Round
from layerskip.decoding.rows import DecodeSettings, Row
from layerskip.decoding.stop_rule import COPIED, StopRule
from layerskip.decoding.stopping import Stops
from tests import kit
from tests.decoding.levers_kit import LONGEST, gpu_like

COSTS = gpu_like()
EXIT = kit.EXIT_LAYER
STATIC = DecodeSettings(EXIT, kit.NUM_LAYERS, LONGEST, Stops(24, frozenset()), costs=COSTS)
AUTO = replace(STATIC, exit_layer=kit.NUM_LAYERS, chooses_exit=True)
ADAPTIVE = replace(STATIC, stops_drafts_early=True)
BOTH = replace(AUTO, stops_drafts_early=True)
# By exit, what its states come to in the head below.
STATES = {layer: layer * 10 for layer in COSTS.exit_layers}


@dataclass
class Seen:
    """What was observed and booked."""

    exits: list[tuple[int, list[float]]] = field(default_factory=list)
    drafts: list[tuple[int, float, float]] = field(default_factory=list)
    rounds: list[dict[str, float]] = field(default_factory=list)
    rule_rounds: list[tuple[float, float]] = field(default_factory=list)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Notes what the controller and the stop rule are told."""
    notes = Seen()

    def note(owner: type, name: str, into: list[Any], read: Any) -> None:
        intact = getattr(owner, name)

        def noting(self: Any, *arguments: Any, **named: Any) -> Any:
            into.append(read(*arguments, **named))
            return intact(self, *arguments, **named)

        monkeypatch.setattr(owner, name, noting)

    note(ExitController, "observe", notes.exits, lambda layer, agreements: (layer, list(agreements)))
    note(ExitController, "book", notes.rounds, dict)
    note(StopRule, "observe", notes.drafts, lambda layer, confidence, held: (layer, confidence, held))
    note(StopRule, "book", notes.rule_rounds, lambda seconds, tokens: (seconds, tokens))
    return notes


class StubHead:
    """A head whose exits agree where their states are those of a settled token; notes the places of each call."""

    def __init__(self) -> None:
        self.choice = GreedyChoice()
        self.calls: list[tuple[int, list[int], list[int]]] = []

    def agreement(
        self, states: torch.Tensor, rows: list[int], counts: list[int], targets: torch.Tensor, settled: list[int]
    ) -> list[float]:
        assert len(states) == len(rows) == len(counts) == len(targets) == len(settled)
        assert targets.argmax(-1).tolist() == settled
        self.calls.append((int(states[0, 0]), rows, counts))
        return [float(token % 2) for token in settled]


def pace_of(settings: DecodeSettings) -> tuple[Pace, Any]:
    head: Any = StubHead()
    return Pace(settings, head), head


def learn(
    pace: Pace, plan: Round, drafted: Sequence[RowDraft], settled: Sequence[list[int]], steps: int | None = None
) -> None:
    """Lets a round of `rows` be learned from; each row has five new tokens already."""
    rows = [Row(index, 10, tokens=[1] * 5) for index in range(len(drafted))]
    longest = max(len(each.tokens) for each in drafted)
    draft = Draft(
        plan.exit_layer, list(drafted), [LONGEST] * len(rows), passes=1 + (longest if steps is None else steps)
    )
    width = longest + 1
    draft.states = {layer: torch.full((len(rows), width, 4), float(mark)) for layer, mark in STATES.items()}
    scores = torch.zeros(len(rows), width, kit.VOCAB)
    for place, tokens in enumerate(settled):
        for offset, token in enumerate(tokens):
            scores[place, offset, token] = 1.0
    pace.learn(plan, rows, draft, settled, scores)


# Settings


@pytest.mark.parametrize("settings", [AUTO, ADAPTIVE, BOTH])
def test_decisions_by_cost_need_costs(settings: DecodeSettings) -> None:
    with pytest.raises(ValueError, match="costs=None"):
        pace_of(replace(settings, costs=None))


def test_rounds_that_are_not_decided_by_cost_need_none_and_follow_the_settings() -> None:
    pace, head = pace_of(replace(STATIC, costs=None))
    assert pace.stop_rule is None
    assert pace.prefill() == Round(kit.NUM_LAYERS, 0, 0)
    assert pace.next_round(STATIC) == Round(EXIT, LONGEST, LONGEST)
    # Settings may be exchanged between rounds.
    assert pace.next_round(replace(STATIC, exit_layer=1, num_draft_tokens=2)) == Round(1, 2, 2)
    learn(pace, pace.next_round(STATIC), [RowDraft([5, 7])], [[5, 7, 9]])
    assert head.calls == []


def test_a_rounds_exit_is_the_controllers() -> None:
    for trusts in (False, True):
        settings = replace(AUTO, trusts_copies=trusts)
        pace, _ = pace_of(settings)
        assert pace.prefill() == Round(kit.NUM_LAYERS, 0, 0, COSTS.exit_layers)
        # Nothing is known yet, so that nothing is drafted; copies that are trusted need no exit.
        plain = pace.next_round(settings)
        assert (plain.exit_layer, plain.num_draft_tokens) == (kit.NUM_LAYERS, 0)
        assert plain.copies == (LONGEST if trusts else 0)
        for _ in range(8):
            learn(pace, Round(EXIT, LONGEST, LONGEST, (EXIT,)), [RowDraft([5, 7, 5, 7])], [[5, 7, 5, 7, 9]])
        better = pace.next_round(settings)
        assert better.exit_layer == EXIT and 0 < better.num_draft_tokens <= LONGEST
        assert better.copies == (LONGEST if trusts else better.num_draft_tokens)


def test_where_a_rule_ends_drafts_their_length_on_average_is_no_limit() -> None:
    pace, _ = pace_of(replace(BOTH, num_draft_tokens=5))
    for _ in range(3):
        learn(pace, Round(EXIT, 5, 5, (EXIT,)), [RowDraft([5])], [[5, 9]])
    assert pace.next_round(replace(BOTH, num_draft_tokens=5)).num_draft_tokens == 5


# What is learned


def test_drafts_teach_as_far_as_all_before_them_held(seen: Seen) -> None:
    pace, head = pace_of(BOTH)
    drafted = RowDraft([5, 7, 8, 6], confidences=[0.9, 0.8, 0.7, 0.6])
    learn(pace, Round(EXIT, 4, 4, (EXIT,)), [drafted], [[5, 9]])
    assert seen.drafts == [(EXIT, 0.9, 1.0), (EXIT, 0.8, 0.0)]
    assert seen.exits == [(EXIT, [1.0, 0.0])]
    assert head.calls == []


@pytest.mark.parametrize(("settled", "held"), [([5, 7], [1.0, 1.0]), ([5, 8], [1.0, 0.0]), ([6], [0.0])])
def test_a_draft_that_was_left_out_teaches_like_the_others(seen: Seen, settled: list[int], held: list[float]) -> None:
    pace, _ = pace_of(BOTH)
    drafted = RowDraft([5], left_out=7, confidences=[0.9, 0.2])
    learn(pace, Round(EXIT, 4, 4, (EXIT,)), [drafted], [settled])
    assert seen.drafts == [(EXIT, confidence, each) for confidence, each in zip((0.9, 0.2), held, strict=False)]
    assert seen.exits == [(EXIT, held)]


def test_a_draft_that_was_left_out_alone_teaches(seen: Seen) -> None:
    """The rule drafted nothing; what it kept back is compared all the same."""
    pace, _ = pace_of(ADAPTIVE)
    learn(pace, Round(EXIT, 4, 4), [RowDraft(left_out=7, confidences=[0.1])], [[7]])
    assert seen.drafts == [(EXIT, 0.1, 1.0)]
    assert seen.exits == seen.rounds == []


def test_copies_teach_up_to_the_first_that_fails_whether_drafted_or_not(seen: Seen) -> None:
    pace, _ = pace_of(ADAPTIVE)
    copy = Copy([5, 7, 8], 3)
    learn(pace, Round(EXIT, 4, 4), [RowDraft([5, 7], copy=copy, is_copied=True)], [[5, 7, 9]])
    trusted = [(COPIED, copy.confidence, held) for held in (1.0, 1.0, 0.0)]
    assert seen.drafts == trusted
    # The text offered them, but the exit drafted something else.
    learn(pace, Round(EXIT, 4, 4), [RowDraft([6], confidences=[0.5], copy=copy)], [[6, 7]])
    assert seen.drafts[3:] == [(COPIED, copy.confidence, 0.0), (EXIT, 0.5, 1.0)]


def test_an_exit_whose_round_was_copied_is_scored_by_the_head(seen: Seen) -> None:
    pace, head = pace_of(BOTH)
    copied = RowDraft([5, 7], copy=Copy([5, 7], 2), is_copied=True)
    learn(pace, Round(EXIT, 4, 4, COSTS.exit_layers), [copied], [[5, 7, 8]])
    assert [mark for mark, _, _ in head.calls] == list(STATES.values())
    assert seen.exits == [(layer, [1.0, 1.0, 0.0]) for layer in COSTS.exit_layers]


def test_nothing_is_scored_where_the_controller_does_not_ask(seen: Seen) -> None:
    pace, head = pace_of(BOTH)
    learn(pace, Round(kit.NUM_LAYERS, 0, 0), [RowDraft()], [[5]])
    copied = RowDraft([5, 7], copy=Copy([5, 7], 2), is_copied=True)
    learn(pace, Round(EXIT, 4, 4, (EXIT,)), [copied], [[5, 7, 8]])
    assert head.calls == [] and seen.exits == []
    assert [each["head_rows"] for each in seen.rounds] == [0.0, 0.0]


def test_places_of_all_rows_are_scored_together(seen: Seen) -> None:
    """Row by row, and within a row in the order of its tokens; counts are of new tokens before each place."""
    pace, head = pace_of(AUTO)
    drafted = [RowDraft([5, 7, 6]), RowDraft([4])]
    learn(pace, Round(EXIT, 4, 4, COSTS.exit_layers), drafted, [[5, 7, 8], [9]])
    places = ([0, 0, 0, 1], [5, 6, 7, 5])
    assert head.calls == [(10, *places), (30, *places)]
    assert seen.exits == [(EXIT, [1.0, 1.0, 0.0]), (EXIT, [0.0]), (1, [1.0, 1.0, 0.0, 1.0]), (3, [1.0, 1.0, 0.0, 1.0])]
    assert [each["head_rows"] for each in seen.rounds] == [2 * 4 / 2]


@pytest.mark.parametrize("rows", [1, 8])
def test_the_head_runs_once_for_each_exit_whatever_the_rows(rows: int) -> None:
    pace, head = pace_of(AUTO)
    learn(pace, Round(EXIT, 4, 4, COSTS.exit_layers), [RowDraft([5, 7])] * rows, [[5, 9]] * rows)
    learn(pace, Round(kit.NUM_LAYERS, 0, 0, COSTS.exit_layers), [RowDraft()] * rows, [[5]] * rows)
    assert [mark for mark, _, _ in head.calls] == [10, 30, 10, 20, 30]


# What is booked


@pytest.mark.parametrize(
    ("plan", "drafts", "steps", "seconds"),
    [
        (Round(EXIT, 4, 4), [4], 4, COSTS.seconds(EXIT, 4, 4)),
        # The longest draft of the rows is what a pass takes.
        (Round(EXIT, 4, 4), [1, 3], 3, COSTS.seconds(EXIT, 3, 3)),
        # Of a copied span that passes at once.
        (Round(EXIT, 4, 4), [4], 1, COSTS.seconds(EXIT, 1, 4)),
        (Round(EXIT, 4, 4), [0], 0, COSTS.seconds(EXIT, 0, 0)),
        (Round(kit.NUM_LAYERS, 0, 0), [0, 0], 0, COSTS.autoregressive_step),
        # Copies that no exit has seen.
        (Round(kit.NUM_LAYERS, 0, 6), [3], 0, COSTS.seconds(COSTS.exit_layers[0], 0, 3)),
    ],
)
def test_a_round_is_booked_by_the_table(seen: Seen, plan: Round, drafts: list[int], steps: int, seconds: float) -> None:
    pace, _ = pace_of(BOTH)
    drafted = [RowDraft([5] * count, is_copied=plan.exit_layer == kit.NUM_LAYERS) for count in drafts]
    settled = [[5] * count + [9] for count in drafts]
    learn(pace, plan, drafted, settled, steps)
    tokens = sum(count + 1 for count in drafts) / len(drafts)
    assert seen.rounds == [{"seconds": seconds, "tokens": tokens, "head_rows": 0.0}]
    assert seen.rule_rounds == [(seconds, tokens)]


def test_a_call_books_its_rounds_and_all_that_it_emits(seen: Seen) -> None:
    """Prefill as a step of plain decoding."""
    for options in ({"exit_layer": "auto"}, {"exit_layer": "auto", "copy_ngrams": "trusted", "draft_stop": "adaptive"}):
        seen.rounds.clear()
        engine = Engine(kit.mixed(), cost_table=COSTS, **options)
        figures = engine.generate(kit.prompt_tensor(), max_new_tokens=40).statistics
        expected = COSTS.autoregressive_step
        for (exit_layer, steps, verified), count in figures.tallies[0].work.items():
            is_plain = exit_layer == kit.NUM_LAYERS
            place = COSTS.exit_layers[0] if is_plain else exit_layer
            step = COSTS.autoregressive_step
            expected += count * (step if is_plain and not verified else COSTS.seconds(place, steps, verified))
        assert sum(each["seconds"] for each in seen.rounds) == pytest.approx(expected)
        assert sum(each["tokens"] for each in seen.rounds) == figures.emitted == 40


# In a batch


@contextmanager
def scored_rounds() -> Iterator[list[tuple[Round, int]]]:
    """Counts, while the block runs, how often each round scores by the head."""
    rounds: list[tuple[Round, int]] = []
    calls = 0
    learn_intact, agree_intact = Pace.learn, ExitHead.agreement

    def agree(head: ExitHead, *arguments: Any) -> list[float]:
        nonlocal calls
        calls += 1
        return agree_intact(head, *arguments)

    def learned(pace: Pace, plan: Round, *arguments: Any) -> None:
        before = calls
        learn_intact(pace, plan, *arguments)
        rounds.append((plan, calls - before))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExitHead, "agreement", agree)
        patch.setattr(Pace, "learn", learned)
        yield rounds


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_a_round_of_any_batch_scores_an_exit_once(rows: int, draft_vocab: int | None) -> None:
    ids = None if draft_vocab is None else torch.arange(draft_vocab)
    engine = Engine(kit.mixed(), exit_layer="auto", cost_table=COSTS, draft_token_ids=ids)
    prompts = torch.stack([kit.prompt_tensor()[0].roll(shift) for shift in range(rows)])
    with scored_rounds() as rounds:
        engine.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, pad_token_id=0)
    assert rounds[0][1] == 3
    for plan, calls in rounds:
        # The exit that drafts is scored by its drafts, unless the budget left room for none.
        assert len([layer for layer in plan.scored if layer != plan.exit_layer]) <= calls <= len(plan.scored)
    assert sum(calls for _, calls in rounds[1:]) > 0
