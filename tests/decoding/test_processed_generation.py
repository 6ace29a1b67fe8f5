"""Generation with logits processors gives what the model's own `generate` gives, whatever is drafted and accepted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from layerskip import Engine, GenerationResult
from tests import kit

GRADES = ("none", "some", "all")
WIDTH = len(kit.PROMPT)
ROWS = [kit.PROMPT, kit.PROMPT[4:], [8, 20, 31, 60, 2, 9, 77, 12]]
# No model here says it by itself.
EOS = 2


@cache
def graded(family: str, grade: str) -> PreTrainedModel:
    """A model of known acceptance; no test changes it."""
    return kit.graded(family, grade)


@cache
def plain_tokens(family: str, grade: str) -> tuple[int, ...]:
    """The different tokens that it says without processors, in the order in which they come."""
    tokens = kit.reference(graded(family, grade), kit.prompt_tensor())[0, WIDTH:].tolist()
    return tuple(dict.fromkeys(tokens))


def padded_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns three prompts of different lengths with padding on the left, and their mask."""
    ids = torch.tensor([[0] * (WIDTH - len(row)) + row for row in ROWS])
    return ids, torch.tensor([[0] * (WIDTH - len(row)) + [1] * len(row) for row in ROWS])


def same_as_generate(
    model: PreTrainedModel,
    ids: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor | None = None,
    num_draft_tokens: Sequence[int] = (4,),
    **arguments: Any,
) -> GenerationResult:
    """Generates with the model's own `generate` and with the engine, once for each draft length.

    Tokens must be the same, chosen from the same scores.

    Returns:
        The engine's result with the last draft length.
    """
    ids = kit.prompt_tensor() if ids is None else ids
    options = {"max_new_tokens": 16, "pad_token_id": 0, "output_scores": True, "output_logits": True, **arguments}
    theirs = model.generate(ids, do_sample=False, return_dict_in_generate=True, **options)
    engine = Engine(model, exit_layer=kit.EXIT_LAYER, draft_token_ids=draft_token_ids)
    for length in num_draft_tokens:
        ours = engine.generate(ids, num_draft_tokens=length, **options)
        assert torch.equal(ours.sequences, theirs.sequences)
        for mine, other in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
            assert mine is not None
            assert len(mine) == len(other)
            for row, tokens in enumerate(ours.new_token_ids):
                both = [torch.stack(steps)[: len(tokens), row] for steps in (mine, other)]
                torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)
        for row_statistics in ours.statistics.per_row:
            expected = 1 + row_statistics.accepted + row_statistics.rounds - row_statistics.cut
            assert row_statistics.emitted == expected
    return ours


class ByIndex(LogitsProcessor):
    """A processor of the caller's own that depends on the row's place, its length with padding, and its ids."""

    def __init__(self) -> None:
        self.table = torch.arange(kit.VOCAB) % 7

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = torch.arange(len(scores)).unsqueeze(1)
        return scores + (self.table == (input_ids.sum(1, keepdim=True) + place) % 7) * (3.0 + input_ids.shape[1] % 2)


def rule_by_row(row: int, ids: torch.Tensor) -> list[int]:
    """Allows a third of the vocabulary, another for each row and each length."""
    return [token for token in range(kit.VOCAB) if token % 3 == (row + len(ids)) % 3]


# Each gets the different tokens that the model says without it, so that it has something to act on.
PROCESSORS: dict[str, Callable[[Sequence[int]], dict[str, Any]]] = {
    "repetition_penalty": lambda _: {"repetition_penalty": 1.7},
    "no_repeat_ngram": lambda _: {"no_repeat_ngram_size": 2},
    "bad_words": lambda said: {"bad_words_ids": [[said[2]], [said[0], said[1]]]},
    "sequence_bias": lambda said: {"sequence_bias": [[[said[1]], -3.0], [[said[0], said[3]], 9.0], [[60], 2.0]]},
    "exponential_decay": lambda said: {"exponential_decay_length_penalty": (2, 1.6), "eos_token_id": said[3]},
    "suppress": lambda said: {"suppress_tokens": [said[1], said[3]]},
    "begin_suppress": lambda said: {"begin_suppress_tokens": [said[0], said[1]]},
    "prefix_function": lambda _: {"prefix_allowed_tokens_fn": rule_by_row},
    "forced_eos": lambda _: {"forced_eos_token_id": EOS, "eos_token_id": EOS},
    "min_length": lambda said: {"min_length": WIDTH + 6, "eos_token_id": said[1]},
    "min_new_tokens": lambda said: {"min_new_tokens": 6, "eos_token_id": said[1]},
    "encoder_repetition": lambda _: {"encoder_repetition_penalty": 1.8},
    "encoder_no_repeat_ngram": lambda _: {"encoder_no_repeat_ngram_size": 1},
    "watermark": lambda _: {"watermarking_config": {"bias": 6.0, "greenlist_ratio": 0.3}},
    "watermark_selfhash": lambda _: {"watermarking_config": {"bias": 6.0, "seeding_scheme": "selfhash"}},
    "remove_invalid": lambda said: {"remove_invalid_values": True, "suppress_tokens": [said[0]]},
    "renormalize": lambda _: {"renormalize_logits": True, "repetition_penalty": 1.3},
    "own": lambda _: {"logits_processor": [ByIndex()]},
    "chain": lambda said: {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[said[1]]],
        "min_new_tokens": 4,
        "eos_token_id": said[2],
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(kit.VOCAB - 10)),
        "logits_processor": [ByIndex()],
    },
}


