"""Ranks that run one tensor parallel model together: what they do not compute alike must be made alike.

Each rank decodes as if it were alone, and all of them see the same logits. Should they ever draw or stop differently,
they would wait for each other for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.stopping_criteria import MaxTimeCriteria

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def tensor_parallel_mesh(model: PreTrainedModel) -> DeviceMesh | None:
    """Returns the ranks among which a tensor parallel plan of transformers has divided a model, in one dimension.

    `None` where every rank has the whole model.
    """
    if model.tp_size is None or model.tp_size == 1:
        return None
    mesh: Any = model._device_mesh
    ranks: DeviceMesh = mesh["tp"]
    return ranks


def check_criteria(model: PreTrainedModel, criteria: Sequence[Any]) -> None:
    """Checks that the ranks of a model are not to stop by their own clocks.

    Raises:
        ValueError: a limit in time, for a model that is tensor parallel.
    """
    for criterion in criteria:
        if isinstance(criterion, MaxTimeCriteria) and tensor_parallel_mesh(model) is not None:
            raise ValueError(
                f"max_time={criterion.max_time} is not supported for a tensor parallel model, whose ranks would each "
                "stop by a clock of their own; limit max_new_tokens."
            )


def share_random_state(model: PreTrainedModel, generator: torch.Generator | None) -> None:
    """Gives the generator of every rank of a tensor parallel model the state that the first rank's has.

    All ranks then draw what the first one would have drawn alone, and their generators stay alike after the call.

    Args:
        model: nothing happens where it is not tensor parallel.
        generator: this rank's; `None` for torch's global one.
    """
    mesh = tensor_parallel_mesh(model)
    if mesh is None:
        return
    own = torch.default_generator if generator is None else generator
    state = own.get_state().to(mesh.device_type)
    torch.distributed.broadcast(state, group=mesh.get_group(), group_src=0)
    own.set_state(state.cpu())
