"""Greedy self-speculation gives the very tokens of plain greedy decoding."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine
from layerskip.comparison.audit import first_difference
from layerskip.model.cache import SharedCacheLayer
from tests import kit

GRADES = ("none", "some", "all")


@pytest.fixture(scope="module", params=[(family, grade) for family in ("llama", "gemma2") for grade in GRADES], ids=str)
def graded(request: pytest.FixtureRequest) -> Iterator[tuple[str, PreTrainedModel, list[int]]]:
    """A model of known acceptance and the tokens that `generate` gives, varied enough to mean something."""
    family, grade = request.param
    model = kit.graded(family, grade)
    expected = kit.reference(model, kit.prompt_tensor())[0].tolist()
    assert len(set(expected[len(kit.PROMPT) :])) >= 6
    yield grade, model, expected


@pytest.mark.parametrize(
    ("exit_layer", "num_draft_tokens"),
    [
        *((kit.EXIT_LAYER, length) for length in range(1, 9)),
        *((other, length) for other in (1, 3) for length in (1, 5)),
    ],
)
def test_equals_generate_at_every_exit_and_draft_length(
    graded: tuple[str, PreTrainedModel, list[int]], exit_layer: int, num_draft_tokens: int
) -> None:
    grade, model, expected = graded
    result = Engine(model).generate(
        kit.prompt_tensor(), max_new_tokens=24, exit_layer=exit_layer, num_draft_tokens=num_draft_tokens
    )
    assert result.sequences[0].tolist() == expected
    rate = result.statistics.draft_acceptance_rate
    assert rate is not None
    if grade == "none":
        assert rate == 0
    elif grade == "all" and exit_layer >= kit.EXIT_LAYER:
        assert rate == 1
    elif exit_layer == kit.EXIT_LAYER:
        assert 0 < rate < 1


@pytest.mark.parametrize(("factor", "num_draft_tokens"), [(1.0, 4), (0.4, 1), (0.4, 8), (0.0, 8)])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2"])
def test_other_families_equal_generate(family: str, factor: float, num_draft_tokens: int) -> None:
    model = kit.scale_late_layers(kit.build(kit.CONFIGS[family]()), factor)
    expected = kit.reference(model, kit.prompt_tensor())[0].tolist()
    assert len(set(expected[len(kit.PROMPT) :])) >= 6
    engine = Engine(model, exit_layer=2)
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24, num_draft_tokens=num_draft_tokens)
    assert result.sequences[0].tolist() == expected
    rate = result.statistics.draft_acceptance_rate
    assert rate is not None
    assert rate == 1 if factor == 0 else 0 < rate < 1


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_equals_an_argmax_loop_without_a_cache(family: str) -> None:
    model = kit.scale_late_layers(kit.build(kit.CONFIGS[family]()), 0.3)
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=24)
    assert result.sequences[0, len(kit.PROMPT) :].tolist() == kit.without_cache(model, kit.PROMPT)


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_autoregressive_strategy_equals_generate(family: str) -> None:
    model = kit.build(kit.CONFIGS[family]())
    expected = kit.reference(model, kit.prompt_tensor())
    result = Engine(model).generate(kit.prompt_tensor(), max_new_tokens=24, strategy="autoregressive")
    assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_early_exit_strategy_equals_the_truncated_model(family: str) -> None:
    model = kit.build(kit.CONFIGS[family]())
    short = kit.truncated(model, 2)
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=24, strategy="early_exit")
    assert torch.equal(result.sequences, kit.reference(short, kit.prompt_tensor()))
    assert result.statistics.late_layer_tokens == 0


def test_fifty_random_models_equal_generate() -> None:
    for seed in range(50):
        model = kit.mixed(seed)
        expected = kit.reference(model, kit.prompt_tensor(), max_new_tokens=12)
        result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=12)
        assert torch.equal(result.sequences, expected), f"seed {seed}"


@pytest.mark.parametrize("length", [4, 5, 6, 7, 10])
@pytest.mark.parametrize(
    ("family", "implementation"),
    [("qwen3", "sdpa"), ("qwen3", "eager"), ("gemma2", "eager"), ("gemma3_text", "sdpa"), ("gemma3_text", "eager")],
)
def test_exact_around_and_past_a_sliding_window(family: str, implementation: str, length: int) -> None:
    config = kit.CONFIGS[family](attn_implementation=implementation)
    model = kit.scale_late_layers(kit.build(config), 0.3)
    assert model.config._attn_implementation == implementation
    prompt = kit.PROMPT[:length]
    expected = kit.reference(model, kit.prompt_tensor(prompt))[0, length:].tolist()
    assert kit.is_greedy(model, prompt, expected)
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(prompt), max_new_tokens=24)
    assert result.sequences[0, length:].tolist() == expected


@pytest.mark.parametrize("prompt", [[10], [10, 7]], ids=["one token", "two tokens"])
def test_shortest_prompts(prompt: list[int]) -> None:
    for make in (kit.l4, kit.mixed, kit.identical):
        model = make()
        result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(prompt), max_new_tokens=24)
        assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(prompt)))


def test_logits_of_emitted_tokens_are_those_of_generate() -> None:
    model = kit.graded("gemma2", "some")
    ours = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=8, output_logits=True)
    theirs = model.generate(
        kit.prompt_tensor(), max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    assert ours.logits is not None
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-5, rtol=0)


@pytest.mark.parametrize("grade", GRADES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rows_of_a_batch_equal_their_solo_runs(family: str, grade: str) -> None:
    model = kit.graded(family, grade)
    prompts = [kit.PROMPT, kit.PROMPT[4:], kit.PROMPT[:1], [8, 20, 31, 60, 2, 9, 77, 12]]
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    engine = Engine(model, exit_layer=2)
    batch = engine.generate(ids, attention_mask=mask, max_new_tokens=16)
    for row, prompt in enumerate(prompts):
        solo = kit.reference(model, kit.prompt_tensor(prompt), max_new_tokens=16)
        assert batch.sequences[row, width:].tolist() == solo[0, len(prompt) :].tolist()
    assert torch.equal(batch.sequences, kit.reference(model, ids, max_new_tokens=16, attention_mask=mask))


def test_rows_that_end_early_hold_padding_and_leave_the_rest_alone() -> None:
    model = kit.mixed()
    prompts = torch.tensor([kit.PROMPT, [8, 20, 31, 60, 2, 9, 77, 12, 4, 4], [50, 3, 11, 90, 41, 6, 7, 8, 2, 1]])
    plain = kit.reference(model, prompts)[:, prompts.shape[1] :]
    eos = int(plain[0, 3])
    expected = kit.reference(model, prompts, eos_token_id=eos)
    result = Engine(model, exit_layer=2).generate(prompts, max_new_tokens=24, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(result.sequences, expected)
    assert result.finish_reasons[0] == "stop"


def _in_bf16(model: PreTrainedModel, ids: torch.Tensor, **arguments: Any) -> tuple[list[int], torch.Tensor]:
    plain = model.generate(
        ids, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0, **arguments
    )
    return plain.sequences[0, ids.shape[1] :].tolist(), torch.cat(plain.logits)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bf16_differs_from_generate_at_near_ties_only(family: str) -> None:
    compared = 0
    for seed in range(12):
        model = kit.scale_late_layers(kit.build(kit.CONFIGS[family](), seed), 0.3).to(torch.bfloat16)
        ids = kit.prompt_tensor()
        reference, logits = _in_bf16(model, ids, max_new_tokens=24)
        result = Engine(model, exit_layer=2).generate(ids, max_new_tokens=24)
        difference = first_difference(reference, result.sequences[0, ids.shape[1] :].tolist(), logits, torch.bfloat16)
        assert difference is None or difference.is_near_tie, f"seed {seed}: {difference}"
        compared += 24 if difference is None else difference.position
    assert compared > 100


def test_the_bf16_audit_flags_a_corrupted_cache_row(monkeypatch: pytest.MonkeyPatch) -> None:
    intact = SharedCacheLayer.update

    def corrupted(layer: SharedCacheLayer, *states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = intact(layer, *states, **kwargs)
        values[:, :, 5] = 3.0
        return keys, values

    flagged = 0
    for seed in range(4):
        model = kit.mixed(seed).to(torch.bfloat16)
        ids = kit.prompt_tensor()
        reference, logits = _in_bf16(model, ids, max_new_tokens=24)
        with monkeypatch.context() as patch:
            patch.setattr(SharedCacheLayer, "update", corrupted)
            result = Engine(model, exit_layer=2).generate(ids, max_new_tokens=24)
        difference = first_difference(reference, result.sequences[0, ids.shape[1] :].tolist(), logits, torch.bfloat16)
        assert difference is not None
        flagged += not difference.is_near_tie
    assert flagged == 4


def test_a_mask_of_ones_and_no_mask_are_the_same() -> None:
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    ids = kit.prompt_tensor()
    without = engine.generate(ids, max_new_tokens=24).sequences
    assert torch.equal(engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24).sequences, without)


def test_a_tokenizer_smaller_than_the_vocabulary_changes_nothing() -> None:
    model = kit.mixed()
    engine = Engine(model, kit.word_tokenizer(), exit_layer=2)
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    assert max(result.sequences[0].tolist()) >= 90
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor()))


def test_a_head_exchanged_after_the_engine_was_made_is_used() -> None:
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    model.set_output_embeddings(kit.build(kit.llama_config(), seed=7).get_output_embeddings())
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor()))


def test_a_dynamic_rotary_table_stretched_by_an_earlier_call_is_reset() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = kit.scale_late_layers(kit.build(kit.llama_config(max_position_embeddings=24, rope_parameters=rope)), 0.3)
    expected = kit.reference(model, kit.prompt_tensor(), max_new_tokens=14)
    kit.reference(model, kit.prompt_tensor(), max_new_tokens=40)
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=14)
    assert torch.equal(result.sequences, expected)


def test_threads_with_different_exits_on_one_model_do_not_disturb_each_other() -> None:
    model = kit.mixed()
    expected = kit.reference(model, kit.prompt_tensor(), max_new_tokens=40)
    engine = Engine(model)

    def generate(exit_layer: int) -> torch.Tensor:
        return engine.generate(kit.prompt_tensor(), max_new_tokens=40, exit_layer=exit_layer).sequences

    with ThreadPoolExecutor(3) as threads:
        for sequences in threads.map(generate, [1, 2, 3, 1, 2, 3]):
            assert torch.equal(sequences, expected)


@pytest.mark.cuda
def test_equals_generate_on_cuda() -> None:
    model = kit.mixed().to("cuda")
    ids = kit.prompt_tensor().to("cuda")
    result = Engine(model, exit_layer=2).generate(ids, max_new_tokens=24)
    assert torch.equal(result.sequences, kit.reference(model, ids))
