"""One training run from beginning to end: model, data, recipe, and the checkpoint that comes out."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from transformers import TrainingArguments, set_seed

from layerskip.model.layered import LayeredModel
from layerskip.model.quantization import is_quantized
from layerskip.training.checkpoint import recipe_metadata
from layerskip.training.data import Collator, DataSettings, TrainingData, load_data
from layerskip.training.draft_vocabulary import draft_vocabulary, kept_token_ids
from layerskip.training.models import add_adapters, initial_model, shape_of
from layerskip.training.recipe import Recipe
from layerskip.training.run_folder import (
    check_space,
    checkpoint_to_continue,
    earlier_run,
    finished_weights,
    has_result,
    save_trained,
    write_recipe,
)
from layerskip.training.stream import Endless
from layerskip.training.time_limit import TimeLimit
from layerskip.training.trainer import LayerSkipTrainer

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def finetune(recipe: Recipe, source: str | None = None) -> dict[str, float]:
    """Trains as a recipe says and saves the checkpoint in its `output_dir`; returns the metrics of the run.

    Everything that can be known is checked before the first step: recipe, output folder, model, data, free space.

    Args:
        recipe: the run.
        source: folder or hub id to load the model from, where `recipe.model` is a name for one.

    Returns:
        Trainer's metrics of training, `dropped_rows` in which no token counted, and with evaluation data those of the
        last evaluation, `eval_…`.

    Raises:
        ValueError: something in the recipe does not fit the model, the data, or what is in the output folder.
        OSError: a file cannot be read or written, or the disk has too little space.
    """
    args = TrainingArguments(output_dir=recipe.output_dir, **recipe.trainer)
    written = _written(recipe)
    set_seed(args.seed)
    earlier = earlier_run(recipe.output_dir, written, recipe.resume)
    model, tokenizer = initial_model(recipe, source)
    layered = LayeredModel(model)
    exit_layers = recipe.exits.layers(layered.num_layers)
    _check_rows(layered, recipe.data)
    if is_quantized(model.config) and recipe.lora is not None and recipe.lora.merge:
        raise ValueError(
            "lora.merge=true cannot merge adapters into the model's quantised weights; set lora.merge=false."
        )
    data = load_data(recipe.data, tokenizer, seed=args.seed)
    resumed = None if earlier is None else checkpoint_to_continue(recipe.output_dir, earlier, data.fingerprint)
    if resumed is not None and recipe.max_minutes is not None and has_result(recipe.output_dir):
        raise ValueError(
            f"output_dir={recipe.output_dir!r} holds a run that ended when its time was over; to train further begin a "
            "new one from what came out: as its model, or as lora.continue_from."
        )
    # Every rank has looked into the folder before one of them writes there.
    PartialState().wait_for_everyone()
    draft_token_ids = _draft_token_ids(recipe, data, model, tokenizer)
    metadata = recipe_metadata(exit_layers, written, data.fingerprint, recipe.draft_vocab_size)
    trained: PreTrainedModel | PeftModel = model
    if recipe.lora is not None:
        trained = add_adapters(model, recipe.lora, recipe.revision)
        metadata["recipe"]["lora"] |= shape_of(trained)
    loading: Any = args.accelerator_config
    if recipe.data.streaming and loading.dispatch_batches is None:
        # By default rank 0 reads for all, and joins batches that are padded to different widths.
        loading.dispatch_batches = False
    try:
        trainer = LayerSkipTrainer(
            trained,
            args,
            exits=recipe.exits,
            dropout=recipe.dropout,
            metadata=metadata,
            draft_token_ids=draft_token_ids,
            train_dataset=Endless(data.train) if recipe.data.streaming else data.train,
            eval_dataset=data.eval,
            data_collator=Collator.for_tokenizer(tokenizer),
            processing_class=tokenizer,
            callbacks=[] if recipe.max_minutes is None else [TimeLimit(recipe.max_minutes)],
        )
    except RuntimeError as error:
        # As Trainer says that a program to report to is not installed.
        raise ValueError(f"trainer: {error}") from error
    merging = recipe.lora is not None and recipe.lora.merge
    if merging and trainer.is_fsdp_enabled:
        raise ValueError("lora.merge=true cannot merge weights that FSDP shards; set lora.merge=false.")
    if args.should_save:
        check_space(trained, recipe.output_dir, merging)
        write_recipe(written, data.fingerprint, recipe.output_dir)

    metrics: dict[str, float] = {} if data.dropped_rows is None else {"dropped_rows": data.dropped_rows}
    finished = None if resumed is None else finished_weights(resumed, args.load_best_model_at_end)
    if finished is not None:
        # It ended between its last step and the files below. Trainer would train on.
        trainer._load_from_checkpoint(finished)
    else:
        metrics |= trainer.train(resume_from_checkpoint=resumed).metrics
        _check_trained(trainer)
    if data.eval is not None:
        metrics |= trainer.evaluate()
    # Gathering shards takes every rank.
    weights = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
    if args.should_save:
        result: Any = trainer.model
        result = result.merge_and_unload() if merging else result
        save_trained(result, tokenizer, recipe.output_dir, metadata, weights, draft_token_ids)
    return metrics


def _check_rows(layered: LayeredModel, data: DataSettings) -> None:
    """Raises ValueError for rows of data that the model cannot read as they are meant."""
    limit: int = layered.config.max_position_embeddings
    if layered.has_last_position and data.max_length > limit:
        raise ValueError(f"data.max_length={data.max_length} is above the {limit} positions that the model has.")
    if data.packing and not layered.family.keeps_packed_apart:
        raise ValueError(
            f"data.packing=true: model_type={layered.config.model_type!r} does not keep the rows apart that are packed "
            "into one; set it to false."
        )


def _draft_token_ids(
    recipe: Recipe, data: TrainingData, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> torch.Tensor | None:
    """Returns the tokens that drafts may choose from, or `None` for all; raises ValueError for too few or too many."""
    if recipe.draft_vocab_size is None:
        return None
    rows = itertools.chain.from_iterable(block["labels"] for block in data.train.iter(1000))
    return draft_vocabulary(rows, recipe.draft_vocab_size, kept_token_ids(model, tokenizer), model.config.vocab_size)


def _check_trained(trainer: LayerSkipTrainer) -> None:
    """Checks that a run has led to something; raises ValueError where its result would only look like one."""
    if trainer.state.global_step == 0:
        raise ValueError(
            "no step was taken: there are fewer rows than one batch takes, or trainer.max_steps and num_train_epochs "
            "are 0. Nothing was saved."
        )
    model: Any = trainer.model
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise ValueError(
            "training diverged: some weights are no finite numbers any more. Nothing was saved beside the checkpoints; "
            "lower trainer.learning_rate."
        )


def _written(recipe: Recipe) -> dict[str, Any]:
    """Returns what a run is known by, as JSON has it: the recipe without its place and whether it is resumed."""
    written = dataclasses.asdict(recipe)
    del written["output_dir"], written["resume"]
    return dict(json.loads(json.dumps(written, default=str)))
