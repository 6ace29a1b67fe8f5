"""Greedy tokens are those of plain decoding, whatever decides on the rounds."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import layerskip
from layerskip.decoding.ngrams import NgramIndex
from tests import kit
from tests.decoding.levers_kit import (
    BUILDERS,
    NEW,
    PROMPTS,
    REPEATS,
    TABLES,
    combinations,
    engine_of,
    model_of,
    padded,
    plain,
    recorded_drafts,
    some_combinations,
)


@combinations
def test_one_row_equals_generate(options: dict[str, Any], table: str) -> None:
    for name in ("mixed", "identical", "looping"):
        result = engine_of(model_of(name), options, table).generate(kit.prompt_tensor(REPEATS), max_new_tokens=NEW)
        assert result.new_token_ids[0] == plain(name, tuple(REPEATS)), name


@combinations
def test_rows_of_different_lengths_equal_generate(options: dict[str, Any], table: str) -> None:
    ids, mask = padded(PROMPTS)
    for name in ("mixed", "looping"):
        engine = engine_of(model_of(name), options, table)
        result = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
        for row, prompt in enumerate(PROMPTS):
            assert result.new_token_ids[row] == plain(name, tuple(prompt)), (name, row)


@some_combinations
def test_every_model_equals_generate_row_by_row(options: dict[str, Any], table: str) -> None:
    """Those of `test_rows_of_different_lengths_equal_generate` aside."""
    ids, mask = padded(PROMPTS)
    for name in BUILDERS.keys() - {"mixed", "looping"}:
        engine = engine_of(model_of(name), options, table)
        result = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
        for row, prompt in enumerate(PROMPTS):
            assert result.new_token_ids[row] == plain(name, tuple(prompt)), (name, row)


@some_combinations
def test_rows_end_with_eos_as_generate_ends_them(options: dict[str, Any], table: str) -> None:
    """At different places; the row that goes on longest is not the first."""
    ids, mask = padded(PROMPTS)
    for name in ("mixed", "identical", "looping"):
        eos = plain(name, tuple(PROMPTS[0]))[5]
        arguments = {"max_new_tokens": NEW, "eos_token_id": eos, "pad_token_id": 0}
        expected = kit.reference(model_of(name), ids, attention_mask=mask, **arguments)
        result = engine_of(model_of(name), options, table).generate(ids, attention_mask=mask, **arguments)
        assert torch.equal(result.sequences, expected), name
        assert result.finish_reasons[0] == "stop"
        assert all(tokens.index(eos) == len(tokens) - 1 for tokens in result.new_token_ids if eos in tokens)


PROCESSED: dict[str, Any] = {
    "max_new_tokens": NEW,
    "pad_token_id": 0,
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[3], [7, 52]],
}


@cache
def processed_plain(name: str) -> torch.Tensor:
    """What `generate` gives for the batch with the processors of `PROCESSED`."""
    ids, mask = padded(PROMPTS)
    return kit.reference(model_of(name), ids, attention_mask=mask, **PROCESSED)


@some_combinations
def test_processed_scores_give_generates_tokens(options: dict[str, Any], table: str) -> None:
    ids, mask = padded(PROMPTS)
    for name in ("mixed", "looping"):
        result = engine_of(model_of(name), options, table).generate(ids, attention_mask=mask, **PROCESSED)
        assert torch.equal(result.sequences, processed_plain(name)), name


@some_combinations
def test_the_hook_gives_generates_tokens(options: dict[str, Any], table: str) -> None:
    ids, mask = padded(PROMPTS)
    for name in ("mixed", "looping"):
        hook = layerskip.self_speculative(cost_table=TABLES[table], **options)
        given = model_of(name).generate(ids, custom_generate=hook, attention_mask=mask, **PROCESSED)
        assert torch.equal(given, processed_plain(name)), name


@some_combinations
def test_a_trimmed_draft_head_gives_generates_tokens(options: dict[str, Any], table: str) -> None:
    """With half of the emitted tokens in it, plainly and behind processors."""
    for name in ("mixed", "looping", "identical"):
        emitted = plain(name, tuple(REPEATS))
        ids = torch.tensor(list(dict.fromkeys([*emitted[::2], *range(20)])))
        engine = engine_of(model_of(name), options, table, draft_token_ids=ids)
        assert engine.generate(kit.prompt_tensor(REPEATS), max_new_tokens=NEW).new_token_ids[0] == emitted, name
        result = engine.generate(kit.prompt_tensor(REPEATS), max_new_tokens=NEW, repetition_penalty=1.4)
        assert result.new_token_ids[0] == plain(name, tuple(REPEATS), repetition_penalty=1.4), name


@some_combinations
def test_stopping_criteria_and_scores_are_as_generates(options: dict[str, Any], table: str) -> None:
    def ends(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= len(REPEATS) + 3 and int(ids[0, -1]) % 3 == 0)

    model = model_of("mixed")
    arguments = {"max_new_tokens": NEW, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    expected: Any = kit.reference(
        model,
        kit.prompt_tensor(REPEATS),
        **arguments,
        stopping_criteria=[ends],
        return_dict_in_generate=True,
    )
    result = engine_of(model, options, table).generate(
        kit.prompt_tensor(REPEATS), stopping_criteria=[ends], **arguments
    )
    assert torch.equal(result.sequences, expected.sequences)
    assert result.finish_reasons == ["criteria"]
    assert len(REPEATS) + 3 <= result.sequences.shape[1] < len(REPEATS) + NEW
    assert result.scores is not None and result.logits is not None
    torch.testing.assert_close(torch.stack(result.scores), torch.stack(expected.scores), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), atol=1e-4, rtol=0)


@some_combinations
def test_a_turn_behind_a_cache_equals_one_that_is_told_everything(options: dict[str, Any], table: str) -> None:
    """Where spans are copied, they come from what the cache holds: what is new says nothing twice."""
    for name in ("mixed", "looping"):
        model = model_of(name)
        engine = engine_of(model, options, table)
        first = engine.generate(kit.prompt_tensor(REPEATS), max_new_tokens=12, return_cache=True)
        said = [*first.sequences[0].tolist(), 9, 33]
        result = engine.generate(kit.prompt_tensor(said), max_new_tokens=NEW, cache=first.cache)
        assert result.new_token_ids[0] == plain(name, tuple(said)), name
        whole = engine.generate(kit.prompt_tensor(said), max_new_tokens=NEW)
        # Rounds are the same as without the cache, copies among them.
        for key in ("rounds", "acceptance_histogram", "draft_tokens_processed", "draft_tokens_verified"):
            assert getattr(result.statistics, key) == getattr(whole.statistics, key), (name, key)


@pytest.mark.parametrize("copies", ["checked", "trusted"])
def test_copies_come_from_the_cached_part(copies: str) -> None:
    """The new turn says nothing twice."""
    model = model_of("looping")
    engine = engine_of(model, {"exit_layer": 2, "copy_ngrams": copies})
    first = engine.generate(kit.prompt_tensor(REPEATS), max_new_tokens=12, return_cache=True)
    # Each token follows from the one before: with what prefill gives, this one is the end of a pair of the cache.
    said = [*first.sequences[0].tolist(), first.new_token_ids[0][2]]
    new = plain("looping", tuple(said), 3)
    with recorded_drafts() as seen:
        engine.generate(kit.prompt_tensor(said), max_new_tokens=6, cache=first.cache)
    expected = NgramIndex([*said, new[0]]).continuation(4).tokens
    assert seen[0].draft.rows[0].copy.tokens == expected != []
