"""Every supported family trains by the recipe: exit losses, layer dropout, gradients, packed rows."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip.model.families import FAMILIES
from layerskip.model.layered import LayeredModel
from layerskip.training.clock import Clock
from layerskip.training.dropout_rates import depth_factor, kept_samples
from layerskip.training.exit_settings import ExitSettings
from layerskip.training.finetune import finetune
from layerskip.training.layer_dropout import DropoutSettings, layer_dropout
from layerskip.training.models import add_adapters
from layerskip.training.objective import exit_objective
from layerskip.training.recipe import LoraSettings, recipe_of
from tests import kit
from tests.families_kit import CONFIGS, built, mixtral_config, opt_config, own_logits

EXIT = 2
ONE_EXIT = ExitSettings(exit_layers=(EXIT,), weights="equal")
HALF = DropoutSettings(p_max=0.5)
SEED = 3
# A step at which layers are dropped for some samples of four and kept for others.
STEP = 7
ROWS = 4
IDS = torch.randint(1, kit.VOCAB, (ROWS, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, 6:] = 0
LABELS = IDS.masked_fill(MASK == 0, -100)
INPUTS = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}


def in_training(family: str) -> PreTrainedModel:
    """A model in train mode without dropout of its own."""
    model = copy.deepcopy(built(family)).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def kept(layer: int) -> list[bool]:
    """Returns which samples a layer keeps at `STEP`."""
    rate = HALF.p_max * depth_factor(layer, kit.NUM_LAYERS)
    return kept_samples(rate, ROWS, seed=SEED, step=STEP, micro_step=0, layer=layer).tolist()


@cache
def cut(family: str) -> PreTrainedModel:
    return kit.truncated(built(family), EXIT)


def cross_entropies(model: PreTrainedModel) -> torch.Tensor:
    """Returns each row's summed cross entropy by transformers' own logits, `(rows,)`."""
    with torch.no_grad():
        logits = model(IDS, attention_mask=MASK, use_cache=False).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), LABELS[:, 1:], ignore_index=-100, reduction="none")
    return losses.sum(1)


# Exit loss


@pytest.mark.parametrize("family", CONFIGS)
def test_exit_losses_are_cross_entropies_of_the_model_cut_there(family: str) -> None:
    model = copy.deepcopy(built(family))
    with exit_objective(model, ONE_EXIT, Clock(1)), torch.no_grad():
        measured = model(**INPUTS)
    torch.testing.assert_close(measured.exits[:, 0], cross_entropies(cut(family)), atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(measured.last, cross_entropies(built(family)), atol=1e-3, rtol=1e-5)
    model = in_training(family)
    with exit_objective(model, ONE_EXIT, Clock(1)), torch.no_grad():
        trained = model(**INPUTS)
    number = (LABELS[:, 1:] != -100).sum()
    torch.testing.assert_close(trained.loss, (measured.exits.sum() + measured.last.sum()) / 2 / number)


@pytest.mark.parametrize("family", CONFIGS)
def test_an_exit_teaches_the_layers_up_to_it_and_no_other(family: str) -> None:
    model = in_training(family)
    of_the_exit_alone = ExitSettings(exit_layers=(EXIT,), weights={EXIT: 1e30})
    with exit_objective(model, of_the_exit_alone, Clock(1)):
        model(**INPUTS).loss.backward()
    for number, layer in enumerate(kit.layers_of(model), start=1):
        largest = max(weight.grad.abs().max() for weight in layer.parameters() if weight.grad is not None)
        assert (largest > 1e-6) == (number <= EXIT), number
    assert model.get_output_embeddings().weight.grad.abs().max() > 1e-6
    assert model.get_input_embeddings().weight.grad.abs().max() > 1e-6


@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_by_the_whole_recipe_lowers_the_loss(family: str) -> None:
    model = in_training(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    losses = []
    clock = Clock(10, step=STEP)
    with ExitStack() as stack:
        stack.enter_context(layer_dropout(model, HALF, clock, SEED))
        stack.enter_context(exit_objective(model, ONE_EXIT, clock))
        for _ in range(2):
            loss = model(**INPUTS).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert torch.tensor(losses).isfinite().all() and losses[1] < losses[0]
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    for number, layer in enumerate(kit.layers_of(model), start=1):
        inside = {id(weight) for weight in layer.parameters()}
        assert any(name in changed for name, weight in model.named_parameters() if id(weight) in inside) == any(
            kept(number)
        )
    if family in ("mixtral", "qwen3_moe"):
        assert any("experts" in name for name in changed) and any("gate.weight" in name for name in changed)


# Layer dropout


@pytest.mark.parametrize("family", CONFIGS)
def test_a_layer_runs_for_the_samples_that_keep_it_alone(family: str) -> None:
    """Against each sample by itself, run through the layers that keep it."""
    model = in_training(family)
    seen: Counter[int] = Counter()
    layers = kit.layers_of(model)

    def mlp_of(layer: nn.Module) -> nn.Module:
        """Returns a part of a layer that all its samples pass at once."""
        return next(part for name, part in layer.named_children() if name in ("mlp", "fc1"))

    handles = [
        mlp_of(layer).register_forward_pre_hook(
            lambda module, given, index=index: seen.update({index: given[0].numel() // given[0].shape[-1]})
        )
        for index, layer in enumerate(layers)
    ]
    with layer_dropout(model, HALF, Clock(100, step=STEP), SEED), torch.no_grad():
        together = model(IDS, attention_mask=MASK, use_cache=False).logits
    for handle in handles:
        handle.remove()
    kept_by = [kept(layer) for layer in range(1, kit.NUM_LAYERS + 1)]
    assert any(any(row) and not all(row) for row in kept_by)
    assert [seen[index] for index in range(kit.NUM_LAYERS)] == [sum(row) * IDS.shape[1] for row in kept_by]
    skipped = LayeredModel(model).family.skipped
    for row in range(ROWS):
        dropped = [layer for layer, keeps in zip(layers, kept_by, strict=True) if not keeps[row]]
        for layer in dropped:
            layer.forward = lambda hidden, *arguments, **named: skipped(hidden)
        with torch.no_grad():
            alone = model(IDS[row : row + 1], attention_mask=MASK[row : row + 1], use_cache=False).logits
        for layer in dropped:
            del layer.forward
        real = MASK[row].bool()
        torch.testing.assert_close(together[row][real], alone[0][real], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_pass_on_what_they_always_do(family: str) -> None:
    """Falcon's a tuple, all others a tensor, whether a layer runs for all samples, for some or for none."""
    model = in_training(family)
    kinds: list[tuple[type, bool]] = []
    handles = [
        layer.register_forward_hook(lambda module, given, output: kinds.append((type(output), output[0].dim() == 3)))
        for layer in kit.layers_of(model)
    ]
    for settings in (DropoutSettings(), HALF, DropoutSettings(p_max=1 - 1e-12)):
        with layer_dropout(model, settings, Clock(100, step=STEP), SEED), torch.no_grad():
            model(IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    assert set(kinds) == {(tuple, True) if family == "falcon" else (torch.Tensor, False)}
    assert len(kinds) == 3 * kit.NUM_LAYERS


@pytest.mark.parametrize("family", CONFIGS)
def test_eval_mode_drops_nothing(family: str) -> None:
    model = copy.deepcopy(built(family))
    with layer_dropout(model, HALF, Clock(100, step=STEP), SEED):
        assert torch.equal(own_logits(model, IDS), own_logits(built(family), IDS))


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_are_the_same_with_gradient_checkpointing(family: str) -> None:
    assert built(family).supports_gradient_checkpointing
    gradients = []
    for checkpointing in (False, True):
        model = in_training(family)
        if checkpointing:
            model.activation_checkpointing_enable()
        clock = Clock(100, step=STEP)
        with layer_dropout(model, HALF, clock, SEED), exit_objective(model, ONE_EXIT, clock):
            model(**INPUTS).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-5)


