"""Models for the tests of the hook."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from tests.decoding.hook_kit import GRADED, graded


@pytest.fixture(name="model", params=GRADED, ids=str)
def every_graded_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model of known acceptance."""
    return graded(*request.param)


@pytest.fixture(name="llama")
def one_llama() -> PreTrainedModel:
    """A Llama of which a part of the drafts is accepted."""
    return graded("llama")
