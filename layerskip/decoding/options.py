"""What of a transformers `GenerationConfig` is honoured, and what is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# `generate` itself turns these into lengths, processors and criteria before decoding begins.
HONOURED = {
    "max_new_tokens",
    "max_length",
    "min_new_tokens",
    "min_length",
    "max_time",
    "stop_strings",
    "eos_token_id",
    "pad_token_id",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "do_sample",
    "num_return_sequences",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "renormalize_logits",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "remove_invalid_values",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "watermarking_config",
}
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
WHOLE_NUMBERS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences", "pad_token_id")
# They name tokens that start a text where there is no prompt, or say where the settings come from.
METADATA = {"_from_model_config", "transformers_version", "bos_token_id", "decoder_start_token_id"}
# `generate` reads them beside num_beams > 1 or an assistant, which are refused.
WITHOUT_EFFECT = {
    "disable_compile",
    "length_penalty",
    "early_stopping",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
}
# Values that mean "off" where neither `None`, `False` nor transformers' own default is the only one that does.
SWITCHED_OFF: dict[str, Any] = {
    "use_cache": True,
    "disable_compile": True,
    "cache_implementation": "dynamic",
    "guidance_scale": 1,
}


@dataclass(frozen=True)
class GenerationOptions:
    """What is left of a call's settings once `generate` has made lengths, processors and criteria of the others.

    Attributes:
        do_sample: draw tokens, instead of taking the best one.
        pad_token_id: fills finished rows; as in `generate` the first EOS token where none is set.
        output_scores: return the processed scores of every emitted token.
        output_logits: return the logits of every emitted token.
    """

    do_sample: bool
    pad_token_id: int | None
    output_scores: bool
    output_logits: bool

    @classmethod
    def of(cls, config: GenerationConfig) -> GenerationOptions:
        """Returns the options of a config that `generate` has filled in.

        Raises:
            TypeError: a token id that is no integer.
            ValueError: an empty list of EOS tokens.
        """
        eos_token_ids = token_ids("eos_token_id", config.eos_token_id)
        pad_token_id = config.pad_token_id
        if pad_token_id is not None:
            _check_whole_number("pad_token_id", pad_token_id)
        elif eos_token_ids:
            pad_token_id = eos_token_ids[0]
        return cls(bool(config.do_sample), pad_token_id, bool(config.output_scores), bool(config.output_logits))


def check_config(generation_config: object) -> None:
    """Raises TypeError for anything but a `GenerationConfig` or `None`."""
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise TypeError(f"generation_config is a {type(generation_config).__name__}, not a GenerationConfig.")


def with_values(
    generation_config: GenerationConfig | None, arguments: dict[str, Any], **values: Any
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Returns a call's config and arguments with some fields set, for `generate`; the caller's config does not change.

    The fields go into the config where there is one, since transformers warns about a config with arguments beside it.
    """
    if generation_config is None:
        return None, {**arguments, **values}
    changed = copy.deepcopy(generation_config)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed, {name: value for name, value in arguments.items() if name not in values}


def merged_config(
    model: PreTrainedModel, generation_config: GenerationConfig | None, arguments: dict[str, Any]
) -> GenerationConfig:
    """Returns the settings of a call as `generate` merges them: arguments, then the call's config, then the model's.

    Raises:
        TypeError: an argument that no `GenerationConfig` has, or one that is no integer where one is needed.
        ValueError: a setting that is not supported, or that has no effect.
    """
    known = vars(GenerationConfig())
    for name, value in arguments.items():
        if name not in known:
            raise TypeError(f"{name}={value!r} is neither an argument of the engine nor of GenerationConfig.")
    # Each source by itself, before transformers compares what they hold with numbers.
    configs = [model.generation_config] if generation_config is None else [generation_config, model.generation_config]
    for settings in (arguments, *map(vars, configs)):
        _check_numbers(settings)
    prepare: Any = model._prepare_generation_config
    config: GenerationConfig = prepare(generation_config, **arguments)[0]
    check_supported(config, arguments)
    return config


def check_supported(config: GenerationConfig, given: Collection[str] = ()) -> None:
    """Checks that a config asks for nothing that is not done here.

    Args:
        config: as `generate` has merged it.
        given: names of the settings that the call itself brought along. A checkpoint's habits for sampling or beams
            change nothing in greedy decoding; what the caller gives would be ignored, and is refused.

    Raises:
        TypeError: a length or a time that is no number.
        ValueError: a setting that is not supported, or that has no effect; the message says how to switch it off.
    """
    _check_numbers(vars(config))
    for name in ("top_p", "typical_p"):
        share = vars(config)[name]
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"{name}={share!r} is out of range; it is a probability, 0 to 1.")
    off = GenerationConfig._get_default_generation_params() | SWITCHED_OFF
    for name in sorted(set(vars(GenerationConfig())) - HONOURED - METADATA):
        value = vars(config)[name]
        # `is`, since 0 equals False but is a token id, a factor or a time.
        is_off = value is None or value is False or (name in off and off[name] is not None and value == off[name])
        if name == "use_cache":
            is_off = value is not False
        if is_off:
            continue
        if name in SAMPLING:
            if name in given and not config.do_sample:
                raise ValueError(
                    f"{name}={value!r} has no effect on greedy decoding; pass do_sample=True, or leave it out."
                )
        elif name not in WITHOUT_EFFECT:
            origin = "in this call" if name in given else "in the generation_config"
            raise ValueError(
                f"{name}={value!r} {origin} is not supported; pass {name}={off.get(name)!r} to switch it off."
            )
        elif name in given:
            raise ValueError(f"{name}={value!r} has no effect without beams or an assistant; leave it out.")


def _check_numbers(settings: Mapping[str, Any]) -> None:
    for name in WHOLE_NUMBERS:
        if settings.get(name) is not None:
            _check_whole_number(name, settings[name])
    copies = settings.get("num_return_sequences")
    if copies is not None and copies < 1:
        raise ValueError(f"num_return_sequences={copies} is out of range; it is at least 1.")
    max_time = settings.get("max_time")
    if max_time is not None and (isinstance(max_time, bool) or not isinstance(max_time, int | float)):
        raise TypeError(f"max_time={max_time!r} is a {type(max_time).__name__}, not a number of seconds.")


def _check_whole_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not an integer.")


def token_ids(name: str, value: Any) -> list[int]:
    """Returns the ids that a setting names: one, several, or none.

    Raises:
        TypeError: one that is no integer.
        ValueError: an empty list.
    """
    if isinstance(value, list | tuple) and not value:
        raise ValueError(f"{name}={value!r} names no token; pass None where there is none.")
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"{name}={value!r} must be an integer or a list of integers.")
    return ids