# Greedy output and scores


@pytest.mark.parametrize(("family", "grade"), [*(("llama", grade) for grade in GRADES), ("gemma2", "some")])
@pytest.mark.parametrize("name", PROCESSORS)
def test_equals_generate(name: str, family: str, grade: str) -> None:
    processors = PROCESSORS[name](plain_tokens(family, grade))
    result = same_as_generate(graded(family, grade), num_draft_tokens=(1, 6), **processors)
    assert result.scores is not None
    assert result.logits is not None
    # Else the test would show nothing.
    assert any(not torch.equal(*both) for both in zip(result.scores, result.logits, strict=True))


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram", "prefix_function", "watermark", "own"])
def test_where_exit_and_model_agree_processed_drafts_are_all_accepted(name: str) -> None:
    """Drafts are processed with the ids that they really follow, drafts before them included."""
    processors = PROCESSORS[name](plain_tokens("llama", "all"))
    statistics = same_as_generate(graded("llama", "all"), **processors).statistics
    assert statistics.draft_acceptance_rate == 1


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_left_padded_batch_equals_generate(name: str) -> None:
    ids, mask = padded_rows()
    said = plain_tokens("llama", "some")
    processors = {"eos_token_id": said[3], **PROCESSORS[name](said)}
    same_as_generate(graded("llama", "some"), ids, num_draft_tokens=(1, 6), attention_mask=mask, **processors)


@pytest.mark.parametrize("grade", GRADES)
def test_a_prefix_function_has_a_rule_of_its_own_for_each_row(grade: str) -> None:
    ids, mask = padded_rows()
    result = same_as_generate(graded("gemma2", grade), ids, attention_mask=mask, prefix_allowed_tokens_fn=rule_by_row)
    for row, tokens in enumerate(result.new_token_ids):
        assert [token % 3 for token in tokens] == [(row + WIDTH + step) % 3 for step in range(16)]


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram", "encoder_repetition", "own"])
@pytest.mark.parametrize("grade", GRADES)
def test_a_prompt_of_one_token_equals_generate(grade: str, name: str) -> None:
    same_as_generate(
        graded("llama", grade),
        torch.tensor([[10]]),
        max_new_tokens=24,
        **PROCESSORS[name](plain_tokens("llama", grade)),
    )


@pytest.mark.parametrize("grade", GRADES)
def test_a_forced_first_token_equals_generate(grade: str) -> None:
    """`generate` forces it behind prompts of one token."""
    result = same_as_generate(graded("llama", grade), torch.tensor([[10]]), forced_bos_token_id=33)
    assert result.new_token_ids[0][0] == 33


def test_the_same_call_twice_does_the_same_rounds() -> None:
    engine = Engine(graded("llama", "some"), exit_layer=2)
    runs = [
        engine.generate(kit.prompt_tensor(), max_new_tokens=24, repetition_penalty=1.3, no_repeat_ngram_size=2)
        for _ in range(2)
    ]
    counts = [{**run.statistics.to_dict(), "seconds": 0, "decode_tokens_per_second": 0, "per_row": 0} for run in runs]
    assert counts[0] == counts[1]
    assert torch.equal(runs[0].sequences, runs[1].sequences)


# The caller's objects


@pytest.mark.parametrize("grade", GRADES)
def test_a_list_of_processors_and_a_config_serve_two_calls_and_stay_as_they_were(grade: str) -> None:
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7), ByIndex()])
    members, states = list(processors), [copy.deepcopy(vars(each)) for each in processors]
    config = GenerationConfig(max_new_tokens=16, no_repeat_ngram_size=2, do_sample=False, pad_token_id=0)
    settings = config.to_dict()
    ids, mask = padded_rows()
    model = graded("llama", grade)
    expected = model.generate(ids, attention_mask=mask, generation_config=config, logits_processor=processors)
    engine = Engine(model, exit_layer=2)
    for _ in range(2):
        result = engine.generate(ids, attention_mask=mask, generation_config=config, logits_processor=processors)
        assert torch.equal(result.sequences, expected)
    assert len(processors) == len(members)
    assert all(mine is before for mine, before in zip(processors, members, strict=True))
    assert vars(processors[0]) == states[0]
    assert torch.equal(processors[1].table, states[1]["table"])
    assert config.to_dict() == settings


