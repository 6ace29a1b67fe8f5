"""Rounds of trees through the engine and the hook: the tokens, scores and counts of a call, and how calls follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import layerskip
from layerskip import Engine
from tests import kit
from tests.decoding.levers_kit import padded

NEW = 18
NODES = 8
PROMPTS = [kit.PROMPT, [60, 2, 71, 13], [8, 20, 31, 60, 2, 9, 77, 12, 4, 4, 15, 31]]
USER_TURN = [61, 17, 30, 2, 85]
BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "mixed": kit.mixed,
    "identical": kit.identical,
    # So sure of its choices, all of them right, that trees are as deep as they may be.
    "sure": lambda: kit.scale_late_layers(kit.build(kit.llama_config(), spread=200.0), 0.0),
    **{f"gemma2 {grade}": lambda grade=grade: kit.graded("gemma2", grade) for grade in ("none", "some", "all")},
}


@cache
def model_of(name: str) -> PreTrainedModel:
    """A model that tests share, so that none may change it."""
    return BUILDERS[name]()


def engine_of(name: str, tree_nodes: int = NODES, num_draft_tokens: int = 3, **arguments: Any) -> Engine:
    return Engine(
        model_of(name),
        exit_layer=kit.EXIT_LAYER,
        tree_nodes=tree_nodes,
        num_draft_tokens=num_draft_tokens,
        **arguments,
    )


@cache
def alone(name: str, prompt: tuple[int, ...], max_new_tokens: int = NEW) -> list[int]:
    """Returns the new tokens of plain greedy `generate` for one prompt."""
    ids = kit.prompt_tensor(list(prompt))
    said = kit.reference(model_of(name), ids, max_new_tokens, attention_mask=torch.ones_like(ids))
    return said[0, len(prompt) :].tolist()


def answers(name: str, prompts: list[list[int]] = PROMPTS, max_new_tokens: int = NEW) -> list[list[int]]:
    return [alone(name, tuple(prompt), max_new_tokens) for prompt in prompts]


# Tokens


@pytest.mark.parametrize("tree_nodes", [1, NODES])
@pytest.mark.parametrize("name", BUILDERS)
def test_rows_of_different_lengths_equal_generate(name: str, tree_nodes: int) -> None:
    ids, mask = padded(PROMPTS)
    result = engine_of(name, tree_nodes).generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
    assert result.new_token_ids == answers(name)
    assert torch.equal(result.sequences[:, : ids.shape[1]], ids)


@pytest.mark.parametrize("budget", range(1, 7))
def test_every_budget_is_kept(budget: int) -> None:
    ids, mask = padded(PROMPTS)
    for name in ("mixed", "identical", "gemma2 some"):
        for nodes in (2, 16):
            result = engine_of(name, nodes, 4).generate(ids, attention_mask=mask, max_new_tokens=budget)
            assert result.new_token_ids == answers(name, max_new_tokens=budget)
            assert result.finish_reasons == ["length"] * 3


@pytest.mark.parametrize("name", ["mixed", "identical"])
def test_rows_end_at_eos_where_generate_ends_them(name: str) -> None:
    """Each row's own tokens in turn, so that EOS comes at any place of a path, and rows end at different ones."""
    ids, mask = padded(PROMPTS)
    engine = engine_of(name)
    for place in range(1, 7):
        arguments = {"max_new_tokens": NEW, "eos_token_id": answers(name)[place % 3][place], "pad_token_id": 0}
        expected = kit.reference(model_of(name), ids, attention_mask=mask, **arguments)
        result = engine.generate(ids, attention_mask=mask, **arguments)
        assert torch.equal(result.sequences, expected)
        assert "stop" in result.finish_reasons
        for row in result.statistics.per_row:
            assert row.emitted == 1 + row.accepted + row.rounds - row.cut


def test_drafts_from_a_trimmed_head_leave_the_tokens_alone() -> None:
    engine = engine_of("mixed", draft_token_ids=torch.arange(0, kit.VOCAB, 2))
    accepted: list[int] = []
    for event in engine.stream(kit.prompt_tensor(), max_new_tokens=NEW):
        accepted += [token for token, flag in zip(event.token_ids, event.accepted, strict=True) if flag]
    assert event.result is not None and event.result.new_token_ids == answers("mixed", [kit.PROMPT])
    assert accepted and all(token % 2 == 0 for token in accepted)


