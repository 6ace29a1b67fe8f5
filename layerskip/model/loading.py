"""Loading a checkpoint, with an answer at once where there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from layerskip.model.adapters import AdapterFolder, is_adapter_folder
from layerskip.model.families import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB_TIMEOUT = 10.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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

    All arguments and the configuration are checked first, so that whatever cannot work is refused before weights are
    read. A folder that holds LoRA adapters alone gives the model that they were trained on with the adapters merged
    into its weights, which in bf16 and fp16 rounds them; its own tokenizer goes before that model's.

    Raises:
        ImportError: a folder of adapters, and peft is not installed.
        TypeError: `path_or_id` is neither a string nor a path.
        ValueError: no model there (a mistyped path is told from a hub id without waiting for the hub), a family that
            is not supported, or a device, type or attention implementation that is not to be had.
    """
    device, dtype = _read_device(device), _read_dtype(dtype)
    source, revision = _find(path_or_id, revision)
    try:
        if is_adapter_folder(Path(source)):
            model, tokenizer = _load_adapted(Path(source), dtype, attn_implementation)
        else:
            model, tokenizer = _load_whole(source, dtype, attn_implementation, revision)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"path_or_id={os.fspath(path_or_id)!r} cannot be loaded: {error}") from error
    return model.to(device).eval(), tokenizer


def _load_whole(
    source: str, dtype: str | torch.dtype, attn_implementation: str | None, revision: str | None
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    # A question on the terminal is no answer to a program: code that a checkpoint brings along is refused.
    options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
    config = AutoConfig.from_pretrained(source, **options)
    family = family_of(config)
    if attn_implementation is not None and attn_implementation not in family.attention:
        raise ValueError(
            f"attn_implementation={attn_implementation!r} is not supported for model_type={config.model_type!r}; "
            f"allowed: {', '.join(map(repr, family.attention))}, or None for the family's default."
        )
    model = AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=dtype, attn_implementation=attn_implementation, **options
    )
    has_tokenizer = not Path(source).is_dir() or _has_tokenizer(Path(source))
    return model, AutoTokenizer.from_pretrained(source, **options) if has_tokenizer else None


def _load_adapted(
    folder: Path, dtype: str | torch.dtype, attn_implementation: str | None
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    adapters = AdapterFolder.read(folder)
    try:
        base, tokenizer = load_model(
            adapters.base,
            device="cpu",
            dtype=dtype,
            attn_implementation=attn_implementation,
            revision=adapters.revision,
        )
    except ValueError as error:
        raise ValueError(
            f"path_or_id={str(folder)!r} holds adapters for the model {adapters.base!r} (base_model_name_or_path in "
            f"its adapter_config.json), which cannot be loaded: {error}"
        ) from error
    if _has_tokenizer(folder):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    return adapters.merge_into(base), tokenizer


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _read_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device={device!r} is not available here: {str(error).splitlines()[0]}") from error
    return found


def _read_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or dtype in DTYPES.values():
        return dtype
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; allowed are 'auto', {', '.join(map(repr, DTYPES))}.")
    return DTYPES[dtype]


def _find(path_or_id: str | os.PathLike[str], revision: str | None) -> tuple[str, str | None]:
    """Returns where to load from: a local folder, or a hub id and the revision there.

    Raises:
        TypeError, ValueError: as `load_model`.
    """
    if not isinstance(path_or_id, str | os.PathLike):
        raise TypeError(f"path_or_id={path_or_id!r} is a {type(path_or_id).__name__}; pass a folder or a hub id.")
    name = os.fspath(path_or_id)
    if Path(name).is_dir():
        if not Path(name, "config.json").is_file() and not is_adapter_folder(Path(name)):
            raise ValueError(f"path_or_id={name!r} is a folder without a model: it has no config.json.")
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for models on the hub, but path_or_id={name!r} is a folder.")
        return name, None
    if Path(name).exists():
        raise ValueError(f"path_or_id={name!r} is a file; pass the folder that holds config.json.")
    if not isinstance(path_or_id, str) or _looks_like_a_path(name):
        beside = Path(name).parent
        hint = f" ({beside} is a folder here, so this was not taken for a hub id)" if beside.is_dir() else ""
        raise ValueError(f"path_or_id={name!r}: there is no such folder; check the path{hint}.")
    return _find_on_hub(name, revision)


def _looks_like_a_path(name: str) -> bool:
    parent = Path(name).parent
    if name.startswith((".", "/", "~", "\\")) or (parent != Path(".") and parent.is_dir()):
        return True
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return False


def _find_on_hub(name: str, revision: str | None) -> tuple[str, str | None]:
    try:
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        beside = "" if revision is None else f" with revision={revision!r}"
        raise ValueError(f"path_or_id={name!r} is neither a local folder nor a model on the hub{beside}.") from error
    except Exception as error:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str):
            raise ValueError(
                f"path_or_id={name!r} is no local folder, and the hub could not be asked for a model of that name "
                f"({type(error).__name__}: {error})."
            ) from error
        # With the folder itself nothing is looked up, where a hub id would be tried again and again.
        return str(Path(cached).parent), None
    return name, revision
