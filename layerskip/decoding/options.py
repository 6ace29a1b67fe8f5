"""What of a transformers `GenerationConfig` is honoured, and what is refused by name."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HONOURED = {
    "max_new_tokens",
    "max_length",
    "eos_token_id",
    "pad_token_id",
    "output_scores",
    "output_logits",
}
WHOLE_NUMBERS = ("max_new_tokens", "max_length", "pad_token_id")
# They name tokens that start a text where there is no prompt, or say where the settings come from.
METADATA = {"_from_model_config", "transformers_version", "bos_token_id", "decoder_start_token_id"}
# `generate` reads them beside do_sample=True, num_beams > 1 or an assistant, which are refused, or as the form of its
# output.
WITHOUT_EFFECT_WHEN_GREEDY = {
    "return_dict_in_generate",
    "disable_compile",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
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
    "return_dict_in_generate": True,
    "disable_compile": True,
    "cache_implementation": "dynamic",
    "min_new_tokens": 0,
    "guidance_scale": 1,
}


@dataclass(frozen=True)
class GenerationOptions:
    """The generation settings of one call.

    Attributes:
        max_new_tokens: the budget of every row.
        eos_token_ids: tokens that end a row.
        pad_token_id: fills finished rows; as in `generate` the first EOS token where none is set.
        output_scores: return the processed scores of every emitted token.
        output_logits: return the logits of every emitted token.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int]
    pad_token_id: int | None
    output_scores: bool
    output_logits: bool


def read_options(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None,
    arguments: dict[str, Any],
    prompt_tokens: int,
) -> GenerationOptions:
    """Returns what a call's generation settings amount to, with the precedence that `generate` gives them.

    Args:
        model: its `generation_config` fills what the call leaves open.
        generation_config: the call's own, or `None`.
        arguments: single `GenerationConfig` fields of the call; they override both.
        prompt_tokens: the length of the longest prompt, padding included.

    Raises:
        TypeError: an argument that no `GenerationConfig` has.
        ValueError: a setting that is not supported, or a length that leaves nothing to generate.
    """
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise TypeError(f"generation_config is a {type(generation_config).__name__}, not a GenerationConfig.")
    # `None` leaves a length open, as in `generate`.
    arguments = {name: value for name, value in arguments.items() if not (name == "max_length" and value is None)}
    for name, value in arguments.items():
        if name not in vars(GenerationConfig()):
            raise TypeError(f"{name}={value!r} is neither an argument of the engine nor of GenerationConfig.")
        if name in WHOLE_NUMBERS and value is not None:
            _check_whole_number(name, value)
    # transformers warns about outputs that are asked for without this; results here always carry them.
    if generation_config is None:
        arguments = {"return_dict_in_generate": True} | arguments
    else:
        generation_config = copy.deepcopy(generation_config)
        generation_config.return_dict_in_generate = True
    prepare: Any = model._prepare_generation_config
    config, _ = prepare(generation_config, **arguments)
    _refuse_unsupported(config, arguments)
    eos_token_ids = _token_ids("eos_token_id", config.eos_token_id)
    pad_token_id = config.pad_token_id
    if pad_token_id is not None:
        _check_whole_number("pad_token_id", pad_token_id)
    elif eos_token_ids:
        pad_token_id = eos_token_ids[0]
    lengths = [model.generation_config.max_length, arguments.get("max_length")]
    lengths += [] if generation_config is None else [generation_config.max_length]
    return GenerationOptions(
        max_new_tokens=_budget(config, all(length is None for length in lengths), prompt_tokens, model),
        eos_token_ids=frozenset(eos_token_ids),
        pad_token_id=pad_token_id,
        output_scores=bool(config.output_scores),
        output_logits=bool(config.output_logits),
    )


def _check_whole_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not an integer.")


def _token_ids(name: str, value: Any) -> list[int]:
    """Returns the ids that a setting names: one, several, or none."""
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"{name}={value!r} must be an integer or a list of integers.")
    return ids


def _refuse_unsupported(config: GenerationConfig, arguments: dict[str, Any]) -> None:
    off = GenerationConfig._get_default_generation_params() | SWITCHED_OFF
    for name in sorted(set(vars(GenerationConfig())) - HONOURED - METADATA):
        value = vars(config)[name]
        # `is`, since 0 equals False but is a token id, a factor or a time.
        is_off = value is None or value is False or (name in off and off[name] is not None and value == off[name])
        if name in ("use_cache", "return_dict_in_generate"):
            is_off = value is not False
        if is_off:
            continue
        if name not in WITHOUT_EFFECT_WHEN_GREEDY:
            origin = "in this call" if name in arguments else "in the generation_config"
            raise ValueError(
                f"{name}={value!r} {origin} is not supported; pass {name}={off.get(name)!r} to switch it off."
            )
        # A checkpoint's defaults for sampling or beams change nothing in greedy decoding; a caller's wish would.
        if name in arguments:
            raise ValueError(f"{name}={value!r} has no effect on greedy decoding, the only kind here; leave it out.")


def _budget(config: GenerationConfig, default_length: bool, prompt_tokens: int, model: PreTrainedModel) -> int:
    """Returns how many tokens each row may emit; `max_length` counts the prompt with its padding, as in `generate`."""
    if config.max_new_tokens is not None:
        _check_whole_number("max_new_tokens", config.max_new_tokens)
    _check_whole_number("max_length", config.max_length)
    if config.max_new_tokens is not None:
        if not default_length:
            warnings.warn(
                f"max_new_tokens={config.max_new_tokens} takes precedence over max_length={config.max_length}.",
                stacklevel=5,  # the line that called the engine
            )
        budget = config.max_new_tokens
        name, value = "max_new_tokens", budget
    elif default_length:
        limit = model.config.max_position_embeddings
        budget = min(config.max_length, limit - prompt_tokens)
        name, value = "max_position_embeddings", limit
    else:
        budget = config.max_length - prompt_tokens
        name, value = "max_length", config.max_length
    if budget < 1:
        raise ValueError(
            f"{name}={value} leaves nothing to generate after a prompt of {prompt_tokens} tokens; shorten the prompt "
            "or pass a larger max_new_tokens."
        )
    return budget
