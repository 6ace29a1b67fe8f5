"""Generation settings: what is followed as `generate` follows it, and what is refused by name."""

from __future__ import annotations

import ast
import copy
import itertools
import logging
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, WatermarkingConfig

from layerskip import Engine
from layerskip.decoding.options import GenerationOptions, read_options
from tests import kit

PROMPT_TOKENS = len(kit.PROMPT)

pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default")

# A value of every field that changes what `generate` does, or tries to.
UNSUPPORTED: dict[str, Any] = {
    # Lengths and stops
    "min_length": 15,
    "min_new_tokens": 5,
    "max_time": 1.5,
    "stop_strings": ["w3"],
    # Other ways of decoding
    "do_sample": True,
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": [[5]],
    "force_words_ids": [[5]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "num_return_sequences": 2,
    "use_mtp": True,
    "is_assistant": True,
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 3,
    "assistant_early_exit": 2,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    # The cache
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 64,
    "prefill_chunk_size": 4,
    "low_memory": True,
    # Logits processors
    "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[5]],
    "renormalize_logits": True,
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (5, 1.1),
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "sequence_bias": [[[5], 2.0]],
    "token_healing": True,
    "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(),
    # Outputs and running
    "output_attentions": True,
    "output_hidden_states": True,
    "compile_config": CompileConfig(),
    "continuous_batching_config": {"max_batch_tokens": 64},
}
# What greedy `generate` does not look at: refused as a wish of the call, let pass as a habit of a checkpoint.
FOR_OTHER_WAYS: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.1,
    "top_h": 0.5,
    "typical_p": 0.9,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4,
    "early_stopping": True,
    "length_penalty": 0.5,
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.5,
    "assistant_lookbehind": 5,
    "target_lookbehind": 5,
}
FOLLOWED = {"max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "output_scores", "output_logits"}
SAY_NOTHING = {
    "_from_model_config",
    "transformers_version",
    "bos_token_id",
    "decoder_start_token_id",
    "return_dict_in_generate",
    "disable_compile",
}
# Zero is on, for these: `generate` would force token 0, leave the prompt unguided, or stop for want of time.
ZERO_IS_ON = ["forced_bos_token_id", "forced_eos_token_id", "guidance_scale", "max_time", "prompt_lookup_num_tokens"]


@pytest.fixture(scope="module")
def shared_model() -> PreTrainedModel:
    return kit.l4()


@pytest.fixture
def model(shared_model: PreTrainedModel) -> PreTrainedModel:
    """L4, whose generation_config says nothing, whatever the test before has written there."""
    shared_model.generation_config = GenerationConfig()
    return shared_model


def read(model: PreTrainedModel, config: GenerationConfig | None = None, **arguments: Any) -> GenerationOptions:
    return read_options(model, config, arguments, PROMPT_TOKENS)


def set_in(config: GenerationConfig, **values: Any) -> GenerationConfig:
    """Sets fields behind the constructor's back, which checks some of them; a loaded file is not checked either."""
    for name, value in values.items():
        setattr(config, name, value)
    return config


# Every field is dealt with


def test_every_field_of_generation_config_is_tested_here() -> None:
    """Fails where transformers brings a new field in: it must be followed or refused, and a value of it stand above."""
    assert set(vars(GenerationConfig())) == {*UNSUPPORTED, *FOR_OTHER_WAYS} | FOLLOWED | SAY_NOTHING


@pytest.mark.parametrize("name", [*UNSUPPORTED, *FOR_OTHER_WAYS])
def test_an_unsupported_setting_of_the_call_is_refused_with_its_value(model: PreTrainedModel, name: str) -> None:
    value = {**UNSUPPORTED, **FOR_OTHER_WAYS}[name]
    with pytest.raises(ValueError) as refusal:
        read(model, **{name: value})
    assert name in str(refusal.value)
    assert str(value) in str(refusal.value)


@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_an_unsupported_setting_of_the_generation_config_is_refused_with_its_value(
    model: PreTrainedModel, name: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        read(model, set_in(GenerationConfig(), **{name: UNSUPPORTED[name]}))
    assert name in str(refusal.value)
    assert str(UNSUPPORTED[name]) in str(refusal.value)


# transformers itself checks this one, at once, and says "different than 1".
@pytest.mark.parametrize("name", [name for name in UNSUPPORTED if name != "num_return_sequences"])
def test_the_way_a_refusal_names_to_switch_a_checkpoints_setting_off_works(model: PreTrainedModel, name: str) -> None:
    set_in(model.generation_config, **{name: UNSUPPORTED[name]})
    with pytest.raises(ValueError, match="in the generation_config is not supported") as refusal:
        read(model)
    advice = re.search(rf"pass {name}=(.*) to switch it off", str(refusal.value))
    assert advice is not None
    assert read(model, **{name: ast.literal_eval(advice[1])}) == read(kit.l4())


@pytest.mark.parametrize("name", ZERO_IS_ON)
def test_a_zero_that_means_something_is_not_taken_for_off(model: PreTrainedModel, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        read(model, **{name: 0})


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"num_beams": 1},
        {"use_cache": True},
        {"cache_implementation": "dynamic"},
        {"min_length": 0},
        {"min_new_tokens": 0},
        {"repetition_penalty": 1.0},
        {"no_repeat_ngram_size": 0},
        {"guidance_scale": 1},
        {"guidance_scale": 1.0},
        {"num_return_sequences": 1},
        {"temperature": 1.0, "top_k": 50, "top_p": 1.0},
        {"temperature": None, "top_k": None, "top_p": None},
        {"bad_words_ids": None, "stop_strings": None, "max_time": None},
        {"renormalize_logits": False, "output_hidden_states": False},
        {"return_dict_in_generate": True},
        {"bos_token_id": 1, "decoder_start_token_id": 1},
        {"disable_compile": True},
    ],
    ids=str,
)
def test_a_setting_that_is_switched_off_is_accepted(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    assert read(model, **settings) == read(model)
    assert read(model, set_in(GenerationConfig(), **settings)) == read(model)


# A checkpoint's sampling settings


def test_sampling_settings_of_a_checkpoint_that_does_not_sample_change_nothing(model: PreTrainedModel) -> None:
    set_in(model.generation_config, **FOR_OTHER_WAYS)
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=12)
    assert torch.equal(result.sequences, kit.reference(kit.l4(), kit.prompt_tensor(), 12))


