"""Where a model is put: one device, or a map from its modules to several.

transformers gives models with a map to accelerate, whose hooks on the modules move what these are given, and bring
offloaded weights back while they run.
"""

from __future__ import annotations

import torch
from torch import nn

# Where accelerate keeps the hook of a module.
HOOK = "_hf_hook"
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def read_device(device: str | torch.device | int | None, name: str = "device") -> torch.device:
    """Returns a device that is there; by default the first CUDA device where there is one, else the CPU.

    Raises:
        ValueError: it is not to be had; the message calls it `name`.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"{name}={device!r} is not available here: {str(error).splitlines()[0]}") from error
    return found


def check_device_map(device_map: object, device: str | torch.device | None) -> None:
    """Checks a `device_map` for `from_pretrained`, and that no `device` stands beside it.

    Raises:
        TypeError: neither a string nor a dict.
        ValueError: an unknown string, a device that is not to be had, or one beside it.
    """
    if device_map is None:
        return
    if not isinstance(device_map, str | dict):
        raise TypeError(
            f"device_map={device_map!r} is a {type(device_map).__name__}; pass 'auto', or a dict from names of modules "
            "to devices. A single device is the argument device."
        )
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise ValueError(
            f"device_map={device_map!r} is unknown; allowed are {', '.join(map(repr, DEVICE_MAPS))}, and a dict from "
            "names of modules to devices. A single device is the argument device."
        )
    if device is not None:
        raise ValueError(
            f"device={device!r} and device_map={device_map!r} both say where the model goes; leave one out."
        )
    if device_map == {}:
        raise ValueError("device_map={} places nothing; pass a device for every module, or leave it out.")
    for name, place in device_map.items() if isinstance(device_map, dict) else ():
        if place != "disk":
            read_device(place, f"device_map[{name!r}]")


def is_dispatched(model: nn.Module) -> bool:
    """Whether accelerate has spread a model over devices or offloaded a part of it."""
    return any(HOOK in vars(module) for module in model.modules())


def device_of(module: nn.Module, weight: torch.Tensor) -> torch.device:
    """Returns where a module runs that has `weight`, also while that is offloaded."""
    hook = vars(module).get(HOOK)
    return torch.device(hook.execution_device) if weight.is_meta and hook is not None else weight.device
