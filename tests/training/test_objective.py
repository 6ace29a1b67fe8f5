"""The loss that a model's own forward returns while the recipe is installed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip.model.layered import LayeredModel
from layerskip.training.clock import Clock
from layerskip.training.exit_settings import ExitSettings
from layerskip.training.layer_dropout import DropoutSettings, layer_dropout
from layerskip.training.objective import ExitOutput, exit_objective
from layerskip.training.originals import FrozenCopy
from tests import kit

EQUAL = ExitSettings(exit_layers=(1, 3), weights="equal")


def batch(rows: int = 3, tokens: int = 11) -> dict[str, torch.Tensor]:
    """Rows of which different parts count, the first with padding on the right."""
    ids = torch.randint(1, kit.VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(2))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, 8:], mask[0, 8:] = -100, 0
    labels[1:, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def in_training(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A model in train mode without dropout of its own."""
    model = kit.build(kit.CONFIGS[family](**changes)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def naive(model: PreTrainedModel, inputs: dict[str, torch.Tensor], weights: dict[int, float]) -> torch.Tensor:
    """The weighted sum of mean cross entropies, from transformers' own hidden states and whole logits."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    outputs = model(**given, output_hidden_states=True, use_cache=False)
    total = torch.zeros(())
    for layer, weight in weights.items():
        last = layer == kit.NUM_LAYERS
        logits = outputs.logits if last else LayeredModel(model).logits(outputs.hidden_states[layer])
        pairs = logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        total = total + weight * torch.nn.functional.cross_entropy(*pairs, ignore_index=-100)
    return total


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_loss_and_gradients_equal_a_naive_reference(family: str) -> None:
    inputs = batch()
    ours, theirs = in_training(family), in_training(family)
    with exit_objective(ours, EQUAL, Clock(1)):
        loss = ours(**inputs).loss
        loss.backward()
    reference = naive(theirs, inputs, {1: 1 / 3, 3: 1 / 3, 4: 1 / 3})
    reference.backward()
    torch.testing.assert_close(loss, reference, atol=1e-5, rtol=1e-5)
    expected = gradients(theirs)
    assert set(gradients(ours)) == set(expected)
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("settings", [ExitSettings((2, 3), weights={2: 0, 3: 0}), ExitSettings(())])
def test_without_weights_the_loss_is_the_models_own(settings: ExitSettings) -> None:
    inputs = batch()
    model = in_training()
    plain = model(**inputs, use_cache=False).loss
    with exit_objective(model, settings, Clock(1)):
        torch.testing.assert_close(model(**inputs).loss, plain, atol=1e-6, rtol=0)


def test_the_last_layer_learns_and_an_exit_is_what_its_own_layer_gave() -> None:
    """Gradients of exit 1's loss reach layer 1 and none above; the last layer's reach all."""
    inputs = batch()
    model = in_training()
    only = ExitSettings(exit_layers=(1,), weights={1: 1e9})
    with exit_objective(model, only, Clock(1)):
        model(**inputs).loss.backward()
    sizes = [layer.mlp.up_proj.weight.grad.norm().item() for layer in kit.layers_of(model)]
    assert all(size > 0 for size in sizes)
    assert sizes[0] > 1e3 * max(sizes[1:])


def test_accumulated_micro_batches_of_unequal_label_counts_equal_one_batch() -> None:
    inputs = batch(rows=8)
    inputs["labels"][2, 5:] = -100
    number = int((inputs["labels"][:, 1:] != -100).sum())
    whole, parts = in_training(), in_training()
    with exit_objective(whole, EQUAL, Clock(1)):
        whole(**inputs, num_items_in_batch=torch.tensor(number)).loss.backward()
    with exit_objective(parts, EQUAL, Clock(1)):
        for begin in range(0, 8, 2):
            part = {name: value[begin : begin + 2] for name, value in inputs.items()}
            parts(**part, num_items_in_batch=torch.tensor(number)).loss.backward()
    expected = gradients(whole)
    for name, gradient in gradients(parts).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)


def test_a_batch_in_which_nothing_counts_gives_zero_and_every_gradient() -> None:
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    model = in_training()
    with exit_objective(model, EQUAL, Clock(1)):
        output = model(**inputs, num_items_in_batch=torch.tensor(5))
        output.loss.backward()
    assert output.loss.item() == 0.0
    assert output.tokens.tolist() == [0, 0, 0] and not output.exits.any() and not output.agreements.any()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_sums_are_kept_row_by_row() -> None:
    inputs = batch()
    model = kit.mixed().eval()
    with exit_objective(model, EQUAL, Clock(1)), torch.no_grad():
        together: ExitOutput = model(**inputs)
        for row in range(3):
            alone = model(**{name: value[row : row + 1] for name, value in inputs.items()})
            for name in ("tokens", "last", "exits", "agreements"):
                torch.testing.assert_close(together[name][row], alone[name][0], atol=1e-4, rtol=1e-5)
    assert together.tokens.tolist() == [7, 7, 7]
    assert 0 < together.agreements.sum() < together.tokens.sum() * 2


def test_in_eval_mode_every_exit_is_measured_by_cross_entropy_and_no_logits_are_returned() -> None:
    inputs = batch()
    model = kit.l4()
    settings = ExitSettings((1, 2, 3), "rotational", rotation=3, weights="equal", loss="acceptance")
    with exit_objective(model, settings, Clock(1)), torch.no_grad():
        output = model(**inputs)
    assert set(output.keys()) == {"loss", "tokens", "last", "exits", "agreements"}
    assert output.exits.shape == (3, 3)
    torch.testing.assert_close(output.loss, model(**inputs).loss, atol=1e-6, rtol=0)
    for column, layer in enumerate((1, 2, 3)):
        mean = output.exits[:, column].sum() / output.tokens.sum()
        torch.testing.assert_close(mean, naive(model, inputs, {layer: 1.0}), atol=1e-5, rtol=1e-5)


def test_only_the_exits_of_the_step_are_on() -> None:
    inputs = batch()
    model = in_training()
    clock = Clock(10)
    heads: list[int] = []
    model.lm_head.register_forward_hook(lambda module, arguments, output: heads.append(len(output)))
    settings = ExitSettings((1, 2, 3), "rotational", rotation=3, weights="equal")
    tokens = int((inputs["labels"][:, 1:] != -100).sum())
    with exit_objective(model, settings, clock), torch.no_grad():
        for clock.step in range(3):
            heads.clear()
            loss = model(**inputs).loss
            assert sum(heads) == 2 * tokens
            expected = naive(model, inputs, {clock.step + 1: 0.5, 4: 0.5})
            torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss", ["self_distillation", "acceptance"])
def test_exits_learn_from_the_last_layer_without_dropout(loss: str) -> None:
    """With layers dropped, the target is still what the whole model says."""
    inputs = batch()
    model = in_training()
    settings = ExitSettings(exit_layers=(1,), weights={1: 1.0}, loss=loss)
    dropout, clock = DropoutSettings(p_max=0.6), Clock(10, step=4)
    with ExitStack() as stack:
        stack.enter_context(layer_dropout(model, dropout, clock, seed=3))
        stack.enter_context(exit_objective(model, settings, clock))
        output = model(**inputs)
        states = model(inputs["input_ids"], attention_mask=inputs["attention_mask"], output_hidden_states=True)
    model.eval()
    counts = inputs["labels"][:, 1:] != -100
    p = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1][counts].softmax(-1)
    q = LayeredModel(model).logits(states.hidden_states[1])[:, :-1][counts].softmax(-1)
    expected = -torch.minimum(p, q).sum(-1).log() if loss == "acceptance" else (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(output.exits.sum(), expected.sum(), atol=1e-4, rtol=1e-5)
    assert model.training is False


def test_a_target_pass_of_its_own_changes_nothing_without_dropout() -> None:
    inputs = batch()
    settings = ExitSettings(exit_layers=(1, 3), weights="equal", loss="self_distillation")
    found = []
    for own_target_pass in (False, True):
        model = in_training()
        with exit_objective(model, settings, Clock(1), own_target_pass=own_target_pass):
            model(**inputs).loss.backward()
        assert model.training
        found.append(gradients(model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], atol=1e-6, rtol=1e-5)


def test_the_guard_pulls_the_last_layer_to_the_model_that_training_began_with() -> None:
    inputs = batch()
    model = in_training()
    original = FrozenCopy(model)
    settings = ExitSettings((), guard_weight=2.0)
    with exit_objective(model, settings, Clock(1), original=original):
        unchanged = model(**inputs).loss
        with torch.no_grad():
            kit.layers_of(model)[3].mlp.down_proj.weight.mul_(50.0)
        changed = model(**inputs).loss
    torch.testing.assert_close(unchanged, naive(kit.l4(), inputs, {4: 1.0}), atol=1e-5, rtol=1e-5)
    counts = inputs["labels"][:, 1:] != -100
    given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    p = kit.l4()(**given).logits[:, :-1][counts].softmax(-1)
    q = model(**given).logits[:, :-1][counts].softmax(-1)
    guard = (p * (p / q).log()).sum(-1).mean()
    assert guard > 0.01
    torch.testing.assert_close(changed, naive(model, inputs, {4: 1.0}) + 2.0 * guard, atol=1e-5, rtol=1e-5)


class Counted(FrozenCopy):
    """An original that counts its passes."""

    passes = 0

    def state(self, inputs: Any) -> torch.Tensor:
        self.passes += 1
        return super().state(inputs)


def test_the_guard_holds_to_what_the_batch_says_only() -> None:
    """Its part of the loss is a sum over tokens, so that those of two halves make that of the whole."""
    inputs = batch()
    model = in_training()
    original = Counted(model)
    halves = torch.rand(inputs["input_ids"].shape, generator=torch.Generator().manual_seed(0)) < 0.5
    with torch.no_grad():
        kit.layers_of(model)[3].mlp.down_proj.weight.mul_(50.0)

    def loss(**guard: torch.Tensor) -> torch.Tensor:
        with exit_objective(model, ExitSettings((), guard_weight=2.0), Clock(1), original=original):
            return model(**inputs, **guard).loss.detach()

    whole, nothing = loss(), loss(guard=torch.zeros_like(halves))
    assert original.passes == 1
    one, other = loss(guard=halves), loss(guard=~halves)
    torch.testing.assert_close(nothing, naive(model, inputs, {4: 1.0}).detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one + other - nothing, whole, atol=1e-5, rtol=1e-5)
    assert min(one, other) > nothing + 0.01


def test_a_guard_without_an_original_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"guard_weight=1.0 needs the original"),
        exit_objective(kit.l4(), ExitSettings(guard_weight=1.0), Clock(1)),
    ):
        pass


def test_a_layer_skipped_for_all_keeps_every_exit_in_its_place() -> None:
    """Exit 3 is layer 3's output, whatever was skipped before it; a skipped layer hands its input on."""
    inputs = batch()
    model = in_training()
    skipped = kit.layers_of(model)[1]
    plain = skipped.forward
    skipped.forward = lambda hidden, *arguments, **named: hidden
    settings = ExitSettings((1, 2, 3), weights={1: 1.0, 2: 1.0, 3: 1.0})
    with exit_objective(model, settings, Clock(1)), torch.no_grad():
        output = model(**inputs)
        expected = naive(model, inputs, {3: 1.0})
    skipped.forward = plain
    sums = output.exits.sum(0) / output.tokens.sum()
    torch.testing.assert_close(sums[0], sums[1], atol=0, rtol=0)
    torch.testing.assert_close(sums[2], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_checkpointing_changes_no_gradient(family: str, reentrant: bool) -> None:
    inputs = batch(rows=6)
    found = []
    for checkpointing in (False, True):
        model = in_training(family)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        clock = Clock(10, step=7)
        with layer_dropout(model, DropoutSettings(p_max=0.5), clock, 3), exit_objective(model, EQUAL, clock):
            model(**inputs).loss.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys() and len(found[0]) > 20
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-5)


def test_compiled_models_give_the_same_loss_and_draw_anew_each_step() -> None:
    inputs = batch(rows=6)
    losses = []
    for compiled in (False, True):
        model, clock = in_training(), Clock(10)
        with layer_dropout(model, DropoutSettings(p_max=0.5), clock, 3), exit_objective(model, EQUAL, clock):
            call = torch.compile(model, backend="aot_eager") if compiled else model
            losses.append([])
            for clock.step in range(4):
                losses[-1].append(call(**inputs).loss.item())
        torch.compiler.reset()
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert len({round(loss, 4) for loss in losses[1]}) == 4


def test_a_call_without_labels_is_the_models_own_and_everything_comes_off() -> None:
    model = kit.l4()
    ids = kit.prompt_tensor()
    plain, keys = model(ids).logits, list(model.state_dict())
    hooks = [len(layer._forward_hooks) for layer in kit.layers_of(model)]
    with exit_objective(model, EQUAL, Clock(1)):
        assert torch.equal(model(ids).logits, plain)
        assert list(model.state_dict()) == keys
        assert torch.equal(kit.reference(model, ids), kit.reference(kit.l4(), ids))
    with pytest.raises(RuntimeError, match="stop"), exit_objective(model, EQUAL, Clock(1)):
        raise RuntimeError("stop")
    assert "forward" not in vars(model)
    assert [len(layer._forward_hooks) for layer in kit.layers_of(model)] == hooks
    assert model(ids, labels=ids).logits is not None


def test_labels_that_leave_nothing_to_predict_are_refused() -> None:
    model = kit.l4()
    with exit_objective(model, EQUAL, Clock(1)), pytest.raises(ValueError, match=r"labels of shape \(1, 1\)"):
        model(torch.tensor([[3]]), labels=torch.tensor([[3]]))
