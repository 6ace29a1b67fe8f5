"""Models that tests place otherwise than in one memory, and the same ones in one place to compare with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from transformers import PreTrainedModel

from tests import kit

BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": kit.mixed,
    "tied": lambda: kit.mixed(tie_word_embeddings=True),
    "gemma2": lambda: kit.graded("gemma2", "some"),
    "gpt2": lambda: kit.build(kit.gpt2_config()),
}


@cache
def whole(family: str) -> PreTrainedModel:
    """Returns a model in one place, for tests that change nothing in it."""
    return BUILDERS[family]()
