"""Streaming one row: an event for prefill and for every round."""

from __future__ import annotations

import pytest
import torch

from layerskip import Engine
from tests import kit


@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_events_add_up_to_the_result(grade: str) -> None:
    model = kit.graded("llama", grade)
    engine = Engine(model, exit_layer=kit.EXIT_LAYER)
    events = list(engine.stream(kit.prompt_tensor(), max_new_tokens=24))
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    streamed = [token for event in events for token in event.token_ids]
    assert streamed == result.sequences[0, len(kit.PROMPT) :].tolist()
    assert len(events) == 1 + result.statistics.rounds
    accepted = [flag for event in events for flag in event.accepted]
    assert accepted.count(True) == result.statistics.accepted
    assert [event.result is None for event in events] == [True] * (len(events) - 1) + [False]
    final = events[-1].result
    assert final is not None
    assert torch.equal(final.sequences, result.sequences)


def test_every_round_ends_with_the_targets_own_token() -> None:
    events = list(Engine(kit.mixed(), exit_layer=2).stream(kit.prompt_tensor(), max_new_tokens=24))
    assert all(event.accepted == (True,) * (len(event.token_ids) - 1) + (False,) for event in events)


def test_nothing_follows_an_eos() -> None:
    model = kit.identical()
    plain = kit.reference(model, kit.prompt_tensor())[0, len(kit.PROMPT) :].tolist()
    events = list(Engine(model, exit_layer=2).stream(kit.prompt_tensor(), max_new_tokens=24, eos_token_id=plain[3]))
    assert [token for event in events for token in event.token_ids] == plain[:4]
    assert events[-1].accepted[-1] is True


def test_a_consumer_that_gives_up_leaves_the_model_as_it_was() -> None:
    model = kit.mixed()
    expected = kit.reference(model, kit.prompt_tensor())
    config = model.config.to_dict()
    events = Engine(model, exit_layer=2).stream(kit.prompt_tensor(), max_new_tokens=24)
    next(events)
    next(events)
    events.close()
    assert model.config.to_dict() == config
    assert torch.is_grad_enabled()
    assert torch.equal(kit.reference(model, kit.prompt_tensor()), expected)
    assert torch.equal(Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=24).sequences, expected)


def test_gradients_are_on_for_the_consumer_between_events() -> None:
    for _ in Engine(kit.mixed(), exit_layer=2).stream(kit.prompt_tensor(), max_new_tokens=6):
        assert torch.is_grad_enabled()
