"""PEFT models with their adapters on: the engine and the hook give what the PEFT model's own `generate` gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaModel

import layerskip
from layerskip import Engine
from layerskip.comparison.audit import first_difference
from layerskip.training.clock import Clock
from layerskip.training.exit_settings import ExitSettings
from layerskip.training.layer_dropout import DropoutSettings, layer_dropout
from layerskip.training.objective import exit_objective
from tests import kit

TARGETS = ["q_proj", "v_proj", "down_proj"]
# Rows of 10, 6 and 10 tokens, padded on the left.
IDS = torch.tensor([kit.PROMPT, [0] * 4 + kit.PROMPT[4:], [8, 20, 31, 60, 2, 9, 77, 12, 4, 4]])
MASK = torch.tensor([[1] * 10, [0] * 4 + [1] * 6, [1] * 10])
GREEDY: dict[str, Any] = {"attention_mask": MASK, "do_sample": False, "pad_token_id": 0, "max_new_tokens": 8}


def lora(**settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **settings})


def randomised(model: Any, seed: int = 1) -> Any:
    """Gives what is trainable in a PEFT model other, random values, and returns the model in eval mode."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


def adapted(config: peft.PeftConfig, **loading: Any) -> Any:
    return randomised(peft.get_peft_model(kit.mixed(**loading), config))


@cache
def with_lora() -> Any:
    """A PEFT model that tests share, so that none may change it."""
    return adapted(lora())


@pytest.fixture(scope="module")
def off() -> torch.Tensor:
    """What MIX answers without adapters."""
    return kit.mixed().generate(IDS, **GREEDY)


def by_engine(model: Any) -> torch.Tensor:
    return Engine(model, exit_layer=2).generate(IDS, **GREEDY).sequences


def by_hook(model: Any) -> torch.Tensor:
    return model.generate(input_ids=IDS, custom_generate=layerskip.self_speculative(exit_layer=2), **GREEDY)


BOTH = pytest.mark.parametrize("answer", [by_engine, by_hook])
Answer = Callable[[Any], torch.Tensor]

KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lora,
    "DoRA": lambda: lora(use_dora=True),
    "embedding and head": lambda: lora(target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "copies of embedding, norm and head": lambda: lora(modules_to_save=["embed_tokens", "norm", "lm_head"]),
    "single tokens": lambda: lora(trainable_token_indices=[1, 5, 9]),
    "more layers": lambda: lora(layer_replication=[[0, 3], [2, 4]]),
    "IA3": lambda: peft.IA3Config(
        target_modules=["v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
        task_type="CAUSAL_LM",
    ),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "adaption prompts": lambda: peft.AdaptionPromptConfig(
        target_modules="self_attn", adapter_len=4, adapter_layers=3, task_type="CAUSAL_LM"
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_tokens_are_those_of_the_peft_models_own_generate(kind: str, off: torch.Tensor) -> None:
    model = adapted(KINDS[kind]())
    expected = model.generate(input_ids=IDS, **GREEDY)
    assert not torch.equal(expected, off) and len(expected[:, 10:].unique()) > 5
    assert torch.equal(by_engine(model), expected)
    assert torch.equal(by_hook(model), expected)


def test_layers_are_counted_as_without_adapters() -> None:
    engine = Engine(with_lora(), exit_layer=2)
    with kit.counted_layers(engine.model) as counts:
        statistics = engine.generate(kit.prompt_tensor(), max_new_tokens=24).statistics
    assert 0 < statistics.accepted < statistics.drafted
    assert counts == [statistics.early_layer_tokens] * 2 + [statistics.late_layer_tokens] * 2
    assert statistics.emitted == 24


def test_the_exit_is_that_of_the_model_with_adapters_cut_at_the_exit_layer() -> None:
    cut = kit.truncated(copy.deepcopy(with_lora()).merge_and_unload(), 2)
    expected = cut.generate(IDS, output_logits=True, return_dict_in_generate=True, **GREEDY)
    result = Engine(with_lora(), exit_layer=2).generate(IDS, strategy="early_exit", output_logits=True, **GREEDY)
    assert torch.equal(result.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@BOTH
def test_the_model_is_as_it_was_afterwards(answer: Answer) -> None:
    model = with_lora()

    def state() -> dict[str, Any]:
        return {
            "modes": [module.training for module in model.modules()],
            "attributes": [sorted(vars(module)) for module in model.modules()],
            "trainable": [weight.requires_grad for weight in model.parameters()],
            "adapters": (model.active_adapters, [str(each) for each in model.get_layer_status()]),
            "config": model.config.to_dict(),
        }

    model.generate(input_ids=IDS, **GREEDY)  # which leaves an attribute of its own
    before, weights = state(), {name: weight.clone() for name, weight in model.state_dict().items()}
    answer(model)
    assert state() == before
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


@pytest.fixture(scope="module")
def two_adapters() -> Iterator[Any]:
    """A PEFT model with the adapters "default", on, and "other"."""
    model = adapted(lora())
    model.add_adapter("other", lora(target_modules=["o_proj", "gate_proj"], init_lora_weights=False))
    model.eval()
    yield model
    assert model.active_adapters == ["default"]


@BOTH
def test_what_is_switched_on_bears_on_the_next_call(two_adapters: Any, answer: Answer, off: torch.Tensor) -> None:
    model, engine = two_adapters, Engine(two_adapters, exit_layer=2)

    def both() -> torch.Tensor:
        given = engine.generate(IDS, **GREEDY).sequences if answer is by_engine else answer(model)
        assert torch.equal(given, model.generate(input_ids=IDS, **GREEDY))
        return given

    first = both()
    model.set_adapter("other")
    second = both()
    with model.disable_adapter():
        assert torch.equal(both(), off)
    assert torch.equal(both(), second)
    model.set_adapter("default")
    assert torch.equal(both(), first)
    assert not torch.equal(first, second) and not torch.equal(first, off) and not torch.equal(second, off)


def test_the_engines_model_is_the_causal_lm_beneath() -> None:
    model = with_lora()
    assert Engine(model).model is Engine(model.get_base_model()).model is model.get_base_model()


@BOTH
def test_adapters_of_different_kinds_go_together(answer: Answer, off: torch.Tensor) -> None:
    model = peft.get_peft_model(kit.mixed(), lora(), mixed=True)
    model.add_adapter("other", peft.LoHaConfig(r=4, target_modules=["o_proj"]))
    model.set_adapter(["default", "other"])
    expected = randomised(model).generate(IDS, **GREEDY)
    assert torch.equal(answer(model), expected) and not torch.equal(expected, off)


def test_fp32_adapters_on_a_bf16_model_differ_from_generate_in_near_ties_alone() -> None:
    model = randomised(peft.get_peft_model(kit.mixed().bfloat16(), lora()))
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16, torch.float32}
    expected = model.generate(input_ids=IDS, output_logits=True, return_dict_in_generate=True, **GREEDY)
    for answer in (by_engine, by_hook):
        for row, sequence in enumerate(answer(model).tolist()):
            logits = torch.stack([step[row] for step in expected.logits])
            reference = expected.sequences[row].tolist()
            difference = first_difference(reference[10:], sequence[10:], logits, torch.bfloat16)
            assert difference is None or difference.is_near_tie


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"target_modules": ["lm_head"]}, r"lora\.layer\.Linear"), ({"modules_to_save": ["lm_head"]}, "ModulesToSave")],
)
def test_a_trimmed_draft_head_over_an_adapted_head_is_refused(settings: dict[str, Any], named: str) -> None:
    engine = Engine(adapted(lora(**settings)), exit_layer=2, draft_token_ids=torch.arange(20))
    with pytest.raises(ValueError, match=rf"draft_vocab_size=20 .*{named}.*draft_vocab_size=97"):
        engine.generate(IDS, **GREEDY)
    expected = engine.model.generate(IDS, **GREEDY)
    assert torch.equal(engine.generate(IDS, draft_vocab_size=97, **GREEDY).sequences, expected)


@pytest.mark.parametrize(
    "settings", [{"target_modules": ["q_proj", "embed_tokens"]}, {"trainable_token_indices": [1, 2]}]
)
def test_a_trimmed_draft_head_under_an_adapted_embedding_is_that_of_a_plain_head(settings: dict[str, Any]) -> None:
    engine = Engine(adapted(lora(**settings)), exit_layer=2, draft_token_ids=torch.arange(0, kit.VOCAB, 2))
    found = engine.generate(IDS, **GREEDY)
    assert torch.equal(found.sequences, engine.model.generate(IDS, **GREEDY))
    assert found.statistics.accepted > 0


# Training


