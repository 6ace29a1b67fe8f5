"""Self-speculation behind `generate(…, custom_generate=…)`: what `generate` itself gives, and refusals by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor
from transformers.generation.streamers import BaseStreamer

import layerskip
from layerskip import SelfSpeculativeOutput, Statistics
from layerskip.comparison.audit import NEAR_TIE_UNITS, spacing
from layerskip.model.cache import SharedCacheLayer
from tests import kit

FAMILIES = tuple(kit.CONFIGS)
GRADED = [
    *((family, grade) for family in ("llama", "gemma2") for grade in ("none", "some", "all")),
    *((family, "some") for family in ("qwen3", "gemma3_text", "gpt2")),
]
SLIDING = ("qwen3", "gemma2", "gemma3_text")
NEW = 12
# Rows of 10 and 6 tokens, padded on the left.
SHORT = kit.PROMPT[4:]
PADDED = torch.tensor([kit.PROMPT, [0] * 4 + SHORT, [8, 20, 31, 60, 2, 9, 77, 12, 4, 4]])
MASK = torch.tensor([[1] * 10, [0] * 4 + [1] * 6, [1] * 10])
USER_TURN = torch.tensor([[61, 17, 30, 2, 85]])


@cache
def graded(family: str, grade: str = "some") -> PreTrainedModel:
    """Returns a model that tests share, so that none may change it."""
    return kit.graded(family, grade)


def hook(**arguments: Any) -> Callable[..., Any]:
    """Returns what is tested, at exit 2."""
    return layerskip.self_speculative(exit_layer=kit.EXIT_LAYER, **arguments)


def plain(model: PreTrainedModel, *inputs: torch.Tensor, **arguments: Any) -> Any:
    """Returns what `generate` itself gives."""
    return model.generate(*inputs, **arguments)


def ours(model: PreTrainedModel, *inputs: torch.Tensor, **arguments: Any) -> Any:
    """Returns what `generate` gives with the hook."""
    return model.generate(*inputs, custom_generate=hook(), **arguments)


def check_equal(model: PreTrainedModel, *inputs: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Checks that both give the same sequences, and returns these."""
    expected = plain(model, *inputs, **arguments)
    given = ours(model, *inputs, **arguments)
    assert torch.equal(given, expected)
    assert given.dtype == expected.dtype
    return given


