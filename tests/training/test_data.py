"""Data from files to batches: what is read, held out, streamed, packed and padded, and what is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from layerskip.training.data import Collator, DataSettings, TrainingData, load_data
from tests import kit

EOS = 81
TEXTS = [{"text": f"w{index} w{index + 1}"} for index in range(10)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no test leave anything behind, or ask the network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def tokenizer() -> PreTrainedTokenizerFast:
    made = kit.word_tokenizer()
    made.add_special_tokens({"eos_token": f"w{EOS}"})
    return made


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Writes JSON lines and returns where."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(train: str | tuple[str, ...], seed: int = 0, **settings: Any) -> TrainingData:
    return load_data(DataSettings(train=train, **settings), tokenizer(), seed=seed)


def ids(rows: Any) -> list[list[int]]:
    return [list(row["input_ids"]) for row in rows]


def tokens(texts: list[dict[str, str]]) -> list[list[int]]:
    """Returns the ids that texts of words should have."""
    return [[*(int(word[1:]) for word in row["text"].split()), EOS] for row in texts]


# Files


def test_json_lines_are_read(tmp_path: Path) -> None:
    data = load(write(tmp_path / "a.jsonl", TEXTS))
    assert ids(data.train) == tokens(TEXTS)
    assert data.eval is None and data.dropped_rows == 0


def test_a_json_list_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(TEXTS, indent=2))
    assert ids(load(str(tmp_path / "a.json")).train) == tokens(TEXTS)


def test_parquet_is_read(tmp_path: Path) -> None:
    Dataset.from_list(TEXTS).to_parquet(tmp_path / "a.parquet")
    assert ids(load(str(tmp_path / "a.parquet")).train) == tokens(TEXTS)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("folder", [False, True])
def test_a_text_file_has_a_text_a_line(tmp_path: Path, streaming: bool, folder: bool) -> None:
    (tmp_path / "a.txt").write_text("w1 w2\n\n  \nw3\n")
    data = load(str(tmp_path if folder else tmp_path / "a.txt"), streaming=streaming)
    assert sorted(ids(data.train)) == [[1, 2, EOS], [3, EOS]]
    assert data.dropped_rows == (None if streaming else 0)


def test_a_files_name_is_no_pattern(tmp_path: Path) -> None:
    assert ids(load(write(tmp_path / "a[1]*.jsonl", TEXTS)).train) == tokens(TEXTS)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_files_may_differ_in_what_their_rows_say_beside_the_text(
    tmp_path: Path, streaming: bool, packing: bool
) -> None:
    """Tokens of a file without `guard` are guarded, and batches tell which ones."""
    free = write(tmp_path / "a.jsonl", [{"text": "w1 w2", "guard": False, "note": "x"}])
    held = write(
        tmp_path / "b.jsonl", [{"text": "w3 w4", "finish_reason": "length", "note": 3}, {"text": "w5", "note": 4}]
    )
    data = load((free, held), streaming=streaming, packing=packing, max_length=16)
    rows = sorted(data.train, key=lambda row: row["input_ids"])
    flat = [(token, held) for row in rows for token, held in zip(row["input_ids"], row["guard"], strict=True)]
    expected = {1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
    assert {token: held for token, held in flat if token != EOS} == expected
    assert sum(token == EOS for token, _ in flat) == 2
    batch = Collator(0)(rows)
    assert batch["guard"].dtype == torch.bool and batch["guard"].shape == batch["input_ids"].shape
    assert not batch["guard"][batch["input_ids"] == 0].any()


def test_several_files_follow_one_another(tmp_path: Path) -> None:
    files = (write(tmp_path / "b.jsonl", TEXTS[:4]), write(tmp_path / "a.jsonl", TEXTS[4:]))
    assert ids(load(files).train) == tokens(TEXTS)


def test_all_files_of_a_folder_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", TEXTS[:4])
    write(tmp_path / "b.jsonl", TEXTS[4:])
    (tmp_path / "README.md").write_text("Ten texts.")
    assert ids(load(str(tmp_path)).train) == tokens(TEXTS)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_with_splits_is_read_by_split(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train-00000.jsonl", TEXTS[:4])
    write(tmp_path / "data" / "test-00000.jsonl", TEXTS[4:])
    data = load(str(tmp_path), eval=str(tmp_path), eval_split="test", streaming=streaming)
    assert sorted(ids(data.train)) == tokens(TEXTS[:4])
    assert data.eval is not None and ids(data.eval) == tokens(TEXTS[4:])


@pytest.mark.parametrize("streaming", [False, True])
def test_strings_and_messages_may_be_mixed(tmp_path: Path, streaming: bool) -> None:
    chatting = tokenizer()
    chatting.chat_template = "{% for message in messages %}w7 {{ message['content'] }} {% endfor %}"
    rows = [
        {"prompt": "w1", "completion": "w2", "finish_reason": "length"},
        {"prompt": [{"role": "user", "content": "w3"}], "completion": "w4", "finish_reason": "stop"},
    ]
    settings = DataSettings(train=write(tmp_path / "a.jsonl", rows), streaming=streaming)
    assert sorted(ids(load_data(settings, chatting, seed=0).train)) == [[1, 2], [7, 3, 4, EOS]]


def test_columns_may_be_called_otherwise(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"id": 3, "question": "w1", "answer": "w2"}])
    data = load(file, columns={"prompt": "question", "completion": "answer"})
    assert data.train[0] == {"input_ids": [1, 2, EOS], "labels": [-100, 2, EOS]}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_rows_hold_no_other_columns(tmp_path: Path, streaming: bool, packing: bool) -> None:
    file = write(tmp_path / "a.jsonl", [{"id": 3, **row} for row in TEXTS])
    data = load(file, eval=file, streaming=streaming, packing=packing)
    expected = {"input_ids", "labels"} | ({"position_ids"} if packing else set())
    for rows in (data.train, data.eval):
        assert rows is not None and set(next(iter(rows))) == expected == set(rows.column_names)


def test_the_last_rows_are_held_out(tmp_path: Path) -> None:
    data = load(write(tmp_path / "a.jsonl", TEXTS), eval_rows=3)
    assert ids(data.train) == tokens(TEXTS[:7])
    assert data.eval is not None and ids(data.eval) == tokens(TEXTS[7:])


def test_long_rows_are_cut(tmp_path: Path) -> None:
    data = load(write(tmp_path / "a.jsonl", [{"text": "w1 w2 w3 w4"}]), max_length=3)
    assert ids(data.train) == [[1, 2, 3]]


def test_rows_in_which_nothing_counts_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "w1 w2 w3", "completion": "w4"}, {"prompt": "w5", "completion": "w6"}]
    data = load(write(tmp_path / "a.jsonl", rows), max_length=3)
    assert ids(data.train) == [[5, 6, EOS]]
    assert data.dropped_rows == 1


# The fingerprint


def test_the_fingerprint_is_that_of_the_rows_not_of_the_file(tmp_path: Path) -> None:
    first = load(write(tmp_path / "a.jsonl", TEXTS)).fingerprint
    os.utime(tmp_path / "a.jsonl", (0, 0))
    assert load(str(tmp_path / "a.jsonl")).fingerprint == first
    assert load(write(tmp_path / "b.jsonl", TEXTS)).fingerprint == first
    (tmp_path / "c.txt").write_text("".join(row["text"] + "\n" for row in TEXTS))
    assert load(str(tmp_path / "c.txt"), packing=True).fingerprint == first
    assert re.fullmatch("[0-9a-f]{64}", first)


def test_the_fingerprint_changes_with_the_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", TEXTS)
    found = {
        load(file).fingerprint,
        load(file, eval_rows=1).fingerprint,
        load(file, max_length=2).fingerprint,
        load(write(tmp_path / "b.jsonl", TEXTS[::-1])).fingerprint,
        # The same tokens, divided otherwise.
        load(write(tmp_path / "c.jsonl", [{"text": "w1"}, {"text": "w2 w81 w3"}])).fingerprint,
        load(write(tmp_path / "d.jsonl", [{"text": "w1 w81 w2"}, {"text": "w3"}])).fingerprint,
    }
    assert len(found) == 6


def test_the_fingerprint_changes_with_what_counts(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "w1 w2", "completion": "w3"}])
    assert load(file).fingerprint != load(file, completion_only=False).fingerprint


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", TEXTS)
    first = load(file).fingerprint
    write(tmp_path / "a.jsonl", TEXTS[:5])
    assert load(file).fingerprint != first


def test_streamed_rows_are_not_known_beforehand(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", TEXTS)
    data = load(file, streaming=True)
    assert re.fullmatch("streaming:[0-9a-f]{64}", data.fingerprint)
    assert data.fingerprint == load(file, streaming=True).fingerprint
    assert data.fingerprint != load(file, streaming=True, max_length=9).fingerprint
    assert data.dropped_rows is None


# Streaming


def streamed(file: str, seed: int, epoch: int, packing: bool) -> list[list[int]]:
    data = load(file, seed=seed, streaming=True, packing=packing, max_length=8, shuffle_buffer=4)
    data.train.set_epoch(epoch)
    return ids(data.train)


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_repeats_itself_for_a_seed_and_an_epoch_only(tmp_path: Path, packing: bool) -> None:
    file = write(tmp_path / "a.jsonl", TEXTS)
    first = streamed(file, 0, 0, packing)
    assert streamed(file, 0, 0, packing) == first
    assert streamed(file, 1, 0, packing) != first
    assert streamed(file, 0, 1, packing) != first


def test_a_stream_holds_every_row_once(tmp_path: Path) -> None:
    found = streamed(write(tmp_path / "a.jsonl", TEXTS), 0, 0, False)
    assert found != tokens(TEXTS) and sorted(found) == tokens(TEXTS)


def test_evaluation_data_are_streamed_in_order(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", TEXTS)
    data = load(file, eval=file, streaming=True)
    assert data.eval is not None and ids(data.eval) == ids(data.eval) == tokens(TEXTS)


def test_a_stream_is_packed(tmp_path: Path) -> None:
    rows = [{"text": "w1 w2"}] * 5
    data = load(write(tmp_path / "a.jsonl", rows), streaming=True, packing=True, max_length=7)
    assert [list(row["position_ids"]) for row in data.train] == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2], [0, 1, 2]]


# Batches


def test_rows_of_different_lengths_are_padded_on_the_right() -> None:
    batch = Collator(0)([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4], "labels": [4]}])
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 2, 3], [4, 0, 0]],
        "labels": [[-100, 2, 3], [4, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    assert all(tensor.dtype == torch.long for tensor in batch.values())


def test_an_eos_that_pads_as_well_keeps_its_label(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "w1"}, {"text": "w2 w3 w4"}])
    collator = Collator.for_tokenizer(tokenizer())
    assert collator.pad_token_id == EOS
    batch = collator(list(load(file).train))
    assert batch["input_ids"].tolist() == [[1, EOS, EOS, EOS], [2, 3, 4, EOS]]
    assert batch["labels"].tolist() == [[-100, EOS, -100, -100], [-100, 3, 4, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_the_tokenizers_padding_token_pads() -> None:
    padding = tokenizer()
    padding.add_special_tokens({"pad_token": "w5"})
    assert Collator.for_tokenizer(padding) == Collator(5)


def test_packed_rows_get_positions_and_no_mask(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "w1 w2"}, {"text": "w3"}, {"text": "w4"}])
    batch = Collator(0)(list(load(file, packing=True, max_length=5).train))
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 2, EOS, 3, EOS], [4, EOS, 0, 0, 0]],
        "labels": [[-100, 2, EOS, -100, EOS], [-100, EOS, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]],
    }


A, B, LONG = kit.PROMPT, [4, 8, 15, 16, 23, 42, 3, 77, 2, 11], list(range(1, 31))
ATTENTION = [
    (family, attention)
    for family in kit.CONFIGS
    for attention in ("sdpa", "eager")
    # Gemma2 caps its attention's scores, which sdpa cannot.
    if (family, attention) != ("gemma2", "sdpa")
]


def packed_batch(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Returns A and B in one row, with padding behind, since another row is longer."""
    texts = [{"text": " ".join(f"w{token}" for token in document)} for document in (A, B, LONG)]
    return Collator(0)(list(load(write(tmp_path / "a.jsonl", texts), packing=True, max_length=31).train))


