"""What a user may get wrong: refused by name before any layer runs, and nothing is different afterwards."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
)

from layerskip import Engine
from tests import kit

SHORT: dict[str, Any] = {"max_new_tokens": 6}
Call = Callable[..., Any]


def generate(engine: Engine, prompts: Any, **arguments: Any) -> Any:
    return engine.generate(prompts, **arguments)


def stream(engine: Engine, prompts: Any, **arguments: Any) -> Any:
    """Asks for a stream, of which nothing is read: a mistake must be told at the call itself."""
    return engine.stream(prompts, **arguments)


BOTH = pytest.mark.parametrize("call", [generate, stream])


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """What MIX answers to the kit's prompt."""
    return kit.reference(kit.mixed(), kit.prompt_tensor())


@pytest.fixture(scope="module")
def shared_model() -> PreTrainedModel:
    return kit.mixed()


@pytest.fixture
def model(shared_model: PreTrainedModel, expected: torch.Tensor) -> Iterator[PreTrainedModel]:
    """MIX. After the test its configurations and modes are as before, and it generates as before."""
    before = state_of(shared_model)
    yield shared_model
    assert state_of(shared_model) == before
    again = expected[:, : len(kit.PROMPT) + 3]
    assert torch.equal(kit.reference(shared_model, kit.prompt_tensor(), max_new_tokens=3), again)
    result = Engine(shared_model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=3)
    assert torch.equal(result.sequences, again)


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "config": copy.deepcopy(model.config.to_dict()),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "training": [module.training for module in model.modules()],
        "forwards": [module.forward.__func__ for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    }


@contextmanager
def refused(
    model: PreTrainedModel, error: type[Exception] | tuple[type[Exception], ...], *named: str
) -> Iterator[None]:
    """Expects an error that names all of `named`, and that no layer runs before it."""
    with kit.counted_layers(model) as counts:
        with pytest.raises(error) as refusal:
            yield
        assert counts == [0] * kit.NUM_LAYERS
    assert type(refusal.value) in (ValueError, TypeError)
    for part in named:
        assert part in str(refusal.value)


# The exit layer


EXIT_LAYERS = [(0, ValueError), (-1, ValueError), (4, ValueError), (5, ValueError)]
EXIT_LAYERS += [("2", TypeError), (2.5, TypeError), (2.0, TypeError), (True, TypeError), ([2], TypeError)]


@BOTH
@pytest.mark.parametrize("strategy", ["self_speculative", "early_exit"])
@pytest.mark.parametrize(("exit_layer", "error"), EXIT_LAYERS, ids=repr)
def test_exit_layer_of_a_call(
    model: PreTrainedModel, call: Call, strategy: str, exit_layer: Any, error: type[Exception]
) -> None:
    engine = Engine(model)
    with refused(model, error, f"exit_layer={exit_layer!r}", "allowed are 1 to 3"):
        call(engine, kit.prompt_tensor(), exit_layer=exit_layer, strategy=strategy, **SHORT)


@pytest.mark.parametrize(("exit_layer", "error"), EXIT_LAYERS, ids=repr)
def test_exit_layer_of_an_engine(model: PreTrainedModel, exit_layer: Any, error: type[Exception]) -> None:
    with refused(model, error, f"exit_layer={exit_layer!r}", "allowed are 1 to 3"):
        Engine(model, exit_layer=exit_layer)


@BOTH
def test_no_exit_layer_at_all(model: PreTrainedModel, call: Call) -> None:
    engine = Engine(model)
    with refused(model, ValueError, "exit_layer=1..3", "inference/compare_exits.py"):
        call(engine, kit.prompt_tensor(), **SHORT)


@BOTH
def test_exit_layer_where_all_layers_run(model: PreTrainedModel, call: Call) -> None:
    engine = Engine(model)
    with refused(model, ValueError, "exit_layer=2", "strategy='autoregressive'"):
        call(engine, kit.prompt_tensor(), strategy="autoregressive", exit_layer=2, **SHORT)


# The draft length


DRAFT_LENGTHS = [(0, ValueError), (-1, ValueError), ("x", TypeError), ("4", TypeError), (2.5, TypeError)]
DRAFT_LENGTHS += [(True, TypeError), (False, TypeError), ([4], TypeError)]


