"""Where training stands: all that the curriculum and the draws of layer dropout follow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """The time of a run; whoever runs it sets the clock before every forward pass.

    Attributes:
        total_steps: T, global steps of the whole run.
        step: t, the global step from 0.
        micro_step: the micro-batch within an accumulation window, from 0.
    """

    total_steps: int
    step: int = 0
    micro_step: int = 0
