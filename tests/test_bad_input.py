"""What a user may get wrong: refused by name before any layer runs, and nothing is different afterwards."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
)
from transformers.generation import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import (
    ClassifierFreeGuidanceLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WhisperNoSpeechDetection,
)
from transformers.generation.streamers import BaseStreamer

from layerskip import Engine
from layerskip.model.cache import CachedTokens
from tests import kit

pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default")

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
    with refused(model, ValueError, f"stream takes one prompt and gives one row, not {len(prompts)}", "use generate"):
        engine.stream(prompts, **SHORT)


# Lengths


@BOTH
@pytest.mark.parametrize("strategy", ["self_speculative", "autoregressive", "early_exit"])
def test_more_tokens_than_learned_positions(call: Call, strategy: str) -> None:
    model = kit.build(kit.gpt2_config(n_positions=16))
    engine = Engine(model, exit_layer=2)
    for prompt_tokens, max_new_tokens in [(10, 7), (16, 1), (17, 1), (1, 100)]:
        prompt = torch.ones(1, prompt_tokens, dtype=torch.long)
        total = f"prompt + max_new_tokens = {prompt_tokens + max_new_tokens} tokens"
        with refused(model, ValueError, total, "16 positions", "shorten the prompt"):
            call(engine, prompt, max_new_tokens=max_new_tokens, strategy=strategy)
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=6)
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(), 6))


@BOTH
def test_a_prompt_that_fills_all_learned_positions_without_a_length(call: Call) -> None:
    model = kit.build(kit.gpt2_config(n_positions=16))
    engine = Engine(model, exit_layer=2)
    with refused(model, ValueError, "Input length of input_ids is 16", "`max_length` is set to 16"):
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
        ({"max_length": 10}, ValueError, ["Input length of input_ids is 10", "`max_length` is set to 10"]),
        ({"max_length": 4}, ValueError, ["Input length of input_ids is 10", "`max_length` is set to 4"]),
        ({"generation_config": GenerationConfig(max_length=9)}, ValueError, ["is 10", "`max_length` is set to 9"]),
        ({"eos_token_id": []}, ValueError, ["eos_token_id=[]", "pass None"]),
        ({"repetition_penalty": -1.0}, ValueError, ["penalty", "-1.0"]),
        ({"bad_words_ids": []}, ValueError, ["bad_words_ids", "[]"]),
        ({"max_new_token": 5}, TypeError, ["max_new_token=5", "GenerationConfig"]),
        ({"temperature": 0.5}, ValueError, ["temperature=0.5", "pass do_sample=True"]),
        ({"do_sample": True, "temperature": 0.0}, ValueError, ["temperature", "0.0"]),
        ({"num_return_sequences": 2}, ValueError, ["num_return_sequences", "do_sample", "2"]),
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


# The strategy


@BOTH
@pytest.mark.parametrize("strategy", ["speculative", "self-speculative", "", None, 1, ["early_exit"]], ids=repr)
def test_an_unknown_strategy(model: PreTrainedModel, call: Call, strategy: Any) -> None:
    engine = Engine(model, exit_layer=2)
    named = [f"strategy={strategy!r}", "self_speculative", "autoregressive", "early_exit"]
    with refused(model, (TypeError, ValueError), *named):
        call(engine, kit.prompt_tensor(), strategy=strategy, **SHORT)


# The generator


@BOTH
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("generator", [0, "cpu", [torch.Generator()]], ids=["seed", "device", "list"])
def test_a_generator_of_another_type(model: PreTrainedModel, call: Call, generator: Any, do_sample: bool) -> None:
    engine = Engine(model, exit_layer=2)
    with refused(model, TypeError, f"generator is a {type(generator).__name__}, not a torch.Generator"):
        call(engine, kit.prompt_tensor(), generator=generator, do_sample=do_sample, **SHORT)


@BOTH
@pytest.mark.parametrize("strategy", ["self_speculative", "autoregressive", "early_exit"])
def test_a_generator_where_nothing_is_drawn(model: PreTrainedModel, call: Call, strategy: str) -> None:
    engine = Engine(model, exit_layer=2)
    generator = torch.Generator()
    before = generator.get_state()
    with refused(model, ValueError, "generator has no effect on greedy decoding", "do_sample=True"):
        call(engine, kit.prompt_tensor(), generator=generator, strategy=strategy, **SHORT)
    assert torch.equal(generator.get_state(), before)


# The cache of an earlier call


def cache_of(model: PreTrainedModel, prompts: torch.Tensor, strategy: str = "self_speculative") -> CachedTokens:
    """Returns what a call has cached."""
    engine = Engine(model, exit_layer=2)
    cache = engine.generate(prompts, return_cache=True, strategy=strategy, **SHORT).cache
    assert cache is not None
    return cache


@BOTH
@pytest.mark.parametrize("cache", [DynamicCache(), 1, (), "cache"], ids=lambda value: type(value).__name__)
def test_a_cache_of_another_type(model: PreTrainedModel, call: Call, cache: Any) -> None:
    engine = Engine(model, exit_layer=2)
    with refused(model, TypeError, f"cache is a {type(cache).__name__}", "return_cache=True"):
        call(engine, kit.prompt_tensor(), cache=cache, **SHORT)


@BOTH
@pytest.mark.parametrize(("held", "given"), [(1, 2), (2, 1), (2, 3)])
def test_a_cache_of_other_rows(model: PreTrainedModel, call: Call, held: int, given: int) -> None:
    engine = Engine(model, exit_layer=2)
    cache = cache_of(model, kit.prompt_tensor().expand(held, -1))
    with refused(model, ValueError, f"cache holds {held} rows, and there are {given} prompts"):
        call(engine, kit.prompt_tensor().expand(given, -1), cache=cache, **SHORT)


def test_a_cache_of_one_row_for_several_drawn_sequences(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    cache = cache_of(model, kit.prompt_tensor())
    with refused(model, ValueError, "cache holds 1 rows, and there are 2 prompts"):
        engine.generate(kit.prompt_tensor(), cache=cache, do_sample=True, num_return_sequences=2, **SHORT)


@BOTH
@pytest.mark.parametrize(
    ("first", "second", "held", "wanted"),
    [
        ("early_exit", "self_speculative", 2, 4),
        ("early_exit", "autoregressive", 2, 4),
        ("self_speculative", "early_exit", 4, 2),
        ("autoregressive", "early_exit", 4, 2),
    ],
)
def test_a_cache_of_another_depth(
    model: PreTrainedModel, call: Call, first: str, second: str, held: int, wanted: int
) -> None:
    engine = Engine(model, exit_layer=2)
    cache = cache_of(model, kit.prompt_tensor(), first)
    with refused(model, ValueError, f"cache holds {held} layers, and this call runs {wanted}", "strategy and exit"):
        call(engine, kit.prompt_tensor(), cache=cache, strategy=second, **SHORT)


@BOTH
def test_a_cache_of_another_conversation(model: PreTrainedModel, call: Call) -> None:
    engine = Engine(model, exit_layer=2)
    cache = cache_of(model, kit.prompt_tensor())
    with refused(model, ValueError, "prompts[0] begins with token 9, and the cache with 1", "another conversation"):
        call(engine, kit.prompt_tensor([9, *kit.PROMPT[1:]]), cache=cache, **SHORT)


def test_a_cache_of_which_one_row_is_of_another_conversation(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    cache = cache_of(model, torch.tensor([kit.PROMPT, kit.PROMPT[::-1]]))
    with refused(model, ValueError, "prompts[1] begins with token 1, and the cache with 44"):
        engine.generate(torch.tensor([kit.PROMPT, kit.PROMPT]), cache=cache, **SHORT)


@BOTH
def test_a_cache_that_is_refused_can_be_used_afterwards(model: PreTrainedModel, call: Call) -> None:
    engine = Engine(model, exit_layer=2)
    cache = cache_of(model, kit.prompt_tensor())
    with refused(model, ValueError, "another conversation"):
        call(engine, kit.prompt_tensor([9, 8, 7]), cache=cache, **SHORT)
    longer = kit.prompt_tensor([*cache.token_ids[0], 9, 8])
    result = engine.generate(longer, cache=cache, **SHORT)
    assert torch.equal(result.sequences, kit.reference(model, longer, 6))


# Streamers, stop strings, criteria


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value)

    def end(self) -> None:
        self.seen.append(torch.tensor([]))


@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "num_return_sequences": 2}], ids=["rows", "copies"])
def test_a_streamer_with_a_batch(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    engine = Engine(model, exit_layer=2)
    streamer = Recorder()
    rows = 2 if not arguments else 1
    with refused(model, ValueError, "streamer takes the tokens of one row, and there are 2"):
        engine.generate(kit.prompt_tensor().expand(rows, -1), streamer=streamer, **arguments, **SHORT)
    assert streamer.seen == []


def test_a_stream_of_several_drawn_sequences(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    with refused(model, ValueError, "stream takes one prompt and gives one row, not 2", "use generate"):
        engine.stream(kit.prompt_tensor(), do_sample=True, num_return_sequences=2, **SHORT)


@BOTH
@pytest.mark.parametrize("has_tokenizer", [False, True])
@pytest.mark.parametrize("strings", [[], "", ["a", ""], [5], 5, {"a": 1}], ids=repr)
def test_stop_strings_that_are_none(model: PreTrainedModel, call: Call, strings: Any, has_tokenizer: bool) -> None:
    engine = Engine(model, kit.word_tokenizer() if has_tokenizer else None, exit_layer=2)
    with refused(model, ValueError, f"stop_strings={strings!r}", "none of them empty"):
        call(engine, kit.prompt_tensor(), stop_strings=strings, **SHORT)


@BOTH
@pytest.mark.parametrize("place", ["call", "config"])
def test_stop_strings_without_a_tokenizer(model: PreTrainedModel, call: Call, place: str) -> None:
    engine = Engine(model, exit_layer=2)
    arguments: dict[str, Any] = {"stop_strings": ["a"], **SHORT}
    if place == "config":
        arguments = {"generation_config": GenerationConfig(**arguments)}
    with refused(model, ValueError, "stop_strings=['a'] need a tokenizer"):
        call(engine, kit.prompt_tensor(), **arguments)


class Verdict(StoppingCriteria):
    """Says the same at every step."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return self.value


