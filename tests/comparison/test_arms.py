"""Ways to generate: all emit what the model's own greedy loop does, and leave the model as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation import candidate_generator

from layerskip import Engine
from layerskip.comparison.arms import (
    Arm,
    RoundCounts,
    assistant_arm,
    compiled_arm,
    early_exit_arm,
    engine_arm,
    prompt_lookup_arm,
    transformers_arm,
)
from layerskip.comparison.batches import Batch
from layerskip.decoding import call
from layerskip.decoding.compiled import CompiledSettings
from layerskip.decoding.cost import CostTable
from tests import kit

BATCH = Batch.of([kit.PROMPT])
WAYS: dict[str, Callable[..., Arm]] = {
    "autoregressive": lambda model, **how: engine_arm(
        "autoregressive", Engine(model), strategy="autoregressive", **how
    ),
    "hf_generate": lambda model, **how: transformers_arm("hf_generate", model, **how),
    "self_speculative E=2 γ=3": lambda model, **how: engine_arm(
        "self_speculative", Engine(model), exit_layer=2, num_draft_tokens=3, **how
    ),
    "hf_early_exit E=2 γ=3": lambda model, **how: early_exit_arm(model, 2, 3, **how),
    "hf_prompt_lookup γ=3": lambda model, **how: prompt_lookup_arm(model, 3, **how),
    "hf_assistant γ=3": lambda model, **how: assistant_arm(model, kit.identical(), 3, **how),
}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keeps torch.compile from compiling, and notes how it is called."""
    calls: list[dict[str, Any]] = []

    def compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def compiled(*arguments: Any, **named: Any) -> Any:
            calls[-1]["runs"] += 1
            return function(*arguments, **named)

        calls.append({**options, "runs": 0})
        return compiled

    monkeypatch.setattr(torch, "compile", compile)
    return calls


@pytest.mark.parametrize("label", WAYS)
def test_every_way_emits_the_models_own_tokens(label: str) -> None:
    model = kit.mixed()
    arm = WAYS[label](model)
    run = arm.generate(BATCH, 16)
    assert arm.label == label
    assert run.token_ids == [kit.without_cache(model, kit.PROMPT, 16)]
    assert 0 < run.decoded <= 15
    assert run.seconds == run.prefill_seconds + run.decode_seconds
    assert json.loads(json.dumps(asdict(run)))["token_ids"] == run.token_ids


@pytest.mark.parametrize("label", WAYS)
def test_answers_end_at_eos_where_that_is_asked_for(label: str) -> None:
    """35 ends MIX's answer in the middle; all arms emit the same tokens up to there."""
    model = kit.mixed(eos_token_id=35)
    plain = kit.without_cache(model, [44, 3], 12)
    expected = plain[: plain.index(35) + 1]
    assert 1 < len(expected) < 12
    batch = Batch.of([[44, 3]])
    assert WAYS[label](model, stop_at_eos=True).generate(batch, 12).token_ids == [expected]
    assert WAYS[label](model).generate(batch, 12).token_ids == [plain]


@pytest.mark.parametrize("label", WAYS)
def test_every_way_can_draw_tokens(label: str) -> None:
    arm = WAYS[label](kit.mixed(), temperature=1.5)
    assert len({tuple(arm.generate(BATCH, 8).token_ids[0]) for _ in range(4)}) > 1


@pytest.mark.parametrize("label", ["autoregressive", "hf_generate", "self_speculative E=2 γ=3"])
def test_rows_of_a_batch_are_answered_together(label: str) -> None:
    model = kit.mixed()
    rows = [kit.PROMPT, kit.PROMPT[:4]]
    run = WAYS[label](model).generate(Batch.of(rows), 8)
    assert run.token_ids == [kit.without_cache(model, row, 8) for row in rows]
    assert run.decoded == 14


@pytest.mark.parametrize("label", WAYS)
def test_the_model_stays_as_it_was(label: str) -> None:
    model = kit.mixed()
    arm = WAYS[label](model)
    before, settings, config = dict(vars(model)), model.generation_config.to_dict(), model.config.to_dict()
    arm.generate(BATCH, 8)
    assert vars(model) == before
    assert (model.generation_config.to_dict(), model.config.to_dict()) == (settings, config)


