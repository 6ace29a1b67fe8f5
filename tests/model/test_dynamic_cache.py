"""Caches that `generate` has filled are gone on from, and `generate` goes on from those that are handed back."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    MtpCache,
    StaticCache,
)

from layerskip.model.cache import CachedTokens, SharedCache
from layerskip.model.dynamic_cache import is_empty, read_dynamic_cache, write_dynamic_cache
from tests import kit
from tests.model.test_cache import SECOND_PROMPT, Driven, fresh_logits

SLIDING = ["qwen3", "gemma2", "gemma3_text"]
WINDOW = 6
# One row before its window ends, one past it, and batches with one of each and with padding longer than the window.
BATCHES = {
    "short": [[60, 2, 71]],
    "long": [kit.PROMPT],
    "batch": [SECOND_PROMPT, kit.PROMPT],
    "uneven": [[5], kit.PROMPT, kit.PROMPT[:7]],
}
FOLLOWING = [40, 41]


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    return kit.build(kit.CONFIGS[family]())


def padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Returns token ids and attention mask of rows padded on the left, and the column where each row starts."""
    width = max(len(row) for row in rows)
    starts = [width - len(row) for row in rows]
    ids = torch.tensor([[0] * start + list(row) for start, row in zip(starts, rows, strict=True)])
    return ids, (torch.arange(width) >= torch.tensor(starts).unsqueeze(1)).long(), starts


