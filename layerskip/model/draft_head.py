"""The draft head: the rows of the model's own head for frequent tokens, and the file that names these tokens.

While drafting at batch 1 most of the time of the head goes into reading its weights. Drafts come from the rows of some
thousand frequent tokens; verification multiplies with the whole head, so that the output is the same whatever the list.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from layerskip.files import replacing

if TYPE_CHECKING:
    from layerskip.model.layered import LayeredModel

TENSORS_FILE = "layerskip.safetensors"
KEY = "draft_token_ids"


@dataclass(frozen=True)
class DraftHead:
    """The model's final norm and a part of its head, made once for a generation call.

    The head is not called as a module: forward hooks on it see verification alone, whose word is what counts.

    Attributes:
        layered: the model; its norm, and what follows its head, are used as they are.
        token_ids: whose rows these are, `(ids,)`, ascending.
        weight: the rows, `(ids, hidden)`.
        bias: the head's bias for them, `(ids,)`, or `None`.
    """

    layered: LayeredModel
    token_ids: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, layered: LayeredModel, token_ids: torch.Tensor) -> DraftHead:
        """Returns the draft head for some tokens, whose rows are copied out of the model's head.

        Args:
            layered: the model.
            token_ids: `(ids,)` in int64, of the model's vocabulary and ascending, so that of equal logits the token
                with the lowest id wins, as in the full head.

        Raises:
            ValueError: the head is no plain floating-point matrix, of which rows can be taken.
        """
        head = layered.head
        wanted = (layered.vocab_size, layered.embedding.weight.shape[1])
        # A subclass of either computes in its own way: quantised, sharded, or with adapters beside the weight.
        is_plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter and not _has_own_forward(head)
        if not is_plain or not head.weight.is_floating_point() or tuple(head.weight.shape) != wanted:
            raise ValueError(
                f"draft_vocab_size={len(token_ids)} takes rows of a head with a plain floating-point weight of shape "
                f"{wanted}, but the model's head is {_describe(head)}; draft with the full head: "
                f"draft_vocab_size={layered.vocab_size}."
            )
        loaded: AbstractContextManager[None] = nullcontext()
        if head.weight.is_meta:
            # accelerate has offloaded the head, and brings it back while its rows are copied.
            from accelerate.utils import align_module_device

            loaded = align_module_device(head)
        with loaded:
            ids = token_ids.to(head.weight.device)
            bias = None if head.bias is None else head.bias.detach()[ids]
            return cls(layered, ids, head.weight.detach()[ids], bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits of `token_ids`: what `LayeredModel.logits` gives, for these tokens alone.

        Args:
            hidden: the output of any layer before the final norm, `(..., hidden)`.

        Returns:
            `(..., ids)`, in the model's type.
        """
        normed = self.layered.normed(hidden).to(self.weight.device)
        logits = nn.functional.linear(normed, self.weight, self.bias)
        return self.layered.family.finish_logits(logits, self.layered.config)

    def full_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits of `token_ids` in rows as wide as the vocabulary, `(..., vocabulary)`; −inf elsewhere."""
        logits = self.logits(hidden)
        full = logits.new_full((*logits.shape[:-1], self.layered.vocab_size), float("-inf"))
        full[..., self.token_ids] = logits
        return full

    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the most likely of `token_ids` after hidden states `(..., hidden)`: token ids `(...)`."""
        return self.token_ids[self.logits(hidden).argmax(-1)]


def read_draft_token_ids(folder: str | os.PathLike[str]) -> torch.Tensor | None:
    """Returns the token ids that a checkpoint's folder names for drafting, or `None` where it has no such file.

    Returns:
        `(ids,)` in int64, the most important first.

    Raises:
        ValueError: the file is damaged, or holds no list of different token ids.
    """
    path = Path(folder, TENSORS_FILE)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as tensors:
            if KEY not in set(tensors.keys()):
                raise ValueError(f"{path} holds no {KEY!r}; write it anew, or remove the file.")
            ids = tensors.get_tensor(KEY)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}; write it anew, or remove the file.") from error
    return check_draft_token_ids(ids, name=f"{KEY} in {path}")


def write_draft_token_ids(folder: str | os.PathLike[str], ids: torch.Tensor) -> None:
    """Writes token ids `(ids,)`, the most important first, into a checkpoint's folder, in int32.

    Raises:
        TypeError, ValueError: no list of different token ids.
    """
    tensors = {KEY: check_draft_token_ids(ids).to(torch.int32)}
    with replacing(Path(folder, TENSORS_FILE)) as draft:
        save_file(tensors, draft)


def check_draft_token_ids(ids: torch.Tensor, vocab_size: int | None = None, name: str = KEY) -> torch.Tensor:
    """Returns token ids in int64 on the CPU, in their order.

    Args:
        ids: `(ids,)` in int32 or int64, each once.
        vocab_size: above all ids, where it is known.
        name: how messages call them.

    Raises:
        TypeError: no tensor.
        ValueError: another type or shape, no ids at all, one that occurs twice or is out of range.
    """
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} is a {type(ids).__name__}; pass a tensor of token ids, the most important first.")
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or not len(ids):
        raise ValueError(
            f"{name} is a tensor of {ids.dtype} and shape {tuple(ids.shape)}; allowed are one or more token ids in a "
            "row, in torch.int32 or torch.int64."
        )
    ids = ids.long().cpu()
    found, counts = ids.unique(return_counts=True)
    if len(found) < len(ids):
        raise ValueError(f"{name} holds the token id {int(found[counts > 1][0])} more than once; name each id once.")
    lowest, highest = int(found[0]), int(found[-1])
    if lowest < 0:
        raise ValueError(f"{name} holds the token id {lowest}; allowed are ids from 0 on.")
    if vocab_size is not None and highest >= vocab_size:
        raise ValueError(f"{name} holds the token id {highest}; the model's vocabulary is 0 to {vocab_size - 1}.")
    return ids


def _has_own_forward(head: nn.Linear) -> bool:
    """Whether a head's `forward` was replaced, other than by accelerate, which keeps it and moves tensors around it."""
    return bool(vars(head).get("_old_forward", head.forward) != MethodType(nn.Linear.forward, head))


def _describe(head: nn.Module) -> str:
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    if type(head) is not nn.Linear:
        return f"a {kind}"
    if _has_own_forward(head):
        return f"a {kind} with a forward of its own"
    weight = head.weight
    return f"a {kind} whose weight is a {type(weight).__name__} of {weight.dtype} and shape {tuple(weight.shape)}"
