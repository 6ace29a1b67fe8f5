"""Training data: from files or the hub to rows of token ids, packed if wanted, and to batches."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from layerskip.training.exit_loss import IGNORED
from layerskip.training.rows import COLUMN_NAMES, OPTIONAL, BlockTokenizer, Packer, RowTokenizer, find_columns

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

    AnyDataset: TypeAlias = Dataset | IterableDataset

# The suffixes of files, and the builder of `datasets` that reads them.
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
# Rows that are tokenised and packed together.
BLOCK = 1000


@dataclass(frozen=True)
class DataSettings:
    """What to train and evaluate on.

    Attributes:
        train: one or several files of one kind (.jsonl, .json, .parquet, or .txt with a text a line), a folder of
            such, or a hub dataset, owner/name. A row has `text`, or `messages`, or `prompt` and `completion`, which are
            strings or lists of messages; `finish_reason` "length" marks an answer that was cut, which gets no EOS;
            `guard` false frees a row from the guard of the last layer's quality, as one that teaches something new.
        eval: what to evaluate on, named likewise; none by default.
        eval_rows: this many of the last rows of `train` are held out to evaluate on, where `eval` names nothing.
        split: which split of a hub dataset, or of a folder that has several, to train on.
        eval_split: which one to evaluate on, where `eval` names such.
        columns: what the data call the columns of a row, such as {prompt: question, completion: answer}; it also
            chooses where the data have the columns of more than one kind of row.
        completion_only: true: only completions count, of `messages` the assistant's; false: everything does. By
            default completions where there are, else everything.
        max_length: tokens of a row; longer ones are cut at the end.
        packing: put several rows into one of at most `max_length` tokens. None sees another.
        streaming: read while training, for data that do not fit on the disk; needs a number of steps to train.
        shuffle_buffer: how many rows of a stream are mixed at a time.
    """

    train: str | tuple[str, ...]
    eval: str | tuple[str, ...] | None = None
    eval_rows: int = 0
    split: str = "train"
    eval_split: str = "validation"
    columns: dict[str, str] = field(default_factory=dict)
    completion_only: bool | None = None
    max_length: int = 1024
    packing: bool = False
    streaming: bool = False
    shuffle_buffer: int = 1000

    def __post_init__(self) -> None:
        """Checks the settings; raises ValueError for values out of range and settings that exclude each other."""
        for name, value in (("train", self.train), ("eval", self.eval)):
            if value is not None and not all(_names(value) or [""]):
                raise ValueError(f"{name}={value!r} names nothing; name files, a folder or a hub dataset.")
        for name, number, least in (
            ("eval_rows", self.eval_rows, 0),
            ("max_length", self.max_length, 2),
            ("shuffle_buffer", self.shuffle_buffer, 1),
        ):
            if number < least:
                raise ValueError(f"{name}={number} is out of range; allowed is {name} ≥ {least}.")
        if self.eval_rows and self.eval is not None:
            raise ValueError(f"eval_rows={self.eval_rows} and eval={self.eval!r} exclude each other; leave one out.")
        if self.eval_rows and self.streaming:
            raise ValueError(
                f"eval_rows={self.eval_rows} takes the last rows of train, and streaming=True does not know them; name "
                "other data as eval."
            )
        for name in self.columns:
            if name not in COLUMN_NAMES:
                raise ValueError(f"columns names {name!r}; allowed are {', '.join(COLUMN_NAMES)}.")


@dataclass(frozen=True)
class TrainingData:
    """Tokenised data, with the columns `input_ids`, `labels`, perhaps `guard`, and, where packed, `position_ids`.

    Attributes:
        train: a `Dataset`, in the order of the data, or where streaming a shuffled `IterableDataset`.
        eval: likewise, never shuffled; `None` for none.
        fingerprint: SHA-256 of the tokenised training rows, before packing; where streaming they cannot be known, and
            it is "streaming:" and a hash of the settings.
        dropped_rows: training rows without a token that counts, which are left out; `None` where streaming.
    """

    train: AnyDataset
    eval: AnyDataset | None
    fingerprint: str
    dropped_rows: int | None


def load_data(settings: DataSettings, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> TrainingData:
    """Returns the data to train and evaluate on, tokenised.

    Everything is read and checked here; of streamed data, the first row. `seed` decides the order of streamed data,
    together with the epoch that is set on them.

    Raises:
        ValueError: data that are missing, empty, damaged, without the columns of a row, or with rows that cannot be
            tokenised; or no EOS token.
        OSError: a hub dataset that cannot be reached.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no EOS token; set tokenizer.eos_token.")
    rows = _read("train", settings.train, settings.split, settings)
    train_name, held_out, first_held_out = f"train={settings.train!r}", None, 0
    held_out_name = train_name if settings.eval is None else f"eval={settings.eval!r}"
    if settings.eval is not None:
        held_out = _read("eval", settings.eval, settings.eval_split, settings)
    elif settings.eval_rows:
        first_held_out = len(rows) - settings.eval_rows
        if first_held_out < 1:
            raise ValueError(
                f"eval_rows={settings.eval_rows} leaves nothing of the {len(rows)} rows of {train_name} to train on; "
                f"allowed is eval_rows < {len(rows)}."
            )
        held_out = rows.select(range(first_held_out, len(rows)))
        rows = rows.select(range(first_held_out))
    train = _tokenised(rows, train_name, settings, tokenizer)
    if held_out is not None:
        held_out = _tokenised(held_out, held_out_name, settings, tokenizer, first_held_out)
    if settings.streaming:
        described = json.dumps(dataclasses.asdict(settings), sort_keys=True)
        fingerprint = f"streaming:{hashlib.sha256(described.encode()).hexdigest()}"
        dropped = None
        train = train.shuffle(seed=seed, buffer_size=settings.shuffle_buffer)
    else:
        fingerprint, dropped = _fingerprint(train), len(rows) - len(train)
    if settings.packing:
        train = _packed(train, settings.max_length)
        held_out = None if held_out is None else _packed(held_out, settings.max_length)
    return TrainingData(train, held_out, fingerprint, dropped)


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows of different lengths, padded on the right.

    Attributes:
        pad_token_id: fills rows; which tokens are padding follows from lengths alone, so that it may equal EOS.
    """

    pad_token_id: int

    @classmethod
    def for_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Returns one that pads with the tokenizer's padding token, or with EOS where it has none.

        Raises:
            ValueError: the tokenizer has neither.
        """
        token = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if token is None:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no EOS token; set tokenizer.eos_token.")
        return cls(token)

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Returns `input_ids`, `labels` (−100 in padding) and `attention_mask`, each `(batch, tokens)`.

        Rows that say what the guard holds to give `guard` as well, bool.

        Packed rows get `position_ids` instead of a mask: from positions that restart, and only without mask and cache,
        transformers keeps documents apart. There each token of padding is a document of its own.
        """
        padded = {
            "input_ids": _padded([row["input_ids"] for row in rows], self.pad_token_id),
            "labels": _padded([row["labels"] for row in rows], IGNORED),
        }
        if "guard" in rows[0]:
            padded["guard"] = _padded([row["guard"] for row in rows], 0).bool()
        if "position_ids" in rows[0]:
            return {**padded, "position_ids": _padded([row["position_ids"] for row in rows], 0)}
        return {**padded, "attention_mask": _padded([[1] * len(row["input_ids"]) for row in rows], 0)}


def _padded(rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows], dtype=torch.long)


# Reading


def _names(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _read(argument: str, value: str | Sequence[str], split: str, settings: DataSettings) -> AnyDataset:
    """Returns the rows that `argument=value` names, at least one."""
    names, streaming = _names(value), settings.streaming
    paths = [Path(name).expanduser() for name in names]
    if len(paths) == 1 and paths[0].is_dir():
        rows = _from_folder(argument, paths[0], split, streaming)
    elif len(paths) == 1 and not paths[0].is_file() and not _looks_like_path(names[0]):
        rows = _from_hub(argument, names[0], split, streaming)
    else:
        rows = _from_files(argument, paths, settings)
    if next(iter(rows), None) is None:
        raise ValueError(f"{argument}={value!r} holds no rows; it must hold at least one.")
    return rows


def _looks_like_path(name: str) -> bool:
    """Whether a name is no owner/name of the hub, so that a mistyped path is not asked for there."""
    path = Path(name).expanduser()
    in_folder = path.parent.is_dir() and len(path.parts) > 1
    return len(path.parts) != 2 or name.startswith((".", "/", "~")) or path.suffix[1:].isalpha() or in_folder


def _builder(argument: str, paths: Iterable[Path]) -> str:
    """Returns which builder reads files, all of one kind."""
    found = {path.suffix.lower() for path in paths}
    for suffix in sorted(found - set(BUILDERS)):
        raise ValueError(f"{argument} names a file that ends with {suffix!r}; allowed are {', '.join(BUILDERS)}.")
    if len({BUILDERS[suffix] for suffix in found}) != 1:
        raise ValueError(f"{argument} mixes files that end with {' and '.join(sorted(found))}; give files of one kind.")
    return BUILDERS[found.pop()]


def _from_files(argument: str, paths: list[Path], settings: DataSettings) -> AnyDataset:
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{argument} names the folder {str(path)!r} beside others; name it alone, or files only.")
        if not path.is_file():
            raise ValueError(f"{argument}={str(path)!r}: there is no such file; a hub dataset is named owner/name.")
    builder = _builder(argument, paths)
    files = {path: _from_file(argument, path, builder, settings.streaming) for path in paths}
    return files[paths[0]] if len(paths) == 1 else _joined(argument, files, settings.columns)


def _from_file(argument: str, path: Path, builder: str, streaming: bool) -> AnyDataset:
    with path.open("rb") as file:
        if not any(line.strip() for line in file):
            raise ValueError(f"{argument}={str(path)!r} is empty; it must hold at least one row.")
    try:
        rows = _load(builder, "train", streaming, data_files=glob.escape(str(path.absolute())))
        next(iter(rows), None)  # a stream is read only now
    except ValueError as error:
        raise ValueError(f"{argument}={str(path)!r} cannot be read: {error}") from error
    return _without_blanks(rows, builder)


def _joined(argument: str, files: Mapping[Path, AnyDataset], renamed: Mapping[str, str]) -> AnyDataset:
    """Returns the rows of all files, one after another; what only some of them say beside is empty in the others."""
    import datasets

    found = {
        path: find_columns(f"{argument}={str(path)!r}", list(next(iter(rows), {})), renamed)
        for path, rows in files.items()
    }
    kinds = {" and ".join(name for name in columns if name not in OPTIONAL): path for path, columns in found.items()}
    if len(kinds) > 1:
        listed = ", ".join(f"{kind} ({path.name})" for kind, path in kinds.items())
        raise ValueError(f"the files of {argument} hold rows of several kinds: {listed}; give files of one kind.")
    names = [name for columns in found.values() for name in columns.values()]
    try:
        return datasets.concatenate_datasets(
            [rows.select_columns(list(found[path].values())).map(_Filled(names)) for path, rows in files.items()]
        )
    except ValueError as error:
        raise ValueError(f"the files of {argument} cannot be read as one dataset: {error}") from error


@dataclass(frozen=True)
class _Filled:
    """Gives a row the columns that it lacks, empty: joined streams must have the same."""

    names: Sequence[str]

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**dict.fromkeys(self.names), **row}


def _from_folder(argument: str, folder: Path, split: str, streaming: bool) -> AnyDataset:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix.lower() in BUILDERS]
    if not files:
        raise ValueError(f"{argument}={str(folder)!r} holds no files that end with {', '.join(BUILDERS)}.")
    builder = _builder(argument, files)
    try:
        # An absolute path, since the name alone may be that of a builder.
        splits = _load(str(folder.absolute()), None, streaming)
    except ValueError as error:
        raise ValueError(f"{argument}={str(folder)!r} cannot be read: {error}") from error
    if split not in splits and len(splits) > 1:
        name = "split" if argument == "train" else "eval_split"
        raise ValueError(f"{name}={split!r} is not in {str(folder)!r}; allowed are {', '.join(splits)}.")
    return _without_blanks(splits[split] if split in splits else next(iter(splits.values())), builder)


def _from_hub(argument: str, name: str, split: str, streaming: bool) -> AnyDataset:
    message = f"{argument}={name!r} is no file or folder, and as a hub dataset it cannot be read"
    try:
        return _load(name, split, streaming)
    except ValueError as error:
        raise ValueError(f"{message}: {error}") from error
    except OSError as error:
        raise OSError(f"{message}: {error}; check the name and the network.") from error


def _load(name: str, split: str | None, streaming: bool, **arguments: Any) -> Any:
    """Returns what `datasets` loads; whatever it says about the data is a ValueError."""
    import datasets

    try:
        return datasets.load_dataset(name, split=split, streaming=streaming, **arguments)
    except (datasets.exceptions.DatasetBuildError, RuntimeError, ValueError) as error:
        raise ValueError(" ".join(str(error.__cause__ or error).split())) from error


def _without_blanks(rows: AnyDataset, builder: str) -> AnyDataset:
    return rows.filter(_is_not_blank) if builder == "text" else rows


def _is_not_blank(row: dict[str, str]) -> bool:
    return bool(row["text"].strip())


# Tokenising and packing


def _tokenised(
    rows: AnyDataset, name: str, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, first_row: int = 0
) -> AnyDataset:
    """Returns `input_ids`, `labels` and perhaps `guard` of the rows in which something counts, at least one."""
    columns = find_columns(name, list(next(iter(rows))), settings.columns)
    tokenise = RowTokenizer(tokenizer, settings.completion_only, settings.max_length)
    own_names = list(columns.values())
    tokenise_block = BlockTokenizer(tokenise, columns, name, first_row)
    rows = _mapped(rows.select_columns(own_names), tokenise_block, own_names, tokenise_block.names, with_indices=True)
    if next(iter(rows), None) is None:
        raise ValueError(
            f"no row of {name} has a token that counts within max_length={settings.max_length}; give longer rows or a "
            "larger max_length."
        )
    return rows


def _mapped(
    rows: AnyDataset, function: Any, old: Sequence[str], new: Sequence[str], with_indices: bool = False
) -> AnyDataset:
    """Returns the rows that `function` makes of blocks of rows, with columns of token ids, labels or positions."""
    import datasets

    # Kept results may be those of another version of this code.
    caching = {"load_from_cache_file": False} if isinstance(rows, datasets.Dataset) else {}
    return rows.map(
        function,
        batched=True,
        batch_size=BLOCK,
        with_indices=with_indices,
        remove_columns=list(old),
        features=datasets.Features({name: datasets.List(datasets.Value("int32")) for name in new}),
        **caching,
    )


def _fingerprint(rows: Dataset) -> str:
    digest = hashlib.sha256()
    for block in rows.with_format("numpy").iter(BLOCK):
        for columns in zip(*block.values(), strict=True):
            digest.update(len(columns[0]).to_bytes(8, "little"))
            for column in columns:
                digest.update(column.astype("<i4").tobytes())
    return digest.hexdigest()


def _packed(rows: AnyDataset, max_length: int) -> AnyDataset:
    names = tuple(next(iter(rows)))
    return _mapped(rows, Packer(max_length), names, (*names, "position_ids"))
