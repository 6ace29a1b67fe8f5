"""How often each layer is skipped, and for which samples: pure functions of the seed and the step.

p(l, t) = S(t) · D(l) · p_max (Elhoushi et al., "LayerSkip", arXiv 2404.16710). Layers are counted from 1 here; the
paper's layer l is l + 1.
"""

from __future__ import annotations

import hashlib
import struct

import torch

SCHEDULES = ("constant", "exponential")


def depth_factor(layer: int, num_layers: int) -> float:
    """Returns D(l) = exp(l · ln 2 / (L − 1)) − 1 for l = `layer` − 1: 0 for the first layer, 1 for the last.

    Raises:
        ValueError: a layer outside 1..L, or fewer than two layers.
    """
    if num_layers < 2 or not 1 <= layer <= num_layers:
        raise ValueError(f"layer={layer} of num_layers={num_layers}: layers are 1 to L, and L is at least 2.")
    return 2.0 ** ((layer - 1) / (num_layers - 1)) - 1.0


def schedule_factor(schedule: str, step: int, total_steps: int) -> float:
    """Returns S(t): 1 for "constant" (fine-tuning), exp(t · ln 2 / (T − 1)) − 1 for "exponential" (from scratch).

    Raises:
        ValueError: an unknown schedule, or a step that is not in 0..T−1.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; allowed are {', '.join(SCHEDULES)}.")
    if not 0 <= step < total_steps:
        raise ValueError(f"step={step} is out of range; allowed are 0 to total_steps − 1 = {total_steps - 1}.")
    if schedule == "constant" or total_steps == 1:
        return 1.0
    return 2.0 ** (step / (total_steps - 1)) - 1.0


# Compiled, the draws of one step would be repeated for ever.
@torch.compiler.disable
def kept_samples(rate: float, samples: int, *, seed: int, step: int, micro_step: int, layer: int) -> torch.Tensor:
    """Returns which samples a layer runs on, `(samples,)` bool on the CPU; each is dropped with probability `rate`.

    The draw follows from its arguments alone, so that it is the same on every rank and when training resumes;
    no global random state is read or moved.

    Args:
        step: the global step.
        micro_step: the micro-batch within an accumulation window.

    Raises:
        ValueError: a rate outside 0 ≤ p < 1.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"rate={rate} is out of range; allowed is 0 ≤ rate < 1.")
    key = hashlib.blake2b(struct.pack("<4q", seed, step, micro_step, layer), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    return torch.rand(samples, generator=generator, dtype=torch.float64) >= rate
