"""Random batches, golden values and the policy losses for their tests."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhfkit import losses
from rlhfkit.losses import LossOutput

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


def beside(loss: Callable[..., LossOutput], **more: Any) -> Callable[..., LossOutput]:
    """A loss that needs more arguments; functions make them of the old policy's log-probs."""

    def whole(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **knobs: Any) -> LossOutput:
        given = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages, "mask": mask}
        given |= {name: value(old_logprobs) if callable(value) else value for name, value in more.items()}
        return loss(**given, **knobs)

    return whole


def grpo_with_kl(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **knobs: Any) -> LossOutput:
    surrogate = losses.grpo_loss(logprobs, old_logprobs, advantages, mask, **knobs)
    shared = {"aggregation": "sequence-mean-token-mean", "denominator": knobs.get("denominator")}
    return losses.sum_losses(surrogate, losses.kl_loss(logprobs, old_logprobs - 0.1, mask, coef=0.1, **shared))


# Its ratio is to the policy that sampled, which the properties move as the old one.
SAMPLED = {"old_logprobs": lambda old: old - 0.05, "rollout_logprobs": lambda old: old}
# A priority that belongs to the token makes the draw the same in any order and padding.
DRAWN = {"priority": lambda old: (old * 1e3).frac().abs(), "fraction": 0.2, "covariance_low": 0.0}
PUBLIC = {name.removesuffix("_loss"): getattr(losses, name) for name in losses.__all__ if name.endswith("_loss")}
PUBLIC = {name: loss for name, loss in PUBLIC.items() if "old_logprobs" in inspect.signature(loss).parameters}
LOSSES = PUBLIC | {
    "grpo": grpo_with_kl,
    "dr_grpo": beside(losses.dr_grpo_loss, max_length=16),
    "decoupled_ppo": beside(losses.decoupled_ppo_loss, rollout_logprobs=lambda old: old - 0.05),
    "dppo": beside(losses.dppo_loss, **SAMPLED),
    "dppo_two_sided": beside(losses.dppo_loss, two_sided=True, **SAMPLED),
    "clip_cov": beside(losses.clip_cov_loss, **DRAWN),
    "kl_cov": beside(losses.kl_cov_loss, fraction=0.2),
}
"""Every policy loss of the package, a new one without a line here, called with the same four tensors."""
AGGREGATION = {
    name: inspect.signature(PUBLIC[name.removesuffix("_two_sided")]).parameters["aggregation"].default
    for name in LOSSES
}
