"""One training run from beginning to end: model, data, recipe, and the checkpoint that comes out."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from torch.utils.data import IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerState, TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from layerskip.model.families import family_of
from layerskip.model.layered import LayeredModel
from layerskip.model.loading import DTYPES, load_model
from layerskip.training.checkpoint import recipe_metadata, saved_with, write_adapter_metadata
from layerskip.training.data import Collator, load_data
from layerskip.training.recipe import FromConfig, LoraSettings, Recipe
from layerskip.training.trainer import LayerSkipTrainer

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECIPE_FILE = "recipe.json"


def finetune(recipe: Recipe, source: str | None = None) -> dict[str, float]:
    """Trains as a recipe says and saves the checkpoint in its `output_dir`; returns the metrics of the run.

    Everything that can be known is checked before the first step: recipe, output folder, model, data, free space.

    Args:
        recipe: the run.
        source: folder or hub id to load the model from, where `recipe.model` is a name for one.

    Returns:
        Trainer's metrics of training, and with evaluation data those of the last evaluation, `eval_…`.

    Raises:
        ValueError: something in the recipe does not fit the model, the data, or what is in the output folder.
        OSError: a file cannot be read or written, or the disk has too little space.
    """
    args = TrainingArguments(output_dir=recipe.output_dir, **recipe.trainer)
    written = _written(recipe)
    resumed = _claim_output(recipe.output_dir, written, recipe.resume)
    set_seed(args.seed)
    model, tokenizer = _load(recipe, source)
    exit_layers = recipe.exits.layers(LayeredModel(model).num_layers)
    data = load_data(recipe.data, tokenizer, seed=args.seed)
    metadata = recipe_metadata(exit_layers, written, data.fingerprint)
    trained = add_adapters(model, recipe.lora) if recipe.method == "lora" else model
    loading: Any = args.accelerator_config
    if recipe.data.streaming and loading.dispatch_batches is None:
        # By default rank 0 reads for all, and joins batches that are padded to different widths.
        loading.dispatch_batches = False
    trainer = LayerSkipTrainer(
        trained,
        args,
        exits=recipe.exits,
        dropout=recipe.dropout,
        metadata=metadata,
        train_dataset=_Endless(data.train) if recipe.data.streaming else data.train,
        eval_dataset=data.eval,
        data_collator=Collator.for_tokenizer(tokenizer),
        processing_class=tokenizer,
    )
    _check_space(trained, args)
    if args.should_save:
        Path(recipe.output_dir, RECIPE_FILE).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")

    metrics: dict[str, float] = {}
    if resumed is not None and _is_finished(resumed):
        # It ended between its last step and the files below. Trainer would train on.
        trainer._load_from_checkpoint(resumed)
    else:
        metrics |= trainer.train(resume_from_checkpoint=resumed).metrics
    if data.eval is not None:
        metrics |= trainer.evaluate()
    _save(trainer, recipe, tokenizer, metadata)
    return metrics


def last_whole_checkpoint(folder: str | Path) -> Path | None:
    """Returns the latest checkpoint-N in a folder that was written to its end, or `None`.

    Trainer writes its state last, so that a checkpoint whose state can be read is whole.
    """
    whole = {}
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            whole[json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]] = path
        except (OSError, ValueError, KeyError):
            continue
    return whole[max(whole)] if whole else None


def _is_finished(checkpoint: str) -> bool:
    state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    return state.global_step >= state.max_steps


class _Endless(IterableDataset[Any]):
    """A stream that begins anew, in another order, when it has been read.

    Trainer does not know how long a stream is: it would take the rest of an accumulation window for the next one's, and
    skip the wrong rows on resuming after the first pass.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        for epoch in itertools.count():
            self._rows.set_epoch(epoch)
            empty = True
            for row in self._rows:
                empty = False
                yield row
            if empty:
                # As in a worker of the data loader for which there is no shard.
                return