@pytest.fixture(name="model", params=GRADED, ids=str)
def every_graded_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model of known acceptance."""
    return graded(*request.param)


@pytest.fixture(name="llama")
def one_llama() -> PreTrainedModel:
    """A Llama of which a part of the drafts is accepted."""
    return graded("llama")


# Greedy decoding, setting by setting.


def test_every_model_says_something_and_accepts_as_it_should(request: pytest.FixtureRequest) -> None:
    for family, grade in GRADED:
        output = ours(graded(family, grade), kit.prompt_tensor(), max_new_tokens=24, return_dict_in_generate=True)
        assert len(set(output.sequences[0, 10:].tolist())) >= 6
        rate = output.statistics.draft_acceptance_rate
        assert {"none": rate == 0, "some": 0 < rate < 1, "all": rate == 1}[grade], (family, grade, rate)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_new_tokens": 24},
        {"max_new_tokens": 1},
        {"max_length": 25},
        {"generation_config": GenerationConfig(max_new_tokens=24)},
        {"generation_config": GenerationConfig(max_length=17, repetition_penalty=1.7)},
        {"generation_config": GenerationConfig(max_new_tokens=24, num_beams=1), "max_new_tokens": 5},
        {"max_new_tokens": NEW, "no_repeat_ngram_size": 2, "bad_words_ids": [[9], [3, 44]], "min_new_tokens": 3},
        {"max_new_tokens": NEW, "exponential_decay_length_penalty": (3, 1.2), "eos_token_id": 9, "min_length": 12},
        {"max_new_tokens": NEW, "temperature": 0.3, "top_k": 3},
        {"max_new_tokens": NEW, "cache_implementation": "dynamic"},
        {"max_new_tokens": NEW, "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])},
        {"max_new_tokens": NEW, "prefix_allowed_tokens_fn": lambda _, ids: list(range(int(ids[-1]) % 7, 97, 7))},
        {"max_new_tokens": NEW, "stopping_criteria": StoppingCriteriaList([lambda ids, _: _ends_at(ids, 15)])},
    ],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)
def test_one_row_equals_generate(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    check_equal(model, kit.prompt_tensor(), **arguments)


def _ends_at(ids: torch.Tensor, length: int) -> torch.Tensor:
    return torch.full((len(ids),), ids.shape[1] >= length)


@pytest.mark.parametrize(
    "defaults",
    [
        {"max_new_tokens": 7},
        {"max_length": 22, "repetition_penalty": 1.3},
        {"eos_token_id": [9, 24], "pad_token_id": 0},
        {"suppress_tokens": [9, 3, 44]},
    ],
    ids=" ".join,
)
def test_the_models_own_generation_config_is_followed(defaults: dict[str, Any]) -> None:
    model = kit.graded("llama", "some")
    untouched = plain(model, kit.prompt_tensor())
    for name, value in defaults.items():
        setattr(model.generation_config, name, value)
    assert check_equal(model, kit.prompt_tensor()).tolist() != untouched.tolist()


@pytest.mark.parametrize("index", range(6))
def test_any_of_several_eos_tokens_ends_the_row(model: PreTrainedModel, index: int) -> None:
    emitted = plain(model, kit.prompt_tensor(), max_new_tokens=8)[0, 10:].tolist()
    eos = [emitted[7], emitted[index]]
    sequences = check_equal(model, kit.prompt_tensor(), max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0)
    assert sequences.shape[1] - 10 == min(map(emitted.index, eos)) + 1


def test_the_inputs_may_go_by_any_of_their_names(llama: PreTrainedModel) -> None:
    expected = plain(llama, kit.prompt_tensor(), max_new_tokens=NEW)
    for name in ("inputs", "input_ids"):
        assert torch.equal(ours(llama, **{name: kit.prompt_tensor()}, max_new_tokens=NEW), expected)
    assert torch.equal(ours(llama, kit.prompt_tensor().int(), max_new_tokens=NEW), expected)
    check_equal(llama, bos_token_id=5, max_new_tokens=NEW)


def test_no_mask_a_mask_of_ones_and_explicit_positions_are_the_same(model: PreTrainedModel) -> None:
    ids = kit.prompt_tensor()
    expected = plain(model, ids, max_new_tokens=NEW)
    for arguments in (
        {"attention_mask": None},
        {"attention_mask": torch.ones_like(ids)},
        {"position_ids": torch.arange(10).unsqueeze(0)},
        {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(10).unsqueeze(0)},
    ):
        assert torch.equal(check_equal(model, ids, max_new_tokens=NEW, **arguments), expected)


def test_a_batch_padded_on_the_left_equals_generate_and_its_solo_runs(model: PreTrainedModel) -> None:
    batch = check_equal(model, PADDED, attention_mask=MASK, max_new_tokens=NEW, pad_token_id=0)
    solo = plain(model, kit.prompt_tensor(SHORT), max_new_tokens=NEW)
    assert batch[1, 10:].tolist() == solo[0, len(SHORT) :].tolist()


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int32])
def test_a_mask_may_be_of_any_type(llama: PreTrainedModel, kind: torch.dtype) -> None:
    check_equal(llama, PADDED, attention_mask=MASK.to(kind), max_new_tokens=NEW, pad_token_id=0)


def test_a_mask_is_inferred_from_padding_as_generate_does(llama: PreTrainedModel) -> None:
    inferred = check_equal(llama, PADDED, max_new_tokens=NEW, pad_token_id=0)
    assert torch.equal(inferred, plain(llama, PADDED, attention_mask=MASK, max_new_tokens=NEW, pad_token_id=0))


def test_positions_of_a_padded_batch_may_be_given(llama: PreTrainedModel) -> None:
    positions = (MASK.cumsum(-1) - 1).masked_fill(MASK == 0, 1)
    check_equal(
        llama, PADDED, attention_mask=MASK, position_ids=positions, max_new_tokens=NEW, pad_token_id=0, max_length=None
    )


def test_rows_that_end_at_different_lengths_are_filled_as_generate_fills_them(model: PreTrainedModel) -> None:
    options = {"attention_mask": MASK, "max_new_tokens": NEW}
    emitted = plain(model, PADDED, pad_token_id=0, **options)[:, 10:].tolist()
    eos = [emitted[0][3], emitted[1][6]]
    check_equal(model, PADDED, eos_token_id=eos, pad_token_id=96, **options)
    check_equal(model, PADDED, eos_token_id=eos, **options)


def test_processors_and_criteria_see_a_padded_batch_as_generate_shows_it(model: PreTrainedModel) -> None:
    """Rules that read the row's index, its padding and its length."""

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return list(range((row + int(ids.sum())) % 5, 97, 5))

    check_equal(
        model,
        PADDED,
        attention_mask=MASK,
        max_new_tokens=NEW,
        pad_token_id=0,
        eos_token_id=96,
        prefix_allowed_tokens_fn=allowed,
        logits_processor=[_favour_by_index],
        repetition_penalty=1.3,
        stopping_criteria=[lambda ids, _: torch.tensor([int(row[-1]) % 10 == 4 for row in ids])],
    )


def _favour_by_index(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + torch.arange(97) * torch.arange(len(scores)).unsqueeze(1) * input_ids.shape[1] / 5000


def test_rows_ended_by_a_criterion_are_padded_where_generate_goes_on_with_them(llama: PreTrainedModel) -> None:
    """Without an EOS token `generate` fills nothing up; the hook does, and so needs a padding token."""
    third = plain(llama, PADDED, attention_mask=MASK, pad_token_id=0, max_new_tokens=NEW)[0, 12]
    options = {
        "attention_mask": MASK,
        "max_new_tokens": 8,
        "stopping_criteria": [lambda ids, _: (ids[:, 10:] == third).any(1)],
    }
    expected = plain(llama, PADDED, pad_token_id=0, **options)
    given = ours(llama, PADDED, pad_token_id=0, **options)
    assert torch.equal(given[0, :13], expected[0, :13])
    assert given[0, 13:].tolist() == [0] * 5
    assert torch.equal(given[1:], expected[1:])
    with pytest.raises(ValueError, match="pad_token_id=None"):
        ours(llama, PADDED, **options)


def test_embedded_prompts_equal_generate(model: PreTrainedModel) -> None:
    ids = kit.prompt_tensor()
    embedded = model.get_input_embeddings()(ids).detach()
    alone = check_equal(model, inputs_embeds=embedded, max_new_tokens=NEW)
    assert alone.shape == (1, NEW)
    both = check_equal(model, ids, inputs_embeds=embedded, max_new_tokens=NEW)
    assert torch.equal(both, plain(model, ids, max_new_tokens=NEW))
    check_equal(model, inputs_embeds=embedded, max_length=18)
    check_equal(model, inputs_embeds=embedded, max_new_tokens=NEW, attention_mask=torch.ones_like(ids))
    check_equal(model, inputs_embeds=embedded, max_new_tokens=NEW, repetition_penalty=1.7)


def test_embedded_batches_equal_generate(model: PreTrainedModel) -> None:
    embedded = model.get_input_embeddings()(PADDED).detach()
    options = {"inputs_embeds": embedded, "attention_mask": MASK, "max_new_tokens": NEW, "pad_token_id": 0}
    alone = check_equal(model, **options)
    assert torch.equal(check_equal(model, PADDED, **options)[:, 10:], alone)
    check_equal(model, **{**options, "inputs_embeds": embedded[[0, 2]], "attention_mask": None})


def test_embeddings_that_no_token_has_equal_generate(llama: PreTrainedModel) -> None:
    soft = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0))
    check_equal(llama, inputs_embeds=soft, max_new_tokens=NEW)


