"""One pass over given answers: the states before their tokens, at every exit on the way."""

from __future__ import annotations

import pytest
import torch

from layerskip.comparison.forced import answer_states, following
from layerskip.model.layered import LayeredModel
from tests import kit

PROMPTS = [kit.PROMPT, [44, 3], [30, 31, 32, 33, 34], [2]]
ANSWERS = [[8, 20, 41], [13, 4, 35, 60, 61, 62, 63], [9], [70, 71]]


def test_all_tokens_but_the_first_follow() -> None:
    assert following(ANSWERS).tolist() == [20, 41, 4, 35, 60, 61, 62, 63, 71]
    assert following([[9], [8]]).tolist() == []


@pytest.mark.parametrize("family", kit.CONFIGS)
def test_states_are_those_of_each_row_alone_in_the_stock_model(family: str) -> None:
    model = kit.build(kit.CONFIGS[family]())
    states = dict(answer_states(LayeredModel(model), PROMPTS, ANSWERS, [1, 2, 3]))
    expected: dict[int, list[torch.Tensor]] = {1: [], 2: [], 3: []}
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([prompt + answer]), output_hidden_states=True, use_cache=False).hidden_states
        for layer, found in expected.items():
            found.append(hidden[layer][0, len(prompt) : len(prompt) + len(answer) - 1])
    for layer, found in expected.items():
        torch.testing.assert_close(states[layer], torch.cat(found), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", kit.CONFIGS)
def test_states_of_the_last_layer_give_the_models_own_logits(family: str) -> None:
    model = kit.build(kit.CONFIGS[family]())
    layered = LayeredModel(model)
    [(layer, states)] = answer_states(layered, PROMPTS[:1], ANSWERS[:1], [kit.NUM_LAYERS])
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0] + ANSWERS[0]]), use_cache=False).logits[0, len(PROMPTS[0]) : -1]
        assert layer == kit.NUM_LAYERS
        torch.testing.assert_close(layered.logits(states), logits, rtol=1e-4, atol=1e-5)


def test_exits_come_in_rising_order_and_once() -> None:
    found = [layer for layer, _ in answer_states(LayeredModel(kit.mixed()), PROMPTS, ANSWERS, [3, 1, 3])]
    assert found == [1, 3]


def test_every_layer_up_to_the_highest_exit_runs_once_and_the_last_tokens_do_not_pass() -> None:
    model = kit.mixed()
    with kit.counted_layers(model) as counts:
        list(answer_states(LayeredModel(model), PROMPTS[:1], ANSWERS[:1], [1, 3]))
    assert counts == [len(PROMPTS[0]) + len(ANSWERS[0]) - 1] * 3 + [0]


def test_answers_of_one_token_have_no_states() -> None:
    found = dict(answer_states(LayeredModel(kit.mixed()), [[44, 3], [2]], [[9], [8]], [1, 4]))
    assert [states.shape for states in found.values()] == [(0, 32), (0, 32)]