@torch.no_grad()
def logits(model: PreTrainedModel, **inputs: torch.Tensor) -> torch.Tensor:
    return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize(("family", "attention"), ATTENTION)
def test_packed_documents_do_not_see_each_other(tmp_path: Path, family: str, attention: str) -> None:
    model = kit.build(kit.CONFIGS[family](), attn_implementation=attention)
    batch = packed_batch(tmp_path)
    assert batch["input_ids"].shape == (2, 31)
    found = logits(model, input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    start = 0
    for document in (A, B):
        alone = logits(model, input_ids=torch.tensor([[*document, EOS]]))[0]
        torch.testing.assert_close(found[0, start : start + len(alone)], alone, atol=1e-5, rtol=0)
        start += len(alone)


def test_with_a_mask_packed_documents_do_see_each_other(tmp_path: Path) -> None:
    """A control: without it the test above might compare what nothing can change."""
    model = kit.build(kit.llama_config())
    batch = packed_batch(tmp_path)
    mask = torch.ones_like(batch["input_ids"])
    found = logits(model, input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=mask)
    alone = logits(model, input_ids=torch.tensor([[*B, EOS]]))[0]
    start = len(A) + 1
    assert (found[0, start : start + len(alone)] - alone).abs().max() > 1e-2


def test_the_first_token_of_a_document_is_no_target_of_the_one_before(tmp_path: Path) -> None:
    labels = packed_batch(tmp_path)["labels"][0].tolist()
    assert labels == [-100, *A[1:], EOS, -100, *B[1:], EOS, *[-100] * 9]


# Settings that are refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": ""}, "train='' names nothing"),
        ({"train": ()}, r"train=\(\) names nothing"),
        ({"train": ("a.jsonl", "")}, "names nothing; name files, a folder or a hub dataset"),
        ({"eval": ""}, "eval='' names nothing"),
        ({"eval_rows": -1}, "eval_rows=-1 is out of range; allowed is eval_rows ≥ 0"),
        ({"max_length": 1}, "max_length=1 is out of range; allowed is max_length ≥ 2"),
        ({"shuffle_buffer": 0}, "shuffle_buffer=0 is out of range; allowed is shuffle_buffer ≥ 1"),
        ({"eval_rows": 2, "eval": "b"}, "eval_rows=2 and eval='b' exclude each other; leave one out"),
        ({"eval_rows": 2, "streaming": True}, "eval_rows=2 takes the last rows of train, and streaming=True"),
        ({"columns": {"question": "prompt"}}, "columns names 'question'; allowed are text, messages, prompt"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSettings(**{"train": "a.jsonl", **settings})


# Data that are refused

WAYS = pytest.mark.parametrize("streaming", [False, True])


@pytest.mark.parametrize(
    "name", ["absent.jsonl", "absent.csv", "json", "a/b.en", "./absent", "/absent/a", "a/b/c", "~/absent"]
)
def test_a_mistyped_path_is_no_hub_dataset(name: str) -> None:
    with pytest.raises(ValueError, match=f"train='.*{Path(name).name}': there is no such file"):
        load(name)


def test_a_file_that_is_not_in_its_folder_is_no_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(ValueError, match="train='here/absent': there is no such file"):
        load("here/absent")


@pytest.mark.parametrize("name", ["nobody/nothing", "nobody/nothing-1.5"])
def test_a_hub_dataset_that_cannot_be_reached_is_named(name: str) -> None:
    with pytest.raises(OSError, match=f"train='{name}' is no file or folder, and as a hub dataset it cannot be read"):
        load(name)


def test_evaluation_data_are_checked_likewise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"eval='absent\.jsonl': there is no such file"):
        load(write(tmp_path / "a.jsonl", TEXTS), eval="absent.jsonl")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nw1\n")
    with pytest.raises(ValueError, match=r"ends with '\.csv'; allowed are \.jsonl, \.json, \.parquet, \.txt"):
        load(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("folder", [False, True])
def test_files_of_several_kinds_are_refused(tmp_path: Path, folder: bool) -> None:
    files = (write(tmp_path / "a.jsonl", TEXTS), write(tmp_path / "b.txt", TEXTS))
    with pytest.raises(ValueError, match=r"train mixes files that end with \.jsonl and \.txt"):
        load(str(tmp_path) if folder else files)


def test_a_folder_beside_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"names the folder .* beside others; name it alone"):
        load((write(tmp_path / "a.jsonl", TEXTS), str(tmp_path)))


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nw1\n")
    with pytest.raises(ValueError, match=r"holds no files that end with \.jsonl"):
        load(str(tmp_path))


@WAYS
def test_a_split_that_a_folder_lacks_is_refused(tmp_path: Path, streaming: bool) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", TEXTS)
    with pytest.raises(ValueError, match=r"eval_split='validation' is not in .*; allowed are train, test"):
        load(str(tmp_path), eval=str(tmp_path), streaming=streaming)


@WAYS
@pytest.mark.parametrize("content", ["", "\n \n"], ids=["empty", "blank"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".txt", ".parquet"])
def test_an_empty_file_is_refused(tmp_path: Path, suffix: str, content: str, streaming: bool) -> None:
    (tmp_path / f"a{suffix}").write_text(content)
    files = (str(tmp_path / f"a{suffix}"), str(tmp_path / f"a{suffix}"))
    with pytest.raises(ValueError, match=f"train='.*a{suffix}' is empty; it must hold at least one row"):
        load(files, streaming=streaming)


@WAYS
def test_a_parquet_file_without_rows_is_refused(tmp_path: Path, streaming: bool) -> None:
    Dataset.from_dict({"text": []}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"train='.*a\.parquet' (holds no rows|cannot be read)"):
        load(str(tmp_path / "a.parquet"), streaming=streaming)


@WAYS
def test_an_empty_json_list_is_refused(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match=r"train='.*a\.json' (holds no rows|cannot be read)"):
        load(str(tmp_path / "a.json"), streaming=streaming)


@WAYS
def test_a_malformed_line_is_refused_with_the_name_of_the_file(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "w1"}\n{"text": \n')
    files = (str(tmp_path / "bad.jsonl"), write(tmp_path / "good.jsonl", TEXTS))
    with pytest.raises(ValueError, match=r"train='[^']*bad\.jsonl' cannot be read: .*JSON"):
        load(files, streaming=streaming)


def test_the_malformed_file_of_several_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": \n')
    with pytest.raises(ValueError, match=r"train='[^']*bad\.jsonl' cannot be read"):
        load((write(tmp_path / "good.jsonl", TEXTS), str(tmp_path / "bad.jsonl")))


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    files = (write(tmp_path / "a.jsonl", TEXTS), write(tmp_path / "b.jsonl", [{"prompt": "w1", "completion": "w2"}]))
    with pytest.raises(ValueError, match=r"several kinds: text \(a.jsonl\), prompt and completion \(b.jsonl\)"):
        load(files)
    files = (files[0], write(tmp_path / "c.jsonl", [{"text": ["w1"]}]))
    with pytest.raises(ValueError, match=r"the files of train cannot be read as one dataset: .*aligned"):
        load(files)


@WAYS
def test_text_that_is_not_utf8_is_refused(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "a.txt").write_bytes(b"w1\n\xe9\xff\n")
    with pytest.raises(ValueError, match=r"train='.*a\.txt' cannot be read: 'utf-8' codec"):
        load(str(tmp_path / "a.txt"), streaming=streaming)


@WAYS
def test_columns_that_make_no_row_are_refused(tmp_path: Path, streaming: bool) -> None:
    file = write(tmp_path / "a.jsonl", [{"question": "w1", "answer": "w2"}])
    message = r"has the columns question, answer; accepted are text, or messages, or prompt and completion.*columns"
    with pytest.raises(ValueError, match=message):
        load(file, streaming=streaming)


@WAYS
def test_a_bad_row_is_refused_with_its_number(tmp_path: Path, streaming: bool) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "w1"}, {"text": None}])
    with pytest.raises(ValueError, match=r"row 2 of train='.*a\.jsonl': text is missing; it must be a string"):
        load(file, streaming=streaming)


