"""Quality per exit: equal to figures computed by hand from the stock model's hidden states, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine
from layerskip.comparison.own_answers import answer
from layerskip.comparison.quality import SPAN, ExitQuality, Reading, exit_quality, read_answers
from layerskip.model.layered import LayeredModel
from tests import kit

EXITS = [1, 2, 3]
LAYERS = [*EXITS, kit.NUM_LAYERS]
PROMPTS = [kit.PROMPT, [44, 3], [30, 31, 32, 33, 34], [2]]
BUDGET = 24
EOS = 35
SOME_IDS = torch.arange(1, kit.VOCAB, 3)


@cache
def mixed(family: str = "llama") -> PreTrainedModel:
    """Returns a model of which exits are right in part, and which ends its answers."""
    return kit.scale_late_layers(kit.build(kit.CONFIGS[family](eos_token_id=EOS)), 0.3)


@cache
def own(model: PreTrainedModel) -> list[list[int]]:
    """Returns the model's own answers to the prompts, in their order."""
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in PROMPTS]
    made = [each for batch in answer(Engine(model, kit.word_tokenizer(kit.VOCAB)), texts, BUDGET, 3) for each in batch]
    return [each.token_ids for each in sorted(made, key=lambda each: each.index)]


def read(model: PreTrainedModel, answers: list[list[int]], **options: Any) -> list[Reading]:
    return read_answers(LayeredModel(model), PROMPTS[: len(answers)], answers, EXITS, **options)


@torch.no_grad()
def stock_logits(model: PreTrainedModel, prompt: list[int], new: list[int]) -> dict[int, torch.Tensor]:
    """Returns each layer's logits before every token of an answer but its first, in float64: hidden states of the
    stock model, its norm, head and soft-cap by hand; of the last layer what the model itself gives."""
    outputs = model(torch.tensor([prompt + new[:-1]]), output_hidden_states=True, use_cache=False)
    norm = model.transformer.ln_f if model.config.model_type == "gpt2" else model.model.norm
    logits = {kit.NUM_LAYERS: outputs.logits}
    for exit_layer in EXITS:
        logits[exit_layer] = model.lm_head(norm(outputs.hidden_states[exit_layer]))
        if model.config.model_type.startswith("gemma"):
            cap = model.config.final_logit_softcapping
            logits[exit_layer] = cap * torch.tanh(logits[exit_layer] / cap)
    return {layer: values[0, len(prompt) :].double() for layer, values in logits.items()}


@cache
def shortened(model: PreTrainedModel) -> dict[int, PreTrainedModel]:
    """Returns models that end at the exits, and after the last layer."""
    return {layer: kit.truncated(model, layer) for layer in LAYERS}


@torch.no_grad()
def truncated_logits(model: PreTrainedModel, prompt: list[int], new: list[int]) -> dict[int, torch.Tensor]:
    """Returns the same from models that end at the exit."""
    ids = torch.tensor([prompt + new[:-1]])
    return {
        layer: short(ids, use_cache=False).logits[0, len(prompt) :].double()
        for layer, short in shortened(model).items()
    }


def overlap(p: torch.Tensor, q: torch.Tensor, temperature: float, ids: torch.Tensor | None) -> torch.Tensor:
    """Returns Σ min(p, q) of logits: p over the whole vocabulary, q renormalised over the ids it may draft."""
    weights = (q / temperature).softmax(-1)
    if ids is not None:
        drafted = torch.isin(torch.arange(kit.VOCAB), ids)
        weights = weights * drafted / weights[:, drafted].sum(-1, keepdim=True)
    return torch.minimum((p / temperature).softmax(-1), weights).sum(-1)


def by_hand(
    model: PreTrainedModel,
    answers: list[list[int]],
    temperature: float = 1.0,
    ids: torch.Tensor | None = None,
    logits_of: Callable[..., dict[int, torch.Tensor]] = stock_logits,
    places: slice = slice(None),
) -> dict[int, tuple[int, float, float, float]]:
    """Returns tokens, perplexity, agreement and expected acceptance of every layer, from some entries of each row."""
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in LAYERS}
    for prompt, new in zip(PROMPTS, answers, strict=False):
        logits = logits_of(model, prompt, new)
        last, follow = logits[kit.NUM_LAYERS], torch.tensor(new[1:], dtype=torch.long)
        for layer, values in logits.items():
            losses = -values.log_softmax(-1)[torch.arange(len(follow)), follow]
            agreed = (values.argmax(-1) == last.argmax(-1)).double()
            accepted = overlap(last, values, temperature, ids)
            if layer == kit.NUM_LAYERS:
                accepted = torch.ones_like(accepted)
            found[layer].append(torch.stack([losses, agreed, accepted])[:, places])
    figures = {}
    for layer, parts in found.items():
        losses, agreed, accepted = torch.cat(parts, dim=1).unbind()
        figures[layer] = (len(losses), float(losses.mean().exp()), float(agreed.mean()), float(accepted.mean()))
    return figures


