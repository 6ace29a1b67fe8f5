"""The cache at fixed addresses: buffers that outlast a call, and passes whose positions only tensors know."""

from __future__ import annotations

import pytest
import torch

from layerskip.model.fixed_cache import FixedCache, fixed_mask
from layerskip.model.masks import attention_mask
from layerskip.model.placement import Placement

CPU = torch.device("cpu")
CAPACITY, HEADS, HEAD_SIZE = 8, 2, 3


def states(width: int, first: float = 0.0) -> torch.Tensor:
    """Returns keys or values `(1, heads, width, head size)` of which no two numbers are alike."""
    count = HEADS * width * HEAD_SIZE
    return (first + 1 + torch.arange(count, dtype=torch.float32)).view(1, HEADS, width, HEAD_SIZE)


def prefilled(length: int = 3, dtype: torch.dtype = torch.float32) -> FixedCache:
    """Returns a cache of one layer that a prefill of `length` tokens has passed, as it runs: in inference mode."""
    cache = FixedCache(1, CAPACITY)
    fill(cache, length, dtype)
    return cache


@torch.inference_mode()
def fill(cache: FixedCache, length: int, dtype: torch.dtype = torch.float32) -> None:
    """Lets a prompt of `length` tokens pass."""
    cache.placement = Placement.prompt([length], CPU)
    cache.update(states(length).to(dtype), -states(length).to(dtype), 0)


def addresses(cache: FixedCache) -> list[int]:
    """Returns where the buffers lie."""
    return [tensor.data_ptr() for layer in cache.shared_layers for tensor in (layer.keys, layer.values)]


def test_buffers_stay_where_they_are_from_call_to_call() -> None:
    cache = prefilled()
    before = addresses(cache)
    cache.reset()
    fill(cache, 5)
    assert addresses(cache) == before
    assert cache.get_seq_length() == 5


def test_a_reset_cache_is_empty_and_holds_nothing_of_the_call_before() -> None:
    cache = prefilled()
    cache.shared_layers[0].keys[:, :, 6] = float("nan")
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.is_initialized
    assert not cache.shared_layers[0].keys.any()


def test_a_reset_cache_can_be_restored() -> None:
    cache = prefilled()
    before = addresses(cache)
    cache.reset()
    cache.restore([(states(4, 50), -states(4, 50))], [2])
    assert addresses(cache) == before
    keys, values = cache.kept([0])[0]
    assert torch.equal(keys, states(4, 50)[:, :, :2]) and torch.equal(values, -keys)


def test_states_of_another_type_get_other_buffers() -> None:
    cache = prefilled()
    cache.reset()
    fill(cache, 3, torch.bfloat16)
    assert cache.shared_layers[0].keys.dtype == torch.bfloat16


def test_buffers_made_in_inference_mode_can_be_written_to_outside_of_it() -> None:
    cache = prefilled()
    assert not cache.shared_layers[0].keys.is_inference()
    with torch.no_grad():
        cache.at(torch.tensor([3])).update(states(1, 90), -states(1, 90), 0)
    assert torch.equal(cache.shared_layers[0].keys[:, :, 3:4], states(1, 90))


def test_a_pass_writes_to_its_positions_alone_and_reads_all_slots() -> None:
    cache = prefilled()
    before = addresses(cache)
    keys, values = cache.at(torch.tensor([3, 4, 7])).update(states(3, 90), -states(3, 90), 0)
    assert [keys.data_ptr(), values.data_ptr()] == before
    assert keys.shape == (1, HEADS, CAPACITY, HEAD_SIZE)
    assert torch.equal(keys[:, :, [3, 4, 7]], states(3, 90)) and torch.equal(values, -keys)
    assert torch.equal(keys[:, :, :3], states(3)) and not keys[:, :, 5:7].any()


def test_the_length_that_the_host_sets_can_be_rolled_back() -> None:
    cache = prefilled()
    cache.set_length(6)
    cache.rollback([5])
    assert cache.get_seq_length() == 5
    with pytest.raises(ValueError, match="do not fit"):
        cache.rollback([6])


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("start", "width"), [(0, 1), (2, 1), (1, 4), (4, 3)])
def test_the_mask_is_that_of_the_shared_cache_over_more_slots(start: int, width: int, window: int | None) -> None:
    mask = fixed_mask(torch.arange(start, start + width), CAPACITY, window, torch.float32)
    assert mask.shape == (1, 1, width, CAPACITY)
    placement = Placement.of([start], [width], width, CAPACITY - 1, CPU)
    wanted = attention_mask(placement, window, torch.float32, causal_by_flag=False)
    seen = mask[..., : placement.view]
    assert torch.equal(seen, torch.zeros_like(seen) if wanted is None else wanted)
    assert (mask[..., placement.view :] == torch.finfo(torch.float32).min).all()
