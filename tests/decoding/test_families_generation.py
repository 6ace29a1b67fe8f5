"""Every supported family generates in a batch, greedily and by drawing, with each strategy."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine
from layerskip.model.families import FAMILIES
from tests import kit

# The longest passes the window of the families that have one; the shortest enters it while it grows.
PROMPTS = [kit.PROMPT, [8, 20, 31, 60], [50, 3]]
WIDTH = max(len(prompt) for prompt in PROMPTS)
IDS = torch.tensor([[0] * (WIDTH - len(prompt)) + prompt for prompt in PROMPTS])
MASK = torch.tensor([[0] * (WIDTH - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
TOP_K = 5
STRATEGIES = ("self_speculative", "autoregressive", "early_exit")


def answering(model: PreTrainedModel, strategy: str) -> PreTrainedModel:
    """Returns the model whose output a strategy gives."""
    return kit.truncated(model, kit.EXIT_LAYER) if strategy == "early_exit" else model


def test_all_supported_families_are_tested_here() -> None:
    assert set(kit.CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", kit.CONFIGS)
def test_greedy_rows_are_those_of_the_model_alone(family: str, strategy: str) -> None:
    model = kit.graded(family, "some")
    engine = Engine(model, exit_layer=kit.EXIT_LAYER)
    result = engine.generate(IDS, attention_mask=MASK, max_new_tokens=16, strategy=strategy)
    reference = answering(model, strategy)
    for prompt, new in zip(PROMPTS, result.new_token_ids, strict=True):
        assert new == kit.reference(reference, kit.prompt_tensor(prompt), 16)[0, len(prompt) :].tolist()
        assert new == kit.without_cache(reference, prompt, 16)
    statistics = result.statistics
    processed = sum(map(len, PROMPTS)) + statistics.draft_tokens_processed + statistics.rounds
    assert statistics.early_layer_tokens == processed
    assert statistics.late_layer_tokens == (0 if strategy == "early_exit" else processed)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", kit.CONFIGS)
def test_drawn_rows_are_possible_and_follow_from_the_generator(family: str, strategy: str) -> None:
    model = kit.graded(family, "some")
    engine = Engine(model, exit_layer=kit.EXIT_LAYER)

    def drawn(seed: int) -> list[list[int]]:
        return engine.generate(
            IDS,
            attention_mask=MASK,
            max_new_tokens=16,
            strategy=strategy,
            do_sample=True,
            temperature=1.5,
            top_k=TOP_K,
            generator=torch.Generator().manual_seed(seed),
        ).new_token_ids

    first = drawn(1)
    assert drawn(1) == first != drawn(2)
    reference = answering(model, strategy)
    for prompt, new in zip(PROMPTS, first, strict=True):
        assert len(new) == 16 and all(0 <= token < kit.VOCAB for token in new)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + new]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        least = logits.topk(TOP_K).values[:, -1]
        # Rounding may order two logits the other way in a batch.
        assert (logits[torch.arange(16), torch.tensor(new)] >= least - 1e-4).all()
    # Not the best token all the time.
    assert first != engine.generate(IDS, attention_mask=MASK, max_new_tokens=16, strategy=strategy).new_token_ids


@pytest.mark.parametrize("family", kit.CONFIGS)
def test_drawing_from_one_token_is_greedy(family: str) -> None:
    engine = Engine(kit.graded(family, "some"), exit_layer=kit.EXIT_LAYER)
    greedy = engine.generate(IDS, attention_mask=MASK, max_new_tokens=16)
    drawn = engine.generate(IDS, attention_mask=MASK, max_new_tokens=16, do_sample=True, top_k=1)
    assert torch.equal(drawn.sequences, greedy.sequences)
    assert drawn.statistics.accepted == greedy.statistics.accepted