def test_a_checkpoint_that_samples_is_refused_and_greedy_decoding_can_be_asked_for(model: PreTrainedModel) -> None:
    set_in(model.generation_config, do_sample=True, temperature=0.6, top_p=0.9)
    engine = Engine(model, exit_layer=2)
    with pytest.raises(
        ValueError, match="do_sample=True in the generation_config is not supported; pass do_sample=False"
    ):
        engine.generate(kit.prompt_tensor(), max_new_tokens=12)
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=12, do_sample=False)
    assert torch.equal(result.sequences, kit.reference(kit.l4(), kit.prompt_tensor(), 12))


def test_a_call_that_samples_is_told_that_the_call_does(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="do_sample=True in this call is not supported"):
        read(model, do_sample=True)


# What is no setting


@pytest.mark.parametrize(
    "name",
    [
        "max_new_token",
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
        "streamer",
        "assistant_model",
        "inputs_embeds",
        "position_ids",
        "past_key_values",
        "synced_gpus",
        "custom_generate",
    ],
)
def test_an_argument_that_generation_config_does_not_have_is_refused_by_name(model: PreTrainedModel, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}=5 is neither an argument of the engine nor of GenerationConfig"):
        read(model, **{name: 5})


@pytest.mark.parametrize("name", ["validate", "to_dict", "update", "extra_output_flags"])
def test_a_method_of_generation_config_is_no_argument(model: PreTrainedModel, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        read(model, **{name: True})


@pytest.mark.parametrize("config", [{"max_new_tokens": 5}, "greedy", 5])
def test_a_generation_config_of_another_type_is_refused_by_name(model: PreTrainedModel, config: Any) -> None:
    with pytest.raises(TypeError, match=f"generation_config is a {type(config).__name__}, not a GenerationConfig"):
        read(model, config)


# Lengths

LENGTHS: list[dict[str, int]] = [
    {},
    {"max_new_tokens": 3},
    {"max_length": PROMPT_TOKENS + 5},
    {"max_new_tokens": 3, "max_length": 14},
]


def generated_length(
    model: PreTrainedModel, ids: torch.Tensor, config: GenerationConfig | None, arguments: dict[str, Any]
) -> int:
    """Returns how many new tokens `generate` gives."""
    given = {} if config is None else {"generation_config": config}
    sequences = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **given, **arguments)
    return sequences.shape[1] - ids.shape[1]


