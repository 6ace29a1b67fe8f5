"""What `generate` hands over, read into prompts, and what the engine's own cache leaves of a conversation."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from layerskip import Engine, self_speculative
from layerskip.decoding.handover import Handover, PromptColumns, behind_cache, read_columns
from layerskip.model.cache import CachedTokens
from layerskip.model.layered import LayeredModel
from tests import kit

IDS = torch.tensor([[1, 5, 9, 33], [0, 0, 7, 52], [0, 18, 3, 44]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])


@pytest.fixture(scope="module", name="model")
def one_model() -> PreTrainedModel:
    """A model that these tests share."""
    return kit.mixed()


def handed(model: PreTrainedModel, *inputs: torch.Tensor, **arguments: Any) -> Handover:
    """Returns what `generate` hands over."""
    handover = model.generate(
        *inputs, custom_generate=Handover.take, **{"max_new_tokens": 6, "pad_token_id": 0, **arguments}
    )
    assert isinstance(handover, Handover)
    return handover


def read(model: PreTrainedModel, *inputs: torch.Tensor, **arguments: Any) -> PromptColumns:
    """Returns what is read from that."""
    return read_columns(LayeredModel(model), handed(model, *inputs, **arguments))


def filled(model: PreTrainedModel, ids: torch.Tensor = IDS, mask: torch.Tensor = MASK) -> DynamicCache:
    """Returns a cache of these tokens, as a forward pass fills it."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), cache=cache)
    return cache


def test_a_handover_is_all_that_generate_has_prepared(model: PreTrainedModel) -> None:
    handover = handed(model, IDS, attention_mask=MASK, repetition_penalty=1.3, eos_token_id=9)
    assert torch.equal(handover.input_ids, IDS)
    assert [type(each).__name__ for each in handover.processors] == ["RepetitionPenaltyLogitsProcessor"]
    assert {type(each).__name__ for each in handover.criteria} == {"MaxLengthCriteria", "EosTokenCriteria"}
    assert handover.config.max_length == 10
    assert torch.equal(handover.model_arguments["attention_mask"], MASK)
    with pytest.raises(dataclasses.FrozenInstanceError):
        handover.input_ids = IDS


def test_rows_are_expanded_for_several_samples(model: PreTrainedModel) -> None:
    columns = read(model, IDS, attention_mask=MASK, do_sample=True, num_return_sequences=2)
    assert columns.prompts == [[1, 5, 9, 33], [1, 5, 9, 33], [7, 52], [7, 52], [18, 3, 44], [18, 3, 44]]
    assert columns.starts == (0, 0, 2, 2, 1, 1)


def test_padding_on_the_left_is_left_out(model: PreTrainedModel) -> None:
    columns = read(model, IDS, attention_mask=MASK)
    assert columns.prompts == [[1, 5, 9, 33], [7, 52], [18, 3, 44]]
    assert columns.starts == (0, 2, 1)
    assert columns.are_left_padded
    assert columns.past is None


def test_padding_on_the_right_and_on_both_sides_is_left_out(model: PreTrainedModel) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]])
    columns = read(model, IDS, attention_mask=mask)
    assert columns.prompts == [[1, 5], [7], [0, 18, 3, 44]]
    assert columns.starts == (0, 2, 0)
    assert not columns.are_left_padded


def test_a_mask_of_ones_that_generate_has_dropped_counts(model: PreTrainedModel) -> None:
    handover = handed(model, IDS, attention_mask=torch.ones_like(IDS))
    assert handover.model_arguments["attention_mask"] is None
    assert read_columns(LayeredModel(model), handover).prompts == IDS.tolist()


def test_embedded_prompts_stay_embedded(model: PreTrainedModel) -> None:
    embedded = torch.randn(3, 4, 32)
    columns = read(model, inputs_embeds=embedded, attention_mask=MASK)
    for row, start in enumerate((0, 2, 1)):
        prompt = columns.prompts[row]
        assert isinstance(prompt, torch.Tensor)
        assert torch.equal(prompt, embedded[row, start:])


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_cache_holds_is_no_part_of_the_prompts(model: PreTrainedModel, whole: bool) -> None:
    cache = filled(model)
    ids = torch.cat([IDS, torch.tensor([[21, 22], [23, 24], [25, 26]])], dim=1)
    mask = torch.cat([MASK, torch.ones(3, 2, dtype=torch.long)], dim=1)
    columns = read(model, ids if whole else ids[:, 4:], attention_mask=mask, cache=cache)
    assert columns.prompts == [[21, 22], [23, 24], [25, 26]]
    assert columns.starts == (0, 2, 1)
    assert columns.past is not None
    assert columns.past.lengths == (4, 2, 3)
    for (keys, values), layer in zip(columns.past.layers, cache.layers, strict=True):
        assert torch.equal(keys[1, :, :2], layer.keys[1, :, 2:])
        assert torch.equal(values[2, :, :3], layer.values[2, :, 1:])


