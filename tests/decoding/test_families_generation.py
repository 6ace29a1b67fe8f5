"""Every supported family generates greedily and by drawing, alone and in a batch, with each strategy and the hook."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine
from layerskip.model.families import FAMILIES
from tests import kit
from tests.decoding.hook_kit import USER_TURN, first_turn, ours, plain
from tests.decoding.levers_kit import padded
from tests.families_kit import CONFIGS, VARIANTS, cut, own_logits, some

NEW = 8
# The longest passes the window of the families that have one; the shortest enters it while it grows.
PROMPTS = [kit.PROMPT, [8, 20, 31, 60], [50, 3]]
IDS, MASK = padded(PROMPTS)
TOP_K = 5
STRATEGIES = ("self_speculative", "autoregressive", "early_exit")


@cache
def expected(family: str, prompt: tuple[int, ...], is_cut: bool = False) -> list[int]:
    """Returns the new tokens of plain `generate` for one prompt, which are those of a loop without a cache, too."""
    model = cut(family) if is_cut else some(family)
    ids = kit.prompt_tensor(list(prompt))
    said = kit.reference(model, ids, NEW, attention_mask=torch.ones_like(ids))
    # Every token is the best behind those before it: a loop would go the same way.
    assert torch.equal(own_logits(model, said)[0, len(prompt) - 1 : -1].argmax(-1), said[0, len(prompt) :])
    return said[0, len(prompt) :].tolist()


def answers(family: str, strategy: str = "self_speculative") -> list[list[int]]:
    """Returns what the rows of a batch get with a strategy."""
    return [expected(family, tuple(prompt), strategy == "early_exit") for prompt in PROMPTS]


def test_all_supported_families_are_tested_here() -> None:
    assert set(CONFIGS) == set(FAMILIES)


# Greedily


@pytest.mark.parametrize("name", [*CONFIGS, *VARIANTS])
def test_rounds_equal_generate_where_a_part_of_the_drafts_is_accepted(name: str) -> None:
    result = Engine(some(name), exit_layer=kit.EXIT_LAYER).generate(kit.prompt_tensor(), max_new_tokens=20)
    assert torch.equal(result.sequences, kit.reference(some(name), kit.prompt_tensor(), 20))
    rate = result.statistics.draft_acceptance_rate
    assert rate is not None and 0 < rate < 1
    assert len(set(result.new_token_ids[0])) >= 6


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_rows_are_those_of_the_model_alone(family: str, strategy: str) -> None:
    engine = Engine(some(family), exit_layer=kit.EXIT_LAYER)
    result = engine.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, strategy=strategy)
    assert result.new_token_ids == answers(family, strategy)
    statistics = result.statistics
    processed = sum(map(len, PROMPTS)) + statistics.draft_tokens_processed + statistics.rounds
    assert statistics.early_layer_tokens == processed
    assert statistics.late_layer_tokens == (0 if strategy == "early_exit" else processed)


@pytest.mark.parametrize("family", CONFIGS)
def test_padding_on_the_right_makes_no_difference(family: str) -> None:
    ids = torch.tensor([prompt + [0] * (len(kit.PROMPT) - len(prompt)) for prompt in PROMPTS])
    engine = Engine(some(family), exit_layer=kit.EXIT_LAYER)
    result = engine.generate(ids, attention_mask=MASK.flip(1), max_new_tokens=NEW)
    assert result.new_token_ids == answers(family)


@pytest.mark.parametrize("family", [family for family in CONFIGS if len(FAMILIES[family].attention) == 2])
def test_eager_attention_says_the_same(family: str) -> None:
    assert some(family).config._attn_implementation == "sdpa"
    engine = Engine(some(family, "eager"), exit_layer=kit.EXIT_LAYER)
    assert engine.generate(IDS, attention_mask=MASK, max_new_tokens=NEW).new_token_ids == answers(family)


@contextmanager
def called_layers(model: PreTrainedModel) -> Iterator[list[str]]:
    """Collects the numbers of the layers that are called while the block runs, in their order."""
    called: list[str] = []
    handles = [
        layer.register_forward_pre_hook(lambda *_, number=number: called.append(str(number)))
        for number, layer in enumerate(kit.layers_of(model), start=1)
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", CONFIGS)
def test_a_draft_step_calls_the_layers_up_to_the_exit_and_no_other(family: str) -> None:
    model = some(family)
    with called_layers(model) as called:
        statistics = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=NEW).statistics
    calls = "".join(called)
    # Prefill, then drafts and a verification in turns.
    assert re.fullmatch("1234((12)+34)+", calls)
    assert calls.count("12") == 1 + statistics.draft_tokens_processed + statistics.rounds
    assert calls.count("34") == 1 + statistics.rounds


# From `generate`, and in conversations


@pytest.mark.parametrize("family", CONFIGS)
def test_the_hook_gives_what_generate_gives_for_padded_rows(family: str) -> None:
    given = ours(some(family), IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert given[:, IDS.shape[1] :].tolist() == answers(family)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_hook_goes_on_from_a_cache(family: str) -> None:
    """From its own and from that of `generate`: what the model says that is told everything."""
    model = some(family)
    for who in (ours, plain):
        turn = first_turn(model, who, kit.prompt_tensor(), max_new_tokens=6)
        assert turn.cache.get_seq_length() == 15
        whole = torch.cat([turn.sequences, USER_TURN], dim=1)
        given = ours(model, whole, attention_mask=torch.ones_like(whole), cache=turn.cache, max_new_tokens=NEW)
        assert given[0, whole.shape[1] :].tolist() == expected(family, tuple(whole[0].tolist()))


@pytest.mark.parametrize("family", CONFIGS)
def test_an_engine_goes_on_from_its_cache(family: str) -> None:
    model = some(family)
    engine = Engine(model, exit_layer=kit.EXIT_LAYER)
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=6, return_cache=True)
    said = first.sequences[0].tolist() + USER_TURN[0].tolist()
    with kit.counted_layers(model) as counts:
        second = engine.generate(kit.prompt_tensor(said), cache=first.cache, max_new_tokens=NEW)
    assert second.new_token_ids[0] == expected(family, tuple(said))
    # The last token of the first answer, and what the user says; nothing else passes the layers again.
    work = 1 + USER_TURN.shape[1] + second.statistics.draft_tokens_processed + second.statistics.rounds
    assert counts == [work] * kit.NUM_LAYERS


# By drawing


def drawn(family: str, strategy: str, seed: int) -> list[list[int]]:
    """Returns the rows' new tokens, each one of the `TOP_K` best."""
    engine = Engine(some(family), exit_layer=kit.EXIT_LAYER)
    arguments = {"do_sample": True, "temperature": 1.5, "top_k": TOP_K, "max_new_tokens": NEW, "strategy": strategy}
    generator = torch.Generator().manual_seed(seed)
    return engine.generate(IDS, attention_mask=MASK, generator=generator, **arguments).new_token_ids


@pytest.mark.parametrize("family", CONFIGS)
def test_drawn_rows_are_possible(family: str) -> None:
    rows = drawn(family, "self_speculative", seed=1)
    for prompt, new in zip(PROMPTS, rows, strict=True):
        assert len(new) == NEW
        logits = own_logits(some(family), torch.tensor([prompt + new]))[0, len(prompt) - 1 : -1]
        least = logits.topk(TOP_K).values[:, -1]
        # Rounding may order two logits the other way in a batch.
        assert (logits[torch.arange(NEW), torch.tensor(new)] >= least - 1e-4).all()
    # Not the best token all the time.
    assert rows != answers(family)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", kit.CONFIGS)
def test_drawn_rows_follow_from_the_generator(family: str, strategy: str) -> None:
    first = drawn(family, strategy, seed=1)
    assert drawn(family, strategy, seed=1) == first != drawn(family, strategy, seed=2)
    assert first != answers(family, strategy)


@pytest.mark.parametrize("family", CONFIGS)
def test_drawing_from_one_token_is_greedy(family: str) -> None:
    engine = Engine(some(family), exit_layer=kit.EXIT_LAYER)
    only = engine.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=True, top_k=1)
    assert only.new_token_ids == answers(family)
