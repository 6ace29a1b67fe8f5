"""Settings for all tests."""

import gc
import os

import pytest
import torch

# Tiny models are slower on several threads than on one, and runs that must be equal to the bit take the same number;
# the variable is for the programs that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need CUDA, visibly, where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Spares the garbage collector, which accelerate calls for every model and training, the modules and tests."""
    gc.freeze()
