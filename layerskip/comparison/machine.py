"""What a measurement was made with: processor, threads, device, type, versions, weights."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def describe_machine(model: PreTrainedModel) -> dict[str, Any]:
    """Returns what latencies depend on beside what is done, by name, as JSON takes it.

    Args:
        model: where and in which type it computes.
    """
    device = model.device
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attn_implementation": model.config._attn_implementation,
        "versions": {name: version(name) for name in ("layerskip", "torch", "transformers")},
    }


def processor() -> str:
    """Returns the processor's name, as far as the system tells it."""
    described = Path("/proc/cpuinfo")
    for line in described.read_text(encoding="utf-8").splitlines() if described.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def fingerprint(model: PreTrainedModel) -> str:
    """Returns a hash of some values of every weight, which training would change."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()
        some = values[:: max(1, len(values) // 64)].float().cpu()
        digest.update(name.encode() + some.numpy().tobytes())
    return digest.hexdigest()