@pytest.mark.filterwarnings("ignore:max_new_tokens=. takes precedence")
@pytest.mark.parametrize(
    ("call", "config", "checkpoint"),
    # The same for all three would say nothing about which one is followed.
    [case for case in itertools.product(LENGTHS, LENGTHS, LENGTHS) if case[0] != case[1] or case[1] != case[2]],
    ids=str,
)
def test_length_equals_that_of_generate(
    model: PreTrainedModel, call: dict[str, int], config: dict[str, int], checkpoint: dict[str, int]
) -> None:
    model.generation_config = GenerationConfig(**{name: value + 2 for name, value in checkpoint.items()})
    given = GenerationConfig(**{name: value + 1 for name, value in config.items()}) if config else None
    expected = generated_length(model, kit.prompt_tensor(), given, call)
    assert read(model, given, **call).max_new_tokens == expected


def test_length_is_20_where_nobody_names_one(model: PreTrainedModel) -> None:
    assert read(model).max_new_tokens == 20 == generated_length(model, kit.prompt_tensor(), None, {})


def test_length_is_taken_from_the_call_then_the_argument_then_the_model(model: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=6)
    set_in(model.generation_config, max_new_tokens=7)
    assert read(model, config, max_new_tokens=5).max_new_tokens == 5
    assert read(model, config).max_new_tokens == 6
    assert read(model).max_new_tokens == 7


def test_the_default_length_ends_at_the_models_positions() -> None:
    model = kit.build(kit.gpt2_config(n_positions=16))
    assert read(model).max_new_tokens == 6 == generated_length(model, kit.prompt_tensor(), None, {})


def test_the_default_length_of_a_rotary_model_ends_there_too() -> None:
    model = kit.l4(max_position_embeddings=16)
    assert read(model).max_new_tokens == 6 == generated_length(model, kit.prompt_tensor(), None, {})


def test_a_rotary_model_goes_past_its_positions_where_it_is_told_to() -> None:
    model = kit.l4(max_position_embeddings=16)
    expected = generated_length(model, kit.prompt_tensor(), None, {"max_new_tokens": 12})
    assert read(model, max_new_tokens=12).max_new_tokens == 12 == expected


def test_max_length_counts_padding_as_generate_does(model: PreTrainedModel) -> None:
    ids = torch.tensor([[0] * 4 + kit.PROMPT[:6], kit.PROMPT])
    mask = torch.tensor([[0] * 4 + [1] * 6, [1] * 10])
    expected = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, max_length=17)
    result = Engine(model, exit_layer=2).generate(ids, attention_mask=mask, max_length=17)
    assert torch.equal(result.sequences, expected)


def test_max_new_tokens_takes_precedence_over_max_length_and_says_so(model: PreTrainedModel) -> None:
    with pytest.warns(UserWarning, match="max_new_tokens=3 takes precedence over max_length=14"):
        assert read(model, max_new_tokens=3, max_length=14).max_new_tokens == 3


@pytest.mark.parametrize(
    "arguments",
    [{"max_new_tokens": 0}, {"max_new_tokens": -1}, {"max_length": 0}, {"max_length": 9}, {"max_length": 10}],
    ids=str,
)
def test_a_length_that_leaves_nothing_to_generate_is_refused_by_name(
    model: PreTrainedModel, arguments: dict[str, int]
) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=name) as refusal:
        read(model, **arguments)
    assert str(value) in str(refusal.value)


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length"])
@pytest.mark.parametrize("value", ["16", 16.5, True, [16]], ids=repr)
def test_a_length_of_another_type_is_refused_by_name(model: PreTrainedModel, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}={re.escape(repr(value))}"):
        read(model, **{name: value})


# EOS and padding


@pytest.mark.parametrize(
    ("eos", "expected"), [(None, set()), (7, {7}), ([7], {7}), ([7, 9], {7, 9}), ((7, 9), {7, 9}), ([], set())], ids=str
)
def test_eos_may_be_one_token_several_or_none(model: PreTrainedModel, eos: Any, expected: set[int]) -> None:
    assert read(model, eos_token_id=eos).eos_token_ids == expected


def test_eos_is_taken_from_the_call_then_the_argument_then_the_model(model: PreTrainedModel) -> None:
    config = GenerationConfig(eos_token_id=6)
    set_in(model.generation_config, eos_token_id=[7, 8])
    assert read(model, config, eos_token_id=5).eos_token_ids == {5}
    assert read(model, config).eos_token_ids == {6}
    assert read(model).eos_token_ids == {7, 8}


