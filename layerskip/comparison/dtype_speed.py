"""Whether bfloat16 is worth having on this CPU.

Without instructions for it a product with a single token is bound by reading weights, which bfloat16 halves, but one
with several tokens by arithmetic, for which every weight is widened first. Verification then costs several steps of
plain decoding, and speculation loses what it wins in float32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

# A round's tokens times one of the demo model's larger weights, (out, in).
ROWS = 8
SHAPE = (1536, 576)
# Different ones, since a single weight would come from the cache, as a model's do not.
WEIGHTS = 12


def bfloat16_slowdown(seconds: Callable[[torch.dtype], float] | None = None) -> float:
    """Returns how many times as long a product of a few tokens takes in bfloat16 as in float32, on the CPU.

    Args:
        seconds: that such a product takes in a type; by default it is measured, in less than a tenth of a second.
    """
    measured = product_seconds if seconds is None else seconds
    return measured(torch.bfloat16) / measured(torch.float32)


@torch.inference_mode()
def product_seconds(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds of a product of `ROWS` tokens with a weight of `SHAPE`: the median over `WEIGHTS` weights.

    Args:
        dtype: of both.
        clock: what tells the time.
    """
    weights = torch.ones(WEIGHTS, *SHAPE, dtype=dtype)
    tokens = torch.ones(ROWS, SHAPE[1], dtype=dtype)
    times = []
    for weight in weights:
        begin = clock()
        torch.nn.functional.linear(tokens, weight)
        times.append(clock() - begin)
    return statistics.median(times)
