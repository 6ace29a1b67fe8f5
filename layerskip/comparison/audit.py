"""Telling rounding from faults where two greedy outputs differ in a half-precision format.

A block of tokens and a single step run through kernels of different shape, so that bf16 and fp16 logits differ in their
last digits, and a tie between two tokens may fall either way. From there on the texts differ. Such a difference is
excused only if the reference itself was close to choosing the other token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

NEAR_TIE_UNITS = 4.0


@dataclass(frozen=True)
class Difference:
    """The first place where two greedy outputs differ.

    Attributes:
        position: index of the new token, from 0.
        reference_token: what the reference chose; `None` where it had ended.
        other_token: what the other chose; `None` where it had ended.
        gap: the reference's logit of its own choice minus that of the other's; infinite where one had ended.
        unit: the spacing of the format at the reference's largest logit.
    """

    position: int
    reference_token: int | None
    other_token: int | None
    gap: float
    unit: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference: the gap is within `NEAR_TIE_UNITS` units."""
        return self.gap <= NEAR_TIE_UNITS * self.unit


def first_difference(
    reference: Sequence[int], other: Sequence[int], logits: torch.Tensor, dtype: torch.dtype
) -> Difference | None:
    """Returns the first difference of two greedy continuations of one prompt, or `None` if they are the same.

    Args:
        reference: new tokens of the reference.
        other: new tokens of what is audited.
        logits: the reference's logits for each of its tokens, `(tokens, vocabulary)`.
        dtype: the format that the models computed in.
    """
    shared = min(len(reference), len(other))
    position = next((index for index in range(shared) if reference[index] != other[index]), shared)
    if position == len(reference) == len(other):
        return None
    if position == shared:
        tokens = [sequence[position] if position < len(sequence) else None for sequence in (reference, other)]
        return Difference(position, tokens[0], tokens[1], math.inf, 0.0)
    row = logits[position].float()
    chosen, rival = reference[position], other[position]
    return Difference(position, chosen, rival, float(row[chosen] - row[rival]), spacing(float(row.abs().max()), dtype))


def spacing(value: float, dtype: torch.dtype) -> float:
    """Returns the distance between neighbouring numbers of `dtype` at `value`: eps · 2^⌊log2 |value|⌋."""
    exponent = math.floor(math.log2(max(abs(value), torch.finfo(dtype).tiny)))
    return torch.finfo(dtype).eps * 2.0**exponent
