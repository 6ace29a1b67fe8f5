"""inference/compare_levers.py, run as a user runs it, on a tiny saved model that ends its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerskip import Engine
from layerskip.decoding.cost import CostTable
from tests import kit
from tests.test_evaluate import EOS, PROMPTS, Runner, own_tokens, run, save_model, write

__all__ = ["run"]
QUICK = ["--repeats", 1, "--cost-repeats", 1, "--max-new-tokens", 6, "--num-draft-tokens", 3, "--tree-nodes", "4"]
LEVERS = [
    *("autoregressive", "static", "adaptive", "ngrams", "trusted", "adaptive+ngrams"),
    *("auto", "all", "all-trusted", "tree-4"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose exits 1 and 2 were trained, and which recommends exit 2 and two drafts."""
    entry = {"format": 1, "exit_layers": [2, 1], "exit_layer": 2, "num_draft_tokens": 2}
    return save_model(tmp_path_factory.mktemp("checkpoint"), layerskip=entry)


@pytest.fixture(scope="module")
def dismissed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that says that no exit pays."""
    return save_model(tmp_path_factory.mktemp("dismissed"), layerskip={"format": 1, "exit_layer": None})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three prompts of two categories."""
    return write(tmp_path, [{"prompt": prompt, "category": prompt.split()[0]} for prompt in [*PROMPTS[:2], "w1"]])


def test_every_lever_is_predicted_and_measured(checkpoint: str, data: Path, tmp_path: Path, run: Runner) -> None:
    options = [
        "--model",
        checkpoint,
        "--prompts",
        data,
        *QUICK,
        "--repeats",
        2,
        "--output-dir",
        tmp_path / "new" / "out",
    ]
    found, shown = run("compare_levers.py", *options)
    assert found["complete"] and found["failed"] == {}
    assert [lever["lever"] for lever in found["levers"]] == LEVERS
    table = CostTable.read(found["cost_table"], "the report")
    assert (table.exit_layers, table.max_num_draft_tokens) == ((1, 2), 4)
    assert table.measured_on["context"] == len(PROMPTS[0].split())
    assert found["costs"]["2"]["c"] == table.c(2)
    assert found["costs"]["1"]["verify_cost"] == [table.verify_cost(1, width) for width in range(5)]
    for lever in found["levers"]:
        assert (lever["same_as_first"], lever["answers"]) == (3, 3)
        assert lever["lowest"] <= lever["measured"] <= lever["highest"]
        assert lever["predicted"] > 0
    assert [lever["num_draft_tokens"] for lever in found["levers"]] == [None, 2, 3, 2, 2, 3, 3, 3, 3, 4]
    plain, static = found["levers"][:2]
    assert plain["predicted"] == plain["measured"] == 1.0
    assert plain["rounds_by_exit"] == {"4": 2 * 3 * 5}
    assert static["rounds_by_exit"].keys() == {"2"}
    assert set(found["categories"]) == {"w44", "w1"}
    assert json.loads((tmp_path / "new" / "out" / "levers.json").read_text(encoding="utf-8")) == found
    assert [line.split()[:1] for line in shown.splitlines()].count(["adaptive"]) == 4
    assert "top_k" in found and found["top_k"] == {}


def test_a_prediction_follows_from_the_engines_own_rounds(checkpoint: str, data: Path, run: Runner) -> None:
    options = ["--model", checkpoint, "--prompts", data, *QUICK, "--levers", "static", "--rows", 2]
    found, _ = run("compare_levers.py", *options)
    table = CostTable.read(found["cost_table"], "the report")
    engine, seconds, tokens = Engine(kit.mixed()), 0.0, 0
    for prompt in PROMPTS[:2]:
        ids = kit.prompt_tensor([int(word[1:]) for word in prompt.split()])
        how: dict[str, Any] = {"exit_layer": 2, "num_draft_tokens": 2, "max_new_tokens": 6}
        for tally in engine.generate(ids, **how).statistics.tallies:
            seconds += sum(table.seconds(*key) * count for key, count in tally.work.items())
            tokens += tally.emitted - 1
    (_, static) = found["levers"]
    assert static["predicted"] == pytest.approx(tokens * table.autoregressive_step / seconds)
    assert table.max_num_draft_tokens == 3


def test_answers_may_end_and_exits_are_read_for_their_first_choices(checkpoint: str, data: Path, run: Runner) -> None:
    options = ["--stop-at-eos", "--top-k", "--levers", "static", "--exit-layers", "3", "--category-rows", 1]
    found, shown = run("compare_levers.py", "--model", checkpoint, "--prompts", data, *QUICK, *options)
    expected = [own_tokens(prompt)[:6] for prompt in PROMPTS[:2]]
    assert found["arms"][0]["new_tokens"] == sum(map(len, expected))
    assert EOS in kit.without_cache(kit.mixed(), [44, 3], 12)
    assert found["top_k"].keys() == {"2", "3"}
    for rates in found["top_k"].values():
        assert list(rates) == ["1", "2", "4", "8"]
        assert 0 <= rates["1"] <= rates["2"] <= rates["4"] <= rates["8"] <= 1
    chains = [tree for tree in found["full_trees"] if tree["children"] == 1]
    assert [chain["exit_layer"] for chain in chains] == [2, 3]
    assert chains[1]["rate"] == found["top_k"]["3"]["1"]
    assert "top 8" in shown


