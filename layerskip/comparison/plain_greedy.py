"""Greedy decoding by the logits alone, whatever a checkpoint's generation config asks for beside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
# What changes no choice of a token.
ABOUT = ("transformers_version", "_from_model_config", "use_cache", "max_length", "max_new_tokens")


@contextmanager
def plain_greedy(model: PreTrainedModel) -> Iterator[None]:
    """Gives a model a generation config with its special tokens alone while the block runs.

    Penalties and other processors that stand in the checkpoint's own change choices step by step, which neither a pass
    over a whole answer nor a replay of rounds would see.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(do_sample=False, **{name: vars(own)[name] for name in KEPT})
    try:
        yield
    finally:
        model.generation_config = own


def left_out(model: PreTrainedModel) -> dict[str, Any]:
    """Returns what a model's generation config asks for and `plain_greedy` leaves out, as JSON takes it."""
    asked = model.generation_config.to_diff_dict()
    return {name: value for name, value in asked.items() if value and name not in (*KEPT, *ABOUT)}
