"""Caches that go into the hook and come out of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    PreTrainedModel,
)

from tests import kit
from tests.decoding.hook_kit import (
    FAMILIES,
    MASK,
    NEW,
    PADDED,
    SLIDING,
    USER_TURN,
    first_turn,
    graded,
    ours,
    plain,
    refused,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_returned_cache_is_that_of_generate(family: str) -> None:
    model = graded(family)
    given = first_turn(model, ours, PADDED, attention_mask=MASK, max_new_tokens=12).cache
    expected = first_turn(model, plain, PADDED, attention_mask=MASK, max_new_tokens=12).cache
    assert given.get_seq_length() == expected.get_seq_length() == 21
    for mine, theirs in zip(given.layers, expected.layers, strict=True):
        assert type(mine) is type(theirs)
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert mine.keys.shape == theirs.keys.shape
        # Where row 1 is padded, `generate` holds what the padding token gave.
        seen = torch.ones(3, 21, dtype=torch.bool)
        seen[:, :10] = MASK.bool()
        seen = seen[:, -mine.keys.shape[2] :]
        for name in ("keys", "values"):
            states = [getattr(layer, name).transpose(1, 2)[seen] for layer in (mine, theirs)]
            torch.testing.assert_close(states[0], states[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [(ours, plain, False), (ours, ours, True), (plain, ours, False)],
    ids=lambda case: str(getattr(case, "__name__", case)),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_from_the_cache(
    family: str, first: Callable[..., Any], second: Callable[..., Any], whole: bool
) -> None:
    """10 tokens, 12 new, 5 of the user's, as one uncached run has them."""
    model = graded(family)
    turn = first_turn(model, first, kit.prompt_tensor(), max_new_tokens=12)
    assert turn.cache.get_seq_length() == 21
    sequence = torch.cat([turn.sequences, USER_TURN], dim=1)
    expected = plain(model, sequence, max_new_tokens=NEW)
    held = 0 if whole else 21
    given = second(
        model,
        sequence[:, held:],
        attention_mask=torch.ones_like(sequence),
        cache=copy.deepcopy(turn.cache),
        max_new_tokens=NEW,
    )
    assert torch.equal(given, expected[:, held:])
    assert kit.is_greedy(model, sequence[0].tolist(), given[0, -NEW:].tolist())


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [(ours, plain, True), (ours, ours, False), (plain, ours, True)],
    ids=lambda case: str(getattr(case, "__name__", case)),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_goes_on_from_the_cache(
    family: str, first: Callable[..., Any], second: Callable[..., Any], whole: bool
) -> None:
    model = graded(family)
    turn = first_turn(model, first, PADDED, attention_mask=MASK, max_new_tokens=12)
    sequence = torch.cat([turn.sequences, USER_TURN.expand(3, -1)], dim=1)
    mask = torch.cat([MASK, torch.ones(3, 17, dtype=torch.long)], dim=1)
    expected = plain(model, sequence, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
    held = 0 if whole else 21
    given = second(
        model,
        sequence[:, held:],
        attention_mask=mask,
        cache=copy.deepcopy(turn.cache),
        max_new_tokens=NEW,
        pad_token_id=0,
    )
    assert torch.equal(given, expected[:, held:])


@pytest.mark.parametrize(("length", "new"), [(2, 2), (3, 3), (3, 4), (4, 3), (5, 3), (10, 12)])
@pytest.mark.parametrize("family", SLIDING)
def test_caches_before_at_and_past_a_sliding_window(family: str, length: int, new: int) -> None:
    model = graded(family)
    for first, second in ((ours, plain), (ours, ours), (plain, ours)):
        turn = first_turn(model, first, kit.prompt_tensor(kit.PROMPT[:length]), max_new_tokens=new)
        sequence = torch.cat([turn.sequences, USER_TURN[:, :1]], dim=1)
        given = second(model, sequence, cache=turn.cache, max_new_tokens=12)
        assert kit.is_greedy(model, sequence[0].tolist(), given[0, -12:].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_three_turns_hand_the_cache_on(family: str) -> None:
    model = graded(family)
    sequence, cache = kit.prompt_tensor(), None
    for _ in range(3):
        with kit.counted_layers(model) as counts:
            turn = first_turn(model, ours, sequence, max_new_tokens=6, cache=cache)
        held = 0 if cache is None else cache.get_seq_length()
        statistics = turn.statistics
        # What the cache holds passes no layer again.
        assert counts[0] == sequence.shape[1] - held + statistics.draft_tokens_processed + statistics.rounds
        assert turn.cache.get_seq_length() == turn.sequences.shape[1] - 1
        sequence, cache = torch.cat([turn.sequences, USER_TURN[:, :3]], dim=1), turn.cache
    whole = kit.prompt_tensor()
    for _ in range(3):
        whole = torch.cat([plain(model, whole, max_new_tokens=6), USER_TURN[:, :3]], dim=1)
    assert torch.equal(sequence, whole)


def test_embedded_prompts_go_on_from_the_cache(llama: PreTrainedModel) -> None:
    embed = llama.get_input_embeddings()
    start = embed(kit.prompt_tensor()).detach()
    turn = first_turn(llama, ours, inputs_embeds=start, prompt=kit.prompt_tensor()[:, :0], max_new_tokens=6)
    whole = torch.cat([start, embed(torch.cat([turn.sequences, USER_TURN], dim=1)).detach()], dim=1)
    expected = plain(llama, inputs_embeds=whole, max_new_tokens=NEW)
    for who in (plain, ours):
        given = who(llama, inputs_embeds=whole, cache=copy.deepcopy(turn.cache), max_new_tokens=NEW)
        assert torch.equal(given, expected)


def test_rows_that_ended_at_different_lengths_leave_a_cache_whose_gaps_are_refused(llama: PreTrainedModel) -> None:
    eos = int(plain(llama, PADDED, attention_mask=MASK, max_new_tokens=NEW, pad_token_id=0)[0, 12])
    turn = first_turn(llama, ours, PADDED, attention_mask=MASK, max_new_tokens=NEW, eos_token_id=eos)
    width = turn.sequences.shape[1]
    assert turn.cache.get_seq_length() == width - 1
    mask = torch.cat([MASK, torch.ones(3, width - 10 + 5, dtype=torch.long)], dim=1)
    mask[0, 13:width] = 0
    sequence = torch.cat([turn.sequences, USER_TURN.expand(3, -1)], dim=1)
    refused(llama, {"attention_mask": mask, "cache": turn.cache}, ValueError, "attention_mask.0. has a zero", sequence)


def test_an_empty_cache_is_ignored(llama: PreTrainedModel) -> None:
    expected = plain(llama, kit.prompt_tensor(), max_new_tokens=NEW)
    for empty in (DynamicCache(), DynamicCache(config=llama.config)):
        output = first_turn(llama, ours, kit.prompt_tensor(), cache=empty, max_new_tokens=NEW)
        assert torch.equal(output.sequences, expected)
        assert empty.get_seq_length() == 0
        assert output.cache is not empty


@pytest.mark.parametrize("family", FAMILIES)
def test_the_callers_cache_does_not_change(family: str) -> None:
    model = graded(family)
    turn = first_turn(model, plain, PADDED, attention_mask=MASK, max_new_tokens=12)
    held = [(layer.keys, layer.values, layer.keys.clone(), layer.values.clone()) for layer in turn.cache.layers]
    sequence = torch.cat([turn.sequences, USER_TURN.expand(3, -1)], dim=1)
    mask = torch.cat([MASK, torch.ones(3, 17, dtype=torch.long)], dim=1)
    outputs = [
        first_turn(model, ours, sequence, attention_mask=mask, cache=turn.cache, max_new_tokens=8) for _ in range(2)
    ]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert turn.cache.get_seq_length() == 21
    for layer, (keys, values, before_keys, before_values) in zip(turn.cache.layers, held, strict=True):
        assert layer.keys is keys
        assert layer.values is values
        assert torch.equal(keys, before_keys)
        assert torch.equal(values, before_values)


def test_the_returned_cache_shares_no_memory_with_the_callers(llama: PreTrainedModel) -> None:
    turn = first_turn(llama, plain, kit.prompt_tensor(), max_new_tokens=6)
    sequence = torch.cat([turn.sequences, USER_TURN], dim=1)
    output = first_turn(llama, ours, sequence, cache=turn.cache, max_new_tokens=6)
    before = [layer.keys.clone() for layer in turn.cache.layers]
    for layer in output.cache.layers:
        layer.keys.fill_(7.0)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(turn.cache.layers, before, strict=True))
