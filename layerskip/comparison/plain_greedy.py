"""Greedy decoding by the logits alone, whatever a checkpoint's generation config asks for beside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def plain_greedy(model: PreTrainedModel) -> Iterator[None]:
    """Gives a model a generation config with its special tokens alone while the block runs.

    Penalties and other processors that stand in the checkpoint's own change choices step by step, which neither a pass
    over a whole answer nor a replay of rounds would see.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    special = {name: vars(own)[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(do_sample=False, **special)
    try:
        yield
    finally:
        model.generation_config = own
