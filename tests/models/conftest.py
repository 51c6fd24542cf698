"""Fixtures of the tests of models."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def batch() -> Any:
    """Two sequences, the second padded."""
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, 8:] = False
    return SimpleNamespace(input_ids=ids, attention_mask=real)
