"""Generation settings: what is followed as `generate` follows it, and what is refused by name."""

from __future__ import annotations

import ast
import copy
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CompileConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    WatermarkingConfig,
)

from layerskip import Engine
from layerskip.decoding import options
from layerskip.decoding.options import GenerationOptions, check_supported, merged_config, with_values
from layerskip.decoding.result import GenerationResult
from tests import kit

PROMPT_TOKENS = len(kit.PROMPT)
ROWS = torch.tensor([kit.PROMPT, [0] * 4 + kit.PROMPT[:6]])
MASK = torch.tensor([[1] * 10, [0] * 4 + [1] * 6])
# As byte-level tokenizers write them: all that is printed, a space, a newline and a tab.
CHARACTERS = [*map(chr, range(33, 127)), "Ġ", "Ċ", "ĉ"]

pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default")

# Of each field that is honoured settings in which it makes a difference, from what greedy `generate` answers without.
TELLING: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    # Lengths and stops
    "max_new_tokens": lambda plain: {"max_new_tokens": 7},
    "max_length": lambda plain: {"max_new_tokens": None, "max_length": 17},
    "min_new_tokens": lambda plain: {"min_new_tokens": 6, "eos_token_id": plain[2]},
    "min_length": lambda plain: {"min_length": 18, "eos_token_id": plain[2]},
    "max_time": lambda plain: {"max_time": 0.0, "pad_token_id": 0},
    "stop_strings": lambda plain: {
        "stop_strings": [character_tokenizer().decode([plain[3]])],
        # Without an EOS token `generate` does not fill up rows that have ended.
        "eos_token_id": 96,
        "pad_token_id": 0,
    },
    "eos_token_id": lambda plain: {"eos_token_id": [plain[4], 96]},
    "pad_token_id": lambda plain: {"pad_token_id": 3, "eos_token_id": plain[4]},
    # Logits processors
    "repetition_penalty": lambda plain: {"repetition_penalty": 1.5},
    "encoder_repetition_penalty": lambda plain: {"encoder_repetition_penalty": 2.0},
    "no_repeat_ngram_size": lambda plain: {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": lambda plain: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda plain: {"bad_words_ids": [[plain[3]], [plain[5], plain[6]]]},
    "forced_bos_token_id": lambda plain: {"forced_bos_token_id": 0},
    "forced_eos_token_id": lambda plain: {"forced_eos_token_id": 0},
    "exponential_decay_length_penalty": lambda plain: {
        "exponential_decay_length_penalty": (3, 5.0),
        "eos_token_id": 7,
    },
    "suppress_tokens": lambda plain: {"suppress_tokens": [plain[3]]},
    "begin_suppress_tokens": lambda plain: {"begin_suppress_tokens": [plain[0]]},
    "sequence_bias": lambda plain: {"sequence_bias": [[[plain[3]], -50.0]]},
    "watermarking_config": lambda plain: {"watermarking_config": WatermarkingConfig(bias=20.0)},
    # These two change scores, and no token of them.
    "renormalize_logits": lambda plain: {"renormalize_logits": True, "output_scores": True},
    "remove_invalid_values": lambda plain: {
        "remove_invalid_values": True,
        "output_scores": True,
        "bad_words_ids": [[5]],
    },
    # Outputs
    "output_scores": lambda plain: {"output_scores": True},
    "output_logits": lambda plain: {"output_logits": True},
    # One token is left to draw, so that both draw the same.
    "num_return_sequences": lambda plain: {"num_return_sequences": 3, "do_sample": True, "top_k": 1},
}
# Drawn tokens are others than those of `generate`: it has tests of its own below.
DRAWN = {"do_sample"}
# A value of every field that changes what `generate` does, or tries to.
REFUSED: dict[str, Any] = {
    # Other ways of decoding
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": [[5]],
    "force_words_ids": [[5]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "use_mtp": True,
    "is_assistant": True,
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 3,
    "assistant_early_exit": 2,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "token_healing": True,
    "guidance_scale": 1.5,
    # The cache
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 64,
    "prefill_chunk_size": 4,
    "low_memory": True,
    # Outputs and running
    "output_attentions": True,
    "output_hidden_states": True,
    "compile_config": CompileConfig(),
    "continuous_batching_config": {"max_batch_tokens": 64},
}
# What greedy `generate` does not look at: refused as a wish of the call, let pass as a habit of a checkpoint.
SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.3,
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.5,
}
# Likewise, with sampling too.
WITHOUT_EFFECT: dict[str, Any] = {
    "early_stopping": True,
    "length_penalty": 0.5,
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.5,
    "assistant_lookbehind": 5,
    "target_lookbehind": 5,
}
SAY_NOTHING = {
    "_from_model_config",
    "transformers_version",
    "bos_token_id",
    "decoder_start_token_id",
    "return_dict_in_generate",
    "disable_compile",
}
# Zero is on, for these: `generate` would leave the prompt unguided, or look up no tokens.
ZERO_IS_ON = ["guidance_scale", "prompt_lookup_num_tokens"]