def test_the_engine_counts_its_rounds() -> None:
    model = kit.identical()
    run = engine_arm("ours", Engine(model), exit_layer=2, num_draft_tokens=3).generate(BATCH, 9)
    result = Engine(model).generate(kit.prompt_tensor(), exit_layer=2, num_draft_tokens=3, max_new_tokens=9)
    assert run.rounds is not None
    counted = (run.rounds.rounds, run.rounds.drafted, run.rounds.accepted, run.rounds.draft_tokens_processed)
    assert counted == (2, 6, 6, 6)
    of_statistics = RoundCounts.of(result.statistics)
    assert of_statistics.verify_seconds == result.statistics.seconds["verify"] + result.statistics.seconds["other"]
    assert of_statistics.draft_seconds == result.statistics.seconds["draft"]
    assert run.rounds.work == of_statistics.work == ((2, 3, 3, 2),)
    assert transformers_arm("theirs", model).generate(BATCH, 9).rounds is None


def test_rounds_go_through_json() -> None:
    """Rows of a batch add up: of four rounds three draft 3 tokens, and the last one what is left of the budget."""
    model = kit.identical()
    batch = Batch.of([kit.PROMPT, kit.PROMPT[:4]])
    run = engine_arm("ours", Engine(model), exit_layer=2, num_draft_tokens=3).generate(batch, 8)
    assert run.rounds is not None
    assert run.rounds.work == ((2, 2, 2, 2), (2, 3, 3, 2))
    assert RoundCounts(**json.loads(json.dumps(asdict(run.rounds)))) == run.rounds


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"exit_layer": "auto"}, "ours E=auto γ=3"),
        ({"exit_layer": 2, "draft_stop": "adaptive", "num_draft_tokens": 2}, "ours E=2 γ=2"),
        ({"exit_layer": 2, "copy_ngrams": "checked"}, "ours E=2 γ=4"),
        ({"exit_layer": 2, "tree_nodes": 5, "num_draft_tokens": 3}, "ours E=2 γ=3"),
    ],
)
def test_every_option_of_the_engine_is_an_arm(options: dict[str, Any], label: str) -> None:
    model = kit.mixed()
    costs = CostTable((1, 2), (0.1, 0.2), ((1.0, 1.1, 1.2, 1.3),) * 2, 1.0, 0.05, 0.05)
    arm = engine_arm("ours", Engine(model, cost_table=costs), **options)
    run = arm.generate(BATCH, 12)
    assert arm.label == label
    assert run.token_ids == [kit.without_cache(model, kit.PROMPT, 12)]
    assert run.rounds is not None
    expected = Engine(model, cost_table=costs).generate(kit.prompt_tensor(), max_new_tokens=12, **options).statistics
    assert run.rounds == replace(RoundCounts.of(expected), **seconds_of(run.rounds))


def seconds_of(rounds: RoundCounts) -> dict[str, float]:
    return {name: value for name, value in asdict(rounds).items() if name.endswith("seconds")}