def test_a_row_may_begin_behind_the_cache(model: PreTrainedModel) -> None:
    """Its columns in the cache are padding."""
    ids = torch.cat([IDS, torch.tensor([[21, 22], [23, 24], [25, 26]])], dim=1)
    mask = torch.tensor([[1] * 6, [0] * 5 + [1], [0] + [1] * 5])
    columns = read(model, ids, attention_mask=mask, cache=filled(model))
    assert columns.prompts == [[21, 22], [24], [25, 26]]
    assert columns.past is not None
    assert columns.past.lengths == (4, 0, 3)
    given = model.generate(
        ids,
        attention_mask=mask,
        cache=filled(model),
        max_new_tokens=6,
        pad_token_id=0,
        custom_generate=self_speculative(exit_layer=2),
    )
    assert given[1, 6:].tolist() == kit.without_cache(model, [24], 6)


def test_an_empty_cache_is_none(model: PreTrainedModel) -> None:
    assert read(model, IDS, attention_mask=MASK, cache=DynamicCache(config=model.config)).past is None


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"labels": IDS}, ValueError, r"labels=a tensor of shape \(3, 4\) is not supported"),
        ({"debug_io": True}, ValueError, "debug_io=True is not supported"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1]] * 3)}, ValueError, r"attention_mask\[0\] has a zero between"),
        ({"attention_mask": MASK * torch.tensor([[1], [0], [1]])}, ValueError, r"attention_mask\[1\] is all zeros"),
        ({"attention_mask": MASK * 2}, ValueError, "other values than 1"),
        ({"attention_mask": torch.ones(3, 6)}, ValueError, "attention mask 6 and the input 4"),
        ({"attention_mask": torch.ones(3, 3)}, ValueError, "attention mask 3 and the input 4"),
        (
            {"attention_mask": MASK[:1, [1, 0, 2, 3]] * 0, "position_ids": torch.arange(4)[None]},
            ValueError,
            r"attention_mask has shape \(1, 4\).*there are 3 rows",
        ),
        ({"position_ids": torch.arange(1, 5)[None]}, ValueError, "position_ids=a tensor"),
        ({"position_ids": torch.arange(3)[None]}, ValueError, "position_ids=a tensor"),
        ({"position_ids": torch.arange(4).repeat(2, 1)}, ValueError, "position_ids=a tensor"),
        ({"position_ids": torch.arange(4).repeat(3, 3, 1)}, ValueError, "position_ids=a tensor"),
        ({"cache": "static"}, TypeError, "cache is a StaticCache"),
        ({"cache": "filled"}, ValueError, "the cache holds 4 tokens, and the input with its attention mask 4"),
        ({"cache": "filled", "attention_mask": torch.ones(3, 5)}, ValueError, "attention mask 5 and the input 4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_read_is_refused_by_name(
    model: PreTrainedModel, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    if arguments.get("cache") == "static":
        arguments = {"cache": StaticCache(config=model.config, max_cache_len=16)}
    if arguments.get("cache") == "filled":
        arguments = {**arguments, "cache": filled(model)}
    with pytest.raises(error, match=match):
        read(model, IDS, **{"attention_mask": torch.ones_like(IDS), **arguments})


@pytest.mark.parametrize("token", [-1, kit.VOCAB])
def test_a_token_outside_the_vocabulary_is_refused_and_padding_may_be_anything(
    model: PreTrainedModel, token: int
) -> None:
    ids = IDS.clone()
    ids[1, 0] = token
    assert read(model, ids, attention_mask=MASK).prompts[1] == [7, 52]
    ids[2, 3] = token
    with pytest.raises(ValueError, match=rf"input_ids\[2\] holds token id {token}; .* 0 to 96"):
        read(model, ids, attention_mask=MASK)


def test_positions_under_padding_may_be_anything(model: PreTrainedModel) -> None:
    positions = (MASK.cumsum(-1) - 1).masked_fill(MASK == 0, 77)
    assert read(model, IDS, attention_mask=MASK, position_ids=positions).starts == (0, 2, 1)
    positions[1, 3] = 5
    with pytest.raises(ValueError, match="position_ids"):
        read(model, IDS, attention_mask=MASK, position_ids=positions)


# The engine's own cache.


def expected(model: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
    """Returns what `generate` gives for the whole conversation."""
    # With a mask, since a token 0 would be taken for padding.
    return kit.reference(model, ids, max_new_tokens, attention_mask=torch.ones_like(ids))


MODEL: Any = torch.nn.Identity()


def cached(*rows: tuple[int, ...], num_layers: int = 4) -> CachedTokens:
    """Returns a cache whose states mean nothing."""
    longest = max(map(len, rows))
    return CachedTokens(rows, ((torch.zeros(len(rows), 2, longest, 8),) * 2,) * num_layers, weakref.ref(MODEL))


ROWS = [[1, 5, 9, 33], [7, 52]]
COLUMNS = PromptColumns([list(row) for row in ROWS], (0, 2), True, None)


@pytest.mark.parametrize(
    ("held", "prompts", "lengths"),
    [
        (((1, 5), (7,)), [[9, 33], [52]], (2, 1)),
        # The last token is always left, since its output is what comes next.
        (((1, 5, 9, 33), (7, 52)), [[33], [52]], (3, 1)),
        (((1, 5, 9, 33, 4, 4), (7, 52, 8)), [[33], [52]], (3, 1)),
        # What was edited is processed again from there on.
        (((1, 5, 8, 33), (7, 53)), [[9, 33], [52]], (2, 1)),
        (((1, 6, 9, 33), (7,)), [[5, 9, 33], [52]], (1, 1)),
    ],
)
def test_what_a_cache_shares_with_a_prompt_is_left_out(
    held: tuple[tuple[int, ...], ...], prompts: list[list[int]], lengths: tuple[int, ...]
) -> None:
    cache = cached(*held)
    columns = behind_cache(COLUMNS, ROWS, cache, MODEL, depth=4)
    assert columns.prompts == prompts
    assert columns.past is not None
    assert columns.past.lengths == lengths
    assert columns.past.layers is cache.layers
    assert (columns.starts, columns.are_left_padded) == (COLUMNS.starts, COLUMNS.are_left_padded)
    assert COLUMNS.prompts == ROWS


@pytest.mark.parametrize(
    ("cache", "error", "match"),
    [
        (DynamicCache(), TypeError, "cache is a DynamicCache; pass the `cache` of an earlier result"),
        ("cache", TypeError, "cache is a str"),
        (cached((1, 5)), ValueError, "cache holds 1 rows, and there are 2 prompts"),
        (cached((1, 5), (7,), num_layers=2), ValueError, "cache holds 2 layers, and this call runs 4"),
        (cached((1, 5), (8, 52)), ValueError, r"prompts\[1\] begins with token 7, and the cache with 8"),
    ],
    ids=["transformers' own", "text", "rows", "depth", "nothing shared"],
)
def test_a_cache_that_does_not_fit_is_refused(cache: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        behind_cache(COLUMNS, ROWS, cache, MODEL, depth=4)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"cache": DynamicCache()}, TypeError, "cache is a DynamicCache"),
        ({"prompts": [kit.PROMPT, kit.PROMPT]}, ValueError, "cache holds 1 rows, and there are 2 prompts"),
        ({"prompts": [[2, *kit.PROMPT]]}, ValueError, r"prompts\[0\] begins with token 2, and the cache with 1"),
        ({"strategy": "early_exit"}, ValueError, "cache holds 4 layers, and this call runs 2"),
    ],
    ids=["type", "rows", "nothing shared", "depth"],
)
def test_the_engine_refuses_it_before_any_layer_runs(
    model: PreTrainedModel, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    engine = Engine(model, exit_layer=2)
    cache = engine.generate(kit.prompt_tensor(), max_new_tokens=4, return_cache=True).cache
    arguments = {"cache": cache, "prompts": [kit.PROMPT], **arguments}
    prompts = torch.tensor(arguments.pop("prompts"))
    with kit.counted_layers(model) as counts, pytest.raises(error, match=match):
        engine.generate(prompts, max_new_tokens=4, **arguments)
    assert counts == [0] * kit.NUM_LAYERS


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_a_conversation_goes_on_exactly_and_processes_nothing_twice(family: str) -> None:
    model = kit.graded(family, "some")
    engine = Engine(model, exit_layer=2)
    conversation, cache = kit.prompt_tensor(), None
    for _ in range(3):
        result = engine.generate(conversation, max_new_tokens=6, cache=cache, return_cache=True)
        assert torch.equal(result.sequences, expected(model, conversation, 6))
        held = 0 if cache is None else len(cache.token_ids[0])
        statistics = result.statistics
        passed = statistics.early_layer_tokens - statistics.draft_tokens_processed - statistics.rounds
        assert passed == conversation.shape[1] - held
        cache = result.cache
        assert cache is not None
        assert cache.token_ids == (tuple(result.sequences[0, :-1].tolist()),)
        conversation = torch.cat([result.sequences, torch.tensor([[61, 17, 30]])], dim=1)


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_an_edited_conversation_is_exact(family: str) -> None:
    """The cache holds more than what is shared: all that was said behind the edit is processed anew."""
    model = kit.graded(family, "some")
    engine = Engine(model, exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=12, return_cache=True)
    for place in (1, 4, 9, 15, 20):
        edited = first.sequences[:, : place + 1].clone()
        edited[0, place] = (edited[0, place] + 1) % kit.VOCAB
        for conversation in (edited, torch.cat([edited, torch.tensor([[61, 17, 30]])], dim=1)):
            result = engine.generate(conversation, max_new_tokens=8, cache=first.cache, return_cache=True)
            assert torch.equal(result.sequences, expected(model, conversation, 8))
            statistics = result.statistics
            passed = statistics.early_layer_tokens - statistics.draft_tokens_processed - statistics.rounds
            assert passed == conversation.shape[1] - place
            again = torch.cat([result.sequences, torch.tensor([[2]])], dim=1)
            following = engine.generate(again, max_new_tokens=4, cache=result.cache)
            assert torch.equal(following.sequences, expected(model, again, 4))


def test_the_same_conversation_again_is_exact(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=8, return_cache=True)
    again = engine.generate(kit.prompt_tensor(), max_new_tokens=8, cache=first.cache)
    assert torch.equal(again.sequences, first.sequences)
    statistics = again.statistics
    assert statistics.early_layer_tokens == 1 + statistics.draft_tokens_processed + statistics.rounds


def test_rows_of_a_batch_share_different_lengths(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    ids = torch.tensor([kit.PROMPT, [0] * 4 + kit.PROMPT[4:]])
    mask = torch.tensor([[1] * 10, [0] * 4 + [1] * 6])
    first = engine.generate(ids, attention_mask=mask, max_new_tokens=8, return_cache=True)
    rows = [first.sequences[0].tolist(), [*first.sequences[1, 4:13].tolist(), 3, 8]]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    result = engine.generate(ids, attention_mask=mask, max_new_tokens=8, cache=first.cache)
    for tokens, row in zip(result.new_token_ids, rows, strict=True):
        assert tokens == kit.without_cache(model, row, 8)


def test_a_cache_serves_two_calls_and_does_not_change(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=8, return_cache=True)
    assert first.cache is not None
    before = [(keys.clone(), values.clone()) for keys, values in first.cache.layers]
    conversation = torch.cat([first.sequences, torch.tensor([[61]])], dim=1)
    results = [engine.generate(conversation, max_new_tokens=8, cache=first.cache) for _ in range(2)]
    assert torch.equal(results[0].sequences, results[1].sequences)
    for (keys, values), (before_keys, before_values) in zip(first.cache.layers, before, strict=True):
        assert torch.equal(keys, before_keys)
        assert torch.equal(values, before_values)


def test_a_cache_of_the_early_layers_serves_answers_of_theirs(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    options: dict[str, Any] = {"max_new_tokens": 8, "strategy": "early_exit"}
    first = engine.generate(kit.prompt_tensor(), return_cache=True, **options)
    conversation = torch.cat([first.sequences, torch.tensor([[61]])], dim=1)
    result = engine.generate(conversation, cache=first.cache, **options)
    assert torch.equal(result.sequences, expected(kit.truncated(model, 2), conversation, 8))


def test_samples_of_one_prompt_go_on_each_from_its_own(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    generator = torch.Generator().manual_seed(0)
    first = engine.generate(
        kit.prompt_tensor(),
        max_new_tokens=6,
        do_sample=True,
        num_return_sequences=3,
        generator=generator,
        return_cache=True,
    )
    assert len({tuple(tokens) for tokens in first.new_token_ids}) == 3
    result = engine.generate(first.sequences, max_new_tokens=6, cache=first.cache)
    assert torch.equal(result.sequences, expected(model, first.sequences, 6))
