"""A comparison step by step, on tiny models: what is done once, what is left as it was, and what a checkpoint gets."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import Engine
from layerskip.comparison import benchmark, compare, latency
from layerskip.comparison.benchmark import Sample
from layerskip.comparison.compare import Comparison, ComparisonSettings
from layerskip.decoding.cost import CostTable
from layerskip.model.draft_head import read_draft_token_ids
from tests import kit

EOS = 35
EXITS = (1, 2, 3)
SETTINGS = ComparisonSettings(
    max_num_draft_tokens=3, max_new_tokens=10, batch_size=2, run_cells=2, run_rows=2, repeats=2, cost_repeats=2
)
ONCE = replace(SETTINGS, repeats=1)
# What is timed in all: plain decoding and every cell, on every prompt in every repeat.
RUNS = 3 * SETTINGS.run_rows * SETTINGS.repeats
PROMPTS = ["w44 w3", "w1 w5 w9", "w2", "w30 w31 w32 w33 w34", "w1"]
CATEGORIES = ["a", "b", "a", "b", None]
COSTS = CostTable(
    EXITS, (0.25, 0.5, 0.75), ((1.0, 1.0, 1.0, 1.0),) * 3, 1.0, 0.25, 0.25, {"device": "cpu", "context": 4}
)


def engine_of(model: Callable[..., Any] = kit.mixed, **changes: Any) -> Engine:
    return Engine(model(eos_token_id=EOS, pad_token_id=0, **changes), kit.word_tokenizer(kit.VOCAB))


@pytest.fixture(scope="module")
def engine() -> Engine:
    """MIX, which ends its answers."""
    return engine_of()


def begin(
    engine: Engine, path: Path, settings: ComparisonSettings = SETTINGS, *, resume: bool = False, **changes: Any
) -> Comparison:
    wanted: dict[str, Any] = {"prompts": PROMPTS, "categories": CATEGORIES, "exit_layers": EXITS, **changes}
    return Comparison.open(
        engine, *wanted.values(), settings=settings, path=path, about={"model": "mine"}, resume=resume
    )


def go(comparison: Comparison) -> Comparison:
    comparison.read_exits()
    comparison.measure_costs()
    comparison.run_cells()
    comparison.write()
    return comparison


def stored(comparison: Comparison) -> Any:
    return json.loads((comparison.folder.path / "exits.json").read_text(encoding="utf-8"))


def know_times(monkeypatch: pytest.MonkeyPatch, **speeds: float) -> None:
    """Makes costs known, and speeds of real runs over plain decoding, by exit and draft length such as E2γ3; else 1."""

    def timed(*arguments: Any, **options: Any) -> Iterator[Sample]:
        for sample in benchmark.timed(*arguments, **options):
            speed = speeds.get(sample.arm.removeprefix("self_speculative ").replace("=", "").replace(" ", ""), 1.0)
            run = replace(sample.run, prefill_seconds=0.5, decode_seconds=sample.run.decoded / speed)
            yield replace(sample, run=run)

    monkeypatch.setattr(compare, "measure_costs", lambda *arguments: COSTS)
    monkeypatch.setattr(compare, "warm_up", lambda *arguments: {})
    monkeypatch.setattr(compare, "timed", timed)


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are as fast as plain decoding."""
    know_times(monkeypatch)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is generated, by strategy; as many as there are calls of the engine."""
    made: list[str] = []
    generate = Engine.generate

    def counting(engine: Engine, prompts: Any, **options: Any) -> Any:
        made.append(options["strategy"])
        return generate(engine, prompts, **options)

    monkeypatch.setattr(Engine, "generate", counting)
    return made


# What is found


def test_replayed_rounds_are_those_that_the_engine_runs(engine: Engine, tmp_path: Path, known_times: None) -> None:
    comparison = begin(engine, tmp_path)
    comparison.read_exits()
    comparison.measure_costs()
    for cell in comparison.found.cells():
        options = {"exit_layer": cell.exit_layer, "num_draft_tokens": cell.num_draft_tokens}
        made = engine.generate(PROMPTS, max_new_tokens=SETTINGS.max_new_tokens, **options)
        assert cell.tokens_per_round == made.statistics.mean_acceptance_length
    assert len(comparison.found.cells()) == len(EXITS) * SETTINGS.max_num_draft_tokens


def check_that_runs_are_as_replayed(comparison: Comparison) -> None:
    assert len(comparison.found.measured) == SETTINGS.run_cells
    for each in comparison.found.measured:
        assert each.tokens_per_round == each.cell.tokens_per_round
        assert (each.same_as_plain, each.answers) == (SETTINGS.run_rows, SETTINGS.run_rows)


@pytest.mark.parametrize("model", [kit.l4, kit.identical])
def test_real_runs_are_as_they_were_replayed(model: Callable[..., Any], tmp_path: Path) -> None:
    check_that_runs_are_as_replayed(go(begin(engine_of(model), tmp_path, ONCE)))


def test_a_models_own_logits_processors_are_left_out_of_answers_and_runs(
    engine: Engine, tmp_path: Path, known_times: None
) -> None:
    """Chat models come with a repetition penalty in their generation config; it is theirs again afterwards."""
    punishing = engine_of()
    own = punishing.model.generation_config
    own.repetition_penalty = 1.5
    comparison = go(begin(punishing, tmp_path / "own", ONCE))
    check_that_runs_are_as_replayed(comparison)
    assert punishing.model.generation_config is own
    assert own.repetition_penalty == 1.5
    plain = begin(engine, tmp_path / "plain", ONCE)
    plain.read_exits()
    assert comparison.found.answers == plain.found.answers


def test_with_a_draft_vocabulary_real_runs_are_as_they_were_replayed(
    engine: Engine, tmp_path: Path, known_times: None
) -> None:
    trimmed = Engine(
        kit.mixed(eos_token_id=EOS), kit.word_tokenizer(kit.VOCAB), draft_token_ids=torch.arange(96, 40, -1)
    )
    comparison = go(begin(trimmed, tmp_path / "trimmed", ONCE))
    check_that_runs_are_as_replayed(comparison)
    assert stored(comparison)["draft_vocab_size"] == 56
    whole = begin(engine, tmp_path / "whole", ONCE)
    whole.read_exits()
    whole.measure_costs()
    assert comparison.found.cells() != whole.found.cells()


def test_costs_are_of_rounds_behind_a_prompt_and_half_of_its_answer(engine: Engine, tmp_path: Path) -> None:
    comparison = begin(engine, tmp_path, ONCE, prompts=["w44 w3"], categories=[None])
    comparison.read_exits()
    comparison.measure_costs()
    costs = comparison.found.costs
    assert costs is not None
    assert costs.measured_on["context"] == 2 + len(comparison.found.answers[0].token_ids) // 2
    assert (costs.exit_layers, costs.max_num_draft_tokens) == (EXITS, 3)


def test_prompts_whose_answers_leave_nothing_to_time_are_not_run(tmp_path: Path, known_times: None) -> None:
    engine, prompts = engine_of(), ["w44 w3", "w1 w5 w9"]
    (first,) = engine.generate(prompts[:1], strategy="autoregressive", max_new_tokens=1).new_token_ids
    engine.model.generation_config.eos_token_id = first[0]
    comparison = go(begin(engine, tmp_path, prompts=prompts, categories=[None, None]))
    assert len(comparison.found.answers[0].token_ids) == 1
    assert [each.answers for each in comparison.found.measured] == [1] * SETTINGS.run_cells


def test_answers_of_one_token_each_are_refused(tmp_path: Path) -> None:
    engine = engine_of()
    (first,) = engine.generate(["w2"], strategy="autoregressive", max_new_tokens=1).new_token_ids
    engine.model.generation_config.eos_token_id = first[0]
    with pytest.raises(ValueError, match="every answer ends with its first token"):
        begin(engine, tmp_path, prompts=["w2"], categories=[None]).read_exits()


def test_the_model_is_the_same_before_and_after(engine: Engine, tmp_path: Path) -> None:
    model = engine.model
    weights = {name: values.clone() for name, values in model.state_dict().items()}
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    attributes = set(vars(model))
    go(begin(engine, tmp_path, ONCE))
    assert all(torch.equal(values, weights[name]) for name, values in model.state_dict().items())
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation)
    assert set(vars(model)) == attributes
    assert not any(module.training or module._forward_pre_hooks for module in model.modules())


# Going on


def interrupt_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second batch of answers."""
    generate, count = Engine.generate, itertools.count(1)

    def interrupted(engine: Engine, prompts: Any, **options: Any) -> Any:
        if next(count) == 2:
            raise KeyboardInterrupt
        return generate(engine, prompts, **options)

    monkeypatch.setattr(Engine, "generate", interrupted)