def figures_of(qualities: list[ExitQuality]) -> dict[int, tuple[int, float, float, float]]:
    return {
        each.exit_layer: (each.tokens, each.perplexity, each.agreement, each.expected_acceptance) for each in qualities
    }


def check(found: list[ExitQuality], expected: dict[int, tuple[int, float, float, float]]) -> None:
    assert list(figures_of(found)) == list(expected) == LAYERS
    for layer, figures in figures_of(found).items():
        assert figures == pytest.approx(expected[layer], rel=2e-5)


# Temperatures and ids are dealt with behind the logits, and those are what families differ in.
@pytest.mark.parametrize("ids", [None, SOME_IDS], ids=["all ids", "some ids"])
@pytest.mark.parametrize(
    ("family", "temperature"), [*((family, 1.0) for family in kit.CONFIGS), ("llama", 0.5), ("gemma2", 2.0)]
)
def test_figures_equal_those_of_the_stock_models_hidden_states(
    family: str, temperature: float, ids: torch.Tensor | None
) -> None:
    model = mixed(family)
    answers = own(model)
    readings = read(model, answers, temperature=temperature, draft_token_ids=ids)
    found = exit_quality(readings, EXITS, kit.NUM_LAYERS)
    check(found, by_hand(model, answers, temperature, ids))
    # A control: the figures are none of those that any exit would have.
    assert 0 < found[0].agreement < 1
    assert len({round(each.perplexity, 3) for each in found}) == len(LAYERS)


@pytest.mark.parametrize("family", kit.CONFIGS)
def test_figures_equal_those_of_models_that_end_at_the_exits(family: str) -> None:
    model = mixed(family)
    answers = own(model)
    found = exit_quality(read(model, answers), EXITS, kit.NUM_LAYERS)
    check(found, by_hand(model, answers, logits_of=truncated_logits))


def test_a_wrong_temperature_or_a_wrong_norm_of_p_or_q_would_be_noticed() -> None:
    """A negative control of the tolerance above."""
    model = mixed()
    answers = own(model)
    right = by_hand(model, answers, 1.0, SOME_IDS)[2][3]
    at_another_temperature = by_hand(model, answers, 1.1, SOME_IDS)[2][3]
    logits = [stock_logits(model, prompt, new) for prompt, new in zip(PROMPTS, answers, strict=True)]
    p, q = (torch.cat([each[layer] for each in logits]) for layer in (kit.NUM_LAYERS, 2))
    hot = torch.minimum((p / 1.1).softmax(-1), q.softmax(-1)).sum(-1).mean()
    cold = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean()
    q_as_among_all = torch.minimum(p.softmax(-1), q.softmax(-1))[:, SOME_IDS].sum(-1).mean()
    p_renormalised = torch.minimum(p[:, SOME_IDS].softmax(-1), q[:, SOME_IDS].softmax(-1)).sum(-1).mean()
    for wrong in (at_another_temperature, q_as_among_all, p_renormalised):
        assert abs(float(wrong) / right - 1) > 1e-3
    assert abs(float(hot / cold) - 1) > 1e-3


def test_an_exit_that_equals_the_model_has_its_figures() -> None:
    model = kit.identical()
    for temperature in (0.5, 1.0, 3.0):
        _, exit_two, _, last = exit_quality(read(model, own(model), temperature=temperature), EXITS, kit.NUM_LAYERS)
        assert (exit_two.exit_layer, exit_two.agreement) == (2, 1.0)
        assert exit_two.expected_acceptance == pytest.approx(1, abs=1e-6)
        assert exit_two.perplexity == pytest.approx(last.perplexity, rel=1e-6)


def test_the_last_layer_agrees_with_itself_whatever_is_drafted_from() -> None:
    model = mixed()
    last = exit_quality(read(model, own(model), draft_token_ids=SOME_IDS), EXITS, kit.NUM_LAYERS)[-1]
    assert (last.exit_layer, last.agreement, last.expected_acceptance) == (kit.NUM_LAYERS, 1.0, 1.0)


@pytest.mark.parametrize("ids", [None, SOME_IDS], ids=["all ids", "some ids"])
def test_matches_are_of_drafts_and_choices_of_the_whole_head(ids: torch.Tensor | None) -> None:
    model = mixed()
    answers = own(model)
    for prompt, new, reading in zip(PROMPTS, answers, read(model, answers, draft_token_ids=ids), strict=True):
        logits = stock_logits(model, prompt, new)
        allowed = torch.arange(kit.VOCAB) if ids is None else ids
        assert reading.choices == [logits[layer].argmax(-1).tolist() for layer in LAYERS]
        drafts = [allowed[logits[layer][:, allowed].argmax(-1)].tolist() for layer in EXITS]
        assert reading.matches == [[one == two for one, two in zip(row, new[1:], strict=True)] for row in drafts]
        # The answers are the model's own.
        assert reading.choices[-1] == new[1:]


