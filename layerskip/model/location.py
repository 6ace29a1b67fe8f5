"""Where a checkpoint lies: in a local folder or on the hub, told apart without waiting for the hub."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

from layerskip.model.adapters import CONFIG_FILE, is_adapter_folder

HUB_TIMEOUT = 10.0


def find(path_or_id: str | os.PathLike[str], revision: str | None) -> tuple[str, str | None]:
    """Returns where to load from: a local folder, or a hub id and the revision there.

    Raises:
        TypeError: neither a string nor a path.
        ValueError: no model there, or a revision of a folder.
    """
    if not isinstance(path_or_id, str | os.PathLike):
        raise TypeError(f"path_or_id={path_or_id!r} is a {type(path_or_id).__name__}; pass a folder or a hub id.")
    name = os.fspath(path_or_id)
    if Path(name).is_dir():
        if not Path(name, "config.json").is_file() and not is_adapter_folder(Path(name)):
            files = sorted(Path(name).glob("*.gguf"))
            remedy = f" {_gguf_remedy(files[0])}" if files else ""
            raise ValueError(f"path_or_id={name!r} is a folder without a model: it has no config.json.{remedy}")
        if Path(name, "config.json").is_file() and Path(name, CONFIG_FILE).is_file():
            raise ValueError(
                f"path_or_id={name!r} holds a whole model (config.json) and adapters ({CONFIG_FILE}); put the adapters "
                "into a folder of their own, so that it is clear which is meant."
            )
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for models on the hub, but path_or_id={name!r} is a folder.")
        return name, None
    if Path(name).exists():
        if Path(name).suffix == ".gguf":
            raise ValueError(f"path_or_id={name!r} is a file. {_gguf_remedy(Path(name))}")
        raise ValueError(f"path_or_id={name!r} is a file; pass the folder that holds config.json.")
    if not isinstance(path_or_id, str) or _looks_like_a_path(name):
        beside = Path(name).parent
        hint = f" ({beside} is a folder here, so this was not taken for a hub id)" if beside.is_dir() else ""
        raise ValueError(f"path_or_id={name!r}: there is no such folder; check the path{hint}.")
    return _find_on_hub(name, revision)


def _gguf_remedy(file: Path) -> str:
    """Returns how to get to an engine from a GGUF file, which says nothing of exits and is unpacked at loading."""
    source = f"{str(file.parent)!r}, gguf_file={file.name!r}"
    return (
        f"Load the GGUF file with AutoModelForCausalLM.from_pretrained({source}) and AutoTokenizer.from_pretrained("
        f"{source}), and pass both to layerskip.Engine."
    )


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
