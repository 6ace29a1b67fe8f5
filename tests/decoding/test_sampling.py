"""Sampling through the engine gives what the full model's own sampling gives: by enumeration, and by draws.

The enumeration composes the very functions that the decode loop calls, on the logits of real models, and goes through
all that a call can do. Draws of the engine itself are held against the probabilities of the model without a cache. Both
refuse what is wrong on purpose. All seeds are fixed: a test of draws fails by chance with probability 1e-4 for each new
set of seeds, never from run to run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel
from transformers.generation import logits_process as hf

from layerskip import Engine
from layerskip.decoding import call
from layerskip.decoding.acceptance import BLOCK_RULE, TOKEN_RULE, Rule, probabilities
from layerskip.decoding.choice import SampledChoice
from tests.decoding.sampling_kit import (
    Tables,
    exit_and_full_logits,
    generation_law,
    greedy,
    law_distance,
    map_tables,
    model_tables,
    p_value,
    processed,
    target_law,
)
from tests.kit import (
    EXIT_LAYER,
    build,
    identical,
    l4,
    llama_config,
    mixed,
    prompt_tensor,
    scale_late_layers,
    truncated,
    without_cache,
)

START = [1, 4, 3]
RULES = [pytest.param(TOKEN_RULE, id="token"), pytest.param(BLOCK_RULE, id="block")]
GRADES = {"low": 3.0, "partial": 1.0, "full": 0.0}
"""How much the layers behind the exit weigh: about a quarter, 60 % and all of the drafts are accepted."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def small(grade: str, vocabulary: int) -> PreTrainedModel:
    """A model of few tokens; nothing changes it."""
    return scale_late_layers(build(llama_config(vocab_size=vocabulary), seed=3, spread=16.0), GRADES[grade])


# Enumeration: prefill and all rounds of a call, on five tokens.

FEW = 5
EOS = 4
EXACT = 1e-6
"""What an exact call may differ from the model by; the wrong ones differ by a thousand times as much and more."""


def two_by_the_ids(batch: int, ids: Tensor) -> list[int]:
    """Two tokens, which depend on all that stands before."""
    first = int(ids.sum()) % FEW
    return [first, (first + 2) % FEW]


def everything() -> list[Any]:
    """Processors that read the ids and such that do not, in the order that `generate` has for them."""
    return [
        hf.RepetitionPenaltyLogitsProcessor(1.7),
        hf.NoRepeatNGramLogitsProcessor(3),
        hf.NoBadWordsLogitsProcessor([[0, 1], [2, 2]]),
        hf.TemperatureLogitsWarper(1.6),
        hf.TopKLogitsWarper(4),
        hf.TopPLogitsWarper(0.97),
        hf.MinPLogitsWarper(0.02),
    ]


PROCESSORS: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "temperature": lambda: [hf.TemperatureLogitsWarper(1.5)],
    "top-k": lambda: [hf.TopKLogitsWarper(3)],
    "top-p": lambda: [hf.TopPLogitsWarper(0.8)],
    "min-p": lambda: [hf.MinPLogitsWarper(0.1)],
    "repetition": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.7)],
    "no repeated pair": lambda: [hf.NoRepeatNGramLogitsProcessor(2)],
    "bad words": lambda: [hf.NoBadWordsLogitsProcessor([[1, 1], [3, 0], [3, 2], [3, EOS]])],
    "prefix function": lambda: [hf.PrefixConstrainedLogitsProcessor(two_by_the_ids, 1)],
    "everything": everything,
}
TRIMMED = torch.tensor([0, 2, EOS])
HEADS = [pytest.param(False, id="full head"), pytest.param(True, id="trimmed head")]


@cache
def exact_model(grade: str) -> PreTrainedModel:
    """In float64, so that the order of sums makes no difference."""
    return copy.deepcopy(small(grade, FEW)).double()


@cache
def engine_tables(grade: str, trimmed: bool, processors: str, length: int) -> tuple[Tables, Tables]:
    """What drafts are drawn from and what verifies them, behind all prefixes of less than `length` tokens."""
    early, full = exit_and_full_logits(exact_model(grade), START, length, EXIT_LAYER, TRIMMED if trimmed else None)
    make = PROCESSORS[processors]
    return processed(early, make(), START), processed(full, make(), START)