def test_fewer_input_ids_than_embeddings_equal_generate(llama: PreTrainedModel) -> None:
    embedded = llama.get_input_embeddings()(kit.prompt_tensor()).detach()
    options = {"inputs_embeds": embedded, "attention_mask": torch.ones(1, 10), "max_new_tokens": NEW}
    assert check_equal(llama, kit.prompt_tensor()[:, :3], **options).shape[1] == 3 + NEW


# What comes back.


def test_the_output_is_that_of_generate_and_more(model: PreTrainedModel) -> None:
    options = {
        "attention_mask": MASK,
        "max_new_tokens": NEW,
        "pad_token_id": 0,
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected, given = plain(model, PADDED, **options), ours(model, PADDED, **options)
    assert isinstance(given, SelfSpeculativeOutput)
    for name in ("sequences", "scores", "logits", "attentions", "hidden_states", "cache"):
        assert type(getattr(given, name)) is type(getattr(expected, name)), name
    assert list(given)[: len(expected)] == list(expected) == ["sequences", "scores", "logits", "cache"]
    assert given[0] is given.sequences is given["sequences"]
    assert given[1] is given.scores
    assert given[:3] == (given.sequences, given.scores, given.logits)
    assert given.past_key_values is given.cache
    assert torch.equal(given.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(given[name]) == len(expected[name]) == NEW
        torch.testing.assert_close(torch.stack(given[name]), torch.stack(expected[name]), atol=1e-5, rtol=0)
        assert not torch.equal(given[name][0], given["logits" if name == "scores" else "scores"][0])
    assert given.finish_reasons == ["length"] * 3
    assert isinstance(given.statistics, Statistics)
    assert given.statistics.emitted == 3 * NEW
    assert len(given.statistics.per_row) == 3
    torch.testing.assert_close(
        model.compute_transition_scores(given.sequences, given.scores, normalize_logits=True),
        model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True),
    )


def test_what_was_not_asked_for_is_none(llama: PreTrainedModel) -> None:
    output = ours(llama, kit.prompt_tensor(), max_new_tokens=4, return_dict_in_generate=True)
    assert output.scores is None
    assert output.logits is None
    assert list(output) == ["sequences", "cache", "finish_reasons", "statistics"]
    assert isinstance(ours(llama, kit.prompt_tensor(), max_new_tokens=4, output_scores=True), torch.Tensor)


def test_scores_of_rows_that_had_finished_are_zeros(llama: PreTrainedModel) -> None:
    options = {"attention_mask": MASK, "max_new_tokens": 8, "pad_token_id": 0}
    eos = int(plain(llama, PADDED, **options)[0, 12])
    options |= {"eos_token_id": eos, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, given = plain(llama, PADDED, **options), ours(llama, PADDED, **options)
    assert len(given.scores) == len(expected.scores)
    for step, (scores, logits, reference) in enumerate(zip(given.scores, given.logits, expected.scores, strict=True)):
        torch.testing.assert_close(scores[1:], reference[1:], atol=1e-5, rtol=0)
        assert (scores[0].abs().sum() == 0) == (logits[0].abs().sum() == 0) == (step > 2)
    assert given.finish_reasons[0] == "stop"


def test_finish_reasons(llama: PreTrainedModel) -> None:
    emitted = plain(llama, kit.prompt_tensor(), max_new_tokens=4)[0, 10:].tolist()
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "pad_token_id": 0}
    for arguments, reason in (
        ({}, "length"),
        ({"eos_token_id": emitted[2]}, "stop"),
        ({"stopping_criteria": [lambda ids, _: _ends_at(ids, 12)]}, "criteria"),
    ):
        assert ours(llama, kit.prompt_tensor(), **options, **arguments).finish_reasons == [reason]


# Sampling.


SAMPLING = {"do_sample": True, "max_new_tokens": 12, "top_k": 5, "temperature": 1.5, "pad_token_id": 0}


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_are_among_those_that_generate_allows(family: str) -> None:
    model = graded(family)
    drawn = set()
    for seed in range(4):
        torch.manual_seed(seed)
        output = ours(
            model,
            PADDED,
            attention_mask=MASK,
            return_dict_in_generate=True,
            output_scores=True,
            **SAMPLING,
        )
        for row, (ids, mask) in enumerate(zip(output.sequences, MASK, strict=True)):
            start = int((mask == 0).sum())
            logits = model(ids[None, start:], use_cache=False).logits[0, 10 - start - 1 : -1]
            nucleus = logits.topk(5, dim=-1).indices
            emitted = ids[10:]
            assert (nucleus == emitted[:, None]).any(1).all()
            kept = torch.stack([scores[row] for scores in output.scores]).isfinite()
            assert torch.equal(kept, torch.zeros_like(kept).scatter(1, nucleus, True))
            drawn.add(tuple(emitted.tolist()))
    assert len(drawn) >= 10


def test_sampling_is_repeatable_by_a_generator_and_by_the_global_seed(llama: PreTrainedModel) -> None:
    def by_generator(seed: int) -> list[int]:
        sample = hook(generator=torch.Generator().manual_seed(seed))
        return llama.generate(kit.prompt_tensor(), custom_generate=sample, **SAMPLING)[0].tolist()

    def by_global_seed(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return ours(llama, kit.prompt_tensor(), **SAMPLING)[0].tolist()

    for sample in (by_generator, by_global_seed):
        assert sample(1) == sample(1)
        assert len({tuple(sample(seed)) for seed in range(6)}) > 3


def test_a_generator_leaves_the_global_one_alone_and_greedy_decoding_both(llama: PreTrainedModel) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    llama.generate(kit.prompt_tensor(), custom_generate=hook(generator=torch.Generator()), **SAMPLING)
    ours(llama, kit.prompt_tensor(), max_new_tokens=NEW)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_without_sampling_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="generator has no effect"):
        llama.generate(kit.prompt_tensor(), custom_generate=hook(generator=torch.Generator()), max_new_tokens=4)


def test_num_return_sequences_gives_so_many_rows_for_each_prompt(llama: PreTrainedModel) -> None:
    torch.manual_seed(0)
    output = ours(llama, PADDED, attention_mask=MASK, num_return_sequences=3, return_dict_in_generate=True, **SAMPLING)
    assert output.sequences.shape == (9, 22)
    assert torch.equal(output.sequences[:, :10], PADDED.repeat_interleave(3, 0))
    assert len({tuple(row) for row in output.sequences[:, 10:].tolist()}) > 6
    assert len(output.finish_reasons) == len(output.statistics.per_row) == 9
    assert output.cache.layers[0].keys.shape[0] == 9
    embedded = llama.get_input_embeddings()(PADDED).detach()
    rows = ours(llama, inputs_embeds=embedded, attention_mask=MASK, num_return_sequences=2, **SAMPLING)
    assert rows.shape == (6, 12)


# Caches.


def first_turn(model: PreTrainedModel, who: Callable[..., Any], prompt: torch.Tensor, **arguments: Any) -> Any:
    return who(model, prompt, return_dict_in_generate=True, pad_token_id=0, **arguments)


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


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "new"])
@pytest.mark.parametrize(
    ("first", "second"), [(ours, plain), (ours, ours), (plain, ours)], ids=lambda who: who.__name__
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
    assert given[0, -NEW:].tolist() == kit.without_cache(model, sequence[0].tolist(), NEW)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "new"])