@pytest.mark.parametrize("options", [{"strategy": "autoregressive"}, {"exit_layer": 2}])
def test_a_compiled_engine_is_counted_as_it_is(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The arm itself decodes by what torch traces, here run as it stands; what counts its work traces nothing."""
    monkeypatch.setattr(call, "CompiledSettings", partial(CompiledSettings, backend="eager"))
    model = kit.mixed()
    engine = Engine(model, num_draft_tokens=1)
    arm = engine_arm("compiled", engine, compile=True, **options)
    assert arm.counted is not None
    torch._dynamo.utils.counters.clear()
    with kit.counted_layers(model) as counts:
        counted = arm.counted(BATCH, 8)
    assert not torch._dynamo.utils.counters["stats"]
    run = arm.generate(BATCH, 8)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert counted.token_ids == run.token_ids == [kit.without_cache(model, kit.PROMPT, 8)]
    assert counted.rounds is not None and run.rounds is not None
    assert counted.rounds.rounds == run.rounds.rounds
    assert min(counts) >= len(kit.PROMPT) + 7
    assert engine_arm("eager", engine, **options).counted is None


def test_an_option_that_the_engine_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="drafts"):
        engine_arm("ours", Engine(kit.mixed()), exit_layer=2, drafts=3)


def test_first_tokens_that_arrive_together_are_not_counted_as_decoded() -> None:
    """With a head that is sure of its choice transformers' exit drafts all γ tokens, so that γ + 1 come at first."""
    model = kit.build(kit.llama_config(), spread=200.0)
    kit.scale_late_layers(model, 0.0)
    for drafts in (2, 4):
        run = early_exit_arm(model, 2, drafts).generate(BATCH, 16)
        assert run.token_ids == [kit.without_cache(model, kit.PROMPT, 16)]
        assert run.decoded == 16 - (drafts + 1)


def test_an_assistant_drafts_as_many_tokens_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the assistant's own settings are, which stay as they were; it is sure of every choice."""
    assistant = kit.scale_late_layers(kit.build(kit.llama_config(), spread=200.0), 0.0)
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    assistant.generation_config.assistant_confidence_threshold = 0.99
    settings = assistant.generation_config.to_dict()
    lengths: list[int] = []
    draft = candidate_generator.AssistedCandidateGenerator.get_candidates

    def noted(self: Any, ids: torch.Tensor, **options: Any) -> Any:
        candidates, logits = draft(self, ids, **options)
        lengths.append(candidates.shape[1] - ids.shape[1])
        return candidates, logits

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "get_candidates", noted)
    assistant_arm(assistant, assistant, 3).generate(BATCH, 12)
    assert lengths == [3, 3, 3]
    assert assistant.generation_config.to_dict() == settings


@pytest.mark.parametrize("during", ["drafting", "verification"])
def test_a_model_is_whole_after_an_early_exit_that_failed(during: str) -> None:
    """transformers itself leaves the model cut to the exit."""
    model = kit.mixed()
    layer = 0 if during == "drafting" else 3

    def fail(*_: Any) -> None:
        raise RuntimeError("out of order")

    handle = kit.layers_of(model)[layer].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of order"):
        early_exit_arm(model, 2, 3).generate(BATCH, 8)
    handle.remove()
    assert model.config.num_hidden_layers == kit.NUM_LAYERS
    assert model.generation_config.num_assistant_tokens is None
    assert transformers_arm("plain", model).generate(BATCH, 8).token_ids == [kit.without_cache(model, kit.PROMPT, 8)]


def test_a_compiled_model_is_compiled_once_and_is_the_arms_own(uncompiled: list[dict[str, Any]]) -> None:
    model = kit.mixed()
    before = dict(vars(model))
    arm = compiled_arm(model, 40)
    for prompt in (kit.PROMPT, kit.PROMPT[:5]):
        assert arm.generate(Batch.of([prompt]), 8).token_ids == [kit.without_cache(model, prompt, 8)]
    assert [call["runs"] for call in uncompiled] == [14]
    assert vars(model) == before
    transformers_arm("plain", model).generate(BATCH, 8)
    assert arm.counted is not None
    assert arm.counted(BATCH, 8).token_ids == [kit.without_cache(model, kit.PROMPT, 8)]
    assert [call["runs"] for call in uncompiled] == [14]


def test_the_static_cache_has_one_length_for_all_prompts(uncompiled: list[dict[str, Any]]) -> None:
    model: PreTrainedModel = kit.mixed()
    lengths: set[int] = set()

    def note(module: Any, arguments: Any, named: dict[str, Any], output: Any) -> None:
        lengths.add(named["cache"].layers[0].keys.shape[2])

    kit.layers_of(model)[0].register_forward_hook(note, with_kwargs=True)
    arm = compiled_arm(model, 40)
    for prompt in (kit.PROMPT[:3], kit.PROMPT):
        arm.generate(Batch.of([prompt]), 8)
    assert lengths == {40}


def test_copied_rows_of_the_head_are_counted() -> None:
    model = kit.mixed()
    engine = Engine(model, draft_token_ids=torch.arange(40), draft_vocab_size=20)
    arm = engine_arm("ours", engine, exit_layer=2)
    assert arm.draft_vocab_size == 20
    assert arm.draft_head_bytes == 20 * 32 * 4
    assert engine_arm("plain", engine, strategy="autoregressive").draft_head_bytes == 0
