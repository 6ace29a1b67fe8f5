"""Loading a checkpoint into an engine."""

from __future__ import annotations

import os
from typing import Any

import torch

from layerskip.decoding.cost import CostTable
from layerskip.decoding.engine import Engine
from layerskip.model.loading import load_checkpoint


def load(
    path_or_id: str | os.PathLike[str],
    *,
    exit_layer: int | str | None = None,
    num_draft_tokens: int | None = None,
    draft_vocab_size: int | None = None,
    draft_stop: str | None = None,
    copy_ngrams: str | None = None,
    tree_nodes: int | None = None,
    compile: bool | None = None,
    cost_table: CostTable | None = None,
    base: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    revision: str | None = None,
) -> Engine:
    """Loads a checkpoint and its tokenizer and returns an `Engine` for them.

    Args:
        path_or_id: a local folder, or a model id on the Hugging Face hub. LoRA adapters in a folder of their own are
            merged into the model that they name, in fp32, and the sums rounded once to `dtype`.
        exit_layer, num_draft_tokens, cost_table: see `Engine`; by default the checkpoint's.
        draft_stop, copy_ngrams, tree_nodes, compile: see `Engine`; off by default.
        draft_vocab_size: how many of the checkpoint's draft token ids to draft from; the model's vocabulary size for
            the full head. By default the checkpoint's recommendation, else all that it has, else the full head.
        base: folder or hub id of the model beneath a folder of adapters, in place of the one that they name.
        device: where the model goes; by default the first CUDA device where there is one, else the CPU.
        device_map: where the parts of a whole model go, in place of `device`: "auto" spreads it over the devices that
            there are, a dict names a device for each module; see `from_pretrained` of transformers.
        dtype: of the weights; "auto" keeps the checkpoint's, of adapters that of the model beneath. Quantised weights
            keep theirs.
        attn_implementation: "sdpa" or "eager"; by default what transformers chooses for the family.
        revision: of a model on the hub.

    Raises:
        ValueError: no model there, a family that is not supported, a number out of range, draft token ids that are
            missing or damaged, a `base` beneath a whole model, a `device_map` beside `device` or for adapters, or
            quantised weights of a kind that is not supported.
        TypeError: `path_or_id` or `base` is no path or id, `device_map` no string or dict, or a number is no integer.
        ImportError: a folder of adapters and no peft, or quantised weights without the package that unpacks them.
    """
    checkpoint = load_checkpoint(
        path_or_id,
        device=device,
        device_map=device_map,
        dtype=dtype,
        attn_implementation=attn_implementation,
        revision=revision,
        base=base,
    )
    return Engine(
        checkpoint.model,
        checkpoint.tokenizer,
        exit_layer=exit_layer,
        num_draft_tokens=num_draft_tokens,
        draft_vocab_size=draft_vocab_size,
        draft_stop=draft_stop,
        copy_ngrams=copy_ngrams,
        tree_nodes=tree_nodes,
        compile=compile,
        draft_token_ids=checkpoint.draft_token_ids,
        cost_table=cost_table,
    )
