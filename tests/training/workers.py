"""Functions run in processes of their own: killed half-way, or side by side as the ranks of a distributed run."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# Processes are forked off a server that has imported the slow libraries and done nothing else.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["layerskip.training.finetune", "transformers.models.llama.modeling_llama", "datasets", "peft"]
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


def tensors_of(folder: str | Path) -> dict[str, torch.Tensor]:
    """Returns the weights in a folder, of a model or of adapters."""
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(path)
    return weights