def test_learned_positions_just_suffice() -> None:
    """Nodes take slots of the cache beyond the last position, and no positions."""
    budget = 9
    model = kit.build(kit.gpt2_config(n_positions=max(map(len, PROMPTS)) + budget))
    ids, mask = padded(PROMPTS)
    engine = Engine(model, exit_layer=kit.EXIT_LAYER, tree_nodes=16, num_draft_tokens=6)
    result = engine.generate(ids, attention_mask=mask, max_new_tokens=budget, pad_token_id=0)
    assert result.new_token_ids == [
        kit.reference(model, kit.prompt_tensor(prompt), budget)[0, len(prompt) :].tolist() for prompt in PROMPTS
    ]
    with pytest.raises(ValueError, match="position"):
        engine.generate(ids, attention_mask=mask, max_new_tokens=budget + 1, pad_token_id=0)


class Ends:
    """A stopping criterion: a row ends with a token, or behind so many of all."""

    def __init__(self, token: int, length: int) -> None:
        self.token = token
        self.length = length

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return (ids[:, -1] == self.token) | (ids.shape[1] >= self.length)


@pytest.mark.parametrize("length", range(1, 7))
def test_criteria_end_rows_wherever_in_a_path(length: int) -> None:
    ids, mask = padded(PROMPTS)
    plain = answers("sure")
    token = plain[0][2]
    criteria = [Ends(token, ids.shape[1] + length)]
    result = engine_of("sure").generate(
        ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, stopping_criteria=criteria
    )
    ends = [row[:length].index(token) + 1 if token in row[:length] else length for row in plain]
    assert result.new_token_ids == [row[:end] for row, end in zip(plain, ends, strict=True)]
    assert result.finish_reasons == ["criteria"] * 3


def test_stop_strings_end_an_answer_inside_a_path() -> None:
    answer = alone("sure", tuple(kit.PROMPT))
    engine = engine_of("sure", tokenizer=kit.spelled({answer[2]: b"stop"}))
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=NEW, stop_strings=["top"])
    assert (result.new_token_ids, result.finish_reasons) == ([answer[:3]], ["stop"])
    assert result.statistics.cut == 1


# Scores


@pytest.mark.parametrize("name", ["mixed", "gemma2 some"])
def test_scores_and_logits_are_those_of_generate(name: str) -> None:
    ids, mask = padded(PROMPTS)
    eos = answers(name)[1][7]
    arguments = {"max_new_tokens": NEW, "pad_token_id": 0, "output_scores": True, "output_logits": True}
    result = engine_of(name).generate(ids, attention_mask=mask, eos_token_id=eos, **arguments)
    assert result.scores is not None and result.logits is not None
    counts = list(map(len, result.new_token_ids))
    assert len(result.scores) == len(result.logits) == max(counts) > min(counts)
    for row, prompt in enumerate(PROMPTS):
        expected = model_of(name).generate(
            kit.prompt_tensor(prompt), do_sample=False, return_dict_in_generate=True, eos_token_id=eos, **arguments
        )
        assert len(expected.scores) == counts[row]
        for step in range(counts[row]):
            torch.testing.assert_close(result.scores[step][row], expected.scores[step][0], rtol=0, atol=1e-4)
            torch.testing.assert_close(result.logits[step][row], expected.logits[step][0], rtol=0, atol=1e-4)
            assert int(result.scores[step][row].argmax()) == result.new_token_ids[row][step]


# Counts


@pytest.mark.parametrize("name", ["mixed", "identical", "gemma2 none"])
def test_layers_process_prompt_nodes_and_roots_once(name: str) -> None:
    with kit.counted_layers(model_of(name)) as counts:
        figures = engine_of(name).generate(kit.prompt_tensor(), max_new_tokens=NEW).statistics
    nodes, rounds = figures.draft_tokens_processed, figures.rounds
    work = len(kit.PROMPT) + nodes + rounds
    assert counts == [work] * kit.NUM_LAYERS
    assert figures.early_layer_tokens == figures.late_layer_tokens == work
    assert (figures.draft_tokens_verified, figures.padding_tokens) == (nodes, 0)
    assert figures.emitted == NEW == 1 + figures.accepted + figures.rounds - figures.cut
    # All rounds but those that the budget leaves no room in have a full tree.
    assert 0 < NODES * (rounds - 1) <= nodes <= NODES * rounds
    assert sum(verified * count for (_, _, verified), count in figures.tallies[0].work.items()) == nodes
    assert figures.rounds_by_exit == {kit.EXIT_LAYER: rounds}