def generated(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], max_new_tokens: int = 3, **arguments: Any
) -> tuple[list[list[int]], DynamicCache, list[int]]:
    """Returns the tokens that `generate` has processed of each row, its cache, and where the rows start in it."""
    ids, mask, starts = padded(rows)
    options = {"attention_mask": mask, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    output = kit.reference(model, ids, **options, **arguments)
    tokens = [row[start:-1].tolist() for row, start in zip(output.sequences, starts, strict=True)]
    return tokens, output.cache, starts


def own_cache(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> DynamicCache:
    """Returns the cache of a forward pass over rows padded on the left."""
    return forward(model, rows, DynamicCache(config=model.config))[1]


@torch.no_grad()
def forward(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], cache: DynamicCache
) -> tuple[torch.Tensor, DynamicCache]:
    """Runs the columns behind `cache` of rows padded on the left; returns their logits and the same cache."""
    ids, mask, _ = padded(rows)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    past = cache.get_seq_length()
    output = model(ids[:, past:], attention_mask=mask, position_ids=positions[:, past:], cache=cache, use_cache=True)
    return output.logits, cache


def prefilled(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> CachedTokens:
    """Returns what a call of ours keeps of rows."""
    driven = Driven(model, rows)
    driven.prefill()
    return driven.kept(range(len(rows)))


def snapshot(cache: DynamicCache) -> list[tuple[Any, ...]]:
    """Returns all that the layers of a cache hold: the objects, what they contain, and how much they count."""
    return [
        (layer, layer.keys, layer.keys.clone(), layer.values, layer.values.clone(), layer.get_seq_length())
        for layer in cache.layers
    ]


def assert_unchanged(cache: DynamicCache, before: list[tuple[Any, ...]]) -> None:
    assert len(cache.layers) == len(before)
    for layer, (same, keys, old_keys, values, old_values, length) in zip(cache.layers, before, strict=True):
        assert layer is same and layer.keys is keys and layer.values is values
        assert torch.equal(keys, old_keys) and torch.equal(values, old_values)
        assert layer.get_seq_length() == length


def assert_same_states(actual: DynamicCache, expected: DynamicCache, starts: Sequence[int]) -> None:
    """Asserts that two caches are of the same build and agree in all columns that are not padding."""
    for mine, other in zip(actual.layers, expected.layers, strict=True):
        assert type(mine) is type(other)
        assert mine.keys.shape == other.keys.shape and mine.values.shape == other.values.shape
        assert mine.get_seq_length() == other.get_seq_length()
        assert mine.get_mask_sizes(2) == other.get_mask_sizes(2)
        first = other.get_seq_length() - other.keys.shape[2]
        for row, start in enumerate(starts):
            begin = max(0, start - first)
            torch.testing.assert_close(mine.keys[row, :, begin:], other.keys[row, :, begin:], rtol=0, atol=1e-5)
            torch.testing.assert_close(mine.values[row, :, begin:], other.values[row, :, begin:], rtol=0, atol=1e-5)


# Reading


@pytest.mark.parametrize("family", list(kit.CONFIGS))
@pytest.mark.parametrize("batch", list(BATCHES))
def test_a_run_goes_on_from_what_generate_has_cached(family: str, batch: str) -> None:
    model = model_of(family)
    tokens, cache, starts = generated(model, BATCHES[batch])
    assert any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers) == (family in SLIDING)
    assert cache.get_seq_length() == max(len(row) for row in tokens)
    before = snapshot(cache)
    lengths = [len(row) for row in tokens]
    layers = read_dynamic_cache(cache, starts, kit.NUM_LAYERS)
    cached = CachedTokens(tuple(map(tuple, tokens)), layers, weakref.ref(model))
    driven = Driven.restored(model, cached, lengths, budget=10)
    logits = driven.extend([FOLLOWING[: 1 + row % 2] for row in range(len(tokens))])
    for row, ids in enumerate(driven.rows):
        width = 1 + row % 2
        torch.testing.assert_close(logits[row, :width], fresh_logits(model, ids)[-width:], rtol=0, atol=1e-5)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("family", SLIDING)
def test_a_cache_made_without_a_configuration_holds_all_and_is_read_in_full(family: str) -> None:
    model = model_of(family)
    tokens, cache, starts = generated(model, BATCHES["batch"], cache=DynamicCache())
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
    layers = read_dynamic_cache(cache, starts, kit.NUM_LAYERS)
    for (keys, values), (expected_keys, expected_values) in zip(layers, prefilled(model, tokens).layers, strict=True):
        for row, ids in enumerate(tokens):
            for mine, other in ((keys, expected_keys), (values, expected_values)):
                torch.testing.assert_close(mine[row, :, : len(ids)], other[row, :, : len(ids)], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", SLIDING)
def test_slots_that_a_sliding_layer_has_let_go_are_zeros(family: str) -> None:
    model = model_of(family)
    cache = own_cache(model, BATCHES["batch"])
    layers = read_dynamic_cache(cache, padded(BATCHES["batch"])[2], kit.NUM_LAYERS)
    for layer, (keys, values) in zip(cache.layers, layers, strict=True):
        assert keys.shape == values.shape == (2, 2, len(kit.PROMPT), keys.shape[3])
        # The short row's columns are all within the window; of the long one the last five are.
        gone = len(kit.PROMPT) - (WINDOW - 1) if isinstance(layer, DynamicSlidingWindowLayer) else 0
        assert not keys[1, :, :gone].any() and keys[1, :, gone:].all()
        assert keys[0, :, : len(SECOND_PROMPT)].all()


@pytest.mark.parametrize("family", SLIDING)
def test_one_slot_too_few_in_a_sliding_layer_would_show(family: str) -> None:
    """A control: the first column that a sliding layer still holds is seen by the next token."""
    model = model_of(family)
    tokens, cache, starts = generated(model, [kit.PROMPT])
    layers = read_dynamic_cache(cache, starts, kit.NUM_LAYERS)
    for layer, (_, values) in zip(cache.layers, layers, strict=True):
        if isinstance(layer, DynamicSlidingWindowLayer):
            values[:, :, len(tokens[0]) - (WINDOW - 1)] = 0
    cached = CachedTokens((tuple(tokens[0]),), layers, weakref.ref(model))
    driven = Driven.restored(model, cached, [len(tokens[0])], budget=10)
    assert (driven.extend([[40]])[0, 0] - fresh_logits(model, driven.rows[0])[-1]).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_row_whose_tokens_begin_behind_the_cache_has_none_in_it(family: str) -> None:
    model = model_of(family)
    layers = read_dynamic_cache(own_cache(model, [kit.PROMPT, kit.PROMPT]), [0, len(kit.PROMPT) + 2], kit.NUM_LAYERS)
    cached = CachedTokens((tuple(kit.PROMPT), ()), layers, weakref.ref(model))
    driven = Driven.restored(model, cached, [len(kit.PROMPT), 0], budget=10)
    logits = driven.extend([[40], [7, 8]])
    torch.testing.assert_close(logits[0, 0], fresh_logits(model, [*kit.PROMPT, 40])[-1], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[1], fresh_logits(model, [7, 8]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("padding", [2, 6, 9])
def test_rows_with_the_same_padding_are_read_from_where_they_start(family: str, padding: int) -> None:
    """The padding ends before, at and behind the first column that a sliding layer still holds of 12."""
    model = model_of(family)
    rows = [(kit.PROMPT * 2)[:12], (SECOND_PROMPT * 3)[: 12 - padding], kit.PROMPT[: 12 - padding]]
    cache = own_cache(model, rows)
    cache.batch_select_indices(torch.tensor([1, 2]))
    layers = read_dynamic_cache(cache, [padding, padding], kit.NUM_LAYERS)
    cached = CachedTokens(tuple(map(tuple, rows[1:])), layers, weakref.ref(model))
    driven = Driven.restored(model, cached, cached.lengths, budget=10)
    logits = driven.extend([[40], [41]])
    for row, tokens in enumerate(driven.rows):
        torch.testing.assert_close(logits[row, 0], fresh_logits(model, tokens)[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3_text"])
def test_a_sliding_layer_that_records_its_past_is_read_in_full(family: str) -> None:
    model = model_of(family)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    forward(model, [kit.PROMPT], cache)
    expected = prefilled(model, [kit.PROMPT]).layers
    for mine, other in zip(read_dynamic_cache(cache, [0], kit.NUM_LAYERS), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama"])
def test_rows_that_start_alike_are_read_without_a_copy(family: str) -> None:
    cache = own_cache(model_of(family), [kit.PROMPT])
    layers = read_dynamic_cache(cache, [0], kit.NUM_LAYERS)
    assert [keys.data_ptr() for keys, _ in layers] == [layer.keys.data_ptr() for layer in cache.layers]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_cache_is_empty_until_a_pass_has_filled_it(family: str) -> None:
    model = model_of(family)
    cache = DynamicCache(config=model.config)
    assert is_empty(DynamicCache()) and is_empty(cache)
    forward(model, [kit.PROMPT], cache)
    assert not is_empty(cache)
    cache.reset()
    assert is_empty(cache)


@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize("function", [is_empty, lambda cache: read_dynamic_cache(cache, [0], 4)])
def test_other_kinds_of_caches_are_refused_by_name(family: str, function: Any) -> None:
    config = kit.CONFIGS[family]()
    refused = {
        "StaticCache": StaticCache(config=config, max_cache_len=8),
        "MtpCache": MtpCache(config=config),
        "EncoderDecoderCache": EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "SharedCache": SharedCache(4, 1, 8),
        "tuple": ((torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)),) * 4,
        "NoneType": None,
    }
    for name, cache in refused.items():
        with pytest.raises(TypeError, match=f"^cache is a {name}; pass a transformers DynamicCache"):
            function(cache)


class OtherLayer(DynamicLayer):
    """A layer that keeps its states in a way of its own, as quantized ones do."""


@pytest.mark.parametrize("family", ["llama"])
def test_other_kinds_of_layers_and_offloading_are_refused_by_name(family: str) -> None:
    cache = own_cache(model_of(family), [kit.PROMPT])
    cache.layers[2] = OtherLayer()
    with pytest.raises(TypeError, match="layer 3 of cache is a OtherLayer; supported are DynamicLayer"):
        read_dynamic_cache(cache, [0], kit.NUM_LAYERS)
    cache = own_cache(model_of(family), [kit.PROMPT])
    cache.offloading = True
    with pytest.raises(ValueError, match="offloading=True"):
        read_dynamic_cache(cache, [0], kit.NUM_LAYERS)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_caches_of_another_shape_are_refused(family: str) -> None:
    model = model_of(family)
    cache = own_cache(model, BATCHES["batch"])
    before = snapshot(cache)
    with pytest.raises(ValueError, match="cache has 4 layers, but the model 6"):
        read_dynamic_cache(cache, [6, 0], 6)
    with pytest.raises(ValueError, match="layer 1 of cache holds 2 rows, but the input has 3"):
        read_dynamic_cache(cache, [6, 0, 0], kit.NUM_LAYERS)
    with pytest.raises(ValueError, match=r"starts=\(6, -1\)"):
        read_dynamic_cache(cache, [6, -1], kit.NUM_LAYERS)
    with pytest.raises(ValueError, match=r"hold \[0, 0, 0, 0\] tokens"):
        read_dynamic_cache(DynamicCache(config=model.config), [0], kit.NUM_LAYERS)
    assert_unchanged(cache, before)
    cache.update(
        torch.zeros(2, 2, 1, cache.layers[3].keys.shape[3]), torch.zeros_like(cache.layers[3].values[:, :, :1]), 3
    )
    with pytest.raises(ValueError, match=r"hold \[10, 10, 10, 11\] tokens"):
        read_dynamic_cache(cache, [6, 0], kit.NUM_LAYERS)


# Writing


@pytest.mark.parametrize("family", list(kit.CONFIGS))
@pytest.mark.parametrize("batch", list(BATCHES))
def test_a_written_cache_is_what_the_model_itself_would_have_cached(family: str, batch: str) -> None:
    model, rows = model_of(family), BATCHES[batch]
    ids, _, starts = padded(rows)
    cached = prefilled(model, rows)
    written = write_dynamic_cache(cached.layers, cached.lengths, starts, ids.shape[1], model.config)
    own = own_cache(model, rows)
    assert_same_states(written, own, starts)
    longer = [[*row, *FOLLOWING] for row in rows]
    logits, expected = forward(model, longer, written)[0], forward(model, longer, own)[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert_same_states(written, own, starts)
    for row, tokens in enumerate(longer):
        torch.testing.assert_close(logits[row], fresh_logits(model, tokens)[-2:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", list(kit.CONFIGS))
@pytest.mark.parametrize("batch", ["short", "batch"])
def test_generate_goes_on_from_a_written_cache(family: str, batch: str) -> None:
    model, rows = model_of(family), BATCHES[batch]
    cached = prefilled(model, rows)
    written = write_dynamic_cache(cached.layers, cached.lengths, padded(rows)[2], max(cached.lengths), model.config)
    ids, mask, _ = padded([[*row, *FOLLOWING] for row in rows])
    tokens = kit.reference(model, ids, 6, attention_mask=mask, cache=written)
    assert torch.equal(tokens, kit.reference(model, ids, 6, attention_mask=mask, cache=own_cache(model, rows)))
    assert torch.equal(tokens, kit.reference(model, ids, 6, attention_mask=mask))


@pytest.mark.parametrize("family", list(kit.CONFIGS))
@pytest.mark.parametrize("batch", list(BATCHES))
def test_reading_and_writing_gives_the_same_cache(family: str, batch: str) -> None:
    model = model_of(family)
    tokens, cache, starts = generated(model, BATCHES[batch])
    layers = read_dynamic_cache(cache, starts, kit.NUM_LAYERS)
    lengths = [len(row) for row in tokens]
    written = write_dynamic_cache(layers, lengths, starts, cache.get_seq_length(), model.config)
    before = snapshot(cache)
    assert_same_states(written, cache, starts)
    for layer in written.layers:
        layer.keys.zero_()
    assert_unchanged(cache, before)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_rows_that_end_early_leave_zeros_behind_for_the_mask_to_hide(family: str) -> None:
    model = model_of(family)
    rows, starts, columns = [[*kit.PROMPT[:4]], [*kit.PROMPT, 7]], [3, 0], 11
    cached = prefilled(model, rows)
    written = write_dynamic_cache(cached.layers, cached.lengths, starts, columns, model.config)
    for layer in written.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            assert not layer.keys[0, :, 7 - columns :].any() and layer.keys[0, :, : 7 - columns].all()
        else:
            assert not layer.keys[0, :, :3].any() and not layer.keys[0, :, 7:].any()
            assert layer.keys[0, :, 3:7].all() and layer.keys[1].all()
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1], [1] * 12])
    if family != "gemma3_text":
        # Its window counts columns, so the gap would push the row's own tokens out of sight.
        with torch.no_grad():
            output = model(
                torch.tensor([[40], [40]]), attention_mask=mask, position_ids=torch.tensor([[4], [11]]), cache=written
            )
        for row, tokens in enumerate(rows):
            expected = fresh_logits(model, [*tokens, 40])[-1]
            torch.testing.assert_close(output.logits[row, 0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3_text"])
def test_sliding_layers_let_go_of_what_lies_before_their_window(family: str) -> None:
    model = model_of(family)
    prompt = kit.PROMPT * 3
    cached = prefilled(model, [prompt])
    for layer in write_dynamic_cache(cached.layers, cached.lengths, [0], len(prompt), model.config).layers:
        columns = layer.keys.untyped_storage().nbytes() // layer.keys[:, :, :1].nbytes
        assert columns == (WINDOW if isinstance(layer, DynamicSlidingWindowLayer) else len(prompt))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_cache_of_one_column_can_be_written(family: str) -> None:
    model = model_of(family)
    cached = prefilled(model, [[5]])
    written = write_dynamic_cache(cached.layers, cached.lengths, [0], 1, model.config)
    assert_same_states(written, own_cache(model, [[5]]), [0])


@pytest.mark.parametrize("family", ["llama"])
def test_a_cache_written_from_inference_mode_serves_passes_with_gradients(family: str) -> None:
    model = kit.build(kit.CONFIGS[family]())
    with torch.inference_mode():
        cached = prefilled(model, [kit.PROMPT])
    written = write_dynamic_cache(cached.layers, cached.lengths, [0], len(kit.PROMPT), model.config)
    assert not written.layers[0].keys.is_inference() and not written.layers[0].keys.requires_grad
    model(torch.tensor([[40]]), cache=written).logits.sum().backward()
    assert model.get_output_embeddings().weight.grad is not None


@pytest.mark.parametrize("family", ["llama"])
def test_a_cache_filled_with_gradients_is_read_without(family: str) -> None:
    model = model_of(family)
    cache = model(kit.prompt_tensor(), use_cache=True).cache
    assert cache.layers[0].keys.requires_grad
    assert not any(keys.requires_grad for keys, _ in read_dynamic_cache(cache, [0], kit.NUM_LAYERS))
    assert cache.layers[0].keys.requires_grad


@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize(
    ("lengths", "starts", "columns", "message"),
    [
        ([10], [0, 0], 10, "layers holds 2 rows, lengths 1 and starts 2"),
        ([10, 4], [0], 10, "lengths 2 and starts 1"),
        ([10, 4], [0, 7], 10, "do not fit into columns=10"),
        ([10, 4], [-1, 0], 10, "do not fit into columns=10"),
    ],
)
def test_rows_that_do_not_fit_into_the_columns_are_refused(
    family: str, lengths: list[int], starts: list[int], columns: int, message: str
) -> None:
    model = model_of(family)
    cached = prefilled(model, [kit.PROMPT, SECOND_PROMPT])
    with pytest.raises(ValueError, match=message):
        write_dynamic_cache(cached.layers, lengths, starts, columns, model.config)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_layers_of_an_early_exit_alone_make_no_cache_of_the_model(family: str) -> None:
    model = model_of(family)
    cached = prefilled(model, [kit.PROMPT])
    with pytest.raises(ValueError, match="layers holds 2 layers, but config has 4"):
        write_dynamic_cache(cached.layers[:2], cached.lengths, [0], len(kit.PROMPT), model.config)