# Packed rows

A, B = [5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23, 24]
PACKED = {
    "input_ids": torch.tensor([A + B]),
    "position_ids": torch.tensor([[*range(len(A)), *range(len(B))]]),
    "labels": torch.tensor([[*A, -100, *B[1:]]]),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_rows_are_kept_apart_where_the_family_says_so(family: str) -> None:
    """In train mode, by the exit's loss and the last layer's."""
    model = in_training(family)
    with exit_objective(model, ONE_EXIT, Clock(1)), torch.no_grad():
        packed = model(**PACKED)
        rows = [torch.tensor([row]) for row in (A, B)]
        alone = [model(input_ids=row, labels=row) for row in rows]
    gaps = []
    for name in ("exits", "last"):
        gaps.append((packed[name] - sum(each[name] for each in alone)).abs().max().item())
    if FAMILIES[family].keeps_packed_apart:
        assert max(gaps) < 1e-3
    else:
        assert min(gaps) > 1e-2


@pytest.mark.parametrize(
    ("family", "data", "message"),
    [
        ("opt", {"packing": True, "max_length": 32}, "data.packing=true: model_type='opt' .* set it to false"),
        ("opt", {"max_length": 65}, "data.max_length=65 is above the 64 positions"),
        ("gptj", {"max_length": 65}, "data.max_length=65 is above the 64 positions"),
    ],
)
def test_rows_that_a_family_cannot_read_are_refused(
    family: str, data: dict[str, Any], message: str, tmp_path: Path
) -> None:
    built(family).save_pretrained(tmp_path / "model")
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    tokenizer.add_special_tokens({"eos_token": "w1", "pad_token": "w1"})
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "w2 w3"}\n')
    recipe = {
        "model": str(tmp_path / "model"),
        "data": {"train": str(tmp_path / "rows.jsonl"), **data},
        "output_dir": str(tmp_path / "run"),
        "trainer": {"max_steps": 1, "use_cpu": True},
    }
    with pytest.raises(ValueError, match=message):
        finetune(recipe_of(recipe))
    assert not (tmp_path / "run").exists()