@pytest.mark.parametrize("trimmed", HEADS)
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("grade", GRADES)
def test_a_call_gives_every_output_as_often_as_the_model(grade: str, processors: str, trimmed: bool) -> None:
    """Up to four tokens; the bad words leave the trimmed head none to draft behind token 3."""
    q, p = engine_tables(grade, trimmed, processors, length=4)
    assert torch.cat(p).isfinite().all()
    assert torch.cat(q).isnan().any() == (trimmed and processors == "bad words")
    own = model_tables(exact_model(grade), START, 4, PROCESSORS[processors]())
    for eos in (None, EOS):
        expected = target_law(own, eos)
        assert sum(float(law.sum()) for law in expected) == pytest.approx(1)
        for rule in (TOKEN_RULE, BLOCK_RULE):
            for num_draft_tokens in (1, 2):
                found = generation_law(rule, lambda start: (p, q, q), num_draft_tokens, 4, eos)
                assert law_distance(found, expected) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("processors", ["none", "everything"])
def test_long_rounds_give_every_output_as_often_as_the_model(processors: str, rule: Rule) -> None:
    """Five tokens, three drafts a round."""
    q, p = engine_tables("partial", True, processors, length=5)
    own = model_tables(exact_model("partial"), START, 5, PROCESSORS[processors]())
    for eos in (None, EOS):
        found = generation_law(rule, lambda start: (p, q, q), 3, 5, eos)
        assert law_distance(found, target_law(own, eos)) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_drafts_may_come_from_anything_that_the_rule_is_told(rule: Rule) -> None:
    """The argmax of the exit as a one-hot distribution; and logits of the exit that no processor has seen."""
    early, _ = exit_and_full_logits(exact_model("partial"), START, 4, EXIT_LAYER)
    _, p = engine_tables("partial", False, "everything", length=4)
    expected = target_law(p, EOS)
    for q in (map_tables(greedy, early), processed(early, [], START)):
        q = map_tables(Tensor.double, q)
        assert law_distance(generation_law(rule, lambda start, q=q: (p, q, q), 2, 4, EOS), expected) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("processors", ["none", "top-k", "everything"])
def test_a_model_in_bf16_gives_the_law_of_its_own_logits(processors: str, rule: Rule) -> None:
    """Drafts and targets come from bf16 logits, some of them equal; both sides of the ratio are of what was drawn."""
    model = copy.deepcopy(small("partial", FEW)).bfloat16()
    early, full = exit_and_full_logits(model, START, 4, EXIT_LAYER)
    assert {table.dtype for table in (*early, *full)} == {torch.bfloat16}
    q, p = (processed(logits, PROCESSORS[processors](), START) for logits in (early, full))
    found = generation_law(rule, lambda start: (p, q, q), 2, 4, EOS)
    assert law_distance(found, target_law(p, EOS)) < EXACT


# The enumeration refuses what is wrong.