def add_adapters(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """Returns a PEFT model around `model`, whose own weights are frozen.

    Raises:
        ValueError: a target that the model does not have, or the head or embedding where both are one matrix.
    """
    from peft import LoraConfig, get_peft_model

    tied = {"lm_head", "embed_tokens", "wte"}.intersection(settings.targets)
    if tied and model.config.tie_word_embeddings:
        raise ValueError(
            f"lora.targets has {sorted(tied)[0]}, but this model's head is its embedding (tie_word_embeddings), which "
            "an adapter on one of them would take apart; leave it out."
        )
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    config = LoraConfig(
        r=settings.rank,
        # Declared as an integer there, and used as a factor.
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"lora.targets={settings.targets!r} cannot be adapted: {error}") from error


def _written(recipe: Recipe) -> dict[str, Any]:
    """Returns what a run is known by, as JSON has it: the recipe without its place and whether it is resumed."""
    written = dataclasses.asdict(recipe)
    del written["output_dir"], written["resume"]
    return dict(json.loads(json.dumps(written, default=str)))


def _claim_output(output_dir: str, written: Mapping[str, Any], resume: bool) -> str | None:
    """Returns the checkpoint to continue from, or `None` to begin; on every rank before any of them writes.

    Raises:
        ValueError: the folder holds something else than the run that is asked for.
    """
    folder, recipe_file = Path(output_dir), Path(output_dir, RECIPE_FILE)
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and not recipe_file.is_file():
        raise ValueError(f"output_dir={output_dir!r} is not empty and holds no run; choose another folder.")
    if taken and not resume:
        raise ValueError(
            f"output_dir={output_dir!r} holds another run; continue it with resume=true, or choose another folder."
        )
    checkpoint = None
    if taken:
        before = json.loads(recipe_file.read_text(encoding="utf-8"))
        changed = sorted(key for key in {*before, *written} if before.get(key) != written.get(key))
        if changed:
            raise ValueError(
                f"output_dir={output_dir!r} holds a run with another recipe ({', '.join(changed)} differ); to continue "
                "it, give its own recipe; for a new run choose another folder."
            )
        checkpoint = last_whole_checkpoint(folder)
    PartialState().wait_for_everyone()
    return None if checkpoint is None else str(checkpoint)


def _load(recipe: Recipe, source: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the model that training begins with, on the CPU, and its tokenizer."""
    if isinstance(recipe.model, FromConfig):
        return _new_model(recipe, recipe.model)
    model, tokenizer = load_model(
        source or recipe.model,
        device="cpu",
        dtype=recipe.dtype,
        attn_implementation=recipe.attn_implementation,
        revision=recipe.revision,
    )
    if tokenizer is None:
        raise ValueError(f"model={recipe.model!r} has no tokenizer, without which no text can be read.")
    return model, tokenizer


def _new_model(recipe: Recipe, scratch: FromConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    settings = dict(scratch.from_config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    family_of(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(scratch.tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.tokenizer={scratch.tokenizer!r} cannot be loaded: {error}") from error
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"model.from_config.vocab_size={config.vocab_size} is below the tokenizer's {len(tokenizer)} tokens."
        )
    dtype = DTYPES.get(recipe.dtype)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=recipe.attn_implementation, dtype=dtype)
    return model, tokenizer


def _check_space(model: torch.nn.Module, args: TrainingArguments) -> None:
    """Checks that the disk has room for one checkpoint: weights, and two moments of each trained one.

    Raises:
        OSError: it has not.
    """
    if not args.should_save:
        return
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
    needed, free = 3 * weights, shutil.disk_usage(str(args.output_dir)).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint takes about {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; free some, or choose "
            "another output_dir than",
            args.output_dir,
        )


def _save(
    trainer: LayerSkipTrainer, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any]
) -> None:
    """Saves the trained checkpoint at the root of the run's folder; what is there stays whole until it is written."""
    merged: Any = trainer.model
    if recipe.method == "lora" and recipe.lora.merge:
        merged = merged.merge_and_unload()
    if not trainer.args.should_save:
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=recipe.output_dir) as made:
            if is_peft_model(merged):
                merged.save_pretrained(made)
                write_adapter_metadata(made, metadata)
            else:
                with saved_with(merged.config, metadata):
                    merged.save_pretrained(made)
            tokenizer.save_pretrained(made)
            for path in Path(made).iterdir():
                path.replace(Path(recipe.output_dir, path.name))
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the trained model could not be written to {recipe.output_dir!r}; checkpoints there are whole. Free some "
            f"space and continue with resume=true. The cause: {error}"
        ) from error