class Counting(LogitsProcessor):
    """Gives its n-th call another result than its first."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores + (torch.arange(scores.shape[1]) % 5 == self.calls % 5) * 5.0


def test_a_processor_that_counts_its_calls_is_refused_by_name_and_the_engine_goes_on() -> None:
    model = graded("llama", "some")
    engine = Engine(model, exit_layer=2)
    with pytest.raises(ValueError, match=r"logits_processor holds Counting, which changed .*: calls"):
        engine.generate(kit.prompt_tensor(), max_new_tokens=8, logits_processor=[Counting()])
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=8)
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(), 8))


# Rules that must hold at every token


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("grade", GRADES)
def test_a_rule_on_the_last_token_is_never_broken(grade: str, do_sample: bool) -> None:
    """No id below 50 may follow one that can be divided by 3, wherever in a block that comes."""

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return list(range(50 if int(ids[-1]) % 3 == 0 else 0, kit.VOCAB))

    engine = Engine(graded("llama", grade), exit_layer=2)
    bound = free = 0
    for seed in range(8 if do_sample else 1):
        options: dict[str, Any] = {}
        if do_sample:
            options = {"do_sample": True, "temperature": 2.0, "generator": torch.Generator().manual_seed(seed)}
        result = engine.generate(kit.prompt_tensor(), max_new_tokens=24, prefix_allowed_tokens_fn=allowed, **options)
        tokens = result.sequences[0, WIDTH - 1 :].tolist()
        for before, after in pairwise(tokens):
            assert before % 3 != 0 or after >= 50
            bound += before % 3 == 0
            free += after < 50
    assert bound > 0
    if do_sample:
        # The rule did not hold by chance.
        assert free > 10


@pytest.mark.parametrize("grade", GRADES)
def test_where_one_token_is_allowed_it_is_drafted_and_accepted_also_when_sampling(grade: str) -> None:
    """The rule of a row is the same for drafts and targets, so that no draft is lost."""
    result = Engine(graded("llama", grade), exit_layer=2).generate(
        kit.prompt_tensor(), max_new_tokens=16, do_sample=True, prefix_allowed_tokens_fn=lambda row, ids: [len(ids)]
    )
    assert result.new_token_ids == [list(range(WIDTH, WIDTH + 16))]
    assert result.statistics.draft_acceptance_rate == 1


# Several sequences for a prompt, and beams


def test_several_sampled_sequences_of_a_prompt_share_its_index_in_a_prefix_function_as_in_generate() -> None:
    ids, mask = padded_rows()
    options: dict[str, Any] = {
        "attention_mask": mask,
        "do_sample": True,
        "num_return_sequences": 2,
        "max_new_tokens": 8,
        "pad_token_id": 0,
    }
    asked: list[set[int]] = []

    def rule(row: int, ids: torch.Tensor) -> list[int]:
        asked[-1].add(row)
        return rule_by_row(row, ids)

    model = graded("llama", "some")
    sequences = []
    for generate in (model.generate, lambda *a, **k: Engine(model, exit_layer=2).generate(*a, **k).sequences):
        asked.append(set())
        sequences.append(generate(ids, prefix_allowed_tokens_fn=rule, **options))
    assert asked[0] == asked[1] == set(range(3))
    assert sequences[0].shape == sequences[1].shape == (6, WIDTH + 8)
    for both in sequences:
        assert torch.equal(both[:, :WIDTH], ids.repeat_interleave(2, dim=0))
        for row, tokens in enumerate(both[:, WIDTH:].tolist()):
            assert [token % 3 for token in tokens] == [(row // 2 + WIDTH + step) % 3 for step in range(8)]


def test_several_sampled_sequences_of_a_prompt_are_drawn_independently() -> None:
    result = Engine(graded("llama", "some"), exit_layer=2).generate(
        kit.prompt_tensor(),
        max_new_tokens=8,
        do_sample=True,
        temperature=2.0,
        num_return_sequences=3,
        generator=torch.Generator().manual_seed(0),
    )
    assert len({tuple(tokens) for tokens in result.new_token_ids}) == 3


def test_several_greedy_sequences_are_refused_as_generate_refuses_them() -> None:
    model = graded("llama", "some")
    for generate in (model.generate, Engine(model, exit_layer=2).generate):
        with pytest.raises(ValueError, match="num_return_sequences"):
            generate(kit.prompt_tensor(), do_sample=False, num_return_sequences=2, max_new_tokens=4)


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_beams_are_refused_by_name(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"num_beams=2 in this call is not supported; pass num_beams="):
        Engine(graded("llama", "some"), exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=4, **settings)


# With a trimmed draft head


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_trimmed_draft_head_changes_nothing(name: str) -> None:
    said = plain_tokens("llama", "some")
    listed = torch.tensor([token for token in range(kit.VOCAB) if token % 2 == 0 or token in said[:4]])
    result = same_as_generate(graded("llama", "some"), draft_token_ids=listed, **PROCESSORS[name](said))
    assert result.statistics.drafted > 0


@pytest.mark.parametrize("grade", GRADES)
def test_a_left_padded_batch_with_a_trimmed_draft_head_equals_generate(grade: str) -> None:
    ids, mask = padded_rows()
    same_as_generate(
        graded("llama", grade),
        ids,
        draft_token_ids=torch.arange(0, kit.VOCAB, 2),
        attention_mask=mask,
        eos_token_id=plain_tokens("llama", grade)[3],
        repetition_penalty=1.7,
        prefix_allowed_tokens_fn=rule_by_row,
    )


def only_odd(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Allows odd tokens alone."""
    return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 0, -torch.inf)