@BOTH
@pytest.mark.parametrize(("num_draft_tokens", "error"), DRAFT_LENGTHS, ids=repr)
def test_num_draft_tokens_of_a_call(
    model: PreTrainedModel, call: Call, num_draft_tokens: Any, error: type[Exception]
) -> None:
    engine = Engine(model, exit_layer=2)
    with refused(model, error, f"num_draft_tokens={num_draft_tokens!r}", "from 1 on"):
        call(engine, kit.prompt_tensor(), num_draft_tokens=num_draft_tokens, **SHORT)


@pytest.mark.parametrize(("num_draft_tokens", "error"), DRAFT_LENGTHS, ids=repr)
def test_num_draft_tokens_of_an_engine(model: PreTrainedModel, num_draft_tokens: Any, error: type[Exception]) -> None:
    with refused(model, error, f"num_draft_tokens={num_draft_tokens!r}", "from 1 on"):
        Engine(model, exit_layer=2, num_draft_tokens=num_draft_tokens)


@BOTH
@pytest.mark.parametrize("strategy", ["autoregressive", "early_exit"])
def test_num_draft_tokens_where_nothing_is_drafted(model: PreTrainedModel, call: Call, strategy: str) -> None:
    engine = Engine(model, exit_layer=2)
    with refused(model, ValueError, "num_draft_tokens=4", f"strategy={strategy!r}"):
        call(engine, kit.prompt_tensor(), strategy=strategy, num_draft_tokens=4, **SHORT)


# Prompts


@BOTH
@pytest.mark.parametrize(
    ("prompts", "error", "named"),
    [
        (torch.zeros(1, 0, dtype=torch.long), ValueError, "prompts[0] is empty"),
        (torch.zeros(0, 3, dtype=torch.long), ValueError, "prompts is empty"),
        ([], ValueError, "prompts is empty"),
        (torch.tensor([[1, 97]]), ValueError, "prompts[0] holds token id 97; the model's vocabulary is 0 to 96"),
        (torch.tensor([[-1, 1]]), ValueError, "prompts[0] holds token id -1; the model's vocabulary is 0 to 96"),
        (torch.tensor([1, 2]), TypeError, "prompts has shape (2,)"),
        (torch.tensor([[1.0, 2.0]]), TypeError, "torch.float32"),
        ([1, 2], TypeError, "prompts[0] is a int; allowed: a string"),
        (None, TypeError, "prompts is a NoneType; allowed: a string"),
        ("text", ValueError, "the engine has no tokenizer; pass Engine(model, tokenizer) or token ids"),
        ([{"role": "user", "content": "text"}], ValueError, "the engine has no tokenizer"),
    ],
)
def test_prompts(model: PreTrainedModel, call: Call, prompts: Any, error: type[Exception], named: str) -> None:
    engine = Engine(model, exit_layer=2)
    with refused(model, error, named):
        call(engine, prompts, **SHORT)


@BOTH
def test_attention_mask_with_a_hole(model: PreTrainedModel, call: Call) -> None:
    engine = Engine(model, exit_layer=2)
    with refused(model, ValueError, "attention_mask[0] has a zero between ones"):
        call(engine, torch.tensor([[1, 2, 3]]), attention_mask=torch.tensor([[1, 0, 1]]), **SHORT)


@pytest.mark.parametrize("prompts", [torch.ones(2, 3, dtype=torch.long), torch.ones(5, 1, dtype=torch.long)], ids=len)
def test_stream_of_more_than_one_prompt(model: PreTrainedModel, prompts: torch.Tensor) -> None:
    engine = Engine(model, exit_layer=2)
    with refused(model, ValueError, f"stream takes one prompt, not {len(prompts)}", "use generate"):
        engine.stream(prompts, **SHORT)


# Lengths


@BOTH
@pytest.mark.parametrize("strategy", ["self_speculative", "autoregressive", "early_exit"])
@pytest.mark.parametrize(("prompt_tokens", "max_new_tokens"), [(10, 7), (16, 1), (17, 1), (1, 100)])
def test_more_tokens_than_learned_positions(call: Call, strategy: str, prompt_tokens: int, max_new_tokens: int) -> None:
    model = kit.build(kit.gpt2_config(n_positions=16))
    prompt = torch.ones(1, prompt_tokens, dtype=torch.long)
    engine = Engine(model, exit_layer=2)
    total = prompt_tokens + max_new_tokens
    with refused(model, ValueError, f"prompt + max_new_tokens = {total} tokens", "16 positions", "shorten the prompt"):
        call(engine, prompt, max_new_tokens=max_new_tokens, strategy=strategy)
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=6)
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(), 6))


