"""`transformers.Trainer` with the LayerSkip recipe: layer dropout and the exit loss."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from transformers import EvalPrediction, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from layerskip.model.draft_head import write_draft_token_ids
from layerskip.model.peft_models import causal_lm_beneath
from layerskip.training.checkpoint import recipe_metadata, saved_with, write_adapter_metadata
from layerskip.training.clock import Clock
from layerskip.training.exit_settings import ExitSettings
from layerskip.training.layer_dropout import DropoutSettings, layer_dropout
from layerskip.training.objective import ExitOutput, exit_objective
from layerskip.training.originals import AdaptersOff, FrozenCopy, Original
from layerskip.training.run_folder import step_of
from layerskip.training.tally import Tally

if TYPE_CHECKING:
    from peft import PeftModel


class LayerSkipTrainer(Trainer):
    """Fine-tunes a causal LM, or a PEFT model around one, with the whole recipe; everything else is `Trainer`'s.

    While `train` and `evaluate` run, the model carries wrappers for layer dropout and the exit loss; afterwards it is a
    plain model again. Logs hold `loss_exit_E` and `agreement_exit_E` (how often the exit's first choice is the last
    layer's) of the exits that were on, `loss_last_layer`, and `tokens_per_second` (padding left out, while steps ran).
    Evaluation gives `loss` and `perplexity` of the last layer, and `loss_exit_E`, `perplexity_exit_E` and
    `agreement_exit_E` of every exit, per token over the whole set.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        args: TrainingArguments,
        *,
        exits: ExitSettings,
        dropout: DropoutSettings | None = None,
        metadata: Mapping[str, Any] | None = None,
        draft_token_ids: torch.Tensor | None = None,
        **named: Any,
    ) -> None:
        """Prepares training.

        Args:
            model: what to train. With `exits.guard_weight` the guard holds to its weights as they are now, or to those
                under the adapters of a PEFT model.
            args: as for `Trainer`; `args.seed` seeds the draws of layer dropout as well.
            exits: exits, their weights and loss.
            dropout: rates of layer dropout; none by default.
            metadata: what checkpoints say under `config.json["layerskip"]`; by default exits, recipe and versions.
            draft_token_ids: tokens that drafts may choose from, `(ids,)`, saved beside each checkpoint; `None` for all.
            named: further arguments of `Trainer`: datasets, collator, `processing_class`, callbacks, optimizers.

        Raises:
            ValueError: settings that do not fit the model, or an option of Trainer that this loss could only ignore.
        """
        _check_arguments(args, named)
        given: Any = model
        self._given = given
        self._base: PreTrainedModel = causal_lm_beneath(given)
        self._num_layers: int = self._base.config.num_hidden_layers
        self._exit_layers = exits.layers(self._num_layers)
        self._exits = exits
        self._dropout = DropoutSettings() if dropout is None else dropout
        self._metadata = dict(metadata or self._own_metadata())
        self._draft_token_ids = draft_token_ids
        self._clock = Clock(total_steps=1)
        self._original: Original | None = None
        if exits.guard_weight > 0:
            self._original = AdaptersOff(given) if is_peft_model(given) else FrozenCopy(given)
        self._installed = False
        self._tally = Tally(self._num_layers)
        # Trainer switches the cache off in the configuration, where it would stay off once saved.
        use_cache = self._base.config.use_cache
        super().__init__(model=model, args=args, **named)
        self._base.config.use_cache = use_cache
        _check_placement(args, self.accelerator.device)
        if self._dropout.p_max > 0 and self.accelerator.ddp_handler is not None:
            # A layer that is skipped for a whole batch has no gradients.
            self.accelerator.ddp_handler.find_unused_parameters = True
        self.compute_metrics = self._exit_metrics
        self.add_callback(_StepCallback(self._clock, self._tally))

    def _own_metadata(self) -> dict[str, Any]:
        recipe = {"exits": dataclasses.asdict(self._exits), "dropout": dataclasses.asdict(self._dropout)}
        return recipe_metadata(self._exit_layers, recipe)

    @contextmanager
    def _recipe(self) -> Iterator[None]:
        """Installs layer dropout and the exit loss, once, while the block runs."""
        if self._installed:
            yield
            return
        drops = self._dropout.p_max > 0
        with ExitStack() as stack:
            if drops:
                stack.enter_context(layer_dropout(self._base, self._dropout, self._clock, self.args.seed))
            stack.enter_context(
                exit_objective(self._base, self._exits, self._clock, original=self._original, own_target_pass=drops)
            )
            self._installed = True
            try:
                yield
            finally:
                self._installed = False
                if "_original_forward" in vars(self._given):
                    # accelerate's mixed precision wraps the forward that is about to go, or that of a PEFT model.
                    self.accelerator.unwrap_model(self._given, keep_fp32_wrapper=False)
                    if self._given is not self._base:
                        del self._given.forward

    def train(self, *arguments: Any, **named: Any) -> Any:
        """As `Trainer.train`, with the recipe."""
        with self._recipe():
            return super().train(*arguments, **named)

    def evaluation_loop(self, *arguments: Any, **named: Any) -> EvalLoopOutput:
        """As `Trainer.evaluation_loop`, with every exit measured."""
        with self._recipe(), nullcontext() if self.is_in_train else self.accelerator.autocast():
            return super().evaluation_loop(*arguments, **named)

    def _set_signature_columns_if_needed(self) -> None:
        """As `Trainer` does it, and keeps the column that only the exit loss reads."""
        if self._signature_columns is None:
            super()._set_signature_columns_if_needed()
            columns: Any = self._signature_columns
            columns.append("guard")

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """As `Trainer.compute_loss`; the model's forward computed the loss already, and its parts are counted here."""
        outputs: ExitOutput
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        exits = [layer for layer in self._exits.weights_at(self._clock, self._num_layers) if layer != self._num_layers]
        self._tally.add(outputs, exits, inputs)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, torch.Tensor | None]:
        """Returns sums for each row, never logits: `(None, (last, exits, agreements), tokens)` as in `ExitOutput`."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs: ExitOutput = model(**inputs)
        return None, (outputs.last, outputs.exits, outputs.agreements), outputs.tokens

    def _exit_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        sums: Any = prediction.predictions
        return exit_metrics(self._exit_layers, prediction.label_ids, *sums)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer.log`, with what the exits did since the last time."""
        if "loss" in logs:
            logs = {**logs, **self._tally.read(self.accelerator)}
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As `Trainer._save`, with the metadata."""
        with saved_with(self._base.config, self._metadata):
            super()._save(output_dir, state_dict)
        if self.args.should_save and is_peft_model(self.model):
            write_adapter_metadata(str(output_dir or self.args.output_dir), self._metadata)
        if self.args.should_save and self._draft_token_ids is not None:
            write_draft_token_ids(str(output_dir or self.args.output_dir), self._draft_token_ids)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """As `Trainer._save_checkpoint`; a checkpoint that cannot be written leaves nothing behind."""
        folder = os.path.join(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            if self.args.should_save and step_of(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"{folder} could not be written; if it was begun it is gone, and checkpoints before it are whole. If "
                f"the disk is full free some space, and continue from the last one. The cause: {error}"
            ) from error


def exit_metrics(exit_layers: Sequence[int], tokens: Any, last: Any, exits: Any, agreements: Any) -> dict[str, float]:
    """Returns mean loss and perplexity of the last layer and of each exit, and each exit's agreement with the last.

    Args:
        exit_layers: the exits, in the order of the columns below.
        tokens: tokens that count in each row, `(rows,)`, an array; the rest as in `ExitOutput`.
        last: `(rows,)`.
        exits: `(rows, exits)`.
        agreements: `(rows, exits)`.
    """
    total = max(int(tokens.sum()), 1)
    means = {"": last.sum() / total}
    means |= {f"_exit_{layer}": exits[:, column].sum() / total for column, layer in enumerate(exit_layers)}
    metrics = {f"loss{name}": float(mean) for name, mean in means.items()}
    metrics |= {f"perplexity{name}": float(torch.tensor(mean).exp()) for name, mean in means.items()}
    for column, layer in enumerate(exit_layers):
        metrics[f"agreement_exit_{layer}"] = float(agreements[:, column].sum() / total)
    return metrics


class _StepCallback(TrainerCallback):
    """Sets the clock from the state of Trainer, which resuming restores, and times the steps."""

    def __init__(self, clock: Clock, tally: Tally) -> None:
        self._clock = clock
        self._tally = tally

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._clock.total_steps = state.max_steps
        self._tally.reset()

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._clock.step, self._clock.micro_step = state.global_step, 0
        self._tally.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._tally.end_step()

    def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._clock.micro_step += 1


def _check_arguments(args: TrainingArguments, named: Mapping[str, Any]) -> None:
    """Refuses by name what this loss could only ignore."""
    for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics", "model_init"):
        if named.get(name) is not None:
            raise ValueError(f"{name} is not supported: loss and metrics come from the exits; leave it out.")
    refused = {
        "label_smoothing_factor": 0.0,
        "use_liger_kernel": False,
        "use_cache": False,
        "batch_eval_metrics": False,
        "prediction_loss_only": False,
        "eval_do_concat_batches": True,
        "include_for_metrics": [],
    }
    for name, allowed in refused.items():
        value = vars(args)[name]
        if value != allowed:
            raise ValueError(f"{name}={value!r} is not supported with the exit loss; leave it at {allowed!r}.")
    if args.ddp_find_unused_parameters is False:
        raise ValueError("ddp_find_unused_parameters=False would hang where a layer is skipped; leave it out.")


def _check_placement(args: TrainingArguments, device: torch.device) -> None:
    """Refuses placements in which the recipe would not run, or not as asked for."""
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process would be used through DataParallel, which is not supported: start with "
            "`accelerate launch` (one process a GPU), or set CUDA_VISIBLE_DEVICES to one."
        )
    if device.type == "cpu" and args.fp16:
        raise ValueError("fp16=True does nothing on CPU; leave it out, or use bf16=True.")
    if device.type == "cpu" and (args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"):
        raise ValueError("FSDP was asked for on CPU, where accelerate drops it without a word; train without it.")
