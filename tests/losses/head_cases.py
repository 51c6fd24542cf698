"""Inputs and a dense reference for the tests of the fused language-model heads."""

from typing import NamedTuple

import torch
from torch import Tensor


class Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor

    def to(self, dtype: torch.dtype) -> "Head":
        """Leaves of their own in another dtype."""
        tensors = (self.hidden, self.weight, self.bias)
        return Head(*(tensor.detach().to(dtype).requires_grad_() for tensor in tensors), self.targets)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias


def random_head(
    *leading: int, width: int = 5, vocabulary: int = 11, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Head:
    """Hidden states (..., H) with random weight (V, H), bias (V,) and targets (...)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(vocabulary, leading, generator=generator)
    return Head(draw(*leading, width), draw(vocabulary, width), draw(vocabulary), targets)


def dense_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy by way of all logits, with nothing but torch's own functions."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    distribution = torch.distributions.Categorical(logits=logits / temperature, validate_args=False)
    return distribution.log_prob(targets), distribution.entropy()
