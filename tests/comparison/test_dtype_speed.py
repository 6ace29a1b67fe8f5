"""What is made of measured times; the times themselves are the machine's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip.comparison.dtype_speed import ROWS, SHAPE, WEIGHTS, bfloat16_slowdown, product_seconds


def test_the_slowdown_is_the_time_in_bfloat16_over_that_in_float32() -> None:
    assert bfloat16_slowdown({torch.bfloat16: 6.0, torch.float32: 1.5}.__getitem__) == 4.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_time_is_the_median_over_products_with_different_weights(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [float(index * index) for index in range(WEIGHTS)]
    readings = iter([reading for seconds in times for reading in (100.0, 100.0 + seconds)])
    used = []

    def product(tokens: torch.Tensor, weight: torch.Tensor) -> Any:
        assert (tokens.dtype, weight.dtype, tuple(tokens.shape), tuple(weight.shape)) == (
            dtype,
            dtype,
            (ROWS, SHAPE[1]),
            SHAPE,
        )
        used.append(weight.data_ptr())

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    assert product_seconds(dtype, lambda: next(readings)) == (times[WEIGHTS // 2 - 1] + times[WEIGHTS // 2]) / 2
    assert len(set(used)) == WEIGHTS
