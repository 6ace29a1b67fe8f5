"""Compiled rounds: the tokens of `generate`, one graph for all rounds and calls, and no silent way round compiling."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip.decoding.compiled import CompiledOutcome, CompiledRounds, CompiledSettings, rounded_capacity
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement
from tests import kit

TOKENS = 24
DRAFT_IDS = tuple(range(0, kit.VOCAB, 3))
MODELS = {
    "mixed": kit.mixed,
    "identical": kit.identical,
    "gemma2": lambda: kit.graded("gemma2", "some"),
    # Its positions just suffice.
    "gpt2": lambda: kit.build(kit.gpt2_config(n_positions=len(kit.PROMPT) + TOKENS)),
}


def rounds_of(model: PreTrainedModel, gamma: int, **changes: Any) -> CompiledRounds:
    """Returns rounds of γ drafts from exit 2, or plain steps for 0; traced by torch, but run without a compiler."""
    layered = LayeredModel(model)
    settings = CompiledSettings(
        exit_layer=kit.EXIT_LAYER if gamma else layered.num_layers,
        depth=layered.num_layers,
        num_draft_tokens=gamma,
        capacity=rounded_capacity(layered, len(kit.PROMPT) + TOKENS),
        backend="eager",
    )
    return CompiledRounds(layered, replace(settings, **changes))


class Driver:
    """Decodes one prompt as a loop does, and keeps what every round found."""

    def __init__(self, rounds: CompiledRounds) -> None:
        self.rounds = rounds
        self.outcomes: list[CompiledOutcome] = []

    @torch.inference_mode()
    def __call__(self, prompt: list[int], max_new_tokens: int = TOKENS) -> list[int]:
        """Returns the new tokens, cut behind the first EOS token."""
        rounds, eos = self.rounds, self.rounds.settings.eos_token_ids
        self.outcomes = []
        rounds.reset()
        tokens = [self._prefill(prompt)]
        rounds.prepare()
        while len(tokens) < max_new_tokens and not eos & set(tokens):
            allowed = max_new_tokens - len(tokens) - 1
            outcome = rounds.round(tokens[-1], len(prompt) + len(tokens) - 1, allowed)
            self.outcomes.append(outcome)
            tokens += [*outcome.drafts[: outcome.accepted], outcome.targets[outcome.accepted]]
            rounds.cache.rollback([len(prompt) + len(tokens) - 1])
        ends = [place for place, token in enumerate(tokens) if token in eos]
        return tokens[: ends[0] + 1] if ends else tokens

    def _prefill(self, prompt: list[int]) -> int:
        model, depth = self.rounds.model, self.rounds.settings.depth
        placement = Placement.prompt([len(prompt)], model.device)
        hidden = model.embed(torch.tensor([prompt]), placement.positions)
        hidden = model.run(hidden, 0, depth, placement=placement, cache=self.rounds.cache, rotary=self.rounds.rotary)
        return int(model.logits(hidden[:, -1:]).argmax())


@cache
def driver(name: str, gamma: int) -> Driver:
    """Tests share its graph and its model, which no test leaves changed."""
    return Driver(rounds_of(MODELS[name](), gamma))


@cache
def trimmed_driver() -> Driver:
    """As `driver`, with drafts from `DRAFT_IDS` alone."""
    return Driver(rounds_of(kit.mixed(), 1, draft_token_ids=DRAFT_IDS))


def model_of(decode: Driver) -> PreTrainedModel:
    return decode.rounds.model.model


def expected(model: PreTrainedModel, prompt: list[int] | None = None, max_new_tokens: int = TOKENS) -> list[int]:
    """Returns the new tokens of plain greedy `generate`."""
    ids = kit.prompt_tensor(prompt)
    return kit.reference(model, ids, max_new_tokens)[0, ids.shape[1] :].tolist()


# The tokens


@pytest.mark.parametrize(("name", "gamma"), [("mixed", 2), ("identical", 3), ("gemma2", 2), ("gpt2", 1)])
def test_rounds_emit_the_tokens_of_generate(name: str, gamma: int) -> None:
    decode = driver(name, gamma)
    assert decode(kit.PROMPT) == expected(model_of(decode))
    assert all(outcome.accepted <= len(outcome.drafts) <= gamma for outcome in decode.outcomes)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_plain_steps_emit_the_tokens_of_generate(name: str) -> None:
    decode = driver(name, 0)
    assert decode(kit.PROMPT) == expected(model_of(decode))
    assert len(decode.outcomes) == TOKENS - 1
    assert all(outcome.drafts == [] and outcome.accepted == 0 for outcome in decode.outcomes)


def test_an_answer_from_the_early_layers_alone_is_that_of_the_shorter_model() -> None:
    model = kit.mixed()
    decode = Driver(rounds_of(model, 0, exit_layer=kit.EXIT_LAYER, depth=kit.EXIT_LAYER))
    assert decode(kit.PROMPT) == expected(kit.truncated(model, kit.EXIT_LAYER))


def test_drafts_that_agree_are_accepted_and_bring_a_token_more() -> None:
    decode = driver("identical", 3)
    decode(kit.PROMPT, 1 + 4 * 4)
    assert [outcome.accepted for outcome in decode.outcomes] == [3, 3, 3, 3]


def test_learned_positions_may_just_suffice() -> None:
    decode = driver("gpt2", 1)
    assert decode.rounds.settings.capacity == len(kit.PROMPT) + TOKENS
    assert decode(kit.PROMPT) == expected(model_of(decode))


def test_the_states_that_are_kept_are_those_of_one_pass() -> None:
    decode = driver("mixed", 2)
    tokens = decode(kit.PROMPT)
    fresh = model_of(decode)(torch.tensor([[*kit.PROMPT, *tokens[:-1]]]), use_cache=True).cache
    for (keys, values), layer in zip(decode.rounds.cache.kept([0]), fresh.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys)
        torch.testing.assert_close(values, layer.values)


# Dead drafts


def test_a_budget_may_end_inside_a_round() -> None:
    decode = driver("identical", 3)
    answer = expected(model_of(decode))
    for budget in range(2, 8):
        assert decode(kit.PROMPT, budget) == answer[:budget]
        # A first token, three drafts and the target behind them are five tokens.
        wanted = [min(3, budget - 2)] if budget <= 5 else [3, budget - 6]
        assert [len(outcome.drafts) for outcome in decode.outcomes] == wanted


def test_nothing_counts_as_drafted_behind_an_eos_token() -> None:
    """Prompts that hold more and more of the answer bring the end to every place of a round."""
    model = kit.identical()
    answer = expected(model)
    end = answer.index(answer[4])
    assert end >= 3
    decode = Driver(rounds_of(model, 2, eos_token_ids=frozenset({answer[end], kit.VOCAB - 1})))
    for said in range(end + 1):
        assert decode([*kit.PROMPT, *answer[:said]]) == answer[said : end + 1]
        assert all(answer[end] not in outcome.drafts[:-1] for outcome in decode.outcomes)


def test_drafts_come_from_the_trimmed_head_and_leave_the_tokens_alone() -> None:
    decode = trimmed_driver()
    assert decode(kit.PROMPT) == expected(model_of(decode))
    drafts = {token for outcome in decode.outcomes for token in outcome.drafts}
    assert drafts and drafts <= set(DRAFT_IDS)


# One graph


def test_all_rounds_of_all_calls_run_one_graph() -> None:
    model = kit.l4(num_hidden_layers=2)
    torch._dynamo.utils.counters.clear()
    decode = Driver(rounds_of(model, 1, exit_layer=1))
    seconds = []
    for prompt in (kit.PROMPT, kit.PROMPT[:4], kit.PROMPT[::-1]):
        assert decode(prompt) == expected(model, prompt)
        seconds.append(decode.rounds.compile_seconds)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert seconds[0] > 0.0 and len(set(seconds)) == 1


def test_warming_up_leaves_the_states_of_the_prompt_alone() -> None:
    decode = driver("mixed", 2)
    for _ in range(2):
        # The second time nothing is left to prepare, so that what is kept is of prefill alone.
        decode(kit.PROMPT, 1)
    rounds = decode.rounds
    kept = rounds.cache.kept([0])
    rounds.is_prepared = False
    assert rounds.prepare() > 0.0
    for held, (keys, values) in zip(kept, rounds.cache.kept([0]), strict=True):
        assert torch.equal(held[0], keys) and torch.equal(held[1], values)


def test_what_an_earlier_call_left_behind_never_counts() -> None:
    decode = driver("mixed", 2)
    decode(kit.PROMPT)
    for layer in decode.rounds.cache.shared_layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    assert decode(kit.PROMPT[:3]) == expected(model_of(decode), kit.PROMPT[:3])


def test_weights_may_change_between_calls() -> None:
    decode = trimmed_driver()
    before = decode(kit.PROMPT)
    weight = model_of(decode).lm_head.weight.detach()
    weight.copy_(weight.roll(1, 0))
    try:
        after = decode(kit.PROMPT)
        assert after == expected(model_of(decode)) != before
        draft_head = decode.rounds.draft_head
        assert draft_head is not None
        assert torch.equal(draft_head.weight, weight[list(DRAFT_IDS)])
    finally:
        weight.copy_(weight.roll(-1, 0))


def test_graphs_serve_the_same_parts_and_settings_alone() -> None:
    model = kit.mixed()
    rounds = rounds_of(model, 2)
    assert rounds.fits(LayeredModel(model), rounds.settings)
    assert not rounds.fits(LayeredModel(model), replace(rounds.settings, num_draft_tokens=3))
    assert not rounds.fits(LayeredModel(kit.mixed()), rounds.settings)
    model.model.layers[3] = kit.mixed().model.layers[3]
    assert not rounds.fits(LayeredModel(model), rounds.settings)


def test_graphs_do_not_serve_weights_of_another_type() -> None:
    model = kit.mixed()
    rounds = rounds_of(model, 2)
    assert not rounds.fits(LayeredModel(model.to(torch.bfloat16)), rounds.settings)


def test_capacities_are_powers_of_two_as_far_as_the_model_goes() -> None:
    llama, gpt2 = LayeredModel(kit.l4()), LayeredModel(kit.build(kit.gpt2_config(n_positions=100)))
    assert [rounded_capacity(llama, tokens) for tokens in (1, 64, 65, 128, 129)] == [64, 64, 128, 128, 256]
    assert [rounded_capacity(gpt2, tokens) for tokens in (64, 65, 100)] == [64, 65, 100]


# The model


def test_nothing_in_the_model_changes() -> None:
    model = kit.l4(num_hidden_layers=2)
    config, modules = model.config.to_dict(), dict(model.named_modules())
    weights = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in modules.items()}
    Driver(rounds_of(model, 1, exit_layer=1))(kit.PROMPT)
    assert model.config.to_dict() == config
    assert dict(model.named_modules()) == modules
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == weights[name][0] and torch.equal(tensor, weights[name][1])


# Failure


def unsupported(*arguments: Any) -> None:
    """A hook that no graph can take in."""
    torch._dynamo.graph_break()


@pytest.mark.parametrize("suppress", [False, True])
def test_a_model_that_cannot_be_compiled_is_an_error(suppress: bool) -> None:
    model = kit.l4(num_hidden_layers=2)
    model.model.layers[1].register_forward_pre_hook(unsupported)
    decode = Driver(rounds_of(model, 1, exit_layer=1))
    with (
        torch._dynamo.config.patch(suppress_errors=suppress),
        pytest.raises(RuntimeError, match=r"compile=True: torch.compile failed with .* Leave compile out"),
    ):
        decode(kit.PROMPT)
    assert not decode.rounds.is_prepared and decode.outcomes == []


def test_a_switched_off_compiler_is_an_error() -> None:
    decode = Driver(rounds_of(kit.mixed(), 1))
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="it is switched off"):
        decode(kit.PROMPT)


# The real compiler


def test_generated_code_emits_the_tokens_of_generate() -> None:
    model = kit.l4(num_hidden_layers=2)
    decode = Driver(rounds_of(model, 1, exit_layer=1, backend="inductor"))
    assert decode(kit.PROMPT) == expected(model)