@pytest.mark.parametrize("arguments", [{"stopping_criteria": [Verdict(False)]}, {"max_time": 5.0}, {"eos_token_id": 7}])
def test_several_rows_that_may_end_apart_need_a_padding_token(
    model: PreTrainedModel, arguments: dict[str, Any]
) -> None:
    engine = Engine(model, exit_layer=2)
    rows = kit.prompt_tensor().expand(2, -1)
    if "eos_token_id" in arguments:
        # An end-of-sequence token is one, as in `generate`.
        assert engine.generate(rows, **arguments, **SHORT).sequences.shape == (2, len(kit.PROMPT) + 6)
        return
    with refused(model, ValueError, "pad_token_id=None", "pass pad_token_id"):
        engine.generate(rows, **arguments, **SHORT)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("value", [torch.zeros(3, dtype=torch.bool), torch.zeros(2, 3)], ids=["3", "2x3"])
def test_a_criterion_whose_value_has_another_shape(model: PreTrainedModel, rows: int, value: torch.Tensor) -> None:
    """It is known only when the criterion has been asked."""
    engine = Engine(model, exit_layer=2)
    named = rf"stopping_criteria: Verdict returned a value of shape {re.escape(str(tuple(value.shape)))} .* {rows} rows"
    with pytest.raises(ValueError, match=named):
        engine.generate(
            kit.prompt_tensor().expand(rows, -1), stopping_criteria=[Verdict(value)], pad_token_id=0, **SHORT
        )
    with pytest.raises(ValueError, match=named.replace(f"{rows} rows", "1 rows")):
        next(engine.stream(kit.prompt_tensor(), stopping_criteria=[Verdict(value)], **SHORT))


