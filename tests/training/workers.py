"""Functions run in processes of their own: killed half-way, or side by side as the ranks of a distributed run."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import os
import random
import resource
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests import kit

ROWS = 22
PADDING = 95
# Processes are forked off a server that has imported what they need and done nothing else.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["tests.training.workers", "layerskip.training.finetune", "transformers.models.llama.modeling_llama"]
)


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        status: 0, or the negative number of the signal that ended it.
        value: what the function returned, where it did.
        error: the exception it raised, as Python prints it; empty for none.
    """

    status: int
    value: Any
    error: str


def run(function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> Outcome:
    """Runs `function(*arguments)` in a process of its own; the result may hold tensors."""
    return _gather([_started(function, arguments, {})], timeout)[0]


def run_ranks(function: Callable[..., Any], *arguments: Any, ranks: int = 2, timeout: float = 120) -> list[Outcome]:
    """Runs `function(*arguments)` on ranks that find each other as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return _gather(
        [_started(function, arguments, {**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in range(ranks)], timeout
    )


_Process = tuple[Any, Connection]


def _started(function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, Any]) -> _Process:
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_enter, args=(sender, function, arguments, environment), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def _enter(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], environment: Any) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    value, error = None, ""
    try:
        value = function(*arguments)
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    buffer = io.BytesIO()
    torch.save((value, error), buffer)
    sender.send_bytes(buffer.getvalue())


def _gather(processes: list[_Process], timeout: float) -> list[Outcome]:
    """Returns how each process ended; one that is still running after `timeout` seconds is killed and fails."""
    ends = time.monotonic() + timeout
    outcomes = []
    try:
        for process, receiver in processes:
            if not receiver.poll(max(0.0, ends - time.monotonic())):
                raise TimeoutError(f"a process hung for {timeout} seconds")
            try:
                value, error = torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=False)
            except EOFError:
                value, error = None, ""
            process.join(10)
            outcomes.append(Outcome(process.exitcode, value, error))
    finally:
        for process, _ in processes:
            process.kill()
    return outcomes


# What the processes run


def train_from_recipe(written: dict[str, Any], fault: str = "", at: tuple[int, int] = (0, 0)) -> list[Any]:
    """Trains as a recipe says; returns global step, micro-step and token ids of each batch that was trained on.

    Args:
        written: the recipe.
        fault: "kill": SIGKILL at the step and micro-step `at`. "second checkpoint" or "result": no file can grow once
            that is being saved.
        at: for "kill".
    """
    from transformers import PreTrainedModel, Trainer

    from layerskip.training import finetune
    from layerskip.training.recipe import recipe_of
    from layerskip.training.trainer import LayerSkipTrainer

    compute_loss = LayerSkipTrainer.compute_loss
    save_optimizer = Trainer._save_optimizer_and_scheduler
    save_pretrained = PreTrainedModel.save_pretrained
    batches = []

    def recorded(self: Any, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        place = self._clock.step, self._clock.micro_step
        if fault == "kill" and place == at:
            os.kill(os.getpid(), signal.SIGKILL)
        batches.append((*place, inputs["input_ids"].tolist()))
        return compute_loss(self, model, inputs, *arguments, **named)

    def without_space(self: Any, folder: str) -> None:
        with nullcontext() if folder.endswith("checkpoint-3") else _full_disk():
            save_optimizer(self, folder)

    def result_without_space(self: Any, folder: str, **named: Any) -> None:
        with _full_disk() if ".saving-" in folder else nullcontext():
            save_pretrained(self, folder, **named)

    LayerSkipTrainer.compute_loss = recorded  # type: ignore[method-assign]
    if fault == "second checkpoint":
        Trainer._save_optimizer_and_scheduler = without_space  # type: ignore[method-assign]
    if fault == "result":
        PreTrainedModel.save_pretrained = result_without_space  # type: ignore[method-assign,assignment]
    finetune.finetune(recipe_of(written))
    return batches


def run_program(path: Path, *arguments: str) -> str:
    """Runs a program as from its command line; returns what it and the processes that it starts print."""
    sys.argv = [str(path), *arguments]
    with tempfile.TemporaryFile() as shown:
        os.dup2(shown.fileno(), 1)
        runpy.run_path(str(path), run_name="__main__")
        sys.stdout.flush()
        shown.seek(0)
        return shown.read().decode()


@contextmanager
def _full_disk() -> Iterator[None]:
    """Makes every write beyond 16 kB of a file fail while the block runs, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def train_by_uneven_clocks(written: dict[str, Any]) -> int:
    """Trains as a recipe says, a tenth of a second a step on the first rank's clock, an hour on that of others.

    Returns how many steps were taken.
    """
    from layerskip.training import time_limit
    from layerskip.training.finetune import finetune
    from layerskip.training.recipe import recipe_of
    from layerskip.training.trainer import LayerSkipTrainer

    ticks = itertools.count()
    second = 0.05 if os.environ["RANK"] == "0" else 1800.0
    time_limit.time = SimpleNamespace(monotonic=lambda: next(ticks) * second)  # type: ignore[assignment]
    steps = []
    compute_loss = LayerSkipTrainer.compute_loss

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        steps.append(self.state.global_step)
        return compute_loss(self, *arguments, **named)

    LayerSkipTrainer.compute_loss = counted  # type: ignore[method-assign]
    finetune(recipe_of(written))
    return len(set(steps))


def train_on_rows(rows: list[dict[str, list[int]]], p_max: float, folder: str, options: dict[str, Any]) -> Any:
    """Trains L4 on rows, in order of `options["seed"]`; returns the trained weights and what layer dropout kept."""
    import datasets
    from transformers import TrainingArguments

    from layerskip.training import layer_dropout
    from layerskip.training.data import Collator
    from layerskip.training.exit_settings import ExitSettings
    from layerskip.training.trainer import LayerSkipTrainer

    kept = _recorded_masks(layer_dropout)
    model = kit.l4()
    trainer = LayerSkipTrainer(
        model,
        TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", save_strategy="no", **options),
        exits=ExitSettings(
            exit_layers=(1, 2, 3),
            weights="equal",
            curriculum="rotational",
            rotation=3,
            loss="self_distillation",
            guard_weight=0.5,
        ),
        dropout=layer_dropout.DropoutSettings(p_max=p_max),
        train_dataset=datasets.Dataset.from_list(rows),
        data_collator=Collator(0),
    )
    trainer.train()
    return {name: weight.detach() for name, weight in model.named_parameters()}, kept


def train_sharded(rows: list[list[int]], steps: int) -> Any:
    """Trains L4 by FSDP2, or plainly where there is one process; returns as `train_on_rows` does."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from layerskip.training import layer_dropout
    from layerskip.training.clock import Clock
    from layerskip.training.exit_settings import ExitSettings
    from layerskip.training.objective import exit_objective

    kept = _recorded_masks(layer_dropout)
    model = kit.l4().train()
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in kit.layers_of(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    clock = Clock(total_steps=steps)
    exits = ExitSettings(exit_layers=(1, 2, 3), weights="equal", curriculum="rotational", rotation=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor(rows)
    dropout = layer_dropout.DropoutSettings(p_max=0.5)
    with layer_dropout.layer_dropout(model, dropout, clock, 0), exit_objective(model, exits, clock):
        for clock.step in range(steps):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = {}
    for name, weight in model.named_parameters():
        weights[name] = weight.full_tensor().detach() if isinstance(weight, DTensor) else weight.detach()
    return weights, kept


def ask_for_fsdp(how: str, folder: str) -> None:
    """Makes a trainer that is to shard by FSDP on CPUs: "argument" or "environment" is where it was asked for."""
    from transformers import TrainingArguments

    from layerskip.training.exit_settings import ExitSettings
    from layerskip.training.trainer import LayerSkipTrainer

    if how == "environment":
        os.environ["ACCELERATE_USE_FSDP"] = "true"
    asked = {"fsdp": True} if how == "argument" else {}
    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", **asked)
    LayerSkipTrainer(kit.l4(), args, exits=ExitSettings(weights="equal"))


def _recorded_masks(layer_dropout: Any) -> list[list[bool]]:
    """Returns a list that grows by what is kept of a batch with every draw."""
    kept: list[list[bool]] = []
    draw = layer_dropout.kept_samples

    def recorded(*arguments: Any, **named: Any) -> torch.Tensor:
        kept.append(draw(*arguments, **named).tolist())
        return draw(*arguments, **named)

    layer_dropout.kept_samples = recorded
    return kept


# For the tests


def save_material(folder: Path) -> dict[str, Any]:
    """Writes a tiny model and some rows of text; returns a recipe of 8 steps without an output folder."""
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    tokenizer.eos_token, tokenizer.pad_token = "w96", f"w{PADDING}"
    kit.l4().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(90)}" for _ in range(draw.randrange(4, 14))) for _ in range(ROWS)]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    exits = {"exit_layers": [1, 2, 3], "curriculum": "rotational", "rotation": 3, "weights": "equal"}
    return {
        "model": str(folder / "model"),
        "data": {"train": str(rows)},
        "exits": {**exits, "guard_weight": 0.5},
        "dropout": {"p_max": 0.5},
        "trainer": {
            "use_cpu": True,
            "max_steps": 8,
            "save_steps": 3,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.01,
            "report_to": "none",
            "disable_tqdm": True,
        },
    }


def tensors_of(folder: str | Path) -> dict[str, torch.Tensor]:
    """Returns the weights in a folder, of a model or of adapters."""
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def assert_same_weights(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compares weights by name, bit by bit."""
    assert expected and weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name
