"""What `generate` hands over when it leaves decoding to a function of ours, read into what the decode loop takes.

By then `generate` has done all that comes before decoding: it has merged its settings, expanded rows for
num_return_sequences, and made lengths, logits processors and stopping criteria of them. The engine goes the same way,
so that both mean the same by every setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from layerskip.decoding.rows import Past, Prompt
from layerskip.model.cache import CachedTokens
from layerskip.model.dynamic_cache import is_empty, read_dynamic_cache
from layerskip.model.layered import LayeredModel

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

# `generate` always takes the last position's logits, so that logits_to_keep changes nothing.
MODEL_ARGUMENTS = {"attention_mask", "position_ids", "cache", "inputs_embeds", "use_cache", "logits_to_keep"}


@dataclass(frozen=True, eq=False)
class Handover:
    """What `generate` hands over.

    Attributes:
        input_ids: `(rows, tokens)`: the prompts with their padding, as processors and criteria see them. They may be
            the new tokens alone where a cache holds what stands before, or empty where prompts come embedded.
        processors: transformers' logits processors, in their order.
        criteria: its stopping criteria, at least one on the length among them.
        config: its settings, filled in.
        model_arguments: what else the model would be called with.
    """

    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_arguments: dict[str, Any]

    @classmethod
    def take(
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_arguments: Any,
    ) -> Handover:
        """Returns the handover of a `generate` call; a function for its argument `custom_generate`."""
        return cls(input_ids, logits_processor, stopping_criteria, generation_config, model_arguments)


@dataclass(frozen=True, eq=False)
class PromptColumns:
    """Prompts in the columns that all rows share in `generate`.

    Attributes:
        prompts: of each row the tokens that are yet to be processed, padding left out.
        starts: the column of each row's first token.
        are_left_padded: whether every row ends in the last column.
        past: what a cache holds of earlier columns.
    """

    prompts: list[Prompt]
    starts: tuple[int, ...]
    are_left_padded: bool
    past: Past | None


def read_columns(layered: LayeredModel, handover: Handover) -> PromptColumns:
    """Returns the prompts of a `generate` call.

    Raises:
        TypeError: a cache that is no DynamicCache.
        ValueError: arguments for the model that are not supported, embeddings or a mask of another shape, a mask with
            a zero between ones or a row of zeros, positions that do not follow from the mask, a cache that does not
            fit, or a token id outside the vocabulary.
    """
    arguments = handover.model_arguments
    for name, value in arguments.items():
        if name not in MODEL_ARGUMENTS and value is not None:
            raise ValueError(f"{name}={_short(value)} is not supported in self-speculative decoding; leave it out.")
    cache = arguments.get("cache")
    if cache is not None and is_empty(cache):
        cache = None
    held = 0 if cache is None else cache.get_seq_length()
    embedded: torch.Tensor | None = arguments.get("inputs_embeds")
    inputs = handover.input_ids if embedded is None else embedded
    width = layered.embedding.weight.shape[1]
    if embedded is not None and (embedded.dim() != 3 or embedded.shape[2] != width):
        raise ValueError(f"inputs_embeds has shape {tuple(embedded.shape)}; it must be (rows, tokens, {width}).")
    mask = _mask(handover, inputs)
    width = mask.shape[1]
    # `generate` takes either the whole sequence or what follows the cache.
    if held >= width:
        raise ValueError(
            f"the cache holds {held} tokens, and the input with its attention mask {width}; append the new tokens, at "
            "least one."
        )
    if inputs.shape[1] not in (width, width - held):
        raise ValueError(
            f"the cache holds {held} tokens, the attention mask {width} and the input {inputs.shape[1]}; pass the "
            f"whole sequence with its mask, or the new tokens with a mask of {held} + their number."
        )
    spans = [_span(row, index) for index, row in enumerate(mask.tolist())]
    ends = [end for _, end in spans]
    if cache is not None and min(ends) < width:
        raise ValueError("attention_mask ends in zeros, but behind a filled cache no row may be padded on the right.")
    _check_positions(arguments.get("position_ids"), mask, inputs.shape[1])
    skipped = width - inputs.shape[1]
    prompts: list[Prompt] = []
    for index, (start, end) in enumerate(spans):
        row = inputs[index, max(start, held) - skipped : end - skipped]
        prompts.append(_checked_ids(row.tolist(), index, layered.vocab_size) if embedded is None else row)
    starts = tuple(start for start, _ in spans)
    past = None
    if cache is not None:
        layers = read_dynamic_cache(cache, starts, layered.num_layers)
        known = None
        if skipped == 0 and embedded is None:
            known = tuple(tuple(inputs[row, start:held].tolist()) for row, start in enumerate(starts))
        past = Past(layers, tuple(max(0, held - start) for start in starts), known)
    return PromptColumns(prompts, starts, min(ends) == width, past)


def behind_cache(
    columns: PromptColumns, rows: Sequence[list[int]], cache: CachedTokens, model: PreTrainedModel, depth: int
) -> PromptColumns:
    """Returns prompts without the beginnings that a cache holds; the last token of each is always left.

    Args:
        columns: the whole prompts.
        rows: their token ids.
        cache: of an earlier call.
        model: the call's.
        depth: how many layers the call runs.

    Raises:
        TypeError: another kind of cache.
        ValueError: a cache of another model, other rows or another depth, or one that shares nothing with a prompt.
    """
    if not isinstance(cache, CachedTokens):
        raise TypeError(
            f"cache is a {type(cache).__name__}; pass the `cache` of an earlier result, which return_cache=True gives."
        )
    if cache.model() is not model:
        raise ValueError("cache is of another model than this one; pass a cache of this model, or none.")
    if len(cache.token_ids) != len(rows):
        raise ValueError(
            f"cache holds {len(cache.token_ids)} rows, and there are {len(rows)} prompts, each counted "
            "num_return_sequences times; there must be as many."
        )
    if cache.num_layers != depth:
        raise ValueError(
            f"cache holds {cache.num_layers} layers, and this call runs {depth}; go on with the strategy and exit of "
            "the call that it is from."
        )
    lengths = []
    for index, (row, held) in enumerate(zip(rows, cache.token_ids, strict=True)):
        shared = _common_prefix(row, held)
        if shared == 0:
            raise ValueError(
                f"prompts[{index}] begins with token {row[0]}, and the cache with {held[0]}: it is of another "
                "conversation; pass the whole conversation so far, or no cache."
            )
        lengths.append(min(shared, len(row) - 1))
    prompts: list[Prompt] = [row[length:] for row, length in zip(rows, lengths, strict=True)]
    known = tuple(tuple(row[:length]) for row, length in zip(rows, lengths, strict=True))
    return replace(columns, prompts=prompts, past=Past(cache.layers, tuple(lengths), known))


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many tokens two rows share from the beginning."""
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place
    return min(len(first), len(second))


