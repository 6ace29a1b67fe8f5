"""The recipe's loss, computed inside the forward pass of the causal LM itself (arXiv 2404.16710, 3.2)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import ModelOutput

from layerskip.model.layered import LayeredModel
from layerskip.model.peft_models import causal_lm_beneath
from layerskip.training.clock import Clock
from layerskip.training.exit_loss import IGNORED, LOSSES, Teacher, chunked_token_losses, cross_entropy
from layerskip.training.exit_settings import ExitSettings
from layerskip.training.exit_states import ExitStates, final_state
from layerskip.training.originals import Original, evaluation
from layerskip.training.trainable import check_trainable

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass
class ExitOutput(ModelOutput):
    """What the model returns for a call with labels; there are no logits in it.

    Attributes:
        loss: the loss to train on, a scalar; in eval mode the last layer's mean cross entropy.
        tokens: how many tokens count in each row, `(batch,)`.
        last: the last layer's summed cross entropy in each row, `(batch,)`.
        exits: each exit's summed loss in each row, `(batch, exits)`: cross entropy in eval mode.
        agreements: for how many tokens each exit's first choice is the last layer's, `(batch, exits)`.
    """

    loss: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    last: torch.Tensor | None = None
    exits: torch.Tensor | None = None
    agreements: torch.Tensor | None = None


@contextmanager
def exit_objective(
    model: PreTrainedModel | PeftModel,
    settings: ExitSettings,
    clock: Clock,
    *,
    original: Original | None = None,
    own_target_pass: bool = True,
) -> Iterator[None]:
    """Makes `model(…, labels=labels)` return the recipe's loss as an `ExitOutput` while the block runs.

    The loss is

        Σ_E ẽ(t, E) · loss_E + ẽ(t, L) · CE_L + guard_weight · KL(original ‖ L),

    each summed over the tokens that count and divided by `num_items_in_batch` where that is passed along, as Trainer
    does for a whole accumulation window, else by their number. In train mode the exits that are on at the clock's step
    take part; in eval mode all of `settings` are measured and layer dropout is off. Where `guard`, bool `(batch,
    tokens)`, is passed along, the guard's term takes its tokens only, and on a single process a batch without
    any is spared the pass of the original. A call without labels is the model's own.

    The `forward` of the causal LM is replaced, so that norm and head run inside the call that DDP and FSDP watch;
    it is put back at the end.

    Args:
        model: any supported causal LM, or a PEFT model around one.
        settings: exits, weights, loss.
        clock: where training stands.
        original: the model that training began with; needed where `settings.guard_weight` is above 0.
        own_target_pass: exits that learn from the last layer learn from it as it is in eval mode, in a pass of its own.
            False takes the one pass there is, which is the same where nothing is dropped.

    Raises:
        ValueError: settings that do not fit the model, a setting of the model that does not go with the loss (see
            `check_trainable`), or a guard without an original.
    """
    model = causal_lm_beneath(model)
    layered = LayeredModel(model)
    check_trainable(layered)
    settings.layers(layered.num_layers)
    if settings.guard_weight > 0 and original is None:
        raise ValueError(f"guard_weight={settings.guard_weight} needs the original model to hold the last layer to.")
    objective = _Objective(layered, settings, clock, original if settings.guard_weight > 0 else None, own_target_pass)
    own, plain = vars(model).get("forward"), model.forward

    @functools.wraps(plain)
    def forward(input_ids: torch.Tensor | None = None, *arguments: Any, **inputs: Any) -> Any:
        if inputs.get("labels") is None:
            return plain(input_ids, *arguments, **inputs)
        if arguments or input_ids is None:
            raise TypeError("a call with labels takes token ids, and everything after them by name.")
        return objective({"input_ids": input_ids, **inputs})

    # A wrapper, not a method, so that what compiles is the decoder inside.
    model.forward = torch.compiler.disable(forward, recursive=False)
    try:
        with objective.states.installed():
            yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


class _Objective:
    """The loss of one model: runs its decoder, then norm and head over chunks of what the chosen layers gave."""

    def __init__(
        self,
        layered: LayeredModel,
        settings: ExitSettings,
        clock: Clock,
        original: Original | None,
        own_target_pass: bool,
    ) -> None:
        self.states = ExitStates(layered)
        self._layered = layered
        self._settings = settings
        self._clock = clock
        self._original = original
        self._own_target_pass = own_target_pass

    def __call__(self, inputs: Mapping[str, Any]) -> ExitOutput:
        """Returns losses and agreements of one batch."""
        training = self._layered.model.training
        num_layers = self._layered.num_layers
        if training:
            weights = self._settings.weights_at(self._clock, num_layers)
            loss = LOSSES[self._settings.loss]
        else:
            weights = {**dict.fromkeys(self._settings.layers(num_layers), 0.0), num_layers: 1.0}
            loss = cross_entropy
        exits = [layer for layer in weights if layer != num_layers]

        labels = inputs["labels"][:, 1:]
        if labels.numel() == 0:
            raise ValueError(f"labels of shape {tuple(inputs['labels'].shape)} leave no token to predict.")
        counts = labels != IGNORED
        tokens = counts.sum(dim=1)
        rows, places = counts.nonzero(as_tuple=True)
        # With nothing to learn one token is taken and weighs nothing, so that every parameter still has its gradient.
        empty = rows.numel() == 0
        if empty:
            rows, places, labels = rows.new_zeros(1), places.new_zeros(1), labels.clamp_min(0)

        def taken(states: torch.Tensor) -> torch.Tensor:
            return states[rows, places]

        target = original = None
        held = inputs["guard"][:, 1:][rows, places] if "guard" in inputs else torch.ones_like(rows, dtype=torch.bool)
        if training and loss is not cross_entropy and exits and self._own_target_pass:
            with evaluation(self._layered.model):
                target = Teacher(taken(final_state(self._layered, inputs)), self._layered.logits)
        # Among several ranks each takes part, since weights may be sharded.
        needed = torch.distributed.is_initialized() or bool(held.any())
        if training and self._original is not None and needed:
            original = Teacher(taken(self._original.state(inputs)), self._original.logits)
        states = self.states.run((*exits, num_layers), inputs)
        # Of each layer only the tokens that count are kept while the losses are made.
        *of_exits, last = [taken(states.pop(layer)) for layer in (*exits, num_layers)]
        losses = chunked_token_losses(
            self._layered.logits,
            of_exits,
            last,
            labels[rows, places],
            loss,
            logit_rows=self._settings.logit_rows,
            target=target,
            original=original,
        )

        weighted = weights[num_layers] * losses.last.sum() + self._settings.guard_weight * losses.guard[held].sum()
        if training:
            for row, layer in zip(losses.exits, exits, strict=True):
                weighted = weighted + weights[layer] * row.sum()
        number = inputs.get("num_items_in_batch")
        divisor = tokens.sum() if number is None else torch.as_tensor(number, device=weighted.device)

        def by_row(values: torch.Tensor) -> torch.Tensor:
            whole = values.new_zeros(*values.shape[:-1], len(tokens), dtype=torch.float32)
            return whole.index_add(-1, rows, 0.0 * values.float() if empty else values.float())

        return ExitOutput(
            loss=(0.0 if empty else 1.0) * weighted / divisor.clamp_min(1),
            tokens=tokens,
            last=by_row(losses.last.detach()),
            exits=by_row(losses.exits.detach()).T,
            agreements=by_row(losses.agreements).T,
        )