def test_a_single_truth_value_for_several_rows(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    rows = kit.prompt_tensor().expand(2, -1)
    criteria = StoppingCriteriaList([Verdict(False)])
    with pytest.raises(
        ValueError, match=r"Verdict returned a value of shape \(\) .* return a bool tensor of shape \(2,\)"
    ):
        engine.generate(rows, stopping_criteria=criteria, pad_token_id=0, **SHORT)
    result = engine.generate(rows[:1], stopping_criteria=criteria, **SHORT)
    assert result.sequences.shape == (1, len(kit.PROMPT) + 6)


# Logits processors


class NeedsMore(LogitsProcessor):
    """Takes an argument that only transformers' own loops could give."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, cur_len: int) -> torch.Tensor:
        return scores


@BOTH
@pytest.mark.parametrize("processor", [NeedsMore(), 5], ids=["needs more", "an integer"])
def test_a_logits_processor_that_cannot_be_called_with_ids_and_scores(
    model: PreTrainedModel, call: Call, processor: Any
) -> None:
    engine = Engine(model, exit_layer=2)
    named = "NeedsMore" if isinstance(processor, NeedsMore) else "logits_processor holds 5"
    with refused(model, (TypeError, ValueError), named):
        call(engine, kit.prompt_tensor(), logits_processor=[processor], **SHORT)


@BOTH
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"logits_processor": [lambda ids: ids]}, "with (input_ids, scores) alone"),
        ({"logits_processor": [lambda ids, scores, more: scores]}, "with (input_ids, scores) alone"),
        ({"logits_processor": abs}, "logits_processor is a builtin_function_or_method; pass a list"),
        ({"stopping_criteria": abs}, "stopping_criteria is a builtin_function_or_method; pass a list"),
        ({"stopping_criteria": [5]}, "stopping_criteria holds 5"),
        ({"stopping_criteria": [lambda ids: False]}, "with (input_ids, scores)"),
        ({"prefix_allowed_tokens_fn": 5}, "prefix_allowed_tokens_fn=5 cannot be called"),
        ({"max_time": "x"}, "max_time='x' is a str, not a number of seconds"),
        ({"num_return_sequences": 0}, "num_return_sequences=0 is out of range"),
        ({"return_dict_in_generate": False}, "the engine's results always carry all"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_called_or_counted(
    model: PreTrainedModel, call: Call, arguments: dict[str, Any], named: str
) -> None:
    with refused(model, (TypeError, ValueError), named):
        call(Engine(model, exit_layer=2), kit.prompt_tensor(), **arguments, **SHORT)


class GuidanceOfMyOwn(UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """Is one, under another name."""


STATEFUL: list[Callable[[PreTrainedModel], LogitsProcessor]] = [
    lambda model: UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model),
    lambda model: GuidanceOfMyOwn(1.5, model),
    lambda model: ClassifierFreeGuidanceLogitsProcessor(1.5),
    lambda model: WhisperNoSpeechDetection(no_speech_token=3, begin_index=1),
    lambda model: SynthIDTextWatermarkLogitsProcessor(
        ngram_len=5,
        keys=[1, 2, 3],
        sampling_table_size=16,
        sampling_table_seed=0,
        context_history_size=8,
        device=torch.device("cpu"),
    ),
]


@BOTH
@pytest.mark.parametrize("made", STATEFUL, ids=["guidance", "subclass", "pairs", "speech", "watermark"])
def test_a_logits_processor_that_cannot_be_shown_drafts(
    model: PreTrainedModel, call: Call, made: Callable[[PreTrainedModel], LogitsProcessor]
) -> None:
    engine = Engine(model, exit_layer=2)
    processor = made(model)
    with refused(model, ValueError, "logits_processor", type(processor).__name__, "the model's own generate"):
        call(engine, kit.prompt_tensor(), logits_processor=LogitsProcessorList([processor]), **SHORT)


def test_guidance_by_its_setting(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    with refused(model, ValueError, "guidance_scale=1.5", "guidance_scale=1 to switch it off"):
        engine.generate(kit.prompt_tensor(), guidance_scale=1.5, **SHORT)


@pytest.mark.parametrize(
    ("result", "error", "named"),
    [(None, TypeError, "a NoneType"), (torch.zeros(1, 5), ValueError, r"a tensor \(1, 5\)")],
)
def test_a_logits_processor_that_returns_no_scores(
    model: PreTrainedModel, result: Any, error: type[Exception], named: str
) -> None:
    """It is known only when the processor has been called."""

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return result

    engine = Engine(model, exit_layer=2)
    with pytest.raises(error, match=f"logits_processor holds .*processor.* returned {named}"):
        engine.generate(kit.prompt_tensor(), logits_processor=[processor], **SHORT)
    with pytest.raises(error, match=f"logits_processor holds .*processor.* returned {named}"):
        next(engine.stream(kit.prompt_tensor(), logits_processor=[processor], **SHORT))


def test_a_logits_processor_that_remembers(model: PreTrainedModel) -> None:
    """What it keeps is seen at its first call."""

    class Counting(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return scores

    engine = Engine(model, exit_layer=2)
    with pytest.raises(ValueError, match=r"logits_processor holds .*Counting, which changed .*: calls"):
        engine.generate(kit.prompt_tensor(), logits_processor=[Counting()], **SHORT)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_prefix_function_that_allows_nothing(model: PreTrainedModel, do_sample: bool) -> None:
    engine = Engine(model, exit_layer=2)
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn returned no tokens for row 0 after 0 new ones"):
        engine.generate(kit.prompt_tensor(), prefix_allowed_tokens_fn=lambda row, ids: [], do_sample=do_sample, **SHORT)


def test_processors_that_leave_nothing_to_draw_from(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    with pytest.raises(ValueError, match="no token is left to choose from"):
        engine.generate(kit.prompt_tensor(), suppress_tokens=list(range(kit.VOCAB)), do_sample=True, **SHORT)


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
    mistakes: list[dict[str, Any]] = [{"exit_layer": 9}, {"num_draft_tokens": 0}, {"strategy": "x"}, {"num_beams": 2}]
    mistakes += [{"cache": 1}, {"generator": torch.Generator()}, {"stop_strings": []}, {"max_new_tokens": "6"}]
    for arguments in mistakes:
        with refused(model, (TypeError, ValueError)):
            engine.generate(kit.prompt_tensor(), **{**SHORT, **arguments})
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


def test_a_tokenizer_that_is_none(model: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="tokenizer is a str; pass what AutoTokenizer"):
        Engine(model, "gpt2")  # type: ignore[arg-type]


@BOTH
def test_a_tokenizers_output_as_prompts(model: PreTrainedModel, call: Call) -> None:
    engine = Engine(model, kit.word_tokenizer(), exit_layer=2)
    encoded = kit.word_tokenizer()("w1 w5", return_tensors="pt")
    with refused(model, TypeError, "prompts is a BatchEncoding; allowed", "Pass its input_ids as a tensor"):
        call(engine, encoded, **SHORT)


def test_numbers_of_numpy_are_numbers(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    options = {"exit_layer": np.int64(2), "num_draft_tokens": np.int32(3), "max_new_tokens": np.int64(6)}
    result = engine.generate(kit.prompt_tensor(), **options)
    expected = engine.generate(kit.prompt_tensor(), exit_layer=2, num_draft_tokens=3, max_new_tokens=6)
    assert torch.equal(result.sequences, expected.sequences)
    assert json.loads(json.dumps(result.statistics.to_dict()))["exit_layer"] == 2
