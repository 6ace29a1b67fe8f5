"""inference/benchmark.py, run as a user runs it, on a tiny saved model that ends its answers."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip.comparison import arms
from layerskip.model.draft_head import write_draft_token_ids
from tests import kit
from tests.test_evaluate import BUDGET, PROMPTS, Runner, own_tokens, run, save_model, write

__all__ = ["run"]
EVERY = "self_speculative,hf_generate,hf_early_exit,hf_prompt_lookup,hf_compiled,hf_assistant"
QUICK = ["--repeats", 1, "--max-new-tokens", 6]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that recommends exit 2 and three drafts."""
    entry = {"format": 1, "exit_layer": 2, "num_draft_tokens": 3}
    return save_model(tmp_path_factory.mktemp("checkpoint"), layerskip=entry)


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that says nothing about exits."""
    return save_model(tmp_path_factory.mktemp("silent"))


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes half a minute even for a tiny model; here the model runs as it is."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def labels(found: dict[str, Any]) -> list[str]:
    return [arm["label"] for arm in found["arms"]]


def test_the_default_compares_three_ways_at_the_recommended_exit(checkpoint: str, run: Runner) -> None:
    found, shown = run("benchmark.py", "--model", checkpoint, "--repeats", 2, "--max-new-tokens", 8)
    assert labels(found) == ["autoregressive", "hf_generate", "self_speculative E=2 γ=3"]
    assert found["complete"] and found["prompts"] == 4
    assert found["arms"][0]["ratio"] == 1.0
    for arm in found["arms"]:
        assert (arm["same_as_first"], arm["answers"], arm["new_tokens"]) == (4, 4, 2 * 4 * 8)
        assert arm["lowest"] <= arm["decode_tokens_per_second"] <= arm["highest"]
        assert arm["lowest_ratio"] <= arm["ratio"] <= arm["highest_ratio"]
    plain, generate, ours = found["arms"]
    assert plain["layer_tokens"] == generate["layer_tokens"]
    assert min(ours["c"], ours["verify_cost"]) > 0
    assert plain["c"] is generate["c"] is None
    assert [line.split()[:1] for line in shown.splitlines()].count(["hf_generate"]) == 2
    assert "peak_MB" not in shown
    assert {"processor", "threads", "device", "dtype", "versions"} < set(found)
    assert found["settings"]["max_new_tokens"] == 8


@pytest.mark.usefixtures("uncompiled")
def test_all_methods_emit_the_same_tokens(checkpoint: str, tmp_path: Path, run: Runner) -> None:
    data = write(tmp_path, [{"prompt": prompt} for prompt in PROMPTS])
    options = ["--prompts", data, "--methods", EVERY, "--assistant-model", checkpoint, "--stop-at-eos", "--repeats", 1]
    found, _ = run("benchmark.py", "--model", checkpoint, *options, "--max-new-tokens", BUDGET)
    assert found["failed"] == {}
    assert [arm["name"] for arm in found["arms"]] == ["autoregressive", *EVERY.split(",")]
    assert [arm["same_as_first"] for arm in found["arms"]] == [3] * 7
    assert {arm["new_tokens"] for arm in found["arms"]} == {sum(len(own_tokens(prompt)) for prompt in PROMPTS)}
    by_name = {arm["name"]: arm for arm in found["arms"]}
    assert by_name["hf_assistant"]["weight_bytes"] == 2 * by_name["self_speculative"]["weight_bytes"]
    assert by_name["self_speculative"]["weight_bytes"] == by_name["autoregressive"]["weight_bytes"]
    assert by_name["self_speculative"]["cache_bytes"] == by_name["autoregressive"]["cache_bytes"]
    assert by_name["hf_early_exit"]["cache_bytes"] > by_name["hf_generate"]["cache_bytes"]
    assert [name for name, arm in by_name.items() if arm["compile_seconds"] is not None] == ["hf_compiled"]
    tokens = sum(len(own_tokens(prompt)) + len(prompt.split()) - 1 for prompt in PROMPTS)
    emitted = sum(len(own_tokens(prompt)) for prompt in PROMPTS)
    assert by_name["autoregressive"]["layer_tokens"] == pytest.approx(kit.NUM_LAYERS * tokens / emitted)


def test_every_cell_of_the_grid_is_an_arm(checkpoint: str, tmp_path: Path, run: Runner) -> None:
    data = write(tmp_path, [{"question": "w1 w5"}])
    options = ["--prompts", data, "--exit-layers", "1,2", "--num-draft-tokens", "2,4", *QUICK]
    found, _ = run(
        "benchmark.py", "--model", checkpoint, *options, "--methods", "self_speculative,hf_early_exit,hf_prompt_lookup"
    )
    cells = [f"E={exit_layer} γ={drafts}" for exit_layer in (1, 2) for drafts in (2, 4)]
    expected = [f"{name} {cell}" for name in ("self_speculative", "hf_early_exit") for cell in cells]
    assert labels(found) == ["autoregressive", *expected, "hf_prompt_lookup γ=2", "hf_prompt_lookup γ=4"]
    assert found["tuning"] == {}


def test_with_tuning_one_cell_of_each_method_is_measured(checkpoint: str, tmp_path: Path, run: Runner) -> None:
    data = write(tmp_path, [{"prompt": prompt} for prompt in PROMPTS])
    options = ["--prompts", data, "--exit-layers", "1,2", "--num-draft-tokens", "2,4", "--tune", 2, *QUICK]
    found, _ = run("benchmark.py", "--model", checkpoint, *options, "--methods", "self_speculative,hf_prompt_lookup")
    assert [arm["name"] for arm in found["arms"]] == ["autoregressive", "self_speculative", "hf_prompt_lookup"]
    assert len(found["tuning"]) == 6
    for arm in found["arms"][1:]:
        rivals = {label: speed for label, speed in found["tuning"].items() if label.startswith(arm["name"])}
        assert arm["label"] == max(rivals, key=lambda label: rivals[label])


def test_a_slower_way_is_shown_as_slower(checkpoint: str, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's self-speculation is slowed down, and the ratio that is printed is below 1."""
    made = arms.engine_arm

    def slowed(name: str, engine: Any, **options: Any) -> arms.Arm:
        arm = made(name, engine, **options)
        if name != "self_speculative":
            return arm

        def generate(batch: Any, max_new_tokens: int) -> arms.Run:
            run = arm.generate(batch, max_new_tokens)
            return arms.Run(run.token_ids, run.decoded, run.prefill_seconds, run.decode_seconds + 5.0, run.rounds)

        return arms.Arm(name, generate, arm.exit_layer, arm.num_draft_tokens)

    monkeypatch.setattr(arms, "engine_arm", slowed)
    found, shown = run("benchmark.py", "--model", checkpoint, *QUICK, "--methods", "self_speculative")
    assert found["arms"][1]["ratio"] < 1
    header, _, _, row = shown.strip().splitlines()
    assert float(row.split()[header.split().index("ratio") + 2]) < 1