def test_eos_of_none_in_the_call_switches_the_models_off(model: PreTrainedModel) -> None:
    expected = kit.reference(model, kit.prompt_tensor(), 12)
    set_in(model.generation_config, eos_token_id=expected[0, PROMPT_TOKENS + 2].item(), pad_token_id=0)
    engine = Engine(model, exit_layer=2)
    assert engine.generate(kit.prompt_tensor(), max_new_tokens=12).sequences.shape[1] == PROMPT_TOKENS + 3
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=12, eos_token_id=None)
    assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize("eos", ["7", 7.5, True, [7, "9"], [7, 9.5], [[7]]], ids=repr)
def test_an_eos_token_of_another_type_is_refused_by_name(model: PreTrainedModel, eos: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="eos_token_id"):
        read(model, eos_token_id=eos)


@pytest.mark.parametrize("pad", ["7", 7.5, True, [7]], ids=repr)
def test_a_padding_token_of_another_type_is_refused_by_name(model: PreTrainedModel, pad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="pad_token_id"):
        read(model, pad_token_id=pad)


def test_padding_is_by_default_the_first_eos_token(model: PreTrainedModel) -> None:
    assert read(model, eos_token_id=[9, 7]).pad_token_id == 9
    assert read(model, eos_token_id=7).pad_token_id == 7
    assert read(model).pad_token_id is None


def test_padding_that_is_named_is_kept(model: PreTrainedModel) -> None:
    assert read(model, eos_token_id=[9, 7], pad_token_id=3).pad_token_id == 3
    assert read(model, eos_token_id=[9, 7], pad_token_id=0).pad_token_id == 0
    assert read(model, GenerationConfig(pad_token_id=4), eos_token_id=7).pad_token_id == 4
    set_in(model.generation_config, pad_token_id=5)
    assert read(model, eos_token_id=7).pad_token_id == 5


@pytest.mark.parametrize("pad", [None, 0], ids=str)
def test_finished_rows_are_filled_as_generate_fills_them(model: PreTrainedModel, pad: int | None) -> None:
    rows = torch.stack([kit.prompt_tensor()[0], kit.prompt_tensor()[0].flip(0)])
    eos = kit.reference(model, rows, 12)[0, PROMPT_TOKENS + 3].item()
    settings = {"max_new_tokens": 12, "eos_token_id": [eos, 96], "pad_token_id": pad}
    expected = model.generate(rows, attention_mask=torch.ones_like(rows), do_sample=False, **settings)
    assert torch.equal(Engine(model, exit_layer=2).generate(rows, **settings).sequences, expected)


# Outputs


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_outputs_are_asked_for_in_the_call_or_in_a_config(model: PreTrainedModel, name: str) -> None:
    assert getattr(read(model), name) is False
    assert getattr(read(model, **{name: True}), name) is True
    assert getattr(read(model, set_in(GenerationConfig(), **{name: True})), name) is True


# The caller's objects


@pytest.mark.parametrize("arguments", [{}, {"max_new_tokens": 5, "eos_token_id": 7}, {"do_sample": True}], ids=str)
def test_configurations_are_left_as_they_were(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    config = GenerationConfig(max_new_tokens=6, pad_token_id=3)
    set_in(model.generation_config, max_new_tokens=9, temperature=0.5)
    before = copy.deepcopy((vars(config), vars(model.generation_config), model.config.to_dict()))
    own = model.generation_config
    with pytest.raises(ValueError, match="do_sample") if "do_sample" in arguments else nullcontext():
        read(model, config, **arguments)
    assert model.generation_config is own
    assert (vars(config), vars(model.generation_config), model.config.to_dict()) == before


def test_one_generation_config_serves_two_calls(model: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=6, eos_token_id=[5, 7])
    assert read(model, config) == read(model, config)
    engine = Engine(model, exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), generation_config=config)
    assert torch.equal(first.sequences, engine.generate(kit.prompt_tensor(), generation_config=config).sequences)


def test_a_config_of_the_call_that_asks_for_logits_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    settings = GenerationConfig(max_new_tokens=3, output_logits=True, return_dict_in_generate=True)
    before = settings.to_dict()
    logging.getLogger("transformers").propagate = True
    result = Engine(kit.mixed(), exit_layer=2).generate(kit.prompt_tensor(), generation_config=settings)
    assert result.logits is not None
    assert caplog.messages == []
    assert settings.to_dict() == before


def test_a_length_of_none_leaves_it_open() -> None:
    engine = Engine(kit.mixed(), exit_layer=2)
    shape = engine.generate(kit.prompt_tensor(), max_length=None, max_new_tokens=None).sequences.shape
    assert shape == (1, len(kit.PROMPT) + 20)
