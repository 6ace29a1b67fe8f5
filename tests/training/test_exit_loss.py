"""The chunked exit loss against a naive one that makes all logits at once."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from layerskip.model.layered import LayeredModel
from layerskip.training.exit_loss import LOSSES, Teacher, TokenLosses, chunked_token_losses
from tests import kit

EXITS = (1, 3)


def states_of(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Returns the outputs of the exit layers and of the last layer for all tokens but the last, `(tokens, hidden)`."""
    taken: list[torch.Tensor] = []
    layers = kit.layers_of(model)
    wanted = [layers[exit_layer - 1] for exit_layer in (*EXITS, kit.NUM_LAYERS)]
    handles = [layer.register_forward_hook(lambda module, inputs, output: taken.append(output)) for layer in wanted]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return [state[:, :-1].flatten(0, 1) for state in taken]


def naive(model: PreTrainedModel, states: list[torch.Tensor], labels: torch.Tensor, name: str) -> torch.Tensor:
    """Returns each exit's loss and the last layer's for each token, from logits for the whole batch."""
    layered = LayeredModel(model)
    logits = [layered.logits(state) for state in states]
    p = logits[-1].softmax(-1).detach()
    rows = []
    for exit_logits in logits[:-1]:
        q = exit_logits.softmax(-1)
        if name == "cross_entropy":
            rows.append(-q.log()[torch.arange(len(labels)), labels])
        elif name == "self_distillation":
            rows.append((p * (p.log() - q.log())).sum(-1))
        else:
            rows.append(-torch.minimum(p, q).sum(-1).log())
    rows.append(-logits[-1].softmax(-1).log()[torch.arange(len(labels)), labels])
    return torch.stack(rows)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of three rows, and the token after each but the last."""
    ids = torch.randint(1, kit.VOCAB, (3, 11), generator=torch.Generator().manual_seed(2))
    return ids, ids[:, 1:].flatten()


def losses(model: PreTrainedModel, states: list[torch.Tensor], labels: torch.Tensor, name: str) -> TokenLosses:
    *exits, last = states
    return chunked_token_losses(LayeredModel(model).logits, exits, last, labels, LOSSES[name], logit_rows=12)


@pytest.mark.parametrize(("family", "logit_rows"), [("llama", 1), ("llama", 12), ("gemma2", 12), ("llama", 10_000)])
@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_and_gradients_equal_the_naive_ones(family: str, name: str, logit_rows: int) -> None:
    ids, labels = example()
    results = []
    for chunked in (True, False):
        model = kit.build(kit.CONFIGS[family](tie_word_embeddings=True))
        *exits, last = states_of(model, ids)
        if chunked:
            found = chunked_token_losses(
                LayeredModel(model).logits, exits, last, labels, LOSSES[name], logit_rows=logit_rows
            )
            per_token = torch.cat([found.exits, found.last[None]])
        else:
            per_token = naive(model, [*exits, last], labels, name)
        per_token.mean().backward()
        results.append((per_token, {key: parameter.grad for key, parameter in model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    for key, gradient in results[1][1].items():
        assert gradient is not None
        torch.testing.assert_close(results[0][1][key], gradient, atol=1e-5, rtol=1e-4)


def test_agreement_is_the_first_choice_of_both() -> None:
    ids, labels = example()
    model = kit.mixed()
    states = states_of(model, ids)
    first = [LayeredModel(model).logits(state).argmax(-1) for state in states]
    expected = torch.stack([choice == first[-1] for choice in first[:-1]])
    assert torch.equal(losses(model, states, labels, "cross_entropy").agreements, expected)
    assert 0 < expected[1].float().mean() < 1


def test_an_exit_is_taught_by_the_last_layer_and_not_the_other_way() -> None:
    """Self-distillation of an exit moves nothing above it."""
    ids, labels = example()
    model = kit.l4()
    losses(model, states_of(model, ids), labels, "self_distillation").exits[0].sum().backward()
    layers = kit.layers_of(model)
    assert layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    for layer in layers[1:]:
        gradient = layer.mlp.up_proj.weight.grad
        assert gradient is None or not gradient.any()


def test_a_given_target_teaches_instead_of_the_last_layer() -> None:
    ids, labels = example()
    model, other = kit.l4(), kit.l4(seed=1)
    *exits, last = states_of(model, ids)
    target = states_of(other, ids)[-1]
    teacher = Teacher(target, LayeredModel(other).logits)
    found = chunked_token_losses(
        LayeredModel(model).logits, exits, last, labels, LOSSES["self_distillation"], logit_rows=12, target=teacher
    )
    p = LayeredModel(other).logits(target).softmax(-1)
    q = LayeredModel(model).logits(exits[0]).softmax(-1)
    torch.testing.assert_close(found.exits[0], (p * (p.log() - q.log())).sum(-1), atol=1e-5, rtol=1e-5)


def test_the_guard_holds_the_last_layer_to_the_original() -> None:
    ids, labels = example()
    model, other = kit.l4(), kit.l4(seed=1)
    *exits, last = states_of(model, ids)
    original = Teacher(states_of(other, ids)[-1], LayeredModel(other).logits)
    found = chunked_token_losses(
        LayeredModel(model).logits, exits, last, labels, LOSSES["cross_entropy"], logit_rows=12, original=original
    )
    p = LayeredModel(other).logits(original.states).softmax(-1)
    q = LayeredModel(model).logits(last).softmax(-1)
    torch.testing.assert_close(found.guard, (p * (p.log() - q.log())).sum(-1), atol=1e-5, rtol=1e-5)
    found.guard.sum().backward()
    assert kit.layers_of(model)[3].mlp.up_proj.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in other.parameters())


def test_no_exit_holds_logits_for_all_tokens() -> None:
    """The head sees at most `logit_rows` rows at a time, of all layers together, forward and backward."""
    ids, labels = example()
    model = kit.l4()
    states = states_of(model, ids)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[0]))
    losses(model, states, labels, "cross_entropy").exits.sum().backward()
    # Twice, but for the last chunk.
    assert sum(rows) == 3 * (2 * len(labels) - len(labels) % 4)
    assert set(rows) == {12, 3 * (len(labels) % 4)}


class LogitBytes(TorchDispatchMode):
    """Follows the bytes of all living tensors that are as wide as the vocabulary, forward and backward."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.vocabulary, self.hidden = vocabulary, hidden
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        output = function(*arguments, **(named or {}))
        for tensor in output if isinstance(output, tuple) else (output,):
            # Those of `hidden` rows are the head's weight, turned.
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocabulary,):
                if tensor._is_view() or tensor.shape[0] == self.hidden:
                    continue
                self.now += tensor.nbytes
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor, self._free, tensor.nbytes)
        return output

    def _free(self, size: int) -> None:
        self.now -= size


def test_peak_memory_is_that_of_a_chunk() -> None:
    """Three exits and the last layer over 512 tokens of a large vocabulary, against logits for all of them."""
    vocabulary, hidden, logit_rows = 2_000, 32, 64
    model = kit.l4(vocab_size=vocabulary)
    labels = torch.randint(0, vocabulary, (511,))
    states = [torch.randn(511, hidden, requires_grad=True) for _ in range(4)]
    peaks = []
    for rows in (logit_rows, 4 * 512):
        with LogitBytes(vocabulary, hidden) as counted:
            found = chunked_token_losses(
                LayeredModel(model).logits, states[:3], states[3], labels, LOSSES["cross_entropy"], logit_rows=rows
            )
            (found.exits.sum() + found.last.sum()).backward()
        peaks.append(counted.peak)
    # Logits, their softmax and their gradient are three tensors of a chunk's size.
    assert peaks[0] < 4 * logit_rows * vocabulary * 4
    assert peaks[1] > 3 * 511 * vocabulary * 4
