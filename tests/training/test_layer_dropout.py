"""Layer dropout: rates, draws, and what a dropped sample costs."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from layerskip.training.clock import Clock
from layerskip.training.dropout_rates import depth_factor, kept_samples, schedule_factor
from layerskip.training.layer_dropout import DropoutSettings, layer_dropout
from tests import kit

HALF = DropoutSettings(p_max=0.5)
SEED = 3


def test_rates_of_four_layers() -> None:
    assert [0.2 * depth_factor(layer, 4) for layer in (1, 2, 3, 4)] == pytest.approx([0, 0.052, 0.117, 0.2], abs=5e-4)


def test_mean_depth_factor_of_32_layers() -> None:
    assert sum(depth_factor(layer, 32) for layer in range(1, 33)) / 32 == pytest.approx(0.4445, abs=5e-5)


def test_schedules() -> None:
    assert schedule_factor("constant", 5, 10) == 1.0
    assert [schedule_factor("exponential", step, 11) for step in (0, 5, 10)] == pytest.approx([0, 2**0.5 - 1, 1])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_samples_are_dropped_at_the_rate(rate: float) -> None:
    kept = kept_samples(rate, 20_000, seed=0, step=1, micro_step=0, layer=2)
    assert 1 - kept.double().mean().item() == pytest.approx(rate, abs=0.02)


def test_draws_follow_from_their_arguments_alone() -> None:
    here = {"seed": 1, "step": 2, "micro_step": 3, "layer": 4}
    state = torch.get_rng_state()
    drawn = kept_samples(0.5, 64, **here)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(kept_samples(0.5, 64, **here), drawn)
    for name in here:
        assert not torch.equal(kept_samples(0.5, 64, **{**here, name: 9}), drawn)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"p_max": 1.0}, "p_max=1.0"), ({"p_max": -0.1}, "p_max=-0.1"), ({"schedule": "linear"}, "schedule='linear'")],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        DropoutSettings(**settings)  # type: ignore[arg-type]


def drops(settings: DropoutSettings, clock: Clock, samples: int) -> list[list[bool]]:
    """Returns for each layer which samples are kept."""
    rates = [settings.p_max * depth_factor(layer, kit.NUM_LAYERS) for layer in range(1, kit.NUM_LAYERS + 1)]
    here = {"seed": SEED, "step": clock.step, "micro_step": clock.micro_step}
    return [kept_samples(rate, samples, layer=layer, **here).tolist() for layer, rate in enumerate(rates, start=1)]


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_each_sample_passes_the_layers_that_keep_it_and_no_other(family: str) -> None:
    """Against the model cut to the kept layers, sample by sample, with padding, so that masks are sliced along."""
    model = kit.build(kit.CONFIGS[family](), attn_implementation="eager").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = torch.randint(1, kit.VOCAB, (6, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[4, :5] = 0
    clock = Clock(100, step=7)
    with layer_dropout(model, HALF, clock, SEED):
        mixed = model(ids, attention_mask=mask, use_cache=False).logits
    kept = drops(HALF, clock, 6)
    assert any(not all(layer) and any(layer) for layer in kept)
    layers = kit.layers_of(model)
    for sample in range(6):
        skipped = [layer for layer, keeps in zip(layers, kept, strict=True) if not keeps[sample]]
        for layer in skipped:
            layer.forward = lambda hidden, *arguments, **named: hidden
        alone = model(ids[sample : sample + 1], attention_mask=mask[sample : sample + 1], use_cache=False).logits
        for layer in skipped:
            del layer.forward
        seen = mask[sample].bool()
        torch.testing.assert_close(mixed[sample][seen], alone[0][seen], atol=2e-5, rtol=1e-4)


def test_dropped_samples_cost_nothing() -> None:
    model = kit.l4().train()
    ids = torch.randint(1, kit.VOCAB, (8, 5))
    clock = Clock(100)
    passed = [0] * kit.NUM_LAYERS

    def count(index: int) -> object:
        def hook(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            passed[index] += arguments[0].shape[0]

        return hook

    handles = [layer.mlp.register_forward_hook(count(index)) for index, layer in enumerate(kit.layers_of(model))]
    expected = [0] * kit.NUM_LAYERS
    with layer_dropout(model, HALF, clock, SEED):
        for clock.step in range(10):
            model(ids, use_cache=False)
            for index, keeps in enumerate(drops(HALF, clock, 8)):
                expected[index] += sum(keeps)
    for handle in handles:
        handle.remove()
    assert passed == expected
    assert passed[0] == 8 * 10
    assert 0.35 * 8 * 10 < passed[3] < 0.65 * 8 * 10


def test_a_layer_dropped_for_all_passes_its_input_on() -> None:
    model = kit.l4().train()
    with layer_dropout(model, DropoutSettings(p_max=1 - 1e-12), Clock(100), SEED):
        states = model(kit.prompt_tensor(), output_hidden_states=True, use_cache=False).hidden_states
    assert torch.equal(model.model.norm(states[3]), states[4])


def test_eval_mode_drops_nothing() -> None:
    model = kit.l4()
    plain = model(kit.prompt_tensor()).logits
    with layer_dropout(model, HALF, Clock(100), SEED):
        for _ in range(3):
            assert torch.equal(model(kit.prompt_tensor()).logits, plain)


def keys_and_methods(model: PreTrainedModel) -> tuple[list[str], list[bool]]:
    """Returns what a wrapper could leave behind."""
    return list(model.state_dict()), ["forward" in vars(layer) for layer in kit.layers_of(model)]


def test_wrappers_leave_keys_alone_and_come_off_cleanly() -> None:
    model = kit.l4().train()
    before = keys_and_methods(model)
    with layer_dropout(model, HALF, Clock(100), SEED):
        assert list(model.state_dict()) == before[0]
    assert keys_and_methods(model) == before
    with pytest.raises(RuntimeError, match="stop"), layer_dropout(model, HALF, Clock(100), SEED):
        raise RuntimeError("stop")
    assert keys_and_methods(model) == before


def test_a_forward_that_a_layer_had_of_its_own_comes_back() -> None:
    model = kit.l4().train()
    layer = kit.layers_of(model)[3]
    plain, calls = layer.forward, [0]

    def own(*arguments: object, **named: object) -> object:
        calls[0] += 1
        return plain(*arguments, **named)

    layer.forward = own
    with layer_dropout(model, DropoutSettings(), Clock(100), SEED):
        model(kit.prompt_tensor(), use_cache=False)
    assert layer.forward is own
    assert calls == [1]


def test_gradients_are_the_same_with_gradient_checkpointing() -> None:
    ids = torch.randint(1, kit.VOCAB, (6, 9), generator=torch.Generator().manual_seed(1))
    gradients = []
    for checkpointing in (False, True):
        model = kit.l4().train()
        if checkpointing:
            model.activation_checkpointing_enable()
        with layer_dropout(model, HALF, Clock(100, step=7), SEED):
            model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert sum(gradient is not None for gradient in gradients[0].values()) > 20
    for name, gradient in gradients[0].items():
        if gradient is None:  # of a layer that was dropped for all samples
            assert gradients[1][name] is None
            continue
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("layer", range(1, 5))
def test_a_rate_of_one_half_skips_every_layer_about_every_other_step(layer: int) -> None:
    kept = [bool(kept_samples(0.5, 1, seed=SEED, step=step, micro_step=0, layer=layer)) for step in range(200)]
    assert 60 <= kept.count(False) <= 140