def odd_at_every_third(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Allows odd tokens alone at every third place, and even ones elsewhere."""
    return scores.masked_fill(torch.arange(scores.shape[1]) % 2 != int(ids.shape[1] % 3 == 0), -torch.inf)


@pytest.mark.parametrize("processor", ["only_odd", "suppress"])
@pytest.mark.parametrize("grade", GRADES)
def test_where_no_token_of_the_list_is_allowed_nothing_is_drafted(grade: str, processor: str) -> None:
    even = torch.arange(0, kit.VOCAB, 2)
    options = {"only_odd": {"logits_processor": [only_odd]}, "suppress": {"suppress_tokens": even.tolist()}}
    statistics = same_as_generate(graded("llama", grade), draft_token_ids=even, **options[processor]).statistics
    assert (statistics.draft_tokens_processed, statistics.drafted, statistics.accepted) == (0, 0, 0)
    assert (statistics.rounds, statistics.emitted, statistics.draft_acceptance_rate) == (15, 16, None)


@pytest.mark.parametrize("grade", GRADES)
def test_a_prefix_function_that_allows_nothing_of_the_list_equals_generate(grade: str) -> None:
    """transformers then puts the allowed tokens on a par; none of them is drafted all the same."""
    result = same_as_generate(
        graded("llama", grade),
        draft_token_ids=torch.arange(0, kit.VOCAB, 2),
        num_draft_tokens=(1, 4),
        prefix_allowed_tokens_fn=lambda row, ids: list(range(1, kit.VOCAB, 2)),
    )
    assert all(token % 2 for token in result.new_token_ids[0])
    assert result.statistics.drafted == result.statistics.draft_tokens_processed == 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafting_ends_before_a_token_that_the_list_does_not_have(do_sample: bool) -> None:
    """The list is even, so that a round drafts up to two tokens; these are not lost."""
    engine = Engine(graded("llama", "all"), exit_layer=2, draft_token_ids=torch.arange(0, kit.VOCAB, 2))
    result = engine.generate(
        kit.prompt_tensor(), max_new_tokens=16, do_sample=do_sample, logits_processor=[odd_at_every_third]
    )
    tokens = result.new_token_ids[0]
    assert [token % 2 for token in tokens] == [int((WIDTH + step) % 3 == 0) for step in range(16)]
    assert len(result.statistics.acceptance_by_position) == 2
    # Drafts and targets are chosen from the same scores.
    assert result.statistics.draft_acceptance_rate == 1


class ThinkingBudget(LogitsProcessor):
    """Remembers that a token was seen, also where it was a draft that is rejected."""

    def __init__(self) -> None:
        self.done = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.done = self.done or (43 <= int(input_ids[0, -1]) <= 60 and input_ids.shape[1] > WIDTH)
        return scores.masked_fill(torch.arange(kit.VOCAB) > 60, -torch.inf) if self.done else scores


def test_a_processor_that_changes_after_its_first_call_is_found_at_the_end() -> None:
    """Some of these prompts would give other tokens than `generate`; wherever it has changed, there is no result."""
    engine = Engine(graded("llama", "some"), exit_layer=2)
    refused = 0
    for seed in range(12):
        ids = torch.randint(1, kit.VOCAB, (1, WIDTH), generator=torch.Generator().manual_seed(seed))
        processor = ThinkingBudget()
        try:
            engine.generate(ids, max_new_tokens=16, pad_token_id=0, logits_processor=[processor])
        except ValueError as error:
            assert "logits_processor holds ThinkingBudget, which changed when it was called: done" in str(error)
            assert processor.done
            refused += 1
        else:
            assert not processor.done
    assert refused >= 3
