"""``EntropyBonus`` and ``EntropyTarget``: a bonus for entropy, with a fixed weight or one that follows the entropy."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import LossOutput, entropy_bonus, masked_sum
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.metrics import StepMean
from rlhfkit.parts import Coefficient, Part, check_coefficient, coefficient
from rlhfkit.validation import check_number


class EntropyBonus(Part):
    """Adds an entropy bonus to the policy loss, see :func:`~rlhfkit.losses.entropy_bonus`. Example::

        GRPOModule("Qwen/Qwen3-0.6B", parts=[EntropyBonus(lambda step: 0.01 * 0.99**step)])

    Args:
        coef: Weight of the bonus, see :data:`~rlhfkit.parts.Coefficient`; negative lowers the entropy.

    Raises:
        ValueError: If it is not finite.
    """

    outputs = ("entropy",)

    def __init__(self, coef: Coefficient) -> None:
        self.coef = check_coefficient("EntropyBonus.coef", coef)

    def term(self, batch: Experience, out: PolicyOutput, old: Tensor) -> LossOutput:
        """The bonus."""
        assert out.entropy is not None
        coef, shared = coefficient(self.coef, self.module), self.module.policy_loss.aggregation_arguments(batch)
        return entropy_bonus(out.entropy, batch.action_mask, coef=coef, **shared)


class EntropyTarget(Part):
    """Adaptive entropy control (Skywork-OR1: He et al., 2025, arXiv:2505.22312, section 4).

    After each optimizer step with entropy H over its tokens, ``c ← max(0, c + δ)`` where ``H < target``, else
    ``max(0, c - δ)``; the entropy bonus of the next step has the weight ``c`` where ``H ≤ target`` and 0 elsewhere. The
    weight is logged as ``policy/entropy_coef``. Example::

        GRPOModule("Qwen/Qwen3-0.6B", parts=[EntropyTarget(0.2)])

    Args:
        target: Entropy in nats per token below which the bonus acts (0.2 in Skywork-OR1).
        step: δ, by which the coefficient changes in an optimizer step (0.005 in Skywork-OR1).

    Raises:
        ValueError: If an argument is out of range.
    """

    outputs = ("entropy",)

    def __init__(self, target: float, *, step: float = 0.005) -> None:
        check_number("EntropyTarget.target", target, above=0)
        check_number("EntropyTarget.step", step, above=0)
        self.target = target
        self.step = step
        self.coefficient = 0.0
        """``c``."""
        self.applied = 0.0
        """Weight of the bonus in the current step: ``c`` or 0."""
        self._entropy = StepMean()

    def term(self, batch: Experience, out: PolicyOutput, old: Tensor) -> LossOutput:
        """The bonus with the weight of this step."""
        if not self.applied:
            return LossOutput(out.logprobs.new_zeros(()), {})
        assert out.entropy is not None
        return entropy_bonus(
            out.entropy, batch.action_mask, coef=self.applied, **self.module.policy_loss.aggregation_arguments(batch)
        )

    @torch.no_grad()
    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Mapping[str, Any]:
        """Add the entropy of one micro-batch to that of its optimizer step."""
        assert out.entropy is not None
        self._entropy.add(masked_sum(out.entropy.detach().float(), batch.action_mask), batch)
        return {}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Log the weight of this step, and adapt it to the entropy of all ranks. A collective."""
        pl_module.log_means({"policy/entropy_coef": torch.full((), self.applied, device=pl_module.device)})
        entropy = self._entropy.take(pl_module)
        self.coefficient = max(0.0, self.coefficient + (self.step if entropy < self.target else -self.step))
        self.applied = self.coefficient if entropy <= self.target else 0.0

    def state_dict(self) -> dict[str, float]:
        """The coefficient, and what of it is applied."""
        return {"coefficient": self.coefficient, "applied": self.applied}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with them."""
        self.coefficient, self.applied = state["coefficient"], state["applied"]