@pytest.fixture(scope="module")
def shared_model() -> PreTrainedModel:
    return kit.l4()


@pytest.fixture
def model(shared_model: PreTrainedModel) -> PreTrainedModel:
    """L4, whose generation_config says nothing, whatever the test before has written there."""
    shared_model.generation_config = GenerationConfig()
    return shared_model


@pytest.fixture(scope="module")
def graded_models() -> dict[str, PreTrainedModel]:
    return {"mixed": kit.mixed(), "identical": kit.identical()}


def read(model: PreTrainedModel, config: GenerationConfig | None = None, **arguments: Any) -> GenerationConfig:
    """Returns the settings of a call as the engine merges them."""
    return merged_config(model, config, arguments)


def set_in(config: GenerationConfig, **values: Any) -> GenerationConfig:
    """Sets fields behind the constructor's back, which checks some of them; a loaded file is not checked either."""
    for name, value in values.items():
        setattr(config, name, value)
    return config


# Every field is dealt with


def test_every_field_of_generation_config_is_tested_here_in_one_group() -> None:
    """Fails where transformers brings a new field in: it must be followed or refused, and a value of it stand above."""
    groups = [*TELLING, *DRAWN, *REFUSED, *SAMPLING, *WITHOUT_EFFECT, *SAY_NOTHING]
    assert Counter(groups) == Counter(vars(GenerationConfig()).keys())


def test_the_library_has_the_same_groups() -> None:
    assert {*TELLING, "return_dict_in_generate"} | DRAWN == options.HONOURED
    assert set(SAMPLING) == options.SAMPLING
    assert {*WITHOUT_EFFECT, "disable_compile"} == options.WITHOUT_EFFECT


