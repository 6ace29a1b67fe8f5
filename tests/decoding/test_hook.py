"""Self-speculation behind `generate(…, custom_generate=…)`: what `generate` itself gives, and the caller's objects."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from layerskip import SelfSpeculativeOutput, Statistics
from tests import kit
from tests.decoding.hook_kit import (
    FAMILIES,
    GRADED,
    MASK,
    NEW,
    PADDED,
    SHORT,
    check_equal,
    first_turn,
    graded,
    hook,
    ours,
    plain,
)

of_every_family = pytest.mark.parametrize("model", [(family, "some") for family in FAMILIES], indirect=True, ids=str)
"""For what does not depend on how much is accepted."""

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
def test_one_row_equals_generate(llama: PreTrainedModel, arguments: dict[str, Any]) -> None:
    check_equal(llama, kit.prompt_tensor(), **arguments)


@pytest.mark.parametrize("arguments", [{}, {"no_repeat_ngram_size": 2, "bad_words_ids": [[9], [3, 44]]}], ids=str)
def test_one_row_of_every_model_equals_generate(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    check_equal(model, kit.prompt_tensor(), max_new_tokens=24, **arguments)


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


@pytest.mark.parametrize("index", [0, 2, 5])
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


@of_every_family
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


@of_every_family
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


@of_every_family
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


@of_every_family
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