@BOTH
def test_a_prompt_that_fills_all_learned_positions_without_a_length(call: Call) -> None:
    model = kit.build(kit.gpt2_config(n_positions=16))
    engine = Engine(model, exit_layer=2)
    with refused(model, ValueError, "16", "prompt of 16 tokens"):
        call(engine, torch.ones(1, 16, dtype=torch.long))


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def with_rope(rope_type: str) -> PreTrainedModel:
    """Returns a Llama whose rotary table is another one past 16 tokens."""
    positions = 16 if rope_type == "dynamic" else 64
    return kit.l4(max_position_embeddings=positions, rope_parameters=dict(ROPES[rope_type]))


@BOTH
@pytest.mark.parametrize("rope_type", list(ROPES))
@pytest.mark.parametrize("max_new_tokens", [7, 30])
def test_a_length_past_which_the_rotary_table_changes(call: Call, rope_type: str, max_new_tokens: int) -> None:
    model = with_rope(rope_type)
    engine = Engine(model, exit_layer=2)
    total = len(kit.PROMPT) + max_new_tokens
    with refused(model, ValueError, f"rope_type={rope_type!r}", "past 16 tokens", f"max_new_tokens = {total}"):
        call(engine, kit.prompt_tensor(), max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("rope_type", list(ROPES))
def test_up_to_that_length_the_model_is_followed(rope_type: str) -> None:
    model = with_rope(rope_type)
    expected = kit.reference(model, kit.prompt_tensor(), 6)
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=6)
    assert torch.equal(result.sequences, expected)


def test_other_rotary_types_go_as_far_as_transformers_lets_them() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    model = kit.l4(max_position_embeddings=16, rope_parameters=rope)
    expected = kit.reference(model, kit.prompt_tensor())
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(result.sequences, expected)


@BOTH
@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"max_new_tokens": 0}, ValueError, ["max_new_tokens", "0"]),
        ({"max_new_tokens": -1}, ValueError, ["max_new_tokens", "-1"]),
        ({"max_new_tokens": 2.5}, TypeError, ["max_new_tokens=2.5", "integer"]),
        ({"max_length": 10}, ValueError, ["max_length=10", "prompt of 10 tokens"]),
        ({"max_new_token": 5}, TypeError, ["max_new_token=5", "GenerationConfig"]),
        ({"do_sample": True}, ValueError, ["do_sample=True", "do_sample=False"]),
        ({"num_beams": 3}, ValueError, ["num_beams=3", "num_beams=1"]),
        ({"generation_config": {"max_new_tokens": 5}}, TypeError, ["generation_config", "dict", "GenerationConfig"]),
        ({"generation_config": GenerationConfig(num_beams=3)}, ValueError, ["num_beams=3"]),
    ],
    ids=str,
)
def test_generation_settings(
    model: PreTrainedModel, call: Call, arguments: dict[str, Any], error: type[Exception], named: list[str]
) -> None:
    engine = Engine(model, exit_layer=2)
    with refused(model, error, *named):
        call(engine, kit.prompt_tensor(), **arguments)


# Strategy, cache, generator


@BOTH
@pytest.mark.parametrize("strategy", ["speculative", "self-speculative", "", None, 1, ["early_exit"]], ids=repr)
def test_an_unknown_strategy(model: PreTrainedModel, call: Call, strategy: Any) -> None:
    engine = Engine(model, exit_layer=2)
    named = [f"strategy={strategy!r}", "self_speculative", "autoregressive", "early_exit"]
    with refused(model, (TypeError, ValueError), *named):
        call(engine, kit.prompt_tensor(), strategy=strategy, **SHORT)


@BOTH
@pytest.mark.parametrize("name", ["cache", "generator"])
def test_what_is_not_supported_yet(model: PreTrainedModel, call: Call, name: str) -> None:
    engine = Engine(model, exit_layer=2)
    value = DynamicCache() if name == "cache" else torch.Generator()
    with refused(model, (TypeError, ValueError), f"{name}="):
        call(engine, kit.prompt_tensor(), **{name: value}, **SHORT)


# The model


@BOTH
@pytest.mark.parametrize("strategy", ["self_speculative", "autoregressive", "early_exit"])
def test_a_model_in_train_mode(expected: torch.Tensor, call: Call, strategy: str) -> None:
    model = kit.mixed().train()
    engine = Engine(model, exit_layer=2)
    with refused(model, ValueError, "train mode", "call model.eval()"):
        call(engine, kit.prompt_tensor(), strategy=strategy, **SHORT)
    assert all(module.training for module in model.modules())
    model.eval()
    assert torch.equal(engine.generate(kit.prompt_tensor(), max_new_tokens=24).sequences, expected)


