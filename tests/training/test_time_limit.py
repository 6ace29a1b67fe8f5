"""Training that ends after a given time."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerControl

from layerskip.training import time_limit
from layerskip.training.time_limit import TimeLimit


def test_the_rate_falls_to_nothing_by_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that never changes it leaves the rate at 0.1; the clock shows 0, 30, 60, 120 of 120 seconds."""
    now = 1000.0
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: now)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    limit, control = TimeLimit(2.0), TrainerControl()
    limit.on_train_begin(None, None, control)
    rates, stops = [], []
    for seconds in (0.0, 30.0, 60.0, 120.0):
        now = 1000.0 + seconds
        limit.on_step_begin(None, None, control, optimizer=optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        limit.on_optimizer_step(None, None, control, optimizer=optimizer)
        limit.on_step_end(None, None, control)
        stops.append(control.should_training_stop)
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.0])
    assert stops == [False, False, False, True]
