"""Random adapters for the tests of LoRA."""

from typing import Any

import torch
from torch import Tensor, nn

from rlhfkit.models import policy_output


def logprobs(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        return policy_output(model, batch, batch.attention_mask[:, 1:]).logprobs


def train_a_bit(model: nn.Module, seed: int = 0) -> None:
    """Move every trained weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
