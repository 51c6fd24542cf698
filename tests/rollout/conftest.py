"""A tiny model and policies that are far from it, for tests of engines."""

import copy
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from rlhfkit.models import load_causal_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tiny model."""
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def models(folder: Path) -> list[torch.nn.Module]:
    """Three policies, the model's own first, each far from the one before."""
    made = [load_causal_lm(str(folder)).eval()]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        made.append(copy.deepcopy(made[-1]))
        with torch.no_grad():
            for parameter in made[-1].parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return made
