"""The model that a run begins with: a checkpoint, a new one, or adapters on frozen weights."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from layerskip.model.adapters import CONFIG_FILE, AdapterFolder, is_adapter_folder
from layerskip.model.families import family_of
from layerskip.model.loading import DTYPES, load_model
from layerskip.training.recipe import FromConfig, LoraSettings, Recipe

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def initial_model(recipe: Recipe, source: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the model that training begins with, on the CPU, and its tokenizer.

    Args:
        recipe: which model, its type and attention.
        source: folder or hub id to load from, where `recipe.model` is a name for one.

    Raises:
        ValueError: there is no such model, it has no tokenizer, or its vocabulary is too small for it.
    """
    if isinstance(recipe.model, FromConfig):
        return _new_model(recipe, recipe.model)
    path_or_id = source or recipe.model
    model, tokenizer = load_model(
        # Adapters are saved with this name for their base, which should be found from anywhere.
        os.path.abspath(path_or_id) if Path(path_or_id).is_dir() else path_or_id,
        device="cpu",
        dtype=recipe.dtype,
        attn_implementation=recipe.attn_implementation,
        revision=recipe.revision,
    )
    if tokenizer is None:
        raise ValueError(f"model={recipe.model!r} has no tokenizer, without which no text can be read.")
    _check_vocabulary(tokenizer, model.config.vocab_size)
    return model, tokenizer


def _new_model(recipe: Recipe, scratch: FromConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    settings = dict(scratch.from_config)
    model_type = settings.pop("model_type")
    known = AutoConfig.for_model(model_type)
    unknown = set(settings) - set(known.to_dict()) - set(known.attribute_map)
    if unknown:
        raise ValueError(
            f"model.from_config has {sorted(unknown)}, which a {model_type!r} configuration does not know."
        )
    try:
        config = AutoConfig.for_model(model_type, **settings)
    except StrictDataclassError as error:
        raise ValueError(f"model.from_config={scratch.from_config} cannot be: {error}") from error
    family_of(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(scratch.tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.tokenizer={scratch.tokenizer!r} cannot be loaded: {error}") from error
    _check_vocabulary(tokenizer, config.vocab_size)
    dtype = DTYPES.get(recipe.dtype)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=recipe.attn_implementation, dtype=dtype)
    return model, tokenizer


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's vocab_size={vocab_size}; resize the model's "
            "embeddings, or take the tokenizer that belongs to it."
        )


def add_adapters(model: PreTrainedModel, settings: LoraSettings, revision: str | None = None) -> PeftModel:
    """Returns a PEFT model around `model`, whose own weights are frozen: new adapters, or those to train further.

    Args:
        model: the base.
        settings: of the adapters.
        revision: of the base on the hub, which adapters saved alone will name.

    Raises:
        ValueError: a target that the model does not have, or the head or embedding where both are one matrix; adapters
            to train further that are not there or do not fit.
    """
    if settings.continue_from is not None:
        return _adapters_of(settings.continue_from, model)
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    config = LoraConfig(
        r=settings.rank,
        # Declared as an integer there, and used as a factor.
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        rank_pattern=dict(settings.rank_pattern),
        alpha_pattern=dict(settings.alpha_pattern),
        lora_dropout=settings.dropout,
        target_modules=targets,
        revision=revision,
        task_type="CAUSAL_LM",
    )
    try:
        adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"lora.targets={settings.targets!r} cannot be adapted: {error}") from error
    for pattern in (*settings.rank_pattern, *settings.alpha_pattern):
        # As PEFT reads patterns; one without a match it passes over in silence.
        if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in adapted.base_model.targeted_module_names):
            raise ValueError(
                f"lora has the pattern {pattern!r}, which is the end of no adapted module's name; such names are "
                f"{adapted.base_model.targeted_module_names[0]!r}."
            )
    base = adapted.get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if base.config.tie_word_embeddings and any(isinstance(end, BaseTunerLayer) for end in ends):
        raise ValueError(
            f"lora.targets={settings.targets!r} has the head or the embedding, which are one matrix in this model "
            "(tie_word_embeddings) and would be taken apart; leave it out."
        )
    return adapted


def shape_of(adapted: PeftModel) -> dict[str, Any]:
    """Returns rank, alpha and so on of the adapters of a PEFT model, named as in `LoraSettings`."""
    config: Any = adapted.active_peft_config
    targets = config.target_modules
    return {
        "rank": config.r,
        "alpha": config.lora_alpha,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "dropout": config.lora_dropout,
        "targets": targets if isinstance(targets, str) else sorted(targets),
    }


def _adapters_of(folder: str, model: PreTrainedModel) -> PeftModel:
    if not is_adapter_folder(Path(folder)):
        raise ValueError(
            f"lora.continue_from={folder!r} holds no adapters: an {CONFIG_FILE} and no config.json, as a run with "
            "lora.merge=false leaves."
        )
    adapted = AdapterFolder.read(Path(folder), model.name_or_path or "the model").attach_to(model, trainable=True)
    # What is saved names the model beneath, wherever the adapters had it.
    adapted.active_peft_config.base_model_name_or_path = model.name_or_path
    return adapted
