"""The chunked exit loss against a naive one that makes all logits at once."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from layerskip.model.layered import LayeredModel
from layerskip.training.exit_loss import LOSSES, chunked_exit_losses
from tests import kit

EXITS = (1, 3)


def states_of(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Returns the outputs of the exit layers and of the last layer, before the final norm, with gradients."""
    taken: list[torch.Tensor] = []
    layers = kit.layers_of(model)
    wanted = [layers[exit_layer - 1] for exit_layer in (*EXITS, kit.NUM_LAYERS)]
    handles = [layer.register_forward_hook(lambda module, inputs, output: taken.append(output)) for layer in wanted]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return taken


def naive(model: PreTrainedModel, states: list[torch.Tensor], labels: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Returns the summed loss of each exit and of the last layer, from logits for the whole batch."""
    layered = LayeredModel(model)
    logits = [layered.logits(state)[:, :-1].flatten(0, 1) for state in states]
    targets = labels[:, 1:].flatten()
    kept = targets != -100
    final = torch.nn.functional.cross_entropy(logits[-1][kept], targets[kept], reduction="sum")
    p = logits[-1][kept].softmax(-1).detach()
    sums = []
    for exit_logits in logits[:-1]:
        q = exit_logits[kept].softmax(-1)
        if name == "cross_entropy":
            sums.append(torch.nn.functional.cross_entropy(exit_logits[kept], targets[kept], reduction="sum"))
        elif name == "self_distillation":
            sums.append((p * (p.log() - q.log())).sum())
        else:
            sums.append(-torch.minimum(p, q).sum(-1).log().sum())
    return [*sums, final]


def example() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of three rows, of which different parts count."""
    ids = torch.randint(1, kit.VOCAB, (3, 11), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :4] = labels[1, 7:] = -100
    return ids, labels


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_losses_and_gradients_equal_the_naive_ones(family: str, name: str, chunk_tokens: int) -> None:
    ids, labels = example()
    results = []
    for chunked in (True, False):
        model = kit.build(kit.CONFIGS[family](tie_word_embeddings=True))
        *exits, last = states_of(model, ids)
        if chunked:
            sums, final, count = chunked_exit_losses(
                LayeredModel(model), exits, last, labels, LOSSES[name], chunk_tokens
            )
            assert count == int((labels[:, 1:] != -100).sum())
            losses = [*sums, final]
        else:
            losses = naive(model, [*exits, last], labels, name)
        torch.stack(losses).mean().backward()
        results.append((losses, {key: parameter.grad for key, parameter in model.named_parameters()}))
    for ours, theirs in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for key, gradient in results[1][1].items():
        assert gradient is not None
        torch.testing.assert_close(results[0][1][key], gradient, atol=1e-5, rtol=1e-4)


def test_the_last_layers_loss_is_the_models_own() -> None:
    ids, labels = example()
    model = kit.l4()
    *exits, last = states_of(model, ids)
    _, final, count = chunked_exit_losses(LayeredModel(model), exits, last, labels, LOSSES["cross_entropy"], 4)
    torch.testing.assert_close(final / count, model(ids, labels=labels, use_cache=False).loss, atol=1e-6, rtol=0)


def test_without_labels_that_count_losses_and_gradients_are_zero() -> None:
    ids, labels = example()
    model = kit.l4()
    *exits, last = states_of(model, ids)
    sums, final, count = chunked_exit_losses(
        LayeredModel(model), exits, last, torch.full_like(labels, -100), LOSSES["cross_entropy"], 4
    )
    (sums.sum() + final).backward()
    assert (count, final.item(), sums.tolist()) == (0, 0.0, [0.0, 0.0])
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_an_exit_is_taught_by_the_last_layer_and_not_the_other_way() -> None:
    """Self-distillation of an exit moves nothing above it."""
    ids, labels = example()
    model = kit.l4()
    *exits, last = states_of(model, ids)
    sums, _, _ = chunked_exit_losses(LayeredModel(model), exits, last, labels, LOSSES["self_distillation"], 4)
    sums[0].backward()
    layers = kit.layers_of(model)
    assert layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    for layer in layers[1:]:
        gradient = layer.mlp.up_proj.weight.grad
        assert gradient is None or not gradient.any()