def test_levers_without_a_fixed_exit_need_none(dismissed: str, data: Path, run: Runner) -> None:
    options = ["--levers", "all", "--exit-layers", "1,3"]
    found, _ = run("compare_levers.py", "--model", dismissed, "--prompts", data, *QUICK, *options)
    assert [lever["lever"] for lever in found["levers"]] == ["autoregressive", "all"]
    assert found["levers"][1]["exit_layer"] == "auto"
    assert run.status("compare_levers.py", "--model", dismissed, "--prompts", data, *QUICK) == 2
    message = (
        "needs --static-exit-layer and --static-num-draft-tokens, such as 4 and 3: the checkpoint says that none pays"
    )
    assert message in run.capsys.readouterr().err
    static = ["--static-exit-layer", 1, "--static-num-draft-tokens", 3, "--levers", "static"]
    found, _ = run("compare_levers.py", "--model", dismissed, "--prompts", data, *QUICK, *static)
    assert found["arms"][1]["label"] == "static E=1 γ=3"


def failing(name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all calls that ask for an option fail."""
    generate = Engine.generate

    def generating(self: Engine, prompts: Any, **options: Any) -> Any:
        if options.get(name) is not None:
            raise error
        return generate(self, prompts, **options)

    monkeypatch.setattr(Engine, "generate", generating)


def test_a_lever_that_fails_is_reported_and_the_others_go_on(
    checkpoint: str, data: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("tree_nodes", RuntimeError("worn out"), monkeypatch)
    options = ["--model", checkpoint, "--prompts", data, *QUICK, "--levers", "tree-4,static", "--tree-depth", 2]
    found, shown = run("compare_levers.py", *options)
    assert found["failed"] == {"tree-4 E=2 γ=2": "RuntimeError: worn out"}
    assert [lever["lever"] for lever in found["levers"]] == ["autoregressive", "static"]
    assert "tree-4 E=2 γ=2  failed: RuntimeError: worn out" in shown


def test_an_interrupt_reports_what_there_is(
    checkpoint: str, data: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("tree_nodes", KeyboardInterrupt(), monkeypatch)
    options = ["--model", checkpoint, "--prompts", data, *QUICK, "--levers", "tree-4"]
    assert run.status("compare_levers.py", *options) == 130
    found = json.loads(run.capsys.readouterr().out.splitlines()[-1])
    assert (found["complete"], found["levers"]) == (False, [])
    assert found["cost_table"]["exit_layers"] == [1, 2]


MISTAKES: list[tuple[list[Any], str]] = [
    (["--levers", "fast"], "--levers 'fast' is unknown; allowed are autoregressive, static"),
    (["--levers", "compiled-static"], "--levers 'compiled-static' is unknown"),
    (["--levers", "tree-5"], "--levers 'tree-5' is unknown"),
    (["--tree-nodes", "0,4"], "--tree-nodes 0,4 is out of range; allowed are 1 to 64"),
    (["--tree-nodes", "x"], "--tree-nodes 'x' is not a list of numbers"),
    (["--tree-depth", "0"], "--tree-depth 0"),
    (["--exit-layers", "1,x"], "--exit-layers '1,x'"),
    (["--exit-layers", "9"], "exit_layer=9 is out of range"),
    (["--static-exit-layer", "4"], "needs --static-exit-layer and --static-num-draft-tokens"),
    (["--static-exit-layer", "4", "--static-num-draft-tokens", "2"], "exit_layer=4 is out of range"),
    (["--num-draft-tokens", "0"], "--num-draft-tokens 0"),
    (["--cost-repeats", "0"], "--cost-repeats 0"),
    (["--max-new-tokens", "1"], "--max-new-tokens 1 is out of range; allowed are integers from 2 on"),
    (["--output-dir", "rows.jsonl"], "--output-dir rows.jsonl is a file"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_the_program_with_one_line(
    arguments: list[Any], message: str, checkpoint: str, data: Path, run: Runner
) -> None:
    run.monkeypatch.chdir(data.parent)
    assert run.status("compare_levers.py", "--model", checkpoint, "--prompts", data, *arguments) == 2
    output = run.capsys.readouterr()
    last = output.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert output.out == ""


def test_compiled_levers_ask_for_compiled_rounds(
    checkpoint: str, data: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes half a minute even for a tiny model; here it fails."""
    failing("compile", RuntimeError("no compiler"), monkeypatch)
    options = ["--compile", "--levers", "static,compiled-autoregressive,compiled-static"]
    found, _ = run("compare_levers.py", "--model", checkpoint, "--prompts", data, *QUICK, *options)
    assert list(found["failed"]) == ["compiled-autoregressive", "compiled-static E=2 γ=2"]
    assert [lever["lever"] for lever in found["levers"]] == ["autoregressive", "static"]
