"""Settings that must hold before any test imports torch, transformers or triton, and what the `gpu` mark means."""

import os
import random

# Nothing in the suite may wait for a network; two threads keep timings alike on every machine.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import pytest
import torch

torch.set_num_threads(min(2, int(os.environ["OMP_NUM_THREADS"])))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu`, with the reason, on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