def test_categories_have_a_table_of_their_own(checkpoint: str, tmp_path: Path, run: Runner) -> None:
    kinds = ["writing", "maths", "writing", "writing"]
    rows = [
        {"question_id": number, "category": kind, "turns": [f"w{number} w3", "w4"]}
        for number, kind in enumerate(kinds, 1)
    ]
    options = ["--model", checkpoint, "--prompts", write(tmp_path, rows), *QUICK, "--methods", "self_speculative"]
    found, shown = run("benchmark.py", *options, "--batch-size", 2)
    assert list(found["categories"]) == ["writing", "maths"]
    assert set(found["categories"]["maths"]) == set(labels(found))
    assert [line.split() for line in shown.splitlines() if line.startswith("ratio")] == [["ratio", "writing", "maths"]]
    few, shown = run("benchmark.py", *options, "--category-rows", 2)
    assert (few["prompts"], few["arms"][0]["answers"]) == (3, 3)
    one, shown = run("benchmark.py", *options, "--category-rows", 2, "--rows", 1)
    assert (one["prompts"], list(one["categories"])) == (1, ["writing"])
    assert not any(line.startswith("ratio") for line in shown.splitlines())


def failing(name: str, monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int = 0) -> None:
    """Lets the arms of a name fail, from a certain run of theirs on."""
    made, count = arms.engine_arm, [0]

    def broken(given: str, engine: Any, **options: Any) -> arms.Arm:
        arm = made(given, engine, **options)

        def generate(batch: Any, max_new_tokens: int) -> arms.Run:
            count[0] += 1
            if count[0] > after:
                raise error
            return arm.generate(batch, max_new_tokens)

        return arms.Arm(given, generate, arm.exit_layer, arm.num_draft_tokens) if given == name else arm

    monkeypatch.setattr(arms, "engine_arm", broken)