def test_a_bad_row_that_is_held_out_is_refused_with_its_number(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [*TEXTS, {"text": 5}])
    with pytest.raises(ValueError, match=r"row 11 of train='.*a\.jsonl': text is 5 of type int; it must be a string"):
        load(file, eval_rows=2)


@WAYS
def test_completion_only_is_refused_for_texts(tmp_path: Path, streaming: bool) -> None:
    with pytest.raises(ValueError, match="completion_only=True, but in a text nothing is a completion"):
        load(write(tmp_path / "a.jsonl", TEXTS), streaming=streaming, completion_only=True)


@WAYS
def test_messages_need_a_chat_template(tmp_path: Path, streaming: bool) -> None:
    file = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "w1"}]}])
    with pytest.raises(ValueError, match=r"row 1 of train='.*': the tokenizer of .* has no chat template"):
        load(file, streaming=streaming)


@WAYS
def test_data_in_which_nothing_counts_are_refused(tmp_path: Path, streaming: bool) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "w1 w2 w3", "completion": "w4"}])
    message = r"no row of train='.*' has a token that counts within max_length=3; give longer rows or a larger"
    with pytest.raises(ValueError, match=message):
        load(file, streaming=streaming, max_length=3)


@pytest.mark.parametrize("eval_rows", [10, 11])
def test_holding_out_every_row_is_refused(tmp_path: Path, eval_rows: int) -> None:
    file = write(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(
        ValueError, match=f"eval_rows={eval_rows} leaves nothing of the 10 rows.*allowed is eval_rows < 10"
    ):
        load(file, eval_rows=eval_rows)


def test_a_tokenizer_without_eos_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no EOS token; set tokenizer.eos_token"):
        load_data(DataSettings(train="absent.jsonl"), kit.word_tokenizer(), seed=0)


def test_a_tokenizer_that_can_pad_with_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no EOS token; set tokenizer.eos_token"):
        Collator.for_tokenizer(kit.word_tokenizer())
