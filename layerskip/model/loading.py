"""Loading a checkpoint, with an answer at once where there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from layerskip.model.families import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB_TIMEOUT = 10.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_model(
    path_or_id: str | os.PathLike[str],
    *,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    attn_implementation: str | None,
    revision: str | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Returns the model of a local folder or hub id, in eval mode, and its tokenizer (`None` for a folder without one).

    The configuration is read and checked first, so that an unsupported model is refused before its weights are
    touched.

    Raises:
        ValueError: no model there (a mistyped path is told from a hub id without waiting for the hub), or a family
            that is not supported.
    """
    source = os.fspath(path_or_id)
    where: dict[str, Any] = {"revision": revision} if revision is not None else {}
    if Path(source).is_dir():
        if not Path(source, "config.json").is_file():
            raise ValueError(f"path_or_id={source!r} is a folder without a model: it has no config.json.")
    else:
        where["local_files_only"] = not _hub_has(source, revision)
    config = AutoConfig.from_pretrained(source, **where)
    family_of(config)
    if attn_implementation is not None:
        where["attn_implementation"] = attn_implementation
    model: Any = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype, **where)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where.pop("attn_implementation", None)
    has_tokenizer = not Path(source).is_dir() or any(Path(source, name).is_file() for name in TOKENIZER_FILES)
    tokenizer = AutoTokenizer.from_pretrained(source, **where) if has_tokenizer else None
    return model.to(device).eval(), tokenizer


def _hub_has(name: str, revision: str | None) -> bool:
    """Returns whether the hub was reached and has the model; `False` for a model in the local cache of the hub.

    Raises:
        ValueError: `name` is a path where nothing is, or no model of that name is to be had.
    """
    if Path(name).exists():
        raise ValueError(f"path_or_id={name!r} is a file; pass the folder that holds config.json.")
    parent = Path(name).parent
    looks_like_a_path = name.startswith((".", "/", "~", "\\")) or (parent != Path(".") and parent.is_dir())
    try:
        validate_repo_id(name)
    except HFValidationError:
        looks_like_a_path = True
    if looks_like_a_path:
        raise ValueError(f"path_or_id={name!r}: there is no such folder; check the path.")
    try:
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ValueError(
            f"path_or_id={name!r} is neither a local folder nor a model on the hub"
            f"{'' if revision is None else f' with revision={revision!r}'}."
        ) from error
    except Exception as error:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            raise ValueError(
                f"path_or_id={name!r} is no local folder, and the hub could not be asked for a model of that name "
                f"({type(error).__name__}: {error})."
            ) from error
        return False
    return True