def residual_from_p(p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    chances, scale = TOKEN_RULE.chances(p, q, drafts, counts)
    return chances, scale * 1e12


def inverted(p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """min(1, q/p)."""
    ratios = q.gather(2, drafts.unsqueeze(-1)) / p[:, :-1].gather(2, drafts.unsqueeze(-1)).clamp(min=1e-300)
    real = torch.arange(drafts.shape[1], device=drafts.device) < counts.unsqueeze(1)
    return torch.where(real, ratios.squeeze(-1), 0).clamp(max=1), torch.ones_like(p[..., 0])


def always(p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Every draft is accepted."""
    real = torch.arange(drafts.shape[1], device=drafts.device) < counts.unsqueeze(1)
    return real.to(p.dtype), torch.ones_like(p[..., 0])


RIGHT_RULES = {"token": TOKEN_RULE, "block": BLOCK_RULE}
WRONG_RULES = {
    "residual from p": Rule(residual_from_p, TOKEN_RULE.accepted),
    "inverted ratio": Rule(inverted, TOKEN_RULE.accepted),
    "every draft accepted": Rule(always, TOKEN_RULE.accepted),
    "token chances, last pass": Rule(TOKEN_RULE.chances, BLOCK_RULE.accepted),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_enumeration_refuses_a_wrong_rule(name: str) -> None:
    q, p = engine_tables("partial", False, "everything", length=4)
    found = generation_law(WRONG_RULES[name], lambda start: (p, q, q), 2, 4, EOS)
    assert law_distance(found, target_law(p, EOS)) > 1000 * EXACT


def not_normalised(logits: Tables) -> Tables:
    """The softmax over all tokens, at those of the trimmed head alone."""
    return [table.softmax(-1) * torch.zeros(FEW).double().index_fill(0, TRIMMED, 1) for table in logits]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "mistake",
    ["trimmed head not normalised", "raw q", "raw drafts", "target not processed", "prefix of the block's start"],
)
def test_enumeration_refuses_wrong_distributions(mistake: str, rule: Rule) -> None:
    early, full = exit_and_full_logits(exact_model("partial"), START, 4, EXIT_LAYER)
    raw_q, raw_p = processed(early, [], START), processed(full, [], START)
    q, p = engine_tables("partial", False, "everything", length=4)
    trimmed, _ = engine_tables("partial", True, "none", length=4)
    stale = [processed(full, everything(), START, seen=start) for start in range(4)]
    true, tables = {
        "trimmed head not normalised": (raw_p, lambda start: (raw_p, trimmed, not_normalised(early))),
        "raw q": (p, lambda start: (p, q, raw_q)),
        "raw drafts": (p, lambda start: (p, raw_q, q)),
        "target not processed": (p, lambda start: (raw_p, q, q)),
        "prefix of the block's start": (p, lambda start: (stale[start], q, q)),
    }[mistake]
    assert law_distance(generation_law(rule, tables, 2, 4, EOS), target_law(true, EOS)) > 1000 * EXACT


# Draws of the engine.

MANY = 8
LEVEL = 1e-4
"""χ² refuses draws that are less likely than this; right ones fall below it with this probability."""
DRAWS = 1500


def draws(model: PreTrainedModel, rows: int = DRAWS, max_new_tokens: int = 4, **arguments: Any) -> Tensor:
    """Returns new tokens of many draws for one prompt, `(rows, new tokens)`; without processors by default."""
    ids = arguments.pop("draft_token_ids", None)
    engine = Engine(model, exit_layer=EXIT_LAYER, num_draft_tokens=4, draft_token_ids=ids)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": max_new_tokens, "generator": seeded(0), **arguments}
    # The work of a batch grows faster than its rows.
    results = [engine.generate(torch.tensor([START]).expand(500, -1), **settings) for _ in range(rows // 500)]
    return torch.tensor([tokens for result in results for tokens in result.new_token_ids])


def cells(tokens: Tensor, vocabulary: int = MANY) -> Tensor:
    """Returns how often each sequence was drawn, `(V^tokens,)`, of draws `(rows, tokens)`."""
    powers = vocabulary ** torch.arange(tokens.shape[1]).flip(0)
    return (tokens * powers).sum(1).bincount(minlength=vocabulary ** tokens.shape[1])


@cache
def joint(grade: str, processors: str = "none", strategy: str = "self_speculative") -> Tensor:
    """The probabilities of the model's first three tokens, `(512,)`."""
    model = small(grade, MANY)
    if strategy == "early_exit":
        model = truncated(model, EXIT_LAYER)
    return target_law(model_tables(model, START, 3, PROCESSORS[processors]()))[3]


@pytest.mark.parametrize(("grade", "num_draft_tokens"), [("partial", 1), *((grade, 4) for grade in GRADES)])
def test_the_first_three_tokens_follow_the_models_law(grade: str, num_draft_tokens: int) -> None:
    drawn = draws(small(grade, MANY), num_draft_tokens=num_draft_tokens)
    assert p_value(cells(drawn[:, :3]), joint(grade)) > LEVEL


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "top-k": ("top-k", {"top_k": 3}),
    "temperature": ("temperature", {"temperature": 1.5}),
    "trimmed head": ("none", {"draft_token_ids": torch.tensor([5, 0, 1])}),
    "trimmed head and repetition": (
        "repetition",
        {"draft_token_ids": torch.tensor([5, 0, 1]), "repetition_penalty": 1.7},
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_first_three_tokens_follow_the_law_of_processed_scores(setting: str) -> None:
    processors, arguments = SETTINGS[setting]
    drawn = draws(small("partial", MANY), **arguments)
    assert p_value(cells(drawn[:, :3]), joint("partial", processors)) > LEVEL


@pytest.mark.parametrize("strategy", ["autoregressive", "early_exit"])
def test_other_strategies_sample_from_their_own_model(strategy: str) -> None:
    drawn = draws(small("low", MANY), max_new_tokens=3, strategy=strategy)
    assert p_value(cells(drawn), joint("low", strategy=strategy)) > LEVEL
    other = joint("low", strategy="early_exit" if strategy == "autoregressive" else "autoregressive")
    assert p_value(cells(drawn), other) < LEVEL


@pytest.mark.parametrize("name", [*RIGHT_RULES, *WRONG_RULES])
def test_draws_by_a_wrong_rule_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test of the same draws, with another rule in the engine; both right ones pass."""
    rule = {**RIGHT_RULES, **WRONG_RULES}[name]
    monkeypatch.setattr(call, "SampledChoice", lambda generator: SampledChoice(generator, rule))
    drawn = draws(small("low", MANY))
    assert (p_value(cells(drawn[:, :3]), joint("low")) > LEVEL) == (name in RIGHT_RULES)


def test_the_joint_law_of_two_tokens_is_within_the_noise_of_20000_draws() -> None:
    """64 cells have a noise of 0.023 at most; the second token is the first of a round."""
    drawn = draws(small("partial", MANY), rows=20_000, max_new_tokens=3)
    expected = joint("partial").view(-1, MANY).sum(1)
    assert float((cells(drawn[:, :2]) / 20_000 - expected).abs().sum() / 2) < 0.04
    assert p_value(cells(drawn), joint("partial")) > LEVEL


def test_num_return_sequences_are_draws_of_their_own() -> None:
    engine = Engine(small("partial", MANY), exit_layer=EXIT_LAYER)
    result = engine.generate(
        torch.tensor([START]), do_sample=True, num_return_sequences=1000, max_new_tokens=3, generator=seeded(0)
    )
    assert p_value(cells(torch.tensor(result.new_token_ids)), joint("partial")) > LEVEL


def test_rows_of_other_prompts_follow_their_own_law_and_no_other_row() -> None:
    """Two prompts of different lengths by turns: neighbours are independent, token by token."""
    model = small("partial", MANY)
    other = [6, 2, 7, 0, 5]
    pairs = 700
    prompts = torch.tensor([[0, 0, *START], other])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    result = Engine(model, exit_layer=EXIT_LAYER).generate(
        prompts.repeat(pairs, 1),
        attention_mask=mask.repeat(pairs, 1),
        do_sample=True,
        max_new_tokens=3,
        generator=seeded(0),
    )
    drawn = torch.tensor(result.new_token_ids).view(pairs, 2, 3)
    laws = [joint("partial"), target_law(model_tables(model, other, 3))[3]]
    for row, law in enumerate(laws):
        assert p_value(cells(drawn[:, row]), law) > LEVEL
    assert p_value(cells(drawn[:, 0]), laws[1]) < LEVEL
    of_place = [law.view(MANY, MANY, MANY) for law in laws]
    for place in range(3):
        first, second = (law.sum([axis for axis in range(3) if axis != place]) for law in of_place)
        assert p_value(cells(drawn[:, :, place]), torch.outer(first, second).flatten()) > LEVEL


# Where rows end.

ENDS = 5
"""A token of which the model gives about a fifth at most places."""


class EndsWith(LogitsProcessor):
    """No token may follow the end; drafts may stand behind it, where nothing may be drawn."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ended = (input_ids[:, len(START) :] == ENDS).any(1)
        return scores.masked_fill(ended.unsqueeze(1), -torch.inf)


def ends(ids: Tensor, scores: Any, **_: Any) -> Tensor:
    return (ids[:, len(START) :] == ENDS).any(1)


def nothing_behind_the_end(batch: int, ids: Tensor) -> list[int]:
    return [] if (ids[len(START) :] == ENDS).any() else list(range(MANY))


WAYS_TO_END: dict[str, dict[str, Any]] = {
    "eos": {"eos_token_id": ENDS},
    "eos, and no token may follow": {"eos_token_id": ENDS, "logits_processor": [EndsWith()]},
    "eos, and a prefix function allows none": {
        "eos_token_id": ENDS,
        "prefix_allowed_tokens_fn": nothing_behind_the_end,
    },
    "a criterion behind which drafts go on": {"stopping_criteria": [ends]},
    "a criterion, and no token may follow": {"stopping_criteria": [ends], "logits_processor": [EndsWith()]},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", WAYS_TO_END)
def test_outputs_end_as_often_as_the_models(way: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths 1 to 4; what processors say behind an end counts for nothing."""
    monkeypatch.setattr(call, "SampledChoice", lambda generator: SampledChoice(generator, rule))
    model = small("full", MANY)
    result = Engine(model, exit_layer=EXIT_LAYER, num_draft_tokens=3).generate(
        torch.tensor([START]).expand(500, -1),
        do_sample=True,
        max_new_tokens=4,
        pad_token_id=0,
        temperature=1.5,
        generator=seeded(0),
        **WAYS_TO_END[way],
    )
    law = target_law(model_tables(model, START, 4, PROCESSORS["temperature"]()), ENDS)
    lengths = torch.tensor([len(tokens) for tokens in result.new_token_ids])
    assert p_value(lengths.bincount(minlength=5), torch.stack([outputs.sum() for outputs in law])) > LEVEL
    ended = sum(tokens[-1] == ENDS for tokens in result.new_token_ids)
    stopped = sum(float(outputs.view(-1, MANY)[:, ENDS].sum()) for outputs in law[1:])
    assert 0.2 < stopped < 0.8
    assert p_value(torch.tensor([ended, 500 - ended]), torch.tensor([stopped, 1 - stopped])) > LEVEL
    assert sum(reason != "length" for reason in result.finish_reasons) == ended


@pytest.mark.parametrize("rule", RULES)
def test_a_token_that_nothing_may_follow_is_emitted_as_often_as_any(rule: Rule) -> None:
    """One draft by hand: token 0 leads nowhere, which is known behind it alone."""
    rows = 20_000
    choice = SampledChoice(seeded(0), rule)
    drafts, drawn_from = choice.draft(torch.tensor([0.9, 0.1]).log().expand(rows, -1))
    assert drawn_from is not None
    behind = torch.where((drafts == 0).unsqueeze(1), -torch.inf, torch.zeros(rows, 2))
    scores = torch.stack([torch.tensor([0.5, 0.5]).log().expand(rows, -1), behind], dim=1)
    accepted, tokens = choice.verify(scores, drafts.unsqueeze(1).tolist(), drawn_from.unsqueeze(1).unbind(0))
    emitted = [draft if count else token for draft, count, token in zip(drafts.tolist(), accepted, tokens, strict=True)]
    assert p_value(torch.tensor(emitted).bincount(), torch.tensor([0.5, 0.5])) > LEVEL
    for draft, count, token in zip(drafts.tolist(), accepted, tokens, strict=True):
        assert (token is None) == (count == 1 and draft == 0)


# Processors that leave no token.


class DeadEnd(LogitsProcessor):
    """Leaves the second row no token behind two new ones."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        if input_ids.shape[1] >= len(START) + 2:
            scores[1] = -torch.inf
        return scores


@pytest.mark.parametrize("strategy", ["self_speculative", "autoregressive"])
def test_a_row_that_has_no_token_to_go_on_with_is_an_error_and_changes_nothing(strategy: str) -> None:
    model = small("full", MANY)
    engine = Engine(model, exit_layer=EXIT_LAYER)
    prompts, processors = torch.tensor([START, START]), [DeadEnd()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config, settings = model.config.to_dict(), model.generation_config.to_dict()
    arguments = {"do_sample": True, "max_new_tokens": 4, "strategy": strategy}
    with pytest.raises(ValueError, match=r"no token .* for row 1 after 2 new tokens.*loosen the logits processors"):
        engine.generate(prompts, logits_processor=processors, generator=seeded(0), **arguments)
    assert prompts.tolist() == [START, START] and len(processors) == 1 and not vars(processors[0])
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, settings)
    # The row before it, and a row that ends in time, are none.
    engine.generate(prompts[:1], logits_processor=processors, generator=seeded(0), **{**arguments, "max_new_tokens": 2})


def test_a_prefix_function_that_allows_nothing_is_named() -> None:
    with pytest.raises(ValueError, match=r"prefix_allowed_tokens_fn returned no tokens for row 0 after 1 new"):
        Engine(small("full", MANY), exit_layer=EXIT_LAYER).generate(
            torch.tensor([START]),
            do_sample=True,
            max_new_tokens=4,
            prefix_allowed_tokens_fn=lambda _, ids: [2] if len(ids) == len(START) else [],
        )


def test_logits_of_nan_are_an_error() -> None:
    model = copy.deepcopy(small("full", MANY))
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(
        ValueError,
        match=r"no token is left to choose from for row 0 after 0 new tokens.*look for NaN in the model's logits",
    ):
        Engine(model, exit_layer=EXIT_LAYER).generate(torch.tensor([START]), do_sample=True, max_new_tokens=4)


# Settings and seeds, on models of many tokens.


def one(engine: Engine, max_new_tokens: int = 12, **arguments: Any) -> list[int]:
    """Returns the new tokens of a sampled call for the kit's prompt."""
    result = engine.generate(prompt_tensor(), do_sample=True, max_new_tokens=max_new_tokens, **arguments)
    return result.new_token_ids[0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_an_exit_that_equals_the_model_has_all_its_drafts_accepted(temperature: float) -> None:
    result = Engine(identical(), exit_layer=EXIT_LAYER).generate(
        prompt_tensor().expand(50, -1), do_sample=True, temperature=temperature, generator=seeded(0), max_new_tokens=12
    )
    assert result.statistics.drafted > 300
    assert result.statistics.draft_acceptance_rate == 1.0


def test_a_high_temperature_gives_other_outputs_for_other_seeds() -> None:
    engine = Engine(identical(), exit_layer=EXIT_LAYER)
    assert len({tuple(one(engine, temperature=1.5, generator=seeded(seed))) for seed in range(20)}) >= 10


def test_a_low_temperature_tends_to_the_greedy_output() -> None:
    for model in (identical(), mixed(), l4()):
        found = one(Engine(model, exit_layer=EXIT_LAYER), temperature=1e-4, generator=seeded(0))
        assert found == without_cache(model, prompt_tensor()[0].tolist(), 12)


@torch.no_grad()
def outside_the_nucleus(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], top_p: float) -> int:
    """Returns how many tokens lie outside the full model's nucleus at their place."""
    logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    ordered = probabilities(logits).sort(descending=True)
    heavier = ordered.values.cumsum(-1) - ordered.values
    nuclei = [set(ids[mass < top_p].tolist()) for ids, mass in zip(ordered.indices, heavier, strict=True)]
    return sum(token not in nucleus for token, nucleus in zip(tokens, nuclei, strict=True))


def test_every_token_lies_in_the_full_models_nucleus() -> None:
    prompt = prompt_tensor()[0].tolist()
    for model in (mixed(), l4()):
        engine = Engine(model, exit_layer=EXIT_LAYER)
        for seed in range(5):
            tokens = one(engine, top_p=0.3, generator=seeded(seed))
            assert outside_the_nucleus(model, prompt, tokens, 0.3) == 0
        assert outside_the_nucleus(model, prompt, one(engine, generator=seeded(0)), 0.3) > 0


def test_a_seed_repeats_ids_and_rounds_and_another_gives_others() -> None:
    engine = Engine(mixed(), exit_layer=EXIT_LAYER)

    def rounds(seed: int) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
        events = engine.stream(prompt_tensor(), do_sample=True, max_new_tokens=20, generator=seeded(seed))
        return [(event.token_ids, event.accepted) for event in events]

    assert rounds(0) == rounds(0)
    assert len({str(rounds(seed)) for seed in range(5)}) == 5


def test_a_generator_goes_on_from_call_to_call() -> None:
    engine, generator = Engine(mixed(), exit_layer=EXIT_LAYER), seeded(0)
    first, second = one(engine, generator=generator), one(engine, generator=generator)
    assert first != second
    generator.manual_seed(0)
    assert [one(engine, generator=generator), one(engine, generator=generator)] == [first, second]


def test_without_a_generator_torchs_seed_repeats_a_call() -> None:
    engine = Engine(mixed(), exit_layer=EXIT_LAYER)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(one(engine))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("strategy", ["self_speculative", "autoregressive", "early_exit"])
def test_torchs_generator_is_left_alone_where_it_is_not_needed(strategy: str) -> None:
    engine = Engine(mixed(), exit_layer=EXIT_LAYER)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    engine.generate(prompt_tensor(), do_sample=False, max_new_tokens=8, strategy=strategy)
    one(engine, generator=seeded(1), strategy=strategy)
    assert torch.equal(torch.get_rng_state(), before)
    one(engine, strategy=strategy)
    assert not torch.equal(torch.get_rng_state(), before)