def test_of_a_tree_its_depth_counts_as_drafted() -> None:
    """All is accepted: a first token, three drafts and a target, then what the budget leaves, a draft and a target."""
    figures = engine_of("sure").generate(kit.prompt_tensor(), max_new_tokens=7).statistics
    assert (figures.rounds, figures.drafted, figures.accepted, figures.cut) == (2, 4, 4, 0)
    assert figures.draft_tokens_processed == figures.draft_tokens_verified == 2 * NODES
    assert figures.acceptance_histogram == {1: 1, 3: 1}
    # A pass for each level of the tree; all nodes of a level run at once.
    assert figures.tallies[0].work == {(kit.EXIT_LAYER, 3, NODES): 1, (kit.EXIT_LAYER, 1, NODES): 1}


def test_rows_of_a_batch_are_counted_as_alone() -> None:
    ids, mask = padded(PROMPTS)
    engine = engine_of("mixed")
    together = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0).statistics
    for row, prompt in zip(together.per_row, PROMPTS, strict=True):
        one = engine.generate(kit.prompt_tensor(prompt), max_new_tokens=NEW).statistics
        assert row.tallies[0].outcomes == one.tallies[0].outcomes
        assert row.early_layer_tokens == row.late_layer_tokens == one.early_layer_tokens
        assert row.draft_tokens_processed == one.draft_tokens_processed
    assert together.padding_tokens > 0


# Calls that follow


@pytest.mark.parametrize("name", ["mixed", "gemma2 some"])
def test_turns_go_on_from_the_cache(name: str) -> None:
    ids, mask = padded(PROMPTS)
    engine = engine_of(name)
    settings = {"max_new_tokens": 8, "pad_token_id": 0, "return_cache": True}
    first = engine.generate(ids, attention_mask=mask, **settings)
    talk = [[*prompt, *tokens, *USER_TURN] for prompt, tokens in zip(PROMPTS, first.new_token_ids, strict=True)]
    ids, mask = padded(talk)
    second = engine.generate(ids, attention_mask=mask, cache=first.cache, **settings)
    assert second.new_token_ids == answers(name, talk, 8)
    for row in second.statistics.per_row:
        assert row.early_layer_tokens == 1 + len(USER_TURN) + row.draft_tokens_processed + row.rounds
    # What trees leave behind serves a call that drafts chains as well.
    chains = Engine(engine.model, exit_layer=kit.EXIT_LAYER)
    third = chains.generate(ids, attention_mask=mask, cache=first.cache, **settings)
    assert third.new_token_ids == second.new_token_ids


@pytest.mark.parametrize("name", ["mixed", "gemma2 some"])
def test_the_hook_drafts_trees_and_hands_back_a_cache(name: str) -> None:
    model, (ids, mask) = model_of(name), padded(PROMPTS)
    decode = layerskip.self_speculative(exit_layer=kit.EXIT_LAYER, tree_nodes=NODES, num_draft_tokens=3)
    settings = {"return_dict_in_generate": True, "pad_token_id": 0, "max_new_tokens": 8, "do_sample": False}
    for batch, its_mask in ((ids, mask), (kit.prompt_tensor(), torch.ones(1, len(kit.PROMPT), dtype=torch.long))):
        first = model.generate(batch, attention_mask=its_mask, custom_generate=decode, **settings)
        plain = model.generate(batch, attention_mask=its_mask, **settings)
        assert torch.equal(first.sequences, plain.sequences)
        assert first.statistics.draft_tokens_verified > 0
        turn = torch.tensor([USER_TURN] * len(batch))
        prompt = torch.cat([first.sequences, turn], 1)
        its_mask = torch.cat([its_mask, torch.ones(len(batch), 8 + len(USER_TURN), dtype=torch.long)], 1)
        turns = [
            model.generate(prompt, attention_mask=its_mask, cache=first.cache, custom_generate=decode, **settings),
            model.generate(prompt, attention_mask=its_mask, cache=plain.past_key_values, **settings),
        ]
        assert torch.equal(turns[0].sequences, turns[1].sequences)