def interrupt_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second pass over all costs."""
    rounds, count = latency.timed_rounds, itertools.count(1)

    def interrupted(*arguments: Any) -> Any:
        if next(count) == 2:
            raise KeyboardInterrupt
        return rounds(*arguments)

    monkeypatch.setattr(latency, "timed_rounds", interrupted)
    monkeypatch.setattr(compare, "measure_costs", latency.measure_costs)


def interrupt_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C behind five real runs."""
    timed = compare.timed

    def interrupted(*arguments: Any, **options: Any) -> Iterator[Sample]:
        yield from itertools.islice(timed(*arguments, **options), 5)
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "timed", interrupted)


@pytest.fixture(scope="module")
def uninterrupted(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a comparison finds that is not interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        know_times(patch)
        return stored(go(begin(engine, tmp_path_factory.mktemp("uninterrupted"))))


@pytest.mark.parametrize(
    ("interrupt", "answers", "runs"),
    [(interrupt_answering, 2, RUNS), (interrupt_costs, 0, RUNS), (interrupt_runs, 0, RUNS - 5)],
    ids=["answering", "costs", "runs"],
)
def test_an_interrupted_comparison_does_what_is_left_and_finds_the_same(
    engine: Engine,
    tmp_path: Path,
    known_times: None,
    interrupt: Callable[[pytest.MonkeyPatch], None],
    answers: int,
    runs: int,
    calls: list[str],
    uninterrupted: Any,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch)
        with pytest.raises(KeyboardInterrupt):
            go(begin(engine, tmp_path))
    calls.clear()
    assert stored(go(begin(engine, tmp_path, resume=True))) == uninterrupted
    assert len(calls) == answers + runs


def test_a_finished_comparison_does_nothing_again(
    engine: Engine, tmp_path: Path, known_times: None, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go(begin(engine, tmp_path))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    calls.clear()
    for name in ("measure_costs", "warm_up"):
        monkeypatch.setattr(compare, name, None)
    with kit.counted_layers(engine.model) as layers:
        go(begin(engine, tmp_path, resume=True))
    assert (calls, layers) == ([], [0] * kit.NUM_LAYERS)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompts": [*PROMPTS[:4], "w3"]}, "prompts_sha256"),
        ({"exit_layers": (1, 2)}, "exit_layers"),
        ({"categories": ["b", "b", "a", "b", None]}, "categories"),
        ({"settings": replace(SETTINGS, repeats=3)}, "repeats"),
    ],
)
def test_other_prompts_or_settings_are_refused_by_name(
    engine: Engine, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    begin(engine, tmp_path)
    with pytest.raises(ValueError, match=f"other settings .*{named} differ"):
        begin(engine, tmp_path, resume=True, **changes)


# Saving


def saved(engine: Engine, comparison: Comparison, folder: Path) -> Any:
    engine.model.save_pretrained(folder)
    comparison.save(folder)
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["layerskip"]


def test_what_was_fastest_is_saved_with_the_costs(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_times(monkeypatch, E2γ3=1.5)
    comparison = go(begin(engine, tmp_path / "comparison", replace(ONCE, run_cells=9)))
    agreement = tuple(
        each.agreement for each in comparison.found.quality()["all"] if each.exit_layer in COSTS.exit_layers
    )
    assert len(set(agreement)) > 1
    assert saved(engine, comparison, tmp_path / "model") == {
        "format": 1,
        "exit_layer": 2,
        "num_draft_tokens": 3,
        "draft_vocab_size": None,
        "cost_table": json.loads(json.dumps(replace(COSTS, acceptance=agreement).to_dict())),
    }


def test_nothing_is_saved_before_anything_was_run(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was run yet"):
        begin(engine, tmp_path / "comparison").save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["comparison"]


@pytest.mark.parametrize(("size", "expected"), [(None, 40), (20, 20), (kit.VOCAB, kit.VOCAB)])
def test_the_draft_vocabulary_that_was_measured_is_saved_with_its_ids(
    size: int | None, expected: int, tmp_path: Path, known_times: None
) -> None:
    ids = torch.arange(90, 50, -1)
    engine = Engine(
        kit.mixed(eos_token_id=EOS), kit.word_tokenizer(kit.VOCAB), draft_vocab_size=size, draft_token_ids=ids
    )
    comparison = go(begin(engine, tmp_path / "comparison", ONCE))
    assert saved(engine, comparison, tmp_path / "model")["draft_vocab_size"] == expected
    assert torch.equal(read_draft_token_ids(tmp_path / "model"), ids)


def test_exits_that_were_trained_stay_in_the_metadata(tmp_path: Path, known_times: None) -> None:
    engine = engine_of(layerskip={"format": 1, "exit_layers": [3, 1]})
    comparison = go(begin(engine, tmp_path / "comparison", ONCE))
    assert saved(engine, comparison, tmp_path / "model")["exit_layers"] == [3, 1]
