"""A model whose weights accelerate holds elsewhere, and loads for a module only while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM, PreTrainedModel

import layerskip
from layerskip import Engine
from layerskip.comparison.quality import read_answers
from layerskip.decoding.exit_head import ExitHead
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel
from layerskip.training.clock import Clock
from layerskip.training.exit_settings import ExitSettings
from layerskip.training.objective import exit_objective
from tests import kit
from tests.decoding.levers_kit import PROMPTS, TABLES, padded
from tests.model.placed_kit import BUILDERS, whole

NEW = 12
IDS = torch.arange(0, kit.VOCAB, 2)


def from_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Loads a model all over: a layer stays in memory, embedding, norm and head and the other layers on the disk."""
    model.save_pretrained(folder)
    layers = {f"model.layers.{index}": "cpu" if index == 2 else "disk" for index in range(kit.NUM_LAYERS)}
    parts = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head"), "disk")
    device_map = {**layers, **parts, "model.rotary_emb": "cpu"}
    return AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=folder / "offload")


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedModel]:
    """The same models, without their weights."""
    on_disk = {family: from_disk(whole(family), tmp_path_factory.mktemp(family)) for family in ("llama", "tied")}
    in_memory = {family: cpu_offload(BUILDERS[family](), torch.device("cpu")) for family in ("gemma2", "gpt2")}
    models = {**on_disk, **in_memory}
    for model in models.values():
        layered = LayeredModel(model)
        assert all(part.weight.is_meta for part in (layered.embedding, layered.norm, layered.head))
    return models


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"exit_layer": 2},
    "draft head": {"exit_layer": 2, "draft_token_ids": IDS},
    "tree": {"exit_layer": 2, "tree_nodes": 6, "draft_token_ids": IDS},
    "checked": {"exit_layer": 2, "draft_stop": "adaptive", "copy_ngrams": "checked"},
    "auto": {"exit_layer": "auto", "draft_stop": "adaptive", "copy_ngrams": "trusted", "draft_token_ids": IDS},
}


def engine_of(model: PreTrainedModel, options: str) -> Engine:
    return Engine(model, num_draft_tokens=3, cost_table=TABLES["gpu"], **OPTIONS[options])


@pytest.mark.parametrize(
    ("family", "options"), [*(("llama", each) for each in OPTIONS), *((each, "tree") for each in list(BUILDERS)[1:])]
)
def test_greedy_rows_are_those_of_generate_in_memory(
    offloaded: dict[str, PreTrainedModel], family: str, options: str
) -> None:
    ids, mask = padded(PROMPTS)
    engine = engine_of(offloaded[family], options)
    found = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
    assert torch.equal(found.sequences, kit.reference(whole(family), ids, NEW, attention_mask=mask))
    assert found.statistics.drafted > 0


@pytest.mark.parametrize("options", ["plain", "draft head", "auto"])
def test_samples_are_those_of_the_model_in_memory(offloaded: dict[str, PreTrainedModel], options: str) -> None:
    given: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "max_new_tokens": NEW}
    one, other = (
        engine_of(model, options).generate(kit.prompt_tensor(), generator=torch.Generator().manual_seed(3), **given)
        for model in (offloaded["llama"], whole("llama"))
    )
    assert torch.equal(one.sequences, other.sequences)


@pytest.mark.parametrize("family", ["tied", "gpt2"])
def test_the_hook_gives_what_generate_gives_in_memory(offloaded: dict[str, PreTrainedModel], family: str) -> None:
    decode = layerskip.self_speculative(exit_layer=2, draft_token_ids=IDS)
    found = kit.reference(offloaded[family], kit.prompt_tensor(), NEW, custom_generate=decode)
    assert torch.equal(found, kit.reference(whole(family), kit.prompt_tensor(), NEW))


@torch.no_grad()
@pytest.mark.parametrize("family", list(BUILDERS))
def test_rows_of_an_offloaded_head_are_copied_and_the_head_stays_away(
    offloaded: dict[str, PreTrainedModel], family: str
) -> None:
    layered = LayeredModel(offloaded[family])
    head = DraftHead.of(layered, IDS)
    assert torch.equal(head.weight, LayeredModel(whole(family)).head.weight[IDS])
    assert layered.head.weight.is_meta


def test_token_ids_go_to_where_an_offloaded_embedding_runs(offloaded: dict[str, PreTrainedModel]) -> None:
    assert LayeredModel(offloaded["llama"]).device == torch.device("cpu")
    with torch.device("meta"):
        assert LayeredModel(kit.l4()).device == torch.device("meta")