@BOTH
@pytest.mark.parametrize("part", ["model.layers.0", "model.layers.3.mlp", "model.norm", "lm_head"])
def test_one_part_in_train_mode(expected: torch.Tensor, call: Call, part: str) -> None:
    model = kit.mixed()
    model.get_submodule(part).train()
    before = state_of(model)
    engine = Engine(model, exit_layer=2)
    with refused(model, ValueError, "train mode", "call model.eval()"):
        call(engine, kit.prompt_tensor(), **SHORT)
    assert state_of(model) == before
    model.eval()
    assert torch.equal(engine.generate(kit.prompt_tensor(), max_new_tokens=24).sequences, expected)


@pytest.mark.parametrize(
    "made",
    [
        lambda: LlamaModel(kit.llama_config()).eval(),
        lambda: LlamaForSequenceClassification(kit.llama_config(pad_token_id=0)).eval(),
        lambda: torch.nn.Linear(2, 2),
        lambda: "HuggingFaceTB/SmolLM2-135M",
        lambda: None,
    ],
    ids=["no head", "another head", "no transformers model", "a name", "None"],
)
def test_what_is_no_causal_language_model(made: Callable[[], Any]) -> None:
    value = made()
    with pytest.raises((TypeError, ValueError), match=rf"model.*{re.escape(type(value).__name__)}"):
        Engine(value)


@pytest.mark.parametrize("implementation", ["eager", "flash_attention_2"])
@pytest.mark.parametrize("strategy", ["self_speculative", "autoregressive"])
def test_another_attention_implementation_after_the_engine_was_made(strategy: str, implementation: str) -> None:
    """transformers lets it be switched at any time; masks made for another one would be wrong without a word."""
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    model.config._attn_implementation = implementation
    if implementation == "flash_attention_2":
        with refused(model, ValueError, "attn_implementation='flash_attention_2'", "sdpa", "eager"):
            engine.generate(kit.prompt_tensor(), max_new_tokens=24, strategy=strategy)
    else:
        result = engine.generate(kit.prompt_tensor(), max_new_tokens=24, strategy=strategy)
        assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor()))


# Afterwards


def test_an_engine_goes_on_after_any_number_of_refusals(model: PreTrainedModel, expected: torch.Tensor) -> None:
    engine = Engine(model, exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    for arguments in ({"exit_layer": 9}, {"num_draft_tokens": 0}, {"strategy": "x"}, {"do_sample": True}, {"cache": 1}):
        with refused(model, ValueError):
            engine.generate(kit.prompt_tensor(), **SHORT, **arguments)
    second = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(first.sequences, expected) and torch.equal(second.sequences, expected)
    assert first.statistics.acceptance_histogram == second.statistics.acceptance_histogram


def test_a_stream_that_is_dropped_in_the_middle_leaves_the_engine_as_it_was(
    model: PreTrainedModel, expected: torch.Tensor
) -> None:
    engine = Engine(model, exit_layer=2)
    events = engine.stream(kit.prompt_tensor(), max_new_tokens=24)
    next(events)
    next(events)
    events.close()
    assert torch.equal(engine.generate(kit.prompt_tensor(), max_new_tokens=24).sequences, expected)


def test_a_layer_that_fails_in_the_middle_leaves_the_engine_as_it_was(
    model: PreTrainedModel, expected: torch.Tensor
) -> None:
    engine = Engine(model, exit_layer=2)
    calls = []

    def fail(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        calls.append(module)
        if len(calls) == 4:
            raise KeyboardInterrupt

    handle = kit.layers_of(model)[3].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    handle.remove()
    assert torch.equal(engine.generate(kit.prompt_tensor(), max_new_tokens=24).sequences, expected)


@pytest.mark.parametrize("exit_layer", [None, 1])
def test_a_model_of_one_layer_has_no_exit(exit_layer: int | None) -> None:
    model = kit.build(kit.llama_config(num_hidden_layers=1))
    engine = Engine(model)
    with pytest.raises(ValueError, match="single layer, which cannot draft for itself; use strategy='autoregressive'"):
        engine.generate(kit.prompt_tensor(), max_new_tokens=4, exit_layer=exit_layer)
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=4, strategy="autoregressive")
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(), max_new_tokens=4))
