"""Random numbers of tests of losses do not depend on which tests ran before in the same process."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
