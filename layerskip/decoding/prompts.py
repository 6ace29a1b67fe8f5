"""What a caller may pass as prompts, and the token ids it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALLOWED = (
    "a string, a list of messages ({'role': …, 'content': …}), a list of either, or an integer tensor (batch, tokens)"
)


@dataclass(frozen=True)
class Prompts:
    """Prompts as token ids.

    Attributes:
        rows: the token ids of each row, without padding.
        padded: `(batch, tokens)` as the caller gave it; `None` for texts, which are padded on the left when needed.
    """

    rows: list[list[int]]
    padded: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """The length of the longest row, padding included."""
        return max(len(row) for row in self.rows) if self.padded is None else self.padded.shape[1]

    def left_padded(self, pad_token_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the prompts as `generate` wants them, with padding on the left: ids and mask, `(batch, tokens)`.

        Ids that the caller padded on the left stay as they are.
        """
        padding = [self.width - len(row) for row in self.rows]
        mask = [[0] * pads + [1] * len(row) for pads, row in zip(padding, self.rows, strict=True)]
        given = [[]] * len(self.rows) if self.padded is None else self.padded.tolist()
        ids = [
            shown if shown[pads:] == row else [pad_token_id] * pads + row
            for shown, pads, row in zip(given, padding, self.rows, strict=True)
        ]
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def tensor(self, pad_token_id: int | None) -> torch.Tensor:
        """Returns the prompts as `(batch, tokens)`, in the layout that `generate` would return them in.

        Raises:
            ValueError: rows of different lengths and no padding token.
        """
        if self.padded is not None:
            return self.padded
        if pad_token_id is None and any(len(row) != self.width for row in self.rows):
            raise ValueError("pad_token_id=None, but the prompts have different lengths; pass pad_token_id=….")
        return torch.tensor([[pad_token_id] * (self.width - len(row)) + row for row in self.rows])


def read_prompts(
    prompts: Any, tokenizer: PreTrainedTokenizerBase | None, attention_mask: Any, vocab_size: int
) -> Prompts:
    """Returns the token ids of `prompts`.

    A string is tokenised as it stands, a list of messages goes through the chat template, and a list of either is a
    batch. A tensor may be padded on either side where `attention_mask` says so.

    Raises:
        TypeError: prompts of another kind.
        ValueError: an empty prompt, a missing tokenizer or chat template, a mask that does not fit, or a token id
            outside the vocabulary.
    """
    if isinstance(prompts, torch.Tensor):
        read = _from_tensor(prompts, attention_mask)
    else:
        if attention_mask is not None:
            raise ValueError("attention_mask goes with a tensor of token ids; texts and messages need none.")
        read = Prompts(_from_texts(prompts, tokenizer))
    for index, row in enumerate(read.rows):
        if not row:
            raise ValueError(f"prompts[{index}] is empty; generation needs at least one token to start from.")
        for token in (min(row), max(row)):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompts[{index}] holds token id {token}; the model's vocabulary is 0 to {vocab_size - 1}."
                )
    return read


def longest_first(rows: Sequence[Sequence[int]]) -> list[int]:
    """Returns the indices of token rows by falling length: little padding in a batch, and what is too long told first.

    Rows of one length keep their order.
    """
    return sorted(range(len(rows)), key=lambda index: -len(rows[index]))


def inferred_mask(ids: torch.Tensor, pad_token_id: int | None, eos_token_ids: frozenset[int]) -> torch.Tensor | None:
    """Returns the attention mask that `generate` infers for token ids that come without one, or `None` for none.

    Ids equal to the padding token are padding, unless that token ends a text as well.

    Raises:
        ValueError: the padding token stands between other tokens, where it must be text.
    """
    if pad_token_id is None or pad_token_id in eos_token_ids:
        return None
    mask = (ids != pad_token_id).long()
    for index, row in enumerate(mask.tolist()):
        if _has_hole(row):
            raise ValueError(
                f"prompts[{index}] holds pad_token_id={pad_token_id} between other tokens, and without a mask it would "
                "be taken for padding; pass attention_mask."
            )
    return mask


def _has_hole(mask: list[int]) -> bool:
    """Whether a mask has a zero between ones."""
    ones = [position for position, seen in enumerate(mask) if seen]
    return bool(ones) and ones[-1] - ones[0] + 1 != len(ones)


def _from_tensor(ids: torch.Tensor, attention_mask: Any) -> Prompts:
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"prompts has shape {tuple(ids.shape)} and type {ids.dtype}; allowed: {ALLOWED}.")
    if attention_mask is None:
        return Prompts(_not_empty(ids.tolist()), ids)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != ids.shape:
        raise ValueError(f"attention_mask must be a tensor of the prompts' shape {tuple(ids.shape)}.")
    if ((attention_mask != 0) & (attention_mask != 1)).any():
        raise ValueError("attention_mask holds other values than 1 (a token) and 0 (padding); pass these alone.")
    rows = []
    for index, (tokens, mask) in enumerate(zip(ids.tolist(), attention_mask.tolist(), strict=True)):
        if _has_hole(mask):
            raise ValueError(f"attention_mask[{index}] has a zero between ones; padding is allowed at the ends only.")
        rows.append([token for token, seen in zip(tokens, mask, strict=True) if seen])
    return Prompts(_not_empty(rows), ids)


def _from_texts(prompts: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    is_conversation = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], dict)
    batch = [prompts] if isinstance(prompts, str) or is_conversation else prompts
    if not isinstance(batch, list | tuple):
        has_ids = isinstance(prompts, Mapping) and "input_ids" in prompts
        hint = " Pass its input_ids as a tensor, and its attention_mask." if has_ids else ""
        raise TypeError(f"prompts is a {type(prompts).__name__}; allowed: {ALLOWED}.{hint}")
    return [_tokenize(prompt, index, tokenizer) for index, prompt in enumerate(_not_empty(list(batch)))]


def _tokenize(prompt: Any, index: int, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    is_text = isinstance(prompt, str)
    is_messages = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not is_text and not is_messages:
        raise TypeError(f"prompts[{index}] is a {type(prompt).__name__}; allowed: {ALLOWED}.")
    if tokenizer is None:
        raise ValueError(
            "prompts are text, but the engine has no tokenizer; pass Engine(model, tokenizer) or token ids."
        )
    if is_text:
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ValueError(f"prompts[{index}] holds bytes that are not UTF-8 text; decode them first.")
        return list(tokenizer(prompt)["input_ids"])
    if not prompt:
        return []
    if tokenizer.chat_template is None:
        raise ValueError(
            f"prompts[{index}] is a list of messages, but the tokenizer has no chat template; pass a string, or set "
            "tokenizer.chat_template."
        )
    from jinja2 import TemplateError

    try:
        encoded: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    except TemplateError as error:
        raise ValueError(f"prompts[{index}] is refused by the tokenizer's chat template: {error}") from error
    return list(encoded["input_ids"])


def _not_empty(batch: list[Any]) -> list[Any]:
    if not batch:
        raise ValueError("prompts is empty; pass at least one prompt.")
    return batch