def test_spans_of_places_are_read_on_their_own() -> None:
    model = mixed()
    answers = own(model)
    assert SPAN < max(map(len, answers)) - 1 <= 2 * SPAN and min(map(len, answers)) - 1 < SPAN
    found = exit_quality(read(model, answers), EXITS, kit.NUM_LAYERS)
    for number in range(2):
        expected = by_hand(model, answers, places=slice(number * SPAN, (number + 1) * SPAN))
        for quality in found:
            span = quality.by_position[number]
            assert (span.start, span.stop) == (1 + number * SPAN, 1 + (number + 1) * SPAN)
            figures = (span.tokens, span.perplexity, span.agreement, span.expected_acceptance)
            assert figures == pytest.approx(expected[quality.exit_layer], rel=2e-5)


def test_tokens_of_spans_add_up_to_all_but_the_first_of_every_answer() -> None:
    model = mixed()
    answers = own(model)
    for quality in exit_quality(read(model, answers), EXITS, kit.NUM_LAYERS):
        assert quality.tokens == sum(len(tokens) - 1 for tokens in answers)
        assert sum(span.tokens for span in quality.by_position) == quality.tokens


def test_chunks_change_nothing_and_bound_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixed()
    answers = own(model)
    whole = read(model, answers, draft_token_ids=SOME_IDS)
    monkeypatch.setattr("layerskip.comparison.quality.LOGIT_ROWS", 5)
    heights: list[int] = []
    handle = model.lm_head.register_forward_pre_hook(lambda module, inputs: heights.append(inputs[0].shape[0]))
    chunked = read(model, answers, draft_token_ids=SOME_IDS)
    handle.remove()
    assert max(heights) == 5
    assert sum(heights) == len(LAYERS) * sum(len(tokens) - 1 for tokens in answers)
    for one, two in zip(whole, chunked, strict=True):
        assert (one.matches, one.choices) == (two.matches, two.choices)
        for first, second in zip(one.losses + one.acceptances, two.losses + two.acceptances, strict=True):
            assert first == pytest.approx(second, rel=1e-5, abs=1e-6)


def test_a_row_reads_alike_alone_and_in_a_batch() -> None:
    model = mixed()
    answers = own(model)
    [alone] = read_answers(LayeredModel(model), PROMPTS[1:2], answers[1:2], EXITS)
    together = read(model, answers)[1]
    assert (alone.matches, alone.choices) == (together.matches, together.choices)
    for one, two in zip(alone.losses + alone.acceptances, together.losses + together.acceptances, strict=True):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)


def test_every_layer_runs_once_over_each_token() -> None:
    model = mixed()
    tokens = own(model)[:1]
    with kit.counted_layers(model) as counts:
        read(model, tokens)
    # The last token is followed by nothing, and passes no layer.
    assert counts == [len(PROMPTS[0]) + len(tokens[0]) - 1] * kit.NUM_LAYERS


def test_rows_that_are_filled_up_pass_the_layers_together() -> None:
    model = mixed()
    answers = own(model)
    with kit.counted_layers(model) as counts:
        read(model, answers)
    longest = max(len(prompt) + len(tokens) - 1 for prompt, tokens in zip(PROMPTS, answers, strict=True))
    assert counts == [len(PROMPTS) * longest] * kit.NUM_LAYERS


def test_answers_of_one_token_give_nothing() -> None:
    model = mixed()
    readings = read(model, [[9], [8]])
    assert readings == [Reading([[]] * 3, [[]] * 4, [[]] * 4, [[]] * 3)] * 2
    assert [reading.tokens for reading in readings] == [0, 0]
    assert exit_quality(readings, EXITS, kit.NUM_LAYERS) == []
    assert exit_quality([], EXITS, kit.NUM_LAYERS) == []


def test_an_answer_of_one_token_between_others_changes_nothing() -> None:
    model = mixed()
    answers = own(model)
    whole = read(model, [answers[0], answers[1][:1], answers[2]])
    assert whole[1] == Reading([[]] * 3, [[]] * 4, [[]] * 4, [[]] * 3)
    readings = read(model, answers)
    assert [whole[0].choices, whole[2].choices] == [readings[0].choices, readings[2].choices]
    without = exit_quality([whole[0], whole[2]], EXITS, kit.NUM_LAYERS)
    assert exit_quality(whole, EXITS, kit.NUM_LAYERS) == without


def test_sums_by_hand() -> None:
    readings = [
        Reading([[True, False]], [[4, 5], [4, 6]], [[0.5, 1.5], [0.25, 0.25]], [[0.5, 0.25]]),
        Reading([[False]], [[9], [8]], [[1.0], [0.75]], [[0.75]]),
    ]
    exit_two, last = exit_quality(readings, [2], 4)
    assert (exit_two.tokens, exit_two.agreement, exit_two.expected_acceptance) == (3, 1 / 3, 0.5)
    assert exit_two.perplexity == pytest.approx(math.e)
    assert (last.tokens, last.agreement, last.expected_acceptance) == (3, 1.0, 1.0)
    assert last.perplexity == pytest.approx(math.exp(1.25 / 3))
    assert [(span.start, span.stop, span.tokens) for span in exit_two.by_position] == [(1, 17, 3)]
