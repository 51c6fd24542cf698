"""Random batches and golden values for the tests of the policy losses."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

GOLDEN_FOLDER = Path(__file__).parents[1] / "golden"
TRL = json.loads((GOLDEN_FOLDER / "trl.json").read_text())
OPENRLHF = json.loads((GOLDEN_FOLDER / "openrlhf.json").read_text())
FIELD = json.loads((GOLDEN_FOLDER / "field.json").read_text())


def tensors(record: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The lists of a golden record as tensors."""
    return {name: torch.tensor(value, dtype=dtype) for name, value in record.items() if isinstance(value, list)}


class Batch(NamedTuple):
    """Arguments of a policy loss."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor

    def on(self, rows: Any) -> "Batch":
        return Batch(*(tensor[rows] for tensor in self))

    def leaf(self) -> "Batch":
        """The same with log-probs that collect a gradient."""
        return self._replace(logprobs=self.logprobs.clone().requires_grad_())


def policy_batch(seed: int = 0, batch: int = 5, steps: int = 7, dtype: torch.dtype = torch.float64) -> Batch:
    """Sequences of different length with gaps, per-token advantages of both signs, ratios on both sides of the clip."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(batch, steps, generator=generator, dtype=torch.float64)
    new = old + 0.4 * torch.randn(batch, steps, generator=generator, dtype=torch.float64)
    advantages = torch.randn(batch, steps, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, steps + 1, (batch, 1), generator=generator)
    gaps = torch.rand(batch, steps, generator=generator) < 0.2
    mask = (torch.arange(steps) < lengths) & ~gaps
    mask[:, 0] = True
    return Batch(new.to(dtype), old.to(dtype), advantages.to(dtype), mask)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]
