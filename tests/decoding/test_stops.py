"""Where generation ends, and what is counted there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine, GenerationResult
from tests import kit


def generate(model: PreTrainedModel, **arguments: Any) -> GenerationResult:
    """Runs self-speculation at exit 2 on the usual prompt."""
    engine = Engine(model, exit_layer=kit.EXIT_LAYER)
    return engine.generate(kit.prompt_tensor(), **{"max_new_tokens": 24, "pad_token_id": 0, **arguments})


def new_tokens(result: GenerationResult) -> list[int]:
    """Returns the emitted tokens of the only row."""
    return result.sequences[0, len(kit.PROMPT) :].tolist()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model whose drafts are all accepted."""
    return kit.identical()


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> list[int]:
    """What it says without stops; the first six tokens are different ones."""
    tokens = kit.reference(model, kit.prompt_tensor())[0, len(kit.PROMPT) :].tolist()
    assert len(set(tokens[:6])) == 6
    return tokens


@pytest.mark.parametrize("index", range(6))
def test_an_eos_anywhere_in_a_block_ends_the_row(model: PreTrainedModel, plain: list[int], index: int) -> None:
    result = generate(model, eos_token_id=plain[index])
    assert new_tokens(result) == plain[: index + 1]
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(), eos_token_id=plain[index]))
    assert result.finish_reasons == ["stop"]


@pytest.mark.parametrize(("index", "expected", "reason"), [(2, 3, "stop"), (5, 4, "length"), (3, 4, "stop")])
def test_a_stop_and_the_cap_in_one_block(
    model: PreTrainedModel, plain: list[int], index: int, expected: int, reason: str
) -> None:
    result = generate(model, eos_token_id=plain[index], max_new_tokens=4, num_draft_tokens=6)
    assert new_tokens(result) == plain[:expected]
    assert result.finish_reasons == [reason]
    assert result.statistics.emitted == expected


def test_any_of_several_eos_tokens_ends_the_row(model: PreTrainedModel, plain: list[int]) -> None:
    result = generate(model, eos_token_id=[plain[4], plain[2]])
    assert new_tokens(result) == plain[:3]


def test_the_eos_tokens_of_the_checkpoint_are_followed(model: PreTrainedModel, plain: list[int]) -> None:
    model.generation_config.eos_token_id = [plain[3], 96]
    try:
        assert new_tokens(generate(model)) == plain[:4]
    finally:
        model.generation_config.eos_token_id = None


@pytest.mark.parametrize("index", range(1, 6))
def test_nothing_is_drafted_past_an_eos(model: PreTrainedModel, plain: list[int], index: int) -> None:
    statistics = generate(model, eos_token_id=plain[index], num_draft_tokens=8).statistics
    assert statistics.draft_tokens_processed == statistics.drafted == statistics.accepted == index
    # The EOS was a draft, so the round's own target token was cut away.
    assert (statistics.rounds, statistics.cut, statistics.emitted) == (1, 1, index + 1)
    assert statistics.acceptance_histogram == {index: 1}


def test_an_eos_from_prefill_ends_the_row_without_a_round(model: PreTrainedModel, plain: list[int]) -> None:
    statistics = generate(model, eos_token_id=plain[0]).statistics
    assert (statistics.rounds, statistics.emitted, statistics.early_layer_tokens) == (0, 1, len(kit.PROMPT))
    assert statistics.mean_acceptance_length is None
    assert statistics.draft_acceptance_rate is None


def test_an_eos_as_the_targets_own_token_is_not_cut() -> None:
    model = kit.rejected("llama")
    plain = kit.reference(model, kit.prompt_tensor())[0, len(kit.PROMPT) :].tolist()
    statistics = generate(model, eos_token_id=plain[5]).statistics
    ended = plain.index(plain[5])
    assert (statistics.emitted, statistics.rounds, statistics.cut) == (ended + 1, ended, 0)


@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_emitted_is_first_token_plus_accepted_plus_targets_minus_cut(grade: str) -> None:
    model = kit.graded("llama", grade)
    tokens = kit.reference(model, kit.prompt_tensor())[0, len(kit.PROMPT) :].tolist()
    for index in range(24):
        statistics = generate(model, eos_token_id=tokens[index], num_draft_tokens=5).statistics
        assert statistics.emitted == tokens.index(tokens[index]) + 1
        assert statistics.emitted == 1 + statistics.accepted + statistics.rounds - statistics.cut
        assert statistics.accepted <= statistics.drafted <= statistics.draft_tokens_processed


def test_max_length_counts_the_prompt(model: PreTrainedModel, plain: list[int]) -> None:
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_length=15)
    assert new_tokens(result) == plain[:5]


def test_without_a_length_twenty_tokens_as_generate_gives(model: PreTrainedModel, plain: list[int]) -> None:
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor())
    assert new_tokens(result) == plain[:20]
    assert result.sequences.shape == model.generate(kit.prompt_tensor(), do_sample=False).shape


def test_new_tokens_of_a_row_that_ended_early_are_given_without_padding() -> None:
    """The first row ends with a token that pads it as well; the other goes on."""
    model = kit.mixed()
    ids = torch.tensor([kit.PROMPT, kit.PROMPT[::-1]])
    plain = [kit.without_cache(model, row, 8) for row in ids.tolist()]
    eos = next(token for token in plain[0][1:3] if token not in plain[1])
    options = {"max_new_tokens": 8, "eos_token_id": eos, "pad_token_id": eos}
    result = Engine(model, exit_layer=2).generate(ids, **options)
    assert result.new_token_ids == [plain[0][: plain[0].index(eos) + 1], plain[1]]
    assert len(result.new_token_ids[0]) < result.sequences.shape[1] - ids.shape[1] == 8
