"""What hooks count and time, against what plain decoding must do."""

from __future__ import annotations

import time

import pytest

from layerskip import Engine
from layerskip.comparison.arms import Arm, Run, early_exit_arm, engine_arm, transformers_arm
from layerskip.comparison.batches import Batch
from layerskip.comparison.hooks import counts_of, layer_tokens, module_seconds, share_outside_modules, warm_up_batches
from tests import kit

BATCH = Batch.of([kit.PROMPT])


def test_layer_tokens_of_plain_decoding_are_layers_times_tokens() -> None:
    model = kit.mixed()
    for arm in (engine_arm("ours", Engine(model), strategy="autoregressive"), transformers_arm("theirs", model)):
        with layer_tokens(model) as counted:
            arm.generate(BATCH, 8)
        assert counted == [kit.NUM_LAYERS * (len(kit.PROMPT) + 7)]


def test_time_inside_modules_is_what_their_calls_take() -> None:
    model = kit.l4()
    handle = model.get_output_embeddings().register_forward_hook(lambda *_: time.sleep(0.01))
    with module_seconds(model) as seconds:
        Engine(model).generate(kit.prompt_tensor(), strategy="autoregressive", max_new_tokens=4)
    handle.remove()
    assert seconds[0] >= 0.04
    share = share_outside_modules(model, transformers_arm("theirs", model), BATCH, 8)
    assert share is not None
    assert 0 < share < 1


@pytest.mark.parametrize("model", [kit.identical(), kit.l4()])
def test_the_prefill_of_transformers_is_not_told_from_its_first_round(model: object) -> None:
    assert share_outside_modules(model, early_exit_arm(model, 2, 4), BATCH, 16) is None


def test_one_batch_of_every_shape_warms_up() -> None:
    short, padded, single = [[1, 2], [3, 4]], [[1, 2], [3]], [[1]]
    batches = [Batch.of(rows) for rows in (*[short] * 4, padded, single, short, padded)]
    assert list(map(id, warm_up_batches(batches))) == [id(batches[index]) for index in (0, 1, 2, 4, 5)]
    assert warm_up_batches(batches[:2]) == batches[:2]


def test_what_hooks_would_break_up_is_run_without_them_and_counted_in_another_way() -> None:
    """Its first call takes 9 seconds longer, for compiling."""
    model = kit.mixed()
    seconds = [10.0, 1.0, 2.0]
    plain = transformers_arm("plain", model)
    hooked: list[bool] = []

    def generate(batch: Batch, max_new_tokens: int) -> Run:
        hooked.append(any(layer._forward_pre_hooks for layer in kit.layers_of(model)))
        return Run([[1] * max_new_tokens], max_new_tokens - 1, 0.0, seconds.pop(0))

    arm = Arm("compiled", generate, model=model, counted=plain.generate)
    counts = counts_of(arm, [BATCH, Batch.of([kit.PROMPT[:5]])], 8)
    assert hooked == [False] * 3
    assert (counts.compile_seconds, counts.outside_share) == (9.0, None)
    assert counts.layer_tokens == kit.NUM_LAYERS * (17 + 12) / 16
    assert counts.cache_bytes == kit.NUM_LAYERS * 17 * 128
