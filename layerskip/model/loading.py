"""Loading a checkpoint, with an answer at once where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

from layerskip.model.adapters import CONFIG_FILE, AdapterFolder, is_adapter_folder
from layerskip.model.devices import check_device_map, read_device
from layerskip.model.draft_head import TENSORS_FILE, check_draft_token_ids, read_draft_token_ids
from layerskip.model.families import family_of
from layerskip.model.location import find
from layerskip.model.metadata import ADAPTER_FILE, Metadata
from layerskip.model.quantization import check_quantization, check_stored_quantization, is_quantized

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Checkpoint:
    """What a folder or hub id holds.

    Attributes:
        model: the causal LM, in eval mode.
        tokenizer: `None` for a folder without one.
        draft_token_ids: `(ids,)`, the most important first; `None` where the checkpoint names none.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    draft_token_ids: torch.Tensor | None


def load_checkpoint(
    path_or_id: str | os.PathLike[str],
    *,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    attn_implementation: str | None,
    revision: str | None,
    base: str | os.PathLike[str] | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> Checkpoint:
    """Returns what lies in a local folder or under a hub id.

    All arguments and the configuration are checked first, so that whatever cannot work is refused before weights are
    read. A folder that holds LoRA adapters alone gives the model that they were trained on with the adapters merged
    into its weights. They are merged in fp32, which takes 4 bytes of memory for each weight, and rounded to `dtype`
    once; "auto" is the type of the model beneath. The folder's own tokenizer goes before that model's. Metadata and
    draft token ids go together: they are the folder's own where it has a layerskip.json, else that model's.

    Args:
        base: folder or hub id of the model beneath a folder of adapters, in place of the one that they name.
        device_map: where the parts of a whole model go, as `from_pretrained` takes it, in place of `device`.

    Raises:
        ImportError: a folder of adapters or quantised weights, and their package is not installed.
        TypeError: `path_or_id` or `base` is neither a string nor a path, or `device_map` is no string or dict.
        ValueError: no model there (a mistyped path is told from a hub id without waiting for the hub), a family that
            is not supported, a device, type or attention implementation that is not to be had, fewer draft token ids
            than the metadata tell of or one that the model does not have, a `base` for a whole model, a `device_map`
            for adapters or beside `device`, or quantised weights that are not supported, of which another type is
            asked for, or beneath adapters.
    """
    check_device_map(device_map, device)
    device, dtype = read_device(device), _read_dtype(dtype)
    if base is not None and not isinstance(base, str | os.PathLike):
        raise TypeError(f"base={base!r} is a {type(base).__name__}; pass a folder or a hub id.")
    found = _look(path_or_id, attn_implementation, revision, base)
    _check_draft_token_ids(found, path_or_id)
    _check_quantization(found, path_or_id, dtype)
    if is_quantized(found.config) and device_map is None:
        # Quantised weights go where they belong at once: not all of them can be moved.
        device_map = {"": device}
    if device_map is None:
        checkpoint, own_dtype = found.read(dtype)
        model: Any = checkpoint.model
        if own_dtype is not None:
            _cast(model, own_dtype)
        return replace(checkpoint, model=model.to(device).eval())
    if isinstance(found, _Adapted):
        raise ValueError(
            f"device_map={device_map!r} is for whole models, but path_or_id={os.fspath(path_or_id)!r} holds adapters, "
            "which are merged into their model on the CPU; leave it out, or save the model that load returns and load "
            "that with a device_map."
        )
    checkpoint, _ = found.read(dtype, device_map)
    check_quantization(checkpoint.model)
    return replace(checkpoint, model=checkpoint.model.eval())


def load_model(
    path_or_id: str | os.PathLike[str],
    *,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    attn_implementation: str | None,
    revision: str | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Returns the model and the tokenizer of `load_checkpoint`, which says what can be wrong."""
    checkpoint = load_checkpoint(
        path_or_id, device=device, dtype=dtype, attn_implementation=attn_implementation, revision=revision
    )
    return checkpoint.model, checkpoint.tokenizer


@dataclass(frozen=True)
class _Whole:
    """A whole model in a folder or on the hub, before its weights are read."""

    path_or_id: str | os.PathLike[str]
    source: str
    options: dict[str, Any]
    config: Any
    attn_implementation: str | None
    draft_token_ids: torch.Tensor | None

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def metadata(self) -> Metadata:
        return Metadata.of(self.config)

    def read(self, dtype: str | torch.dtype, device_map: str | dict[str, Any] | None = None) -> tuple[Checkpoint, None]:
        """Returns the checkpoint, whose weights have the type asked for; on the CPU without a `device_map`."""
        with _files_of(self.path_or_id):
            model = AutoModelForCausalLM.from_pretrained(
                self.source,
                config=self.config,
                dtype=dtype,
                attn_implementation=self.attn_implementation,
                device_map=device_map,
                **self.options,
            )
            has_tokenizer = not Path(self.source).is_dir() or _has_tokenizer(Path(self.source))
            tokenizer = AutoTokenizer.from_pretrained(self.source, **self.options) if has_tokenizer else None
        return Checkpoint(model, tokenizer, self.draft_token_ids), None


@dataclass(frozen=True)
class _Adapted:
    """A folder of adapters and what lies beneath them, before any weights are read."""

    path_or_id: str | os.PathLike[str]
    adapters: AdapterFolder
    beneath: _Whole | _Adapted
    own_draft_token_ids: torch.Tensor | None

    @property
    def config(self) -> Any:
        return self.beneath.config

    @property
    def vocab_size(self) -> int:
        return self.beneath.vocab_size

    @property
    def metadata(self) -> Metadata:
        stored = self.adapters.metadata
        if stored is None:
            return self.beneath.metadata
        return Metadata.read(stored, str(self.adapters.folder / ADAPTER_FILE))

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        if self.adapters.metadata is None and self.own_draft_token_ids is None:
            return self.beneath.draft_token_ids
        return self.own_draft_token_ids

    def read(self, dtype: str | torch.dtype) -> tuple[Checkpoint, torch.dtype]:
        """Returns the checkpoint in fp32, and the type that its weights are yet to be rounded to."""
        with _beneath(self.adapters):
            checkpoint, own_dtype = self.beneath.read("auto" if dtype == "auto" else torch.float32)
        if own_dtype is None:
            own_dtype = checkpoint.model.dtype
        _cast(checkpoint.model, torch.float32)
        tokenizer = checkpoint.tokenizer
        with _files_of(self.path_or_id):
            if _has_tokenizer(self.adapters.folder):
                tokenizer = AutoTokenizer.from_pretrained(str(self.adapters.folder), trust_remote_code=False)
            merged = self.adapters.merge_into(checkpoint.model)
        wanted = dtype if isinstance(dtype, torch.dtype) else own_dtype
        return Checkpoint(merged, tokenizer, self.draft_token_ids), wanted


def _look(
    path_or_id: str | os.PathLike[str],
    attn_implementation: str | None,
    revision: str | None,
    base: str | os.PathLike[str] | None = None,
) -> _Whole | _Adapted:
    """Returns what lies there, all checked but the weights; see `load_checkpoint` for arguments and errors."""
    source, revision = find(path_or_id, revision)
    is_adapted = is_adapter_folder(Path(source))
    if base is not None and not is_adapted:
        raise ValueError(
            f"base={os.fspath(base)!r} is for a folder of adapters, but path_or_id={os.fspath(path_or_id)!r} holds a "
            "whole model; leave it out."
        )
    with _files_of(path_or_id):
        if not is_adapted:
            return _look_at_whole(path_or_id, source, attn_implementation, revision)
        adapters = AdapterFolder.read(Path(source), base)
        draft_token_ids = read_draft_token_ids(adapters.folder)
    with _beneath(adapters):
        beneath = _look(adapters.base, attn_implementation, adapters.revision)
    return _Adapted(path_or_id, adapters, beneath, draft_token_ids)


def _look_at_whole(
    path_or_id: str | os.PathLike[str], source: str, attn_implementation: str | None, revision: str | None
) -> _Whole:
    # A question on the terminal is no answer to a program: code that a checkpoint brings along is refused.
    options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
    config = AutoConfig.from_pretrained(source, **options)
    family = family_of(config)
    if attn_implementation is not None and attn_implementation not in family.attention:
        raise ValueError(
            f"attn_implementation={attn_implementation!r} is not supported for model_type={config.model_type!r}; "
            f"allowed: {', '.join(map(repr, family.attention))}, or None for the family's default."
        )
    folder: str | None = source
    if not Path(source).is_dir():
        tensors = cached_file(
            source, TENSORS_FILE, revision=options["revision"], _raise_exceptions_for_missing_entries=False
        )
        folder = None if tensors is None else os.path.dirname(tensors)
    draft_token_ids = None if folder is None else read_draft_token_ids(folder)
    return _Whole(path_or_id, source, options, config, attn_implementation, draft_token_ids)


@contextmanager
def _files_of(path_or_id: str | os.PathLike[str]) -> Iterator[None]:
    """Names the checkpoint whose files cannot be read."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"path_or_id={os.fspath(path_or_id)!r} cannot be loaded: {error}") from error


@contextmanager
def _beneath(adapters: AdapterFolder) -> Iterator[None]:
    """Names the adapters whose base cannot be loaded."""
    try:
        yield
    except ValueError as error:
        named = "base" if adapters.is_base_given else f"base_model_name_or_path in its {CONFIG_FILE}"
        raise ValueError(
            f"path_or_id={str(adapters.folder)!r} holds adapters for the model {os.fspath(adapters.base)!r} ({named}), "
            f"which cannot be loaded: {error}"
        ) from error


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts the weights of a model, in place. `model.to` would round rotary tables and other buffers as well."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _check_draft_token_ids(found: _Whole | _Adapted, path_or_id: str | os.PathLike[str]) -> None:
    """Raises ValueError where the metadata tell of more draft token ids than there are, or the model lacks one."""
    where = f"path_or_id={os.fspath(path_or_id)!r}:"
    ids, size = found.draft_token_ids, found.metadata.draft_vocab_size
    if ids is not None:
        check_draft_token_ids(ids, found.vocab_size, f"{where} {TENSORS_FILE}")
    if size is None or size == found.vocab_size:
        return
    remedy = "copy the file from the original checkpoint, or remove draft_vocab_size from the metadata"
    if ids is None:
        raise ValueError(
            f"{where} the metadata has draft_vocab_size={size}, but there is no {TENSORS_FILE} with the token ids; "
            f"{remedy}."
        )
    if len(ids) < size:
        raise ValueError(
            f"{where} the metadata has draft_vocab_size={size}, but {TENSORS_FILE} holds {len(ids)} token ids; "
            f"{remedy}."
        )


def _check_quantization(found: _Whole | _Adapted, path_or_id: str | os.PathLike[str], dtype: str | torch.dtype) -> None:
    """Checks that quantised weights can be read, and are taken as they are.

    Raises:
        ImportError: their package is missing.
        ValueError: a kind that is not supported, another type than the stored one, or adapters to be merged into them.
    """
    if not is_quantized(found.config):
        return
    where = f"path_or_id={os.fspath(path_or_id)!r}"
    if isinstance(found, _Adapted):
        raise ValueError(
            f"{where} holds adapters on a model with quantised weights, into which they cannot be merged. Load that "
            "model with AutoModelForCausalLM.from_pretrained, attach the adapters with PeftModel.from_pretrained, and "
            "pass the result to layerskip.Engine; or pass as base the model from which the quantised one was made."
        )
    check_stored_quantization(found.config, where)
    if dtype not in ("auto", found.config.dtype):
        raise ValueError(
            f"dtype={dtype!r} is not the type in which {where} was quantised, {found.config.dtype}, and quantised "
            "weights cannot be cast; leave it out."
        )


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _read_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or dtype in DTYPES.values():
        return dtype
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; allowed are 'auto', {', '.join(map(repr, DTYPES))}.")
    return DTYPES[dtype]
