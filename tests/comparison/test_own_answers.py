"""Own answers: the model's own tokens, and for each exit which of them it would have chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine
from layerskip.comparison.own_answers import OwnAnswer, coverage, exit_matches, own_answers, reference_sums
from layerskip.model.layered import LayeredModel
from tests import kit

PROMPTS = ["w44 w3", "w1 w5 w9", "w2", "w30 w31 w32 w33 w34 w35 w36 w37"]
EXITS = [1, 2, 3]
BUDGET = 12
EOS = 35
SOME_IDS = torch.arange(96, 30, -2)


def ids(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def engine_of(model: PreTrainedModel) -> Engine:
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    tokenizer.eos_token = f"w{EOS}"
    return Engine(model, tokenizer)


@torch.no_grad()
def by_hand(short: PreTrainedModel, answer: OwnAnswer, allowed: torch.Tensor) -> list[bool]:
    """Returns for every token after the first whether a model that ends at the exit would choose it among `allowed`."""
    logits = short(torch.tensor([answer.prompt_ids + answer.token_ids]), use_cache=False).logits[0]
    chosen = allowed[logits[len(answer.prompt_ids) : -1, allowed].argmax(-1)]
    return (chosen == torch.tensor(answer.token_ids[1:])).tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_matches_are_those_of_a_model_that_ends_at_the_exit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerskip.comparison.own_answers.LOGIT_ROWS", 5)
    model = kit.scale_late_layers(kit.build(kit.CONFIGS[family](eos_token_id=EOS)), 0.3)
    answers = own_answers(engine_of(model), PROMPTS, [3, 1, 2], BUDGET, 3, draft_token_ids=(None, SOME_IDS))
    for exit_layer in EXITS:
        short = kit.truncated(model, exit_layer)
        for answer in answers:
            whole, trimmed = answer.matches[exit_layer]
            assert whole == by_hand(short, answer, torch.arange(kit.VOCAB))
            assert trimmed == by_hand(short, answer, SOME_IDS)
    flags = [flag for answer in answers for flag in answer.matches[2][0]]
    assert {True, False} == set(flags)
    assert sum(flags) != sum(flag for answer in answers for flag in answer.matches[2][1])


def test_answers_are_the_models_own_in_the_order_of_the_prompts() -> None:
    model = kit.mixed(eos_token_id=EOS)
    answers = own_answers(engine_of(model), PROMPTS, [2], BUDGET, batch_size=2)
    plain = [kit.without_cache(model, ids(prompt), BUDGET) for prompt in PROMPTS]
    expected = [tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens for tokens in plain]
    assert [answer.token_ids for answer in answers] == expected
    assert [answer.prompt_ids for answer in answers] == [ids(prompt) for prompt in PROMPTS]
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert [answer.text for answer in answers] == [" ".join(f"w{token}" for token in tokens) for tokens in expected]


def test_the_right_exit_always_agrees_and_an_answer_of_one_token_has_no_matches() -> None:
    layered = LayeredModel(kit.identical())
    tokens = kit.without_cache(kit.identical(), kit.PROMPT, BUDGET)
    whole, short = exit_matches(layered, [kit.PROMPT, kit.PROMPT], [tokens, tokens[:1]], [2])
    assert whole == {2: ([True] * (BUDGET - 1),)}
    assert short == {2: ([],)}
    assert exit_matches(layered, [kit.PROMPT], [tokens[:1]], [2]) == [{2: ([],)}]


def test_coverage_counts_all_tokens_but_the_first() -> None:
    answers = [OwnAnswer([1], [9, 5, 6], None, "stop", {}), OwnAnswer([1], [5, 7, 7], None, "stop", {})]
    assert coverage(answers, torch.tensor([7, 6])) == 0.75
    assert coverage([OwnAnswer([1], [9], None, "stop", {})], torch.tensor([9])) is None


def test_losses_are_those_of_models_that_end_at_the_exits() -> None:
    model = kit.mixed(eos_token_id=EOS)
    rows = [
        {"prompt": "w1 w5", "completion": "w9 w3 w4"},
        {"prompt": "w7 w8 w9 w10", "completion": "w2"},
        {"prompt": "w44", "completion": "w3 w8"},
    ]
    sums = reference_sums(engine_of(model), {str(number): row for number, row in enumerate(rows)}, [3, 1], batch_size=2)
    losses: dict[int, list[float]] = {1: [], 3: [], 4: []}
    for row in rows:
        prompt, answer = ids(row["prompt"]), [*ids(row["completion"]), EOS]
        for layer, found in losses.items():
            with torch.no_grad():
                logits = kit.truncated(model, layer)(torch.tensor([prompt + answer])).logits[0]
            predicted = logits[len(prompt) - 1 : -1]
            found.append(float(torch.nn.functional.cross_entropy(predicted, torch.tensor(answer), reduction="sum")))
    metrics = sums.metrics()
    assert metrics["loss"] == pytest.approx(sum(losses[4]) / 9, rel=1e-5)
    assert metrics["loss_exit_1"] == pytest.approx(sum(losses[1]) / 9, rel=1e-5)
    assert metrics["loss_exit_3"] == pytest.approx(sum(losses[3]) / 9, rel=1e-5)
    assert sums.metrics([1])["loss_exit_3"] == pytest.approx(losses[3][1] / 2, rel=1e-5)
    assert sums.metrics([0, 2])["loss"] == pytest.approx((losses[4][0] + losses[4][2]) / 7, rel=1e-5)


def test_losses_without_an_eos_token_are_refused() -> None:
    engine = Engine(kit.mixed(), kit.word_tokenizer())
    with pytest.raises(ValueError, match="tokenizer with an EOS token"):
        reference_sums(engine, {"row 1": {"prompt": "w1", "completion": "w2"}}, [2], 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "w1 w2", "completion": "w3 w4"}, "row 7: prompt and completion have 5 tokens.* has 4 positions"),
        ({"prompt": "w1", "completion": [{"role": "assistant"}]}, "row 7: completion"),
    ],
)
def test_rows_that_cannot_be_read_whole_are_named(row: dict[str, Any], message: str) -> None:
    engine = engine_of(kit.mixed(max_position_embeddings=4))
    rows = {"row 6": {"prompt": "w1", "completion": "w2 w3"}, "row 7": row}
    with pytest.raises(ValueError, match=message):
        reference_sums(engine, rows, [2], 1)
    del rows["row 7"]
    assert reference_sums(engine, rows, [2], 1).tokens.tolist() == [3]