def test_a_head_whose_forward_was_replaced_is_refused_by_name() -> None:
    model = kit.l4()
    head = model.get_output_embeddings()
    intact = head.forward
    head.forward = lambda hidden: -intact(hidden)
    with pytest.raises(ValueError, match=r"nn\.modules\.linear\.Linear with a forward of its own; draft with the full"):
        DraftHead.of(LayeredModel(model), IDS)


def test_a_hook_on_the_head_decides_though_drafts_do_not_see_it() -> None:
    model = kit.identical()
    plain = kit.reference(model, kit.prompt_tensor(), NEW)
    model.get_output_embeddings().register_forward_hook(lambda module, given, logits: logits.roll(1, -1))
    found = engine_of(model, "draft head").generate(kit.prompt_tensor(), max_new_tokens=NEW)
    wanted = kit.reference(model, kit.prompt_tensor(), NEW)
    assert torch.equal(found.sequences, wanted)
    assert not torch.equal(wanted, plain)
    assert found.statistics.accepted == 0


# Norm and head run as modules on every path to an exit, since all else would miss what is around them


@contextmanager
def calls(model: PreTrainedModel) -> Iterator[Counter[str]]:
    """Counts calls of norm and head while the block runs."""
    layered = LayeredModel(model)
    counts: Counter[str] = Counter()
    handles = [
        part.register_forward_hook(lambda *_, name=name: counts.update([name]))
        for name, part in (("norm", layered.norm), ("head", layered.head))
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def test_every_draft_and_every_verification_calls_norm_and_head() -> None:
    with calls(whole("llama")) as counts:
        done = engine_of(whole("llama"), "plain").generate(kit.prompt_tensor(), max_new_tokens=NEW).statistics
    assert counts["norm"] == counts["head"] == 1 + done.rounds + done.drafted


@pytest.mark.parametrize("options", ["draft head", "tree"])
def test_with_a_draft_head_verifications_alone_call_the_head(options: str) -> None:
    with calls(whole("llama")) as counts:
        done = engine_of(whole("llama"), options).generate(kit.prompt_tensor(), max_new_tokens=NEW).statistics
    assert counts["head"] == 1 + done.rounds
    # Every draft step of either kind norms its states once.
    assert counts["norm"] > counts["head"]


def test_a_tree_with_the_full_head_calls_it_for_every_level() -> None:
    engine = Engine(whole("llama"), exit_layer=2, num_draft_tokens=3, tree_nodes=6)
    with calls(whole("llama")) as counts:
        done = engine.generate(kit.prompt_tensor(), max_new_tokens=NEW).statistics
    assert counts["norm"] == counts["head"] > 1 + 2 * done.rounds


def test_exits_that_are_scored_beside_a_draft_call_norm_and_head(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[bool] = []
    intact = ExitHead.agreement

    def scoring(*given: Any) -> list[float]:
        scored.append(True)
        return intact(*given)

    monkeypatch.setattr(ExitHead, "agreement", scoring)
    engine = Engine(whole("llama"), exit_layer="auto", cost_table=TABLES["gpu"])
    with calls(whole("llama")) as counts:
        done = engine.generate(kit.prompt_tensor(), max_new_tokens=NEW).statistics
    assert scored
    assert counts["norm"] == counts["head"] == 1 + done.rounds + done.drafted + len(scored)


def test_the_quality_of_exits_is_measured_through_offloaded_modules(offloaded: dict[str, PreTrainedModel]) -> None:
    answers = [kit.PROMPT[:4], kit.PROMPT[4:]]
    one, other = (
        read_answers(LayeredModel(model), PROMPTS[:2], answers, [1, 2], draft_token_ids=IDS)
        for model in (offloaded["gemma2"], whole("gemma2"))
    )
    assert one == other


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_offloaded_model_is_neither_trained_nor_compiled(offloaded: dict[str, PreTrainedModel], family: str) -> None:
    """Its offloaded weights would get no gradients, and graphs do not hold what hooks do."""
    model = offloaded[family]
    with pytest.raises(ValueError, match=r"device_map.*load it onto one device"):
        exit_objective(model, ExitSettings((2, 3)), Clock(1)).__enter__()
    with pytest.raises(ValueError, match=r"compile=True does not go with .*device_map"):
        Engine(model, exit_layer=2, compile=True).generate(kit.prompt_tensor(), max_new_tokens=4, do_sample=False)
