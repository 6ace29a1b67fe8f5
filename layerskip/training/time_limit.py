"""Training that ends after a given time."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback


class TimeLimit(TrainerCallback):
    """Ends training when its time is over, and lowers the learning rate in a straight line to 0 by then.

    The rate of a step is the scheduler's times the share of the time that is left, so that a run which does not know
    how many steps it will take still ends with small ones. After an interruption the time counts anew.
    """

    def __init__(self, minutes: float) -> None:
        """Ends training `minutes` after it began; the time counts from the first step."""
        self._seconds = 60.0 * minutes
        self._begun = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """The time begins."""
        self._begun = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Lowers the learning rate of the step that begins."""
        left = max(0.0, 1.0 - (time.monotonic() - self._begun) / self._seconds)
        for group in named["optimizer"].param_groups:
            group["lr"] *= left

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Ends training after the first step that passed the limit."""
        if time.monotonic() - self._begun >= self._seconds:
            control.should_training_stop = True
