"""Every supported family runs in spans of layers exactly as its own model does, and its model stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip import Engine
from layerskip.model.cache import SharedCache
from layerskip.model.families import FAMILIES
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement
from tests import kit
from tests.families_kit import CONFIGS, IMPLEMENTATIONS, VARIANTS, built, own_logits
from tests.model.exits_kit import batch, exit_logits, exit_state

EXITS = [1, 2, 3, kit.NUM_LAYERS]


def check_exits(model: PreTrainedModel, rows: tuple[int, ...] = (2,), exits: Sequence[int] = EXITS) -> None:
    """Checks exit logits against the model cut to as many layers, at the last layer against the model itself."""
    for exit_layer in exits:
        reference = model if exit_layer == kit.NUM_LAYERS else kit.truncated(model, exit_layer)
        for count in rows:
            logits = exit_logits(model, batch(count), exit_layer)
            assert logits.shape == (count, len(kit.PROMPT), kit.VOCAB)
            torch.testing.assert_close(logits, own_logits(reference, batch(count)), rtol=0, atol=1e-5)


def test_every_family_of_the_table_is_tested_here() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize(("family", "attention"), IMPLEMENTATIONS)
def test_exit_logits_equal_those_of_the_model_cut_there(family: str, attention: str) -> None:
    check_exits(built(family, attention), rows=(1, 3))


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_kinds_of_a_family_are_followed(variant: str) -> None:
    check_exits(built(variant))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", CONFIGS)
def test_exit_state_is_the_state_before_the_final_norm(family: str, rows: int) -> None:
    """transformers norms its last hidden state and no other, so that layer 2 of 4 is the plain one."""
    model = built(family)
    with torch.no_grad():
        state = exit_state(LayeredModel(model), batch(rows), kit.EXIT_LAYER)
        hidden_states = model(batch(rows), use_cache=False, output_hidden_states=True).hidden_states
    assert state.shape == (rows, len(kit.PROMPT), model.config.hidden_size)
    torch.testing.assert_close(state, hidden_states[kit.EXIT_LAYER], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_second_span_resumes_where_the_first_stopped(family: str) -> None:
    model = built(family)
    layered = LayeredModel(model)
    rows, width = batch(3).shape
    placement = Placement.prompt([width] * rows, layered.device)
    call: dict[str, Any] = {
        "placement": placement,
        "cache": SharedCache(layered.num_layers, rows, width),
        "rotary": layered.rotary_tables(width),
    }
    with torch.no_grad():
        hidden = layered.embed(batch(3), placement.positions)
        for start, stop in [(0, 1), (1, 3), (3, 4)]:
            hidden = layered.run(hidden, start, stop, **call)
        logits = layered.logits(hidden)
    torch.testing.assert_close(logits, own_logits(model, batch(3)), rtol=0, atol=1e-5)


# Norm and head


@pytest.mark.parametrize("family", CONFIGS)
def test_exit_head_norms_each_state_by_its_own_statistics(family: str) -> None:
    """An early state is far smaller or larger than a late one; large embeddings make the difference plain."""
    model = copy.deepcopy(built(family))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10)
    check_exits(model, exits=[1, 2, 3])


@pytest.mark.parametrize("family", CONFIGS)
def test_norm_and_head_are_called_as_modules(family: str) -> None:
    """Sharding and offloading hook the modules; using their weights alone would pass them by."""
    model = copy.deepcopy(built(family))
    layered = LayeredModel(model)
    behind_the_layers = {"norm": layered.norm, "projection": layered.project_out, "head": layered.head}
    present = {name: module for name, module in behind_the_layers.items() if not isinstance(module, nn.Identity)}
    # The kind of OPT whose blocks end in norms, and whose embedding is narrower than its layers.
    assert list(present) == (["projection", "head"] if family == "opt" else ["norm", "head"])
    called: list[str] = []
    for name, module in present.items():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    for exit_layer in (1, 2, 3):
        called.clear()
        exit_logits(model, batch(2), exit_layer)
        assert called == list(present)


@pytest.mark.parametrize("family", CONFIGS)
def test_exactly_the_layers_of_a_span_are_called(family: str) -> None:
    model = built(family)
    passed = 2 * len(kit.PROMPT)
    for exit_layer in EXITS:
        with kit.counted_layers(model) as counts:
            exit_logits(model, batch(2), exit_layer)
        assert counts == [passed] * exit_layer + [0] * (kit.NUM_LAYERS - exit_layer)


def test_tied_head_is_the_embedding() -> None:
    model = kit.build(kit.llama_config(tie_word_embeddings=True))
    assert LayeredModel(model).head.weight is model.get_input_embeddings().weight
    check_exits(model, exits=[2])


# The model stays the caller's


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that a wrapper could change: module tree, parameters, configurations, modes."""
    return {
        "modules": [(name, type(module), id(module), module.training) for name, module in model.named_modules()],
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "keys": list(model.state_dict()),
        "buffers": [name for name, _ in model.named_buffers()],
        "config": copy.deepcopy(model.config.to_dict()),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "attention": model.config._attn_implementation,
        "attributes": sorted(vars(model)),
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_wrapping_and_generating_change_nothing_in_the_model(family: str) -> None:
    model = copy.deepcopy(built(family))
    before = fingerprint(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = Engine(model, exit_layer=2)
    assert fingerprint(model) == before
    for strategy in ("self_speculative", "autoregressive", "early_exit"):
        engine.generate(batch(2), max_new_tokens=4, strategy=strategy)
    list(engine.stream(kit.prompt_tensor(), max_new_tokens=4))
    assert fingerprint(model) == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