# What does not go with training


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: kit.build(mixtral_config(output_router_logits=True)), "output_router_logits=True .* to False"),
        (lambda: kit.build(opt_config(layerdrop=0.1)), "layerdrop=0.1 .* to 0"),
    ],
    ids=["mixtral", "opt"],
)
def test_settings_that_interfere_are_refused(model: object, message: str) -> None:
    made = model()  # type: ignore[operator]
    with pytest.raises(ValueError, match=message), layer_dropout(made, HALF, Clock(1), SEED):
        pass
    with pytest.raises(ValueError, match=message), exit_objective(made, ONE_EXIT, Clock(1)):
        pass


@pytest.mark.parametrize(
    ("family", "dropout"),
    [("gpt2", "embd_pdrop"), ("gptj", "embd_pdrop"), ("gpt_neox", "hidden_dropout"), ("opt", "dropout")],
)
def test_the_models_own_dropout_is_on_in_training_and_off_in_measuring(family: str, dropout: str) -> None:
    torch.manual_seed(0)
    model = kit.build(CONFIGS[family](**{dropout: 0.5}))
    with exit_objective(model, ONE_EXIT, Clock(1)), torch.no_grad():
        measured = [model(**INPUTS).loss for _ in range(2)]
        model.train()
        trained = [model(**INPUTS).loss for _ in range(2)]
    assert measured[0] == measured[1]
    assert trained[0] != trained[1]


@pytest.mark.parametrize("family", ["phi3", "gpt_neox", "falcon", "opt", "gptj"])
def test_adapters_find_their_places_where_projections_are_fused_or_named_otherwise(family: str) -> None:
    adapted = add_adapters(copy.deepcopy(built(family)), LoraSettings(rank=2, alpha=4)).train()
    layered = LayeredModel(adapted.base_model.model)
    with exit_objective(layered.model, ONE_EXIT, Clock(1)):
        adapted(**INPUTS).loss.backward()
    learning = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert all("lora_" in name for name in learning)
    for number in range(kit.NUM_LAYERS):
        of_this = [name for name in learning if f".{number}." in name]
        assert len(of_this) >= 4
    # At the start B is 0, so that only its gradients are not.
    assert all(weight.grad.abs().max() > 0 for name, weight in adapted.named_parameters() if "lora_B" in name)