def _mask(handover: Handover, inputs: torch.Tensor) -> torch.Tensor:
    """Returns the attention mask over all columns, `(rows, columns)`, also where `generate` has dropped one of ones."""
    mask: torch.Tensor | None = handover.model_arguments.get("attention_mask")
    rows = inputs.shape[0]
    if mask is None:
        config: Any = handover.config
        return inputs.new_ones((rows, config._mask_length), dtype=torch.long)
    if mask.dim() != 2 or mask.shape[0] != rows:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; it must be (rows, columns), and there are {rows} rows."
        )
    if ((mask != 0) & (mask != 1)).any():
        raise ValueError("attention_mask holds other values than 1 (a token) and 0 (padding); pass these alone.")
    return mask


def _span(mask: list[int], row: int) -> tuple[int, int]:
    """Returns the first column of a row's tokens and the one behind its last."""
    ones = [column for column, seen in enumerate(mask) if seen]
    if not ones:
        raise ValueError(f"attention_mask[{row}] is all zeros; a prompt needs at least one token.")
    if ones[-1] - ones[0] + 1 != len(ones):
        raise ValueError(
            f"attention_mask[{row}] has a zero between ones; padding is allowed at the ends only. Without a mask, "
            "generate takes every pad_token_id for padding."
        )
    return ones[0], ones[-1] + 1


def _check_positions(position_ids: torch.Tensor | None, mask: torch.Tensor, tokens: int) -> None:
    """Checks that positions count the tokens that the mask shows, the only ones that can be followed here."""
    if position_ids is None:
        return
    expected = (mask.long().cumsum(-1) - 1)[:, -tokens:]
    seen = mask[:, -tokens:] != 0
    given = position_ids[..., -tokens:].to(mask.device)
    fits = given.dim() == 2 and given.shape[0] in (1, len(mask)) and given.shape[1] == tokens
    if not fits or ((given != expected) & seen).any():
        raise ValueError(
            f"position_ids={_short(position_ids)} do not follow from attention_mask, whose tokens are counted from 0; "
            "leave them out."
        )


def _checked_ids(tokens: list[int], row: int, vocab_size: int) -> list[int]:
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"input_ids[{row}] holds token id {token}; the model's vocabulary is 0 to {vocab_size - 1}."
            )
    return tokens


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
