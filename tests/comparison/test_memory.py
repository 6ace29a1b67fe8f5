"""Bytes of weights and caches, against what the shapes give."""

from __future__ import annotations

import pytest
import torch

from layerskip import Engine
from layerskip.comparison.arms import Arm, assistant_arm, compiled_arm, early_exit_arm, engine_arm, transformers_arm
from layerskip.comparison.batches import Batch
from layerskip.comparison.memory import (
    CacheSizes,
    cache_bytes,
    cache_sizes,
    module_bytes,
    peak_bytes,
    storage_bytes,
    weight_bytes,
)
from layerskip.model.layered import LayeredModel
from tests import kit

BATCH = Batch.of([kit.PROMPT])
# Keys and values of 2 heads of size 8 in fp32, for one token in one layer.
SLOT = 2 * 2 * 8 * 4


def most(arm: Arm, max_new_tokens: int) -> int:
    assert arm.model is not None
    models = [arm.model] if arm.assistant is None else [arm.model, arm.assistant]
    with cache_bytes(*models) as found:
        (arm.counted or arm.generate)(BATCH, max_new_tokens)
    return found[0]


def test_views_count_their_whole_storage_once() -> None:
    whole = torch.zeros(10)
    assert storage_bytes([whole[:2], whole[5:], torch.zeros(3)]) == 40 + 12
    assert storage_bytes([]) == 0


def test_tied_weights_count_once() -> None:
    untied = module_bytes(kit.l4())
    assert untied - module_bytes(kit.l4(tie_word_embeddings=True)) == kit.VOCAB * 32 * 4
    assert untied >= sum(parameter.nbytes for parameter in kit.l4().parameters())


def test_only_a_second_model_adds_more_than_some_rows_of_the_head() -> None:
    model, assistant = kit.mixed(), kit.build(kit.llama_config(num_hidden_layers=2))
    alone = module_bytes(model)
    engine = Engine(model, draft_token_ids=torch.arange(40), draft_vocab_size=20)
    assert weight_bytes(transformers_arm("plain", model)) == alone
    assert weight_bytes(early_exit_arm(model, 2, 3)) == alone
    assert weight_bytes(engine_arm("ours", Engine(model), exit_layer=2)) == alone
    assert weight_bytes(engine_arm("ours", engine, exit_layer=2)) == alone + 20 * 32 * 4
    assert weight_bytes(assistant_arm(model, assistant, 3)) == alone + module_bytes(assistant)


@pytest.mark.parametrize("family", kit.CONFIGS)
def test_a_shared_cache_is_as_large_as_prompt_and_budget(family: str) -> None:
    """Whatever the strategy: drafts use the cache that is there. GPT-2 has as many key heads as heads."""
    model = kit.build(kit.CONFIGS[family]())
    heads, size = {"llama": (2, 8), "gpt2": (4, 8)}.get(family, (2, 16))
    slot = 2 * heads * size * 4
    plain = most(engine_arm("plain", Engine(model), strategy="autoregressive"), 8)
    assert plain % slot == 0
    assert kit.NUM_LAYERS * 17 <= plain // slot <= kit.NUM_LAYERS * 18
    assert most(engine_arm("ours", Engine(model), exit_layer=2, num_draft_tokens=3), 8) == plain


def test_caches_of_transformers_count_what_they_hold() -> None:
    """The last token passes no layer; early exit drafts into a second cache, for the lower layers."""
    model = kit.identical()
    plain = most(transformers_arm("plain", model), 8)
    assert plain == kit.NUM_LAYERS * 17 * SLOT
    assert plain < most(early_exit_arm(model, 2, 3), 8) <= plain + kit.EXIT_LAYER * 17 * SLOT
    assert most(compiled_arm(model, 40), 8) == kit.NUM_LAYERS * 40 * SLOT


def test_the_assistants_cache_counts_as_well() -> None:
    model, assistant = kit.identical(), kit.identical()
    plain = most(transformers_arm("plain", model), 8)
    assert 1.5 * plain < most(assistant_arm(model, assistant, 3), 8) <= 2 * plain


def test_both_caches_of_a_model_without_windows_hold_all_tokens() -> None:
    """The shared cache has a slot more."""
    sizes = cache_sizes(LayeredModel(kit.l4()), kit.PROMPT)
    tokens = len(kit.PROMPT)
    assert sizes == CacheSizes(
        context=tokens,
        shared=kit.NUM_LAYERS * (tokens + 1) * SLOT,
        dynamic=kit.NUM_LAYERS * tokens * SLOT,
        num_layers=kit.NUM_LAYERS,
        sliding_layers=0,
    )


@pytest.mark.parametrize(("family", "sliding"), [("qwen3", 3), ("gemma2", 2), ("gemma3_text", 2)])
def test_transformers_cuts_sliding_layers_to_their_window_and_the_shared_cache_does_not(
    family: str, sliding: int
) -> None:
    """Keys and values of 2 heads of size 16 in fp32; the windows are of 6 tokens."""
    tokens, slot = 24, 2 * 2 * 16 * 4
    sizes = cache_sizes(LayeredModel(kit.build(kit.CONFIGS[family]())), [1, 5, 9] * 8)
    full = kit.NUM_LAYERS - sliding
    assert (sizes.num_layers, sizes.sliding_layers) == (kit.NUM_LAYERS, sliding)
    assert sizes.shared == kit.NUM_LAYERS * (tokens + 1) * slot
    assert sizes.dynamic == (full * tokens + sliding * 6) * slot


@pytest.mark.parametrize(("context", "message"), [([1], "context has 1 tokens"), ([1] * 64, "has only 64 positions")])
def test_a_text_that_no_cache_can_hold_a_step_of_is_refused(context: list[int], message: str) -> None:
    model = kit.build(kit.gpt2_config())
    with kit.counted_layers(model) as counts, pytest.raises(ValueError, match=message):
        cache_sizes(LayeredModel(model), context)
    assert counts == [0] * kit.NUM_LAYERS


def test_no_hooks_stay() -> None:
    model = kit.l4()
    with pytest.raises(RuntimeError, match="in the middle"), cache_bytes(model):
        raise RuntimeError("in the middle")
    assert all(not layer._forward_hooks for layer in kit.layers_of(model))


def test_only_cuda_has_a_highest_mark() -> None:
    with peak_bytes(torch.device("cpu")) as peak:
        torch.zeros(10)
    assert peak == [None]


@pytest.mark.cuda
def test_the_highest_mark_is_of_the_block() -> None:
    held = torch.zeros(1000, device="cuda")
    with peak_bytes(held.device) as peak:
        torch.zeros(10_000_000, device="cuda")
    assert peak[0] is not None
    assert 40_000_000 <= peak[0] < 80_000_000
