"""Training that ends after a given time."""

from __future__ import annotations

import time
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from transformers import TrainerCallback


class TimeLimit(TrainerCallback):
    """Ends training when its time is over, and lowers the learning rate in a straight line to 0 by then.

    The rate of a step is the scheduler's times the share of the time that is left, so that a run which does not know
    how many steps it will take still ends with small ones. Of several ranks the first one's clock counts. After an
    interruption the time counts anew. Logs show the scheduler's rate.
    """

    def __init__(self, minutes: float) -> None:
        """Ends training `minutes` after it began; the time counts from the first step."""
        self._seconds = 60.0 * minutes
        self._begun = 0.0
        self._rates: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """The time begins."""
        self._begun = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Lowers the learning rate of the step that begins."""
        left = self._left()
        self._rates = [group["lr"] for group in named["optimizer"].param_groups]
        for group in named["optimizer"].param_groups:
            group["lr"] *= left

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Gives the scheduler its own rate back, from which some go on."""
        for group, rate in zip(named["optimizer"].param_groups, self._rates, strict=True):
            group["lr"] = rate

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Ends training after the first step that passed the limit."""
        if self._left() == 0.0:
            control.should_training_stop = True

    def _left(self) -> float:
        """Returns the share of the time that is left, the same on all ranks."""
        left = max(0.0, 1.0 - (time.monotonic() - self._begun) / self._seconds)
        return float(broadcast(torch.tensor([left], dtype=torch.float32, device=PartialState().device)))
