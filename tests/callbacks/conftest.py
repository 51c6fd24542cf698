"""For all tests of callbacks."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """A tiny model is faster on one core, and two ranks share two of them."""
    torch.set_num_threads(1)
