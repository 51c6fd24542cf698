"""Entropy control: a bonus whose weight follows the policy's entropy, and vanishes above a target."""

from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import masked_sum
from rlhfkit.validation import check_number


@dataclass(frozen=True, kw_only=True)
class EntropyControl:
    """Adaptive entropy control (Skywork-OR1: He et al., 2025, arXiv:2505.22312, section 4).

    After each optimizer step with entropy H over its tokens, ``c ← max(0, c + δ)`` where ``H < target``, else
    ``max(0, c - δ)``; the entropy bonus of the next step has the weight ``c`` where ``H ≤ target`` and 0 elsewhere.
    Example::

        GRPOModule("Qwen/Qwen3-0.6B", entropy_control=EntropyControl(target=0.2))
    """

    target: float | None = None
    """Entropy in nats per token below which the bonus acts (0.2 in Skywork-OR1); ``None``: no control."""
    step: float = 0.005
    """δ, by which the coefficient changes in an optimizer step (0.005 in Skywork-OR1); only with a ``target``."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_number("EntropyControl.target", self.target, above=0, optional=True)
        check_number("EntropyControl.step", self.step, above=0)
        if self.target is None and self.step != type(self).step:
            raise ValueError(f"EntropyControl(step={self.step}) is how fast a bonus follows a target: give target too")


class EntropyController:
    """The state of an :class:`EntropyControl`."""

    def __init__(self, control: EntropyControl) -> None:
        self.control = control
        self.coefficient = 0.0
        """``c``."""
        self.applied = 0.0
        """Weight of the bonus in the current step: ``c`` or 0."""
        self._entropy: Tensor | float = 0.0

    @torch.no_grad()
    def measure(self, batch: Experience, entropy: Tensor) -> None:
        """Add the entropy (B, T-1) of one micro-batch to that of its optimizer step."""
        total = masked_sum(entropy.detach().float(), batch.action_mask)
        self._entropy = self._entropy + total / max(batch.step_tokens or float(batch.action_mask.sum()), 1.0)

    def update(self, module: L.LightningModule) -> float:
        """Adapt the coefficient after an optimizer step's micro-batches; returns their entropy. A collective."""
        total = torch.as_tensor(self._entropy, dtype=torch.float32, device=module.device)
        self._entropy = 0.0
        entropy, target = float(module.trainer.strategy.reduce(total, reduce_op="sum")), self.control.target
        assert target is not None
        step = self.control.step if entropy < target else -self.control.step
        self.coefficient = max(0.0, self.coefficient + step)
        self.applied = self.coefficient if entropy <= target else 0.0
        return entropy

    def state_dict(self) -> list[float]:
        """The coefficient and what of it is applied."""
        return [self.coefficient, self.applied]

    def load_state_dict(self, state: list[float]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.coefficient, self.applied = state