def test_the_loss_and_layer_dropout_take_a_peft_model() -> None:
    inputs = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}

    def loss_of(given: Any) -> torch.Tensor:
        with ExitStack() as stack:
            clock = Clock(total_steps=4)
            stack.enter_context(layer_dropout(given, DropoutSettings(p_max=0.5), clock, seed=1))
            stack.enter_context(exit_objective(given, ExitSettings(exit_layers=(1, 2), weights="equal"), clock))
            return model(**inputs).loss

    model = adapted(lora()).train()
    loss = loss_of(model)
    assert torch.equal(loss, loss_of(model.get_base_model()))
    loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.requires_grad)
    assert model(**inputs).logits.shape == (3, 10, kit.VOCAB)


# What is refused


def refused(model: Any, answer: Answer, error: type[Exception], match: str) -> None:
    """Checks that an answer is refused before any layer runs."""
    with kit.counted_layers(model.get_base_model()) as counts, pytest.raises(error, match=match):
        answer(model)
    assert counts == [0] * kit.NUM_LAYERS


@BOTH
@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig, peft.PromptEncoderConfig])
def test_virtual_tokens(kind: Any, answer: Answer) -> None:
    model = adapted(kind(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    name = model.active_peft_config.peft_type.value
    refused(model, answer, ValueError, rf"'default' \(peft_type='{name}'\) are virtual tokens.*get_base_model\(\)")
    base = model.get_base_model()
    assert torch.equal(by_engine(base), base.generate(IDS, **GREEDY))


STATEFUL: dict[str, tuple[Callable[[], peft.PeftConfig], str]] = {
    "aLoRA": (lambda: lora(alora_invocation_tokens=[3, 3]), "'LORA'.* begin where alora_invocation_tokens stand"),
    "sampling PVeRA": (
        lambda: peft.PveraConfig(r=4, target_modules=["q_proj"], sample_at_inference=True, task_type="CAUSAL_LM"),
        r"'PVERA'.* draw random numbers \(sample_at_inference=True\)",
    ),
    "Poly": (lambda: peft.PolyConfig(target_modules=TARGETS, task_type="CAUSAL_LM"), "'POLY'.* task ids of each row"),
    "Shadow": (lambda: peft.ShadowConfig(task_type="CAUSAL_LM"), "'SHADOW'.* second state from layer to layer"),
}


@BOTH
@pytest.mark.parametrize("kind", list(STATEFUL))
def test_adapters_that_need_more_than_the_inputs_of_their_layers(kind: str, answer: Answer) -> None:
    config, message = STATEFUL[kind]
    refused(adapted(config()), answer, ValueError, rf"'default' \(peft_type={message}.*own generate")


@BOTH
def test_adapters_that_scale_each_other_by_a_pass_of_their_own(tmp_path: Path, answer: Answer) -> None:
    with_lora().save_pretrained(tmp_path)
    config = peft.XLoraConfig(hidden_size=32, adapters={"0": str(tmp_path), "1": str(tmp_path)}, task_type="CAUSAL_LM")
    model = peft.get_peft_model(kit.mixed(use_cache=False), config).eval()
    refused(model, answer, ValueError, r"peft_type='XLORA'\) are scaled by a pass of their own")


@BOTH
def test_such_adapters_may_be_there_as_long_as_they_are_off(answer: Answer, off: torch.Tensor) -> None:
    poly = adapted(STATEFUL["Poly"][0]())
    with poly.disable_adapter():
        assert torch.equal(by_engine(poly), off)
    model = adapted(lora(alora_invocation_tokens=[3, 3]))
    with model.disable_adapter():
        assert torch.equal(answer(model), off)
    model.add_adapter("other", lora(init_lora_weights=False))
    model.set_adapter("other")
    assert torch.equal(answer(model.eval()), model.generate(input_ids=IDS, **GREEDY))


def test_an_adapter_for_each_row(two_adapters: Any) -> None:
    names = ["default", "other", "__base__"]
    hook = layerskip.self_speculative(exit_layer=2)
    with pytest.raises(ValueError, match=r"adapter_names=\['default', 'other', '__base__'\] .*set_adapter"):
        two_adapters.generate(input_ids=IDS, adapter_names=names, custom_generate=hook, **GREEDY)


def test_adapters_in_train_mode_as_peft_makes_them() -> None:
    with pytest.raises(ValueError, match=r"is in train mode.*call model\.eval\(\)"):
        by_engine(peft.get_peft_model(kit.mixed(), lora(lora_dropout=0.1)))


def test_a_peft_model_around_something_else() -> None:
    with pytest.raises(ValueError, match="model is a LlamaModel, which has no language-model head"):
        Engine(peft.get_peft_model(LlamaModel(kit.llama_config()), lora(task_type="FEATURE_EXTRACTION")))
