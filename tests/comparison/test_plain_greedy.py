"""A model's generation config is left alone, and told."""

from __future__ import annotations

import pytest

from layerskip.comparison.plain_greedy import left_out, plain_greedy
from tests import kit


def test_only_special_tokens_stay_while_the_block_runs() -> None:
    model = kit.mixed(eos_token_id=35, pad_token_id=3)
    own = model.generation_config
    own.repetition_penalty, own.do_sample, own.temperature = 1.5, True, 0.7
    before = own.to_dict()
    with pytest.raises(KeyError), plain_greedy(model):
        inside = model.generation_config
        assert (inside.eos_token_id, inside.pad_token_id) == (35, 3)
        assert left_out(model) == {}
        raise KeyError
    assert model.generation_config is own
    assert own.to_dict() == before
    found = left_out(model)
    assert {name: found[name] for name in ("repetition_penalty", "do_sample", "temperature")} == {
        "repetition_penalty": 1.5,
        "do_sample": True,
        "temperature": 0.7,
    }
    assert "eos_token_id" not in found


def test_a_plain_config_leaves_nothing_out() -> None:
    assert left_out(kit.mixed(eos_token_id=35)) == {}