# What is honoured


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token for each character, of the kind that transformers can look for strings in."""
    backend = Tokenizer(models.BPE({character: token for token, character in enumerate(CHARACTERS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def outputs(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **settings: Any) -> Any:
    """Returns what `generate` gives."""
    with_strings = {"tokenizer": character_tokenizer()} if "stop_strings" in settings else {}
    return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **with_strings, **settings)


def are_equal(first: Any, second: Any) -> bool:
    """Whether two outputs have the same tokens and, up to rounding, the same scores and logits."""
    if first.sequences.shape != second.sequences.shape or not torch.equal(first.sequences, second.sequences):
        return False
    for ours, theirs in ((first.scores, second.scores), (first.logits, second.logits)):
        if (ours is None) != (theirs is None):
            return False
        for a, b in zip(ours or (), theirs or (), strict=True):
            if not torch.allclose(a, b.float(), atol=1e-4):
                return False
    return True


@cache
def telling(name: str, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], Any]:
    """Returns prompts, their mask, settings in which a field makes a difference, and what `generate` gives with them.

    Fails where the field makes none, since a test could then not tell whether it is followed.
    """
    ids, mask = ROWS, MASK
    if name == "forced_bos_token_id":
        # Only a first token can be forced.
        ids, mask = torch.tensor([[5], [9]]), torch.ones(2, 1, dtype=torch.long)
    plain = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    settings = {"max_new_tokens": 12, "do_sample": False, **TELLING[name](plain)}
    expected = outputs(model, ids, mask, **settings)
    others = {field: value for field, value in settings.items() if field != name}
    assert not are_equal(expected, outputs(model, ids, mask, **others))
    return ids, mask, settings, expected


def engine_for(model: PreTrainedModel) -> Engine:
    return Engine(model, character_tokenizer(), exit_layer=kit.EXIT_LAYER)


@pytest.mark.parametrize("grade", ["mixed", "identical"])
@pytest.mark.parametrize("name", TELLING)
def test_an_honoured_setting_does_what_it_does_in_generate(
    graded_models: dict[str, PreTrainedModel], grade: str, name: str
) -> None:
    model = graded_models[grade]
    ids, mask, settings, expected = telling(name, model)
    assert are_equal(engine_for(model).generate(ids, attention_mask=mask, **settings), expected)


@pytest.mark.parametrize("strategy", ["autoregressive", "early_exit"])
@pytest.mark.parametrize(
    "name", ["min_length", "max_time", "repetition_penalty", "suppress_tokens", "renormalize_logits"]
)
def test_an_honoured_setting_is_followed_in_other_strategies(
    graded_models: dict[str, PreTrainedModel], strategy: str, name: str
) -> None:
    """The exit of this model gives what the model gives."""
    model = graded_models["identical"]
    ids, mask, settings, expected = telling(name, model)
    assert are_equal(engine_for(model).generate(ids, attention_mask=mask, strategy=strategy, **settings), expected)


@pytest.mark.parametrize("place", ["config", "model"])
@pytest.mark.parametrize("name", TELLING)
def test_an_honoured_setting_of_a_config_is_followed_and_the_config_stays(
    graded_models: dict[str, PreTrainedModel], name: str, place: str
) -> None:
    model = graded_models["mixed"]
    ids, mask, settings, expected = telling(name, model)
    own = model.generation_config
    given = set_in(GenerationConfig(), **settings)
    before = copy.deepcopy(given.to_dict())
    try:
        if place == "model":
            model.generation_config = given
        result = engine_for(model).generate(
            ids, attention_mask=mask, generation_config=given if place == "config" else None
        )
    finally:
        model.generation_config = own
    assert are_equal(result, expected)
    assert given.to_dict() == before


@pytest.mark.parametrize(
    ("name", "call", "config", "checkpoint"),
    [
        ("max_new_tokens", 5, 6, 7),
        ("eos_token_id", 5, 6, [7, 8]),
        ("pad_token_id", 5, 0, 7),
        ("repetition_penalty", 1.1, 1.2, 1.3),
        ("suppress_tokens", [5], [6], [7]),
        ("max_time", 0.0, 2.0, 3.0),
        ("forced_eos_token_id", 0, 1, 2),
        ("output_scores", False, True, False),
        ("do_sample", False, True, False),
    ],
)
def test_a_setting_is_taken_from_the_call_then_the_config_then_the_model(
    model: PreTrainedModel, name: str, call: Any, config: Any, checkpoint: Any
) -> None:
    set_in(model.generation_config, **{name: checkpoint})
    given = set_in(GenerationConfig(), **{name: config})
    assert vars(read(model, given, **{name: call}))[name] == call
    assert vars(read(model, given))[name] == config
    assert vars(read(model))[name] == checkpoint


# What is refused


@pytest.mark.parametrize("name", [*REFUSED, *SAMPLING, *WITHOUT_EFFECT])
def test_an_unsupported_setting_of_the_call_is_refused_with_its_value(model: PreTrainedModel, name: str) -> None:
    value = {**REFUSED, **SAMPLING, **WITHOUT_EFFECT}[name]
    with pytest.raises(ValueError) as refusal:
        read(model, **{name: value})
    assert f"{name}={value!r}" in str(refusal.value)


@pytest.mark.parametrize("place", ["config", "model"])
@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_setting_of_a_config_is_refused_with_its_value(
    model: PreTrainedModel, name: str, place: str
) -> None:
    given = set_in(GenerationConfig() if place == "config" else model.generation_config, **{name: REFUSED[name]})
    with pytest.raises(ValueError) as refusal:
        read(model, given if place == "config" else None)
    assert f"{name}={REFUSED[name]!r} in the generation_config is not supported" in str(refusal.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_generate_has_filled_in_is_checked_alone(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* in the generation_config is not supported"):
        check_supported(set_in(GenerationConfig(), **{name: REFUSED[name]}))


@pytest.mark.parametrize("name", REFUSED)
def test_the_way_a_refusal_names_to_switch_a_checkpoints_setting_off_works(model: PreTrainedModel, name: str) -> None:
    set_in(model.generation_config, **{name: REFUSED[name]})
    with pytest.raises(ValueError, match="in the generation_config is not supported") as refusal:
        read(model)
    advice = re.search(rf"pass {name}=(.*) to switch it off", str(refusal.value))
    assert advice is not None
    off = ast.literal_eval(advice[1])
    assert vars(read(model, **{name: off}))[name] == off


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
def test_a_setting_that_is_switched_off_changes_nothing(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    expected = kit.reference(model, kit.prompt_tensor(), 4)
    engine = Engine(model, exit_layer=2)
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=4, **settings)
    assert torch.equal(result.sequences, expected)
    given = set_in(GenerationConfig(max_new_tokens=4), **settings)
    assert torch.equal(engine.generate(kit.prompt_tensor(), generation_config=given).sequences, expected)


# Sampling


def first_scores(result: GenerationResult) -> torch.Tensor:
    """Returns what the first token of each row was drawn from."""
    assert result.scores is not None
    return result.scores[0]


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_setting_shapes_what_tokens_are_drawn_from(model: PreTrainedModel, name: str) -> None:
    settings = {"do_sample": True, "output_scores": True, "max_new_tokens": 2}
    engine = Engine(model, exit_layer=2)
    without = first_scores(engine.generate(ROWS, attention_mask=MASK, **settings))
    shaped = first_scores(engine.generate(ROWS, attention_mask=MASK, **settings, **{name: SAMPLING[name]}))
    expected = outputs(model, ROWS, MASK, **settings, **{name: SAMPLING[name]}).scores[0]
    assert torch.allclose(shaped, expected, atol=1e-4)
    assert not torch.allclose(shaped, without, atol=1e-4)


def test_a_sampling_setting_of_a_config_counts_where_the_call_samples(model: PreTrainedModel) -> None:
    set_in(model.generation_config, top_k=1)
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=12, do_sample=True)
    assert torch.equal(result.sequences, kit.reference(kit.l4(), kit.prompt_tensor(), 12))


def test_a_call_that_samples_draws_with_its_generator() -> None:
    engine = Engine(kit.mixed(), exit_layer=2)

    def drawn(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        settings = {"max_new_tokens": 24, "do_sample": True, "temperature": 3.0, "generator": generator}
        return engine.generate(kit.prompt_tensor(), **settings).new_token_ids[0]

    assert drawn(0) == drawn(0)
    assert len({tuple(drawn(seed)) for seed in range(4)}) == 4


def test_a_call_that_samples_without_a_generator_follows_the_global_seed() -> None:
    engine = Engine(kit.mixed(), exit_layer=2)

    def drawn(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return engine.generate(kit.prompt_tensor(), max_new_tokens=24, do_sample=True, temperature=3.0).new_token_ids[0]

    assert drawn(0) == drawn(0) != drawn(1)


def test_several_drawn_sequences_of_one_prompt_stand_below_each_other() -> None:
    result = Engine(kit.mixed(), exit_layer=2).generate(
        ROWS, attention_mask=MASK, do_sample=True, temperature=3.0, num_return_sequences=3, max_new_tokens=8
    )
    assert torch.equal(result.sequences[:, :PROMPT_TOKENS], ROWS.repeat_interleave(3, dim=0))
    assert len({tuple(tokens) for tokens in result.new_token_ids}) == 6
    assert len(result.finish_reasons) == len(result.statistics.per_row) == 6


def test_habits_of_a_checkpoint_that_does_not_sample_change_nothing(model: PreTrainedModel) -> None:
    set_in(model.generation_config, **SAMPLING, **WITHOUT_EFFECT)
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=12)
    assert torch.equal(result.sequences, kit.reference(kit.l4(), kit.prompt_tensor(), 12))


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_setting_of_a_call_that_does_not_sample_is_told_what_is_missing(
    model: PreTrainedModel, name: str
) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* has no effect on greedy decoding; pass do_sample=True"):
        read(model, **{name: SAMPLING[name]})
    assert vars(read(model, set_in(GenerationConfig(), **{name: SAMPLING[name]})))[name] == SAMPLING[name]
    assert vars(read(model, do_sample=True, **{name: SAMPLING[name]}))[name] == SAMPLING[name]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_setting_for_beams_or_an_assistant_has_no_effect_in_any_call(
    model: PreTrainedModel, name: str, do_sample: bool
) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* has no effect"):
        read(model, do_sample=do_sample, **{name: WITHOUT_EFFECT[name]})
    given = set_in(GenerationConfig(do_sample=do_sample), **{name: WITHOUT_EFFECT[name]})
    assert vars(read(model, given))[name] == WITHOUT_EFFECT[name]


def test_a_checkpoint_that_samples_can_be_asked_for_greedy_decoding(model: PreTrainedModel) -> None:
    set_in(model.generation_config, do_sample=True, temperature=3.0, top_p=0.9)
    expected = kit.reference(kit.l4(), kit.prompt_tensor(), 12)
    engine = Engine(model, exit_layer=2)
    torch.manual_seed(0)
    assert not torch.equal(engine.generate(kit.prompt_tensor(), max_new_tokens=12).sequences, expected)
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=12, do_sample=False)
    assert torch.equal(result.sequences, expected)


# What is no setting


@pytest.mark.parametrize(
    "name",
    [
        "max_new_token",
        "tokenizer",
        "assistant_model",
        "inputs_embeds",
        "position_ids",
        "past_key_values",
        "synced_gpus",
        "custom_generate",
        "negative_prompt_ids",
        "logits_to_keep",
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
        Engine(model, exit_layer=2).generate(kit.prompt_tensor(), generation_config=config, max_new_tokens=3)


# Lengths

LENGTHS: list[dict[str, int]] = [
    {},
    {"max_new_tokens": 3},
    {"max_length": PROMPT_TOKENS + 5},
    {"max_new_tokens": 3, "max_length": 14},
]


def lengths(
    model: PreTrainedModel, config: GenerationConfig | None = None, strategy: str = "self_speculative", **arguments: Any
) -> tuple[int, int]:
    """Returns how many new tokens the engine gives, and how many `generate` does."""
    ids = kit.prompt_tensor()
    given = {} if config is None else {"generation_config": config}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **given, **arguments)
    ours = Engine(model, exit_layer=2).generate(ids, generation_config=config, strategy=strategy, **arguments)
    return ours.sequences.shape[1] - PROMPT_TOKENS, theirs.shape[1] - PROMPT_TOKENS


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
    ours, theirs = lengths(model, given, **call)
    assert ours == theirs


def test_length_is_20_where_nobody_names_one(model: PreTrainedModel) -> None:
    assert lengths(model) == (20, 20)


@pytest.mark.parametrize("name", ["max_length", "max_new_tokens", "min_length", "min_new_tokens"])
def test_a_length_of_none_leaves_it_open(model: PreTrainedModel, name: str) -> None:
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), **{name: None})
    assert result.sequences.shape == (1, PROMPT_TOKENS + 20)


def test_a_length_of_none_leaves_it_to_the_config_then_the_model(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2)
    set_in(model.generation_config, max_length=PROMPT_TOKENS + 7)
    assert engine.generate(kit.prompt_tensor(), max_length=None).sequences.shape == (1, PROMPT_TOKENS + 7)
    given = GenerationConfig(max_length=PROMPT_TOKENS + 6)
    result = engine.generate(kit.prompt_tensor(), generation_config=given, max_length=None)
    assert result.sequences.shape == (1, PROMPT_TOKENS + 6)


def test_the_default_length_ends_at_the_models_positions() -> None:
    assert lengths(kit.build(kit.gpt2_config(n_positions=16))) == (6, 6)


def test_the_default_length_of_a_rotary_model_ends_there_too() -> None:
    assert lengths(kit.l4(max_position_embeddings=16)) == (6, 6)


def test_a_rotary_model_goes_past_its_positions_where_it_is_told_to() -> None:
    assert lengths(kit.l4(max_position_embeddings=16), max_new_tokens=12) == (12, 12)


def test_max_length_counts_padding_as_generate_does(model: PreTrainedModel) -> None:
    expected = model.generate(ROWS, attention_mask=MASK, do_sample=False, pad_token_id=0, max_length=17)
    result = Engine(model, exit_layer=2).generate(ROWS, attention_mask=MASK, max_length=17)
    assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize(
    "arguments",
    [{"max_new_tokens": 0}, {"max_new_tokens": -1}, {"max_length": 0}, {"max_length": 9}, {"max_length": 10}],
    ids=str,
)
def test_a_length_that_leaves_nothing_to_generate_is_refused_by_name(
    model: PreTrainedModel, arguments: dict[str, int]
) -> None:
    ((name, value),) = arguments.items()
    with kit.counted_layers(model) as counts, pytest.raises(ValueError, match=name) as refusal:
        Engine(model, exit_layer=2).generate(kit.prompt_tensor(), **arguments)
    assert str(value) in str(refusal.value)
    assert counts == [0] * kit.NUM_LAYERS


WHOLE_NUMBERS = ["max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences", "pad_token_id"]


@pytest.mark.parametrize("place", ["call", "config", "model"])
@pytest.mark.parametrize("name", WHOLE_NUMBERS)
@pytest.mark.parametrize("value", ["16", 16.5, True, [16]], ids=repr)
def test_a_whole_number_of_another_type_is_refused_by_name(
    model: PreTrainedModel, name: str, value: Any, place: str
) -> None:
    call = {name: value} if place == "call" else {}
    config = set_in(GenerationConfig(), **{name: value}) if place == "config" else None
    if place == "model":
        set_in(model.generation_config, **{name: value})
    with pytest.raises(TypeError, match=f"{name}={re.escape(repr(value))} is a .*, not an integer"):
        read(model, config, **call)


# EOS and padding


def options_of(model: PreTrainedModel, config: GenerationConfig | None = None, **arguments: Any) -> GenerationOptions:
    return GenerationOptions.of(read(model, config, **arguments))


@pytest.mark.parametrize(
    ("eos", "expected"), [(None, []), (7, [7]), ([7], [7]), ([7, 9], [7, 9]), ((7, 9), [7, 9])], ids=str
)
def test_eos_may_be_one_token_several_or_none(eos: Any, expected: list[int]) -> None:
    assert options.token_ids("eos_token_id", eos) == expected


def test_an_empty_list_of_eos_tokens_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"eos_token_id=\[\].* pass None"):
        Engine(model, exit_layer=2).generate(kit.prompt_tensor(), eos_token_id=[])


def test_eos_of_none_in_the_call_switches_the_models_off(model: PreTrainedModel) -> None:
    expected = kit.reference(model, kit.prompt_tensor(), 12)
    set_in(model.generation_config, eos_token_id=expected[0, PROMPT_TOKENS + 2].item(), pad_token_id=0)
    engine = Engine(model, exit_layer=2)
    assert engine.generate(kit.prompt_tensor(), max_new_tokens=12).sequences.shape[1] == PROMPT_TOKENS + 3
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=12, eos_token_id=None)
    assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize("eos", ["7", 7.5, True, [7, "9"], [7, 9.5], [[7]]], ids=repr)
def test_an_eos_token_of_another_type_is_refused_by_name(model: PreTrainedModel, eos: Any) -> None:
    with pytest.raises(TypeError, match=f"eos_token_id={re.escape(repr(eos))}"):
        options_of(model, eos_token_id=eos)
    with pytest.raises(TypeError, match=f"eos_token_id={re.escape(repr(eos))}"):
        options_of(model, set_in(GenerationConfig(), eos_token_id=eos))


def test_padding_is_by_default_the_first_eos_token(model: PreTrainedModel) -> None:
    assert options_of(model, eos_token_id=[9, 7]).pad_token_id == 9
    assert options_of(model, eos_token_id=7).pad_token_id == 7
    assert options_of(model).pad_token_id is None


def test_padding_that_is_named_is_kept(model: PreTrainedModel) -> None:
    assert options_of(model, eos_token_id=[9, 7], pad_token_id=3).pad_token_id == 3
    assert options_of(model, eos_token_id=[9, 7], pad_token_id=0).pad_token_id == 0
    assert options_of(model, GenerationConfig(pad_token_id=4), eos_token_id=7).pad_token_id == 4
    set_in(model.generation_config, pad_token_id=5)
    assert options_of(model, eos_token_id=7).pad_token_id == 5


@pytest.mark.parametrize("pad", [None, 0], ids=str)
def test_finished_rows_are_filled_as_generate_fills_them(model: PreTrainedModel, pad: int | None) -> None:
    rows = torch.stack([kit.prompt_tensor()[0], kit.prompt_tensor()[0].flip(0)])
    eos = kit.reference(model, rows, 12)[0, PROMPT_TOKENS + 3].item()
    settings = {"max_new_tokens": 12, "eos_token_id": [eos, 96], "pad_token_id": pad}
    expected = model.generate(rows, attention_mask=torch.ones_like(rows), do_sample=False, **settings)
    assert torch.equal(Engine(model, exit_layer=2).generate(rows, **settings).sequences, expected)


# Outputs


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "do_sample"])
def test_outputs_and_sampling_are_asked_for_in_the_call_or_in_a_config(model: PreTrainedModel, name: str) -> None:
    assert vars(options_of(model))[name] is False
    assert vars(options_of(model, **{name: True}))[name] is True
    assert vars(options_of(model, set_in(GenerationConfig(), **{name: True})))[name] is True
    set_in(model.generation_config, **{name: True})
    assert vars(options_of(model))[name] is True
    assert vars(options_of(model, **{name: False}))[name] is False


# The caller's objects


@pytest.mark.parametrize("arguments", [{}, {"max_new_tokens": 5, "eos_token_id": 7}, {"num_beams": 2}], ids=str)
def test_configurations_are_left_as_they_were(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    config = GenerationConfig(max_new_tokens=6, pad_token_id=90, bad_words_ids=[[5]], sequence_bias=[[[6], 1.0]])
    set_in(model.generation_config, max_new_tokens=9, temperature=0.5, suppress_tokens=[5])
    before = copy.deepcopy((vars(config), vars(model.generation_config), model.config.to_dict()))
    own = model.generation_config
    with pytest.raises(ValueError, match="num_beams") if "num_beams" in arguments else nullcontext():
        Engine(model, exit_layer=2).generate(kit.prompt_tensor(), generation_config=config, **arguments)
    assert model.generation_config is own
    assert (vars(config), vars(model.generation_config), model.config.to_dict()) == before


def test_values_are_set_in_a_copy_of_a_config_or_among_the_arguments() -> None:
    config = GenerationConfig(pad_token_id=3, bad_words_ids=[[5]])
    arguments = {"pad_token_id": 4, "top_k": 5}
    changed, rest = with_values(config, arguments, pad_token_id=6)
    assert changed is not None
    assert (changed.pad_token_id, changed.bad_words_ids, rest) == (6, [[5]], {"top_k": 5})
    assert (config.pad_token_id, arguments) == (3, {"pad_token_id": 4, "top_k": 5})
    assert changed.bad_words_ids is not config.bad_words_ids
    assert with_values(None, arguments, pad_token_id=6) == (None, {"pad_token_id": 6, "top_k": 5})
    assert arguments == {"pad_token_id": 4, "top_k": 5}


def test_one_generation_config_serves_two_calls(model: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=6, eos_token_id=[5, 7])
    assert read(model, config).to_dict() == read(model, config).to_dict()
    engine = Engine(model, exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), generation_config=config)
    assert torch.equal(first.sequences, engine.generate(kit.prompt_tensor(), generation_config=config).sequences)


@pytest.mark.parametrize("place", ["call", "config", "model"])
@pytest.mark.parametrize(
    "settings",
    [{"output_logits": True, "return_dict_in_generate": True}, {"output_scores": True}, {"eos_token_id": 7}],
    ids=str,
)
def test_nothing_is_logged_that_the_caller_could_not_help(
    model: PreTrainedModel,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    place: str,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    settings = {"max_new_tokens": 3, **settings}
    if place == "model":
        set_in(model.generation_config, **settings)
    engine = Engine(model, exit_layer=2)
    if place == "config":
        result = engine.generate(kit.prompt_tensor(), generation_config=GenerationConfig(**settings))
    else:
        result = engine.generate(kit.prompt_tensor(), **settings if place == "call" else {})
    assert result.sequences.shape == (1, PROMPT_TOKENS + 3)
    assert (result.logits is not None, result.scores is not None) == (
        "output_logits" in settings,
        "output_scores" in settings,
    )
    assert caplog.messages == []