@pytest.mark.parametrize(
    ("first", "second"), [(ours, plain), (ours, ours), (plain, ours)], ids=lambda who: who.__name__
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
        assert given[0, -12:].tolist() == kit.without_cache(model, sequence[0].tolist(), 12)


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


# Refusals.


def refused(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    error: type[Exception],
    match: str,
    ids: torch.Tensor | None = None,
    decode: Callable[..., Any] | None = None,
) -> None:
    """Checks that a call is refused before any layer runs, that nothing changed, and that the next call is right."""
    configs = [copy.deepcopy(each.to_dict()) for each in (model.config, model.generation_config)]
    options = {"max_new_tokens": 8, "pad_token_id": 0, **arguments}
    with kit.counted_layers(model) as counts, pytest.raises(error, match=match):
        model.generate(ids if ids is not None else kit.prompt_tensor(), custom_generate=decode or hook(), **options)
    assert counts == [0] * kit.NUM_LAYERS
    assert [each.to_dict() for each in (model.config, model.generation_config)] == configs
    expected = kit.reference(model, kit.prompt_tensor(), max_new_tokens=8)
    assert torch.equal(ours(model, kit.prompt_tensor(), max_new_tokens=8), expected)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_beams": 2, "num_return_sequences": 2}, "num_beams=2"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=2"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"assistant_early_exit": 2}, "assistant_early_exit=2"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
        ({"dola_layers": "low"}, "dola_layers='low'"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size=4"),
        ({"token_healing": True}, "token_healing|tokenizer"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
        ({"use_cache": False}, "use_cache=False"),
        ({"token_type_ids": torch.zeros(1, 10, dtype=torch.long)}, "token_type_ids"),
        ({"labels": torch.zeros(1, 10, dtype=torch.long)}, "labels=a tensor of shape"),
        ({"cache": StaticCache}, "StaticCache"),
        ({"attention_mask": torch.tensor([[1] * 4 + [0] + [1] * 5])}, "attention_mask.0. has a zero between"),
        ({"attention_mask": torch.zeros(1, 10)}, "attention_mask.0. is all zeros"),
        ({"attention_mask": torch.tensor([[2] * 10])}, "attention_mask holds other values"),
        ({"attention_mask": torch.ones(1, 14)}, "attention mask 14"),
        ({"position_ids": torch.arange(1, 11).unsqueeze(0)}, "position_ids"),
        ({"position_ids": torch.arange(10)}, "position_ids"),
        ({"position_ids": torch.arange(10).repeat(2, 1)}, "position_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused_by_name(llama: PreTrainedModel, arguments: dict[str, Any], name: str) -> None:
    if "cache" in arguments:
        arguments = {"cache": StaticCache(config=llama.config, max_cache_len=32)}
    error = TypeError if "cache" in arguments else ValueError
    refused(llama, arguments, error, name)


def test_what_only_some_families_know_is_refused_by_name() -> None:
    model = graded("gpt2")
    refused(model, {"token_type_ids": torch.zeros(1, 10, dtype=torch.long)}, ValueError, "token_type_ids=a tensor")


def test_a_setting_of_the_checkpoint_is_refused_as_well() -> None:
    model = kit.graded("llama", "some")
    model.generation_config.num_beams = 3
    with pytest.raises(ValueError, match=r"num_beams=3 in the generation_config.*pass num_beams=1"):
        ours(model, kit.prompt_tensor(), max_new_tokens=8)
    given = ours(model, kit.prompt_tensor(), max_new_tokens=8, num_beams=1)
    assert torch.equal(given, plain(model, kit.prompt_tensor(), max_new_tokens=8, num_beams=1))


def test_compilation_is_refused_by_name(llama: PreTrainedModel) -> None:
    from transformers.generation.configuration_utils import CompileConfig

    refused(llama, {"compile_config": CompileConfig()}, ValueError, "compile_config=")


def test_masks_of_another_number_of_rows_are_refused(llama: PreTrainedModel) -> None:
    for mask in (MASK[1:2], torch.cat([MASK, MASK])):
        with pytest.raises(ValueError, match=r"attention_mask has shape .* there are 3 rows"):
            ours(llama, PADDED, attention_mask=mask, position_ids=torch.arange(10).unsqueeze(0), max_new_tokens=4)


def test_embeddings_of_another_shape_are_refused(llama: PreTrainedModel) -> None:
    embedded = llama.get_input_embeddings()(kit.prompt_tensor()).detach()
    for wrong in (embedded[0], embedded[..., :7]):
        with kit.counted_layers(llama) as counts:
            with pytest.raises(ValueError, match=r"inputs_embeds has shape .* must be \(rows, tokens, 32\)"):
                ours(llama, inputs_embeds=wrong, max_new_tokens=4)
            assert counts == [0] * kit.NUM_LAYERS


def test_token_ids_outside_the_vocabulary_are_refused(llama: PreTrainedModel) -> None:
    for token in (97, -1):
        refused(llama, {}, ValueError, f"input_ids.0. holds token id {token}", torch.tensor([[5, token, 7]]))


@pytest.mark.parametrize("kind", ["rows", "layers", "whole prompt", "padded on the right", "uneven", "offloaded"])
def test_caches_that_do_not_fit_are_refused(llama: PreTrainedModel, kind: str) -> None:
    turn = first_turn(llama, plain, PADDED, attention_mask=MASK, max_new_tokens=6)
    sequence = torch.cat([turn.sequences, USER_TURN.expand(3, -1)], dim=1)
    mask = torch.cat([MASK, torch.ones(3, 11, dtype=torch.long)], dim=1)
    cache = turn.cache
    error, match = ValueError, "cache"
    if kind == "rows":
        sequence, mask, match = sequence[:2], mask[:2], "layer 1 of cache holds 3 rows"
    elif kind == "layers":
        short = kit.truncated(llama, 3)
        cache = first_turn(short, plain, PADDED, attention_mask=MASK, max_new_tokens=6).cache
        match = "cache has 3 layers, but the model 4"
    elif kind == "whole prompt":
        sequence, mask, match = (
            sequence[:, :15],
            mask[:, :15],
            "the cache holds 15 tokens, and the input",
        )
    elif kind == "padded on the right":
        mask[1, -2:] = 0
        match = "attention_mask ends in zeros"
    elif kind == "uneven":
        cache.layers[2].keys = cache.layers[2].keys[:, :, :-1]
        cache.layers[2].values = cache.layers[2].values[:, :, :-1]
        match = "the layers of cache hold"
    else:
        cache = DynamicCache(config=llama.config, offloading=True)
        match = "offloading=True"
    refused(llama, {"attention_mask": mask, "cache": cache}, error, match, sequence)


class CountingProcessor(LogitsProcessor):
    """Keeps count of its calls, which a rejected draft makes wrong."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores - self.calls


def test_processors_with_a_state_are_refused_by_name(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="CountingProcessor, which changed when it was called: calls"):
        ours(llama, kit.prompt_tensor(), max_new_tokens=8, logits_processor=[CountingProcessor()])
    remembering = SynthIDTextWatermarkLogitsProcessor(2, [1, 2], 64, 0, 4, device=torch.device("cpu"))
    refused(llama, {"logits_processor": [remembering]}, ValueError, "SynthIDTextWatermarkLogitsProcessor")


def test_train_mode_is_refused_and_stays() -> None:
    model = kit.graded("llama", "some")
    model.model.layers[1].train()
    with kit.counted_layers(model) as counts, pytest.raises(ValueError, match=r"train mode.*model.eval\(\)"):
        ours(model, kit.prompt_tensor(), max_new_tokens=4)
    assert counts == [0] * kit.NUM_LAYERS
    assert model.model.layers[1].training
    assert not model.training


@pytest.mark.parametrize(
    ("exit_layer", "error", "match"),
    [
        (-1, ValueError, "exit_layer=-1 is out of range; allowed are 1 to 3"),
        (0, ValueError, "exit_layer=0 is out of range; allowed are 1 to 3"),
        (4, ValueError, "exit_layer=4 is out of range; allowed are 1 to 3"),
        (5, ValueError, "exit_layer=5 is out of range; allowed are 1 to 3"),
        ("2", TypeError, "exit_layer='2' is a str"),
        (None, ValueError, r"exit_layer=1\.\.3.*compare_exits\.py"),
    ],
)
def test_exits_that_are_none_are_refused(
    llama: PreTrainedModel, exit_layer: Any, error: type[Exception], match: str
) -> None:
    refused(llama, {}, error, match, decode=layerskip.self_speculative(exit_layer=exit_layer))


def test_other_numbers_of_the_hook_are_checked(llama: PreTrainedModel) -> None:
    for arguments, match in (
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"draft_vocab_size": 8}, "draft_vocab_size=8"),
        ({"draft_token_ids": torch.tensor([1, 97])}, "draft_token_ids"),
    ):
        refused(llama, {}, ValueError, match, decode=hook(**arguments))


def test_the_exit_of_the_checkpoint_is_taken() -> None:
    model = kit.graded("llama", "some")
    model.config.layerskip = {"format": 1, "exit_layers": [1], "exit_layer": 1, "num_draft_tokens": 2}
    output = model.generate(
        kit.prompt_tensor(),
        custom_generate=layerskip.self_speculative(),
        max_new_tokens=NEW,
        return_dict_in_generate=True,
    )
    assert (output.statistics.exit_layer, output.statistics.num_draft_tokens) == (1, 2)
    assert torch.equal(output.sequences, plain(model, kit.prompt_tensor(), max_new_tokens=NEW))


def test_what_is_no_causal_language_model_of_a_supported_family_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=4, state_size=4)).eval()
    with pytest.raises(ValueError, match="mamba"):
        ours(model, kit.prompt_tensor(), max_new_tokens=4)


# Streamers, tokenizers and stop strings.


class Puts(BaseStreamer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ends = 0

    @property
    def token_ids(self) -> list[int]:
        """All that it got, in one row."""
        return list(chain.from_iterable(self.puts))

    def put(self, value: torch.Tensor) -> None:
        """Keeps a block."""
        assert self.ends == 0
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        """Counts an end."""
        self.ends += 1


def test_a_streamer_gets_the_prompt_and_a_put_a_round(model: PreTrainedModel) -> None:
    streamed = Puts()
    output = model.generate(
        kit.prompt_tensor(),
        custom_generate=hook(streamer=streamed),
        max_new_tokens=NEW,
        return_dict_in_generate=True,
    )
    expected = Puts()
    plain(model, kit.prompt_tensor(), max_new_tokens=NEW, streamer=expected)
    assert streamed.token_ids == output.sequences[0].tolist() == expected.token_ids
    assert streamed.puts[0] == expected.puts[0] == kit.PROMPT
    # The prompt, prefill's token, and the rounds.
    assert len(streamed.puts) == 2 + output.statistics.rounds
    assert streamed.ends == expected.ends == 1


def test_nothing_is_streamed_past_an_eos() -> None:
    model = graded("llama", "all")
    emitted = plain(model, kit.prompt_tensor(), max_new_tokens=8)[0, 10:].tolist()
    streamed = Puts()
    model.generate(
        kit.prompt_tensor(), custom_generate=hook(streamer=streamed), max_new_tokens=8, eos_token_id=emitted[3]
    )
    assert streamed.token_ids == kit.PROMPT + emitted[:4]


def test_transformers_own_streamer_gives_the_same_text(llama: PreTrainedModel) -> None:
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    streamers = [TextIteratorStreamer(tokenizer, skip_prompt=skip) for skip in (True, False)]
    for skip, streamer in zip((True, False), streamers, strict=True):
        expected = TextIteratorStreamer(tokenizer, skip_prompt=skip)
        plain(llama, kit.prompt_tensor(), max_new_tokens=NEW, streamer=expected)
        llama.generate(kit.prompt_tensor(), custom_generate=hook(streamer=streamer), max_new_tokens=NEW)
        assert "".join(streamer) == "".join(expected) != ""


def test_a_streamer_given_to_generate_gets_the_prompt_alone(llama: PreTrainedModel) -> None:
    streamed = Puts()
    given = ours(llama, kit.prompt_tensor(), max_new_tokens=8, streamer=streamed)
    assert streamed.puts == [kit.PROMPT]
    assert streamed.ends == 0
    assert torch.equal(given, plain(llama, kit.prompt_tensor(), max_new_tokens=8))


def test_other_arguments_that_generate_keeps_have_no_effect(llama: PreTrainedModel) -> None:
    expected = plain(llama, kit.prompt_tensor(), max_new_tokens=8)
    for arguments in ({"tokenizer": kit.word_tokenizer()}, {"assistant_model": llama}, {"synced_gpus": False}):
        assert torch.equal(ours(llama, kit.prompt_tensor(), max_new_tokens=8, **arguments), expected)


def test_a_streamer_is_for_one_row(llama: PreTrainedModel) -> None:
    streamed = Puts()
    arguments = {"attention_mask": MASK}
    refused(llama, arguments, ValueError, "streamer takes the tokens of one row", PADDED, hook(streamer=streamed))
    assert streamed.puts == []


class ThirdPutRaises(Puts):
    """Gives up on the third block."""

    def put(self, value: torch.Tensor) -> None:
        """Keeps a block, or raises."""
        if len(self.puts) == 2:
            raise ConnectionError("the client is gone")
        super().put(value)


def test_a_streamer_that_raises_leaves_everything_as_it_was() -> None:
    model = graded("gemma2")
    config = copy.deepcopy(model.config.to_dict())
    modules = list(map(id, model.modules()))
    expected = plain(model, kit.prompt_tensor(), max_new_tokens=NEW)
    with pytest.raises(ConnectionError, match="the client is gone"):
        model.generate(kit.prompt_tensor(), custom_generate=hook(streamer=ThirdPutRaises()), max_new_tokens=NEW)
    assert model.config.to_dict() == config
    assert list(map(id, model.modules())) == modules
    assert torch.equal(ours(model, kit.prompt_tensor(), max_new_tokens=NEW), expected)


def spaced_tokenizer(words: int = kit.VOCAB) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words, w1, w2, …, that stop strings can be looked for with: it knows "abcdef"."""
    vocabulary = {"abcdef": 0, **{f"w{token}": token for token in range(1, words)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="abcdef"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="abcdef")


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("grade", ["some", "all"])
def test_stop_strings_end_a_row_where_generate_ends_it(grade: str, index: int) -> None:
    model, tokenizer = graded("llama", grade), spaced_tokenizer()
    emitted = plain(model, kit.prompt_tensor(), max_new_tokens=8)[0, 10:].tolist()
    word, following = tokenizer.convert_ids_to_tokens(emitted[index : index + 2])
    for stop_strings in (word, ["nothing", word], f"{word} {following}"):
        options = {"max_new_tokens": NEW, "pad_token_id": 0}
        expected = plain(model, kit.prompt_tensor(), stop_strings=stop_strings, tokenizer=tokenizer, **options)
        output = model.generate(
            kit.prompt_tensor(),
            custom_generate=hook(stop_strings=stop_strings, tokenizer=tokenizer),
            return_dict_in_generate=True,
            **options,
        )
        assert torch.equal(output.sequences, expected)
        assert expected.shape[1] < 10 + NEW
        assert output.finish_reasons == ["stop"]


def test_stop_strings_end_the_rows_of_a_batch_one_by_one(llama: PreTrainedModel) -> None:
    tokenizer = spaced_tokenizer()
    options = {"attention_mask": MASK, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": 96}
    emitted = plain(llama, PADDED, **options)[:, 10:]
    stop_strings = tokenizer.convert_ids_to_tokens([int(emitted[0, 2]), int(emitted[1, 5])])
    expected = plain(llama, PADDED, stop_strings=stop_strings, tokenizer=tokenizer, **options)
    decode = hook(stop_strings=stop_strings, tokenizer=tokenizer)
    assert torch.equal(llama.generate(PADDED, custom_generate=decode, **options), expected)


def test_stop_strings_without_a_tokenizer_are_refused_as_the_hook_is_made() -> None:
    with pytest.raises(ValueError, match=r"stop_strings='w5' need a tokenizer.*pass tokenizer="):
        layerskip.self_speculative(exit_layer=2, stop_strings="w5")


def test_stop_strings_given_to_generate_raise_for_want_of_the_tokenizer(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        ours(llama, kit.prompt_tensor(), max_new_tokens=4, stop_strings="w5", tokenizer=kit.word_tokenizer())


def test_empty_stop_strings_are_refused_before_any_layer_runs(llama: PreTrainedModel) -> None:
    for stop_strings in ("", [], ["w5", ""]):
        decode = hook(stop_strings=stop_strings, tokenizer=kit.word_tokenizer())
        refused(llama, {}, ValueError, "stop_strings=", decode=decode)


def test_a_tokenizer_smaller_than_the_vocabulary_changes_nothing(llama: PreTrainedModel) -> None:
    decode = hook(tokenizer=spaced_tokenizer(90), stop_strings="w1 w2 w3")
    given = llama.generate(kit.prompt_tensor(), custom_generate=decode, max_new_tokens=24, pad_token_id=0)
    assert max(given[0].tolist()) >= 90
    assert torch.equal(given, plain(llama, kit.prompt_tensor(), max_new_tokens=24))


# The caller's objects.


def test_the_callers_objects_do_not_change(llama: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=NEW, pad_token_id=0, eos_token_id=[95, 96], repetition_penalty=1.2)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    criteria = StoppingCriteriaList([lambda ids, _: _ends_at(ids, 20)])
    ids, mask = PADDED.clone(), MASK.clone()
    before = copy.deepcopy(config.__dict__)
    kept = [list(processors), list(criteria), list(map(id, llama.modules())), list(llama.state_dict())]
    configs = [copy.deepcopy(each.__dict__) for each in (llama.config, llama.generation_config)]
    attributes = set(vars(llama))
    decode = hook()
    outputs = [
        llama.generate(
            ids,
            attention_mask=mask,
            custom_generate=decode,
            generation_config=config,
            logits_processor=processors,
            stopping_criteria=criteria,
        )
        for _ in range(2)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert config.__dict__ == before
    assert [list(processors), list(criteria), list(map(id, llama.modules())), list(llama.state_dict())] == kept
    assert [each.__dict__ for each in (llama.config, llama.generation_config)] == configs
    assert set(vars(llama)) == attributes
    assert torch.equal(ids, PADDED)
    assert torch.equal(mask, MASK)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama.modules())


def test_embeddings_of_the_caller_do_not_change(llama: PreTrainedModel) -> None:
    embedded = llama.get_input_embeddings()(PADDED).detach()
    before = embedded.clone()
    ours(llama, inputs_embeds=embedded, attention_mask=MASK, max_new_tokens=8, pad_token_id=0)
    assert torch.equal(embedded, before)


def test_one_hook_serves_two_models_and_two_threads() -> None:
    models = [graded("llama"), graded("gemma2")]
    expected = [plain(model, kit.prompt_tensor(), max_new_tokens=24) for model in models]
    decode = hook()

    def generate(turn: int) -> torch.Tensor:
        return models[turn % 2].generate(kit.prompt_tensor(), custom_generate=decode, max_new_tokens=24)

    with ThreadPoolExecutor(2) as threads:
        for turn, sequences in enumerate(threads.map(generate, range(8))):
            assert torch.equal(sequences, expected[turn % 2])


def test_norm_and_head_are_called_as_modules(model: PreTrainedModel) -> None:
    """Once for prefill, for every draft and for every verification, so that hooks on them act on every exit."""
    base = model.transformer if model.config.model_type == "gpt2" else model.model
    norm = base.ln_f if model.config.model_type == "gpt2" else base.norm
    calls = {"norm": 0, "head": 0}

    def count(name: str) -> Callable[..., None]:
        def add(*_: Any) -> None:
            calls[name] += 1

        return add

    handles = [norm.register_forward_hook(count("norm"))]
    handles.append(model.get_output_embeddings().register_forward_hook(count("head")))
    try:
        output = ours(model, kit.prompt_tensor(), max_new_tokens=NEW, return_dict_in_generate=True)
    finally:
        for handle in handles:
            handle.remove()
    statistics = output.statistics
    expected = 1 + statistics.draft_tokens_processed + statistics.rounds
    assert calls == {"norm": expected, "head": expected}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_padded_on_the_right_equal_their_solo_runs(
    family: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` warns that its own output would be wrong."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = graded(family)
    ids = torch.tensor([kit.PROMPT, SHORT + [0] * 4])
    mask = torch.tensor([[1] * 10, [1] * 6 + [0] * 4])
    output = first_turn(model, ours, ids, attention_mask=mask, max_new_tokens=NEW)
    assert any("right-padding was detected" in message for message in caplog.messages)
    assert torch.equal(output.sequences[:, :10], ids)
    for row, prompt in enumerate([kit.PROMPT, SHORT]):
        solo = plain(model, kit.prompt_tensor(prompt), max_new_tokens=NEW)
        assert output.sequences[row, 10:].tolist() == solo[0, len(prompt) :].tolist()
    assert output.cache is None


# What transformers expects of assisted generation: the tokens of greedy decoding, or a tie where they first differ.


def unexplained(expected: Any, given: Any, prompt: int, tolerance: Callable[[torch.Tensor], float]) -> list[int]:
    """Returns the rows of which the scores differ by more than rounding where tokens first differ, or before.

    Args:
        expected, given: outputs with scores.
        prompt: tokens of the prompts, padding included.
        tolerance: of a step's scores, `(vocabulary,)`, how far rounding may move them.
    """
    rows = []
    for row, (theirs, mine) in enumerate(zip(expected.sequences, given.sequences, strict=True)):
        differing = (theirs != mine).nonzero().flatten().tolist()
        compared = differing[0] - prompt + 1 if differing else len(expected.scores)
        steps = [(expected.scores[step][row], given.scores[step][row]) for step in range(compared)]
        if any(float((left - right).abs().max()) > tolerance(left) for left, right in steps):
            rows.append(row)
    return rows


def fp32_tolerance(scores: torch.Tensor) -> float:
    """The absolute and relative tolerance of transformers' own test."""
    return 1e-5 + 1e-5 * float(scores.abs().max())


def bf16_tolerance(scores: torch.Tensor) -> float:
    """A few units of the format at the largest score, twice, as both sides round."""
    return 2 * NEAR_TIE_UNITS * spacing(float(scores.abs().max()), torch.bfloat16)


TOLERANCES = {torch.float32: fp32_tolerance, torch.bfloat16: bf16_tolerance}
EXPECTATION = {
    "attention_mask": MASK,
    "max_new_tokens": 24,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_scores": True,
}


def in_type(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a model of its own in a format."""
    return kit.graded(family, "some").to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_greedy_decoding_or_scores_tie(family: str, dtype: torch.dtype) -> None:
    model = in_type(family, dtype)
    expected, given = plain(model, PADDED, **EXPECTATION), ours(model, PADDED, **EXPECTATION)
    assert unexplained(expected, given, 10, TOLERANCES[dtype]) == []
    if dtype == torch.float32:
        assert torch.equal(given.sequences, expected.sequences)


@contextmanager
def perturbed(layer: torch.nn.Module, row: int) -> Iterator[None]:
    """Adds to what a layer gives for the prompt of one row."""

    def add(module: torch.nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] != PADDED.shape[1]:
            return output
        changed = output.clone()
        changed[row] += 0.3 * torch.arange(output.shape[-1]).sin()
        return changed

    handle = layer.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_flags_the_row_whose_layer_output_is_wrong(family: str, place: int, dtype: torch.dtype) -> None:
    model = in_type(family, dtype)
    expected = plain(model, PADDED, **EXPECTATION)
    with perturbed(kit.layers_of(model)[place], 1):
        given = ours(model, PADDED, **EXPECTATION)
    assert unexplained(expected, given, 10, TOLERANCES[dtype]) == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_flags_the_row_of_which_one_cached_token_is_wrong(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of its prompt, which every window still shows at first."""
    intact = SharedCacheLayer.update

    def corrupted(layer: SharedCacheLayer, *states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = intact(layer, *states, **kwargs)
        if states[0].shape[2] == PADDED.shape[1]:
            values[2, :, 9] = 3.0
        return keys, values

    model = in_type(family, dtype)
    expected = plain(model, PADDED, **EXPECTATION)
    monkeypatch.setattr(SharedCacheLayer, "update", corrupted)
    given = ours(model, PADDED, **EXPECTATION)
    assert unexplained(expected, given, 10, TOLERANCES[dtype]) == [2]


def test_drafts_that_are_wrong_change_nothing(llama: PreTrainedModel) -> None:
    """Drafts come from five tokens alone, so that most are rejected."""
    few: Sequence[int] = [0, 1, 2, 3, 5]
    output = llama.generate(
        PADDED, custom_generate=hook(draft_token_ids=torch.tensor(few)), **EXPECTATION | {"output_logits": True}
    )
    assert output.statistics.draft_acceptance_rate < 0.2
    assert torch.equal(output.sequences, plain(llama, PADDED, **EXPECTATION).sequences)
