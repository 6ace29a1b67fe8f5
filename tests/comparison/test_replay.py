"""Replayed rounds are those that the engine runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip import Engine
from layerskip.comparison.own_answers import own_answers
from layerskip.comparison.replay import replay, replay_row
from layerskip.decoding.drafting import Draft
from layerskip.decoding.pace import Pace, Round
from layerskip.decoding.rows import Row
from tests import kit

EXITS = range(1, kit.NUM_LAYERS)
BUDGET = 16
PROMPTS = [kit.PROMPT, [44, 3], [30, 31, 32, 33, 34], [2]]


def texts(prompts: list[list[int]]) -> list[str]:
    return [" ".join(f"w{token}" for token in prompt) for prompt in prompts]


def run_rounds(engine: Engine, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, set[int]]:
    """Returns the engine's statistics of each row, and which rows drafted an EOS token after a wrong draft."""
    learning = Pace.learn
    eos_token_ids = {engine.model.config.eos_token_id}
    hits: set[int] = set()

    def recording(
        pace: Pace, plan: Round, rows: list[Row], draft: Draft, settled: list[list[int]], scores: torch.Tensor
    ) -> None:
        for row, tokens, held in zip(rows, draft.tokens, settled, strict=True):
            if eos_token_ids & set(tokens[len(held) - 1 :]):
                hits.add(row.index)
        learning(pace, plan, rows, draft, settled, scores)

    with monkeypatch.context() as patch:
        patch.setattr(Pace, "learn", recording)
        result = engine.generate(texts(PROMPTS), max_new_tokens=BUDGET, **options)
    return result.statistics.per_row, hits


@pytest.mark.parametrize(("model", "eos"), [(kit.l4, 35), (kit.mixed, None), (kit.mixed, 13), (kit.identical, 35)])
def test_a_replay_counts_what_the_engine_counts(model: Any, eos: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model(eos_token_id=eos, pad_token_id=0), kit.word_tokenizer(kit.VOCAB))
    answers = own_answers(engine, texts(PROMPTS), list(EXITS), BUDGET, batch_size=3)
    compared = 0
    for exit_layer in EXITS:
        for num_draft_tokens in (1, 2, 5):
            options = {"exit_layer": exit_layer, "num_draft_tokens": num_draft_tokens}
            counted, drafted_eos = run_rounds(engine, monkeypatch, **options)
            for index, row in enumerate(counted):
                found = replay([answers[index].matches[exit_layer][0]], num_draft_tokens, BUDGET)
                names = ("rounds", "accepted", "emitted", "cut", "mean_acceptance_length", "acceptance_histogram")
                assert [vars(found)[name] for name in names] == [vars(row)[name] for name in names]
                if index not in drafted_eos:
                    compared += 1
                    names = ("drafted", "draft_tokens_processed", "draft_acceptance_rate", "acceptance_by_position")
                    assert [vars(found)[name] for name in names] == [vars(row)[name] for name in names]
                    assert found.drafted == row.draft_tokens_processed
    # Of 36: three exits, three lengths and four rows.
    assert compared > 18


def test_rows_are_counted_together() -> None:
    found = replay([[True, False], [True] * 5], 2, 20)
    assert (found.rounds, found.drafted, found.accepted, found.emitted) == (3, 6, 5, 9)
    assert found.mean_acceptance_length == 7 / 3
    assert found.acceptance_by_position == (1.0, 2 / 3)
    assert (found.strategy, found.num_draft_tokens, found.early_layer_tokens) == ("self_speculative", 2, 0)


def test_rows_end_in_the_middle_and_at_the_budget() -> None:
    """A control: the test above sees both ends."""
    engine = Engine(kit.mixed(eos_token_id=35, pad_token_id=0), kit.word_tokenizer(kit.VOCAB))
    answers = own_answers(engine, texts(PROMPTS), [2], BUDGET, batch_size=4)
    reasons = {answer.finish_reason for answer in answers}
    assert reasons == {"stop", "length"}
    assert any(1 < len(answer.token_ids) < BUDGET for answer in answers)


@pytest.mark.parametrize(
    ("matches", "budget", "outcomes", "cut"),
    [
        # All right: two and their bonus token, then EOS as the second draft, behind which the target is cut away.
        ([True] * 5, 20, {(2, 2): 2}, 1),
        # The budget leaves one token to the target: 1 + (2 + 1) + (1 + 1).
        ([True] * 5, 6, {(2, 2): 1, (1, 1): 1}, 0),
        # Wrong at once: what follows is drafted all the same, but for the last round, which has no room.
        ([False] * 3, 4, {(2, 0): 1, (1, 0): 1, (0, 0): 1}, 0),
        # EOS is the target's own.
        ([True, False], 20, {(2, 1): 1}, 0),
        ([], 20, {}, 0),
    ],
)
def test_rounds_of_one_row(matches: list[bool], budget: int, outcomes: dict[tuple[int, int], int], cut: int) -> None:
    tally = replay_row(matches, 2, budget)
    assert tally.outcomes == outcomes
    assert (tally.cut, tally.emitted) == (cut, len(matches) + 1)


def test_nothing_after_the_first_token_leaves_nothing_to_divide() -> None:
    found = replay([[], []], 4, 1)
    assert (found.rounds, found.emitted, found.mean_acceptance_length) == (0, 2, None)
    assert (found.draft_acceptance_rate, found.acceptance_by_position) == (None, ())


@pytest.mark.parametrize(("rows", "drafts", "name"), [([[True] * 4], 2, "max_new_tokens=4"), ([], 0, "num_draft_tok")])
def test_what_cannot_have_happened_is_refused(rows: list[list[bool]], drafts: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replay(rows, drafts, 4)