@pytest.mark.parametrize("after", [0, 6])
def test_a_method_that_fails_is_reported_and_the_others_go_on(
    after: int, checkpoint: str, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("self_speculative", monkeypatch, RuntimeError("worn out\nbeyond repair"), after)
    found, shown = run("benchmark.py", "--model", checkpoint, *QUICK)
    assert labels(found) == ["autoregressive", "hf_generate"]
    assert found["failed"] == {"self_speculative E=2 γ=3": "RuntimeError: worn out"}
    assert "self_speculative E=2 γ=3  failed: RuntimeError: worn out" in shown.splitlines()
    assert found["arms"][0]["answers"] == 4


@pytest.mark.parametrize("after", [0, 6])
def test_without_its_baseline_a_benchmark_is_an_error(
    after: int, checkpoint: str, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("autoregressive", monkeypatch, RuntimeError("worn out"), after)
    assert run.status("benchmark.py", "--model", checkpoint, *QUICK) == 2
    message = "error: autoregressive, which all others are compared with, failed: RuntimeError: worn out"
    assert run.capsys.readouterr().err.splitlines()[-1] == message


@pytest.mark.parametrize(("after", "answers"), [(0, []), (6, [1, 1, 1])])
def test_an_interrupt_reports_what_was_measured(
    after: int, answers: list[int], checkpoint: str, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four runs warm up, with three batches; the sixth is the second that is timed, and the seventh is broken off."""
    failing("self_speculative", monkeypatch, KeyboardInterrupt(), after)
    assert run.status("benchmark.py", "--model", checkpoint, *QUICK) == 130
    found = json.loads(run.capsys.readouterr().out.splitlines()[-1])
    assert found["complete"] is False
    assert [arm["answers"] for arm in found["arms"]] == [2 * count for count in answers]


def test_drawn_tokens_are_not_compared(checkpoint: str, run: Runner) -> None:
    options = ["--methods", "hf_generate,self_speculative,hf_early_exit,hf_prompt_lookup", "--rows", 1]
    found, _ = run("benchmark.py", "--model", checkpoint, *QUICK, *options, "--temperature", 0.8)
    assert found["failed"] == {}
    assert [arm["same_as_first"] for arm in found["arms"]] == [None] * 5


def test_a_benchmark_says_how_many_ids_its_engine_drafts_from(tmp_path: Path, run: Runner) -> None:
    """The checkpoint's number, which the command line may change; transformers drafts with the full head."""
    folder = tmp_path / "model"
    save_model(folder, layerskip={"format": 1, "draft_vocab_size": 20})
    write_draft_token_ids(folder, torch.arange(40))
    data = write(tmp_path, [{"prompt": "w44 w3"}])
    options = ["--model", folder, "--prompts", data, "--exit-layers", "2", *QUICK]
    for more, size in (([], 20), (["--draft-vocab-size", 5], 5), (["--draft-vocab-size", kit.VOCAB], None)):
        found, _ = run("benchmark.py", *options, "--methods", "self_speculative,hf_early_exit", *more)
        plain, ours, theirs = found["arms"]
        assert [arm["draft_vocab_size"] for arm in (plain, ours, theirs)] == [None, size, None]
        assert (ours["outside_share"] is None) == (size is not None)
        assert plain["outside_share"] is not None
        assert ours["weight_bytes"] - plain["weight_bytes"] == (size or 0) * 32 * 4


def test_a_plot_is_drawn(checkpoint: str, tmp_path: Path, run: Runner) -> None:
    pytest.importorskip("matplotlib")
    run("benchmark.py", "--model", checkpoint, *QUICK, "--rows", 1, "--plot", tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_work(
    checkpoint: str, tmp_path: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert run.status("benchmark.py", "--model", checkpoint, "--plot", tmp_path / "speed.png") == 2
    assert "layerskip[plot]" in run.capsys.readouterr().err


MISTAKES: list[tuple[list[Any], str]] = [
    (["--methods", "fast"], "--methods 'fast' is unknown; allowed are autoregressive, hf_generate"),
    (["--exit-layers", "1,x"], "--exit-layers '1,x'"),
    (["--exit-layers", "9"], "exit_layer=9 is out of range"),
    (["--num-draft-tokens", "0"], "num_draft_tokens=0 is out of range"),
    (["--draft-vocab-size", "8"], "draft_vocab_size=8 is out of range"),
    (["--prompts", "prompts.csv"], "allowed are .txt and .jsonl"),
    (["--prompts", "wrong.jsonl"], "line 2 of wrong.jsonl has answer"),
    (["--repeats", "0"], "--repeats 0 is out of range; allowed are integers from 1 on"),
    (["--max-new-tokens", "1"], "--max-new-tokens 1 is out of range; allowed are integers from 2 on"),
    (["--rows", "0"], "--rows 0"),
    (["--category-rows", "0"], "--category-rows 0"),
    (["--batch-size", "0"], "--batch-size 0"),
    (["--tune", "2"], "--tune 2 has nothing to choose from"),
    (["--temperature", "0"], "--temperature 0.0 is out of range"),
    (["--temperature", "nan"], "--temperature nan is out of range"),
    (["--methods", "hf_generate", "--exit-layers", "2"], "--exit-layers is for self_speculative, hf_early_exit"),
    (["--methods", "hf_generate", "--num-draft-tokens", "2"], "--num-draft-tokens is for self_speculative"),
    (["--methods", "hf_generate", "--tune", "2"], "--tune is for self_speculative"),
    (["--methods", "hf_early_exit", "--draft-vocab-size", "5"], "--draft-vocab-size is for self_speculative"),
    (["--assistant-model", "x"], "--assistant-model is for hf_assistant"),
    (["--methods", "hf_assistant"], "hf_assistant needs --assistant-model"),
    (
        ["--methods", "hf_early_exit,hf_prompt_lookup", "--batch-size", "2"],
        "hf_early_exit, hf_prompt_lookup answers one",
    ),
    (["--plot", "missing/speed.png"], "--plot missing/speed.png"),
    (["--plot", "speed.pdf"], "--plot speed.pdf"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_the_program_with_one_line(
    arguments: list[Any], message: str, checkpoint: str, tmp_path: Path, run: Runner
) -> None:
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "w1"}\n{"answer": "w2"}\n', encoding="utf-8")
    run.monkeypatch.chdir(tmp_path)
    assert run.status("benchmark.py", "--model", checkpoint, *arguments) == 2
    output = run.capsys.readouterr()
    last = output.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert output.out == ""


def test_an_exit_is_needed_where_the_checkpoint_recommends_none(silent: str, run: Runner) -> None:
    for method in ("self_speculative", "hf_early_exit"):
        assert run.status("benchmark.py", "--model", silent, "--methods", method) == 2
        message = f"{method} needs --exit-layers, such as 4,8: the checkpoint recommends none"
        assert message in run.capsys.readouterr().err
    found, _ = run("benchmark.py", "--model", silent, "--methods", "hf_prompt_lookup", *QUICK)
    assert labels(found) == ["autoregressive", "hf_prompt_lookup γ=4"]


@pytest.mark.parametrize("change", ["size", "words"])
def test_an_assistant_with_another_vocabulary_is_refused(
    change: str, checkpoint: str, tmp_path: Path, run: Runner
) -> None:
    kit.l4(vocab_size=kit.VOCAB + (change == "size")).save_pretrained(tmp_path)
    kit.word_tokenizer(kit.VOCAB - (change == "words")).save_pretrained(tmp_path)
    options = ["--methods", "hf_assistant", "--assistant-model", tmp_path]
    assert run.status("benchmark.py", "--model", checkpoint, *options) == 2
    message = run.capsys.readouterr().err.splitlines()[-1]
    assert "has another vocabulary" in message
    assert "tokenizer and assistant_tokenizer" in message
