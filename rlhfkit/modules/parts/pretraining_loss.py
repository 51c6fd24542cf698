"""``PretrainingLoss``: the cross-entropy of pretraining text beside the loss of samples (PTX)."""

from typing import Any

import lightning as L

from rlhfkit.data.types import Experience
from rlhfkit.losses import LossOutput, cross_entropy_loss, weighted_metric
from rlhfkit.models import PolicyOutput, policy_output
from rlhfkit.parts import Coefficient, Part, check_coefficient, coefficient
from rlhfkit.protocols import PretrainingSource
from rlhfkit.trainer_parts import datamodule_of


class PretrainingLoss(Part):
    """Adds the cross-entropy of text to every update of a policy that learns from samples (PTX).

    The text is ``PromptDataModule(pretraining_data=...)``, at temperature 1; its loss is logged as ``ptx/loss``
    (InstructGPT: Ouyang et al., 2022, arXiv:2203.02155, section 3.5). Example::

        PPOModule("sft", parts=[PretrainingLoss(0.05)])

    Args:
        coef: Weight of the cross-entropy (0.05 in OpenRLHF), see :data:`~rlhfkit.parts.Coefficient`.

    Raises:
        ValueError: If it is not above 0, or, when fitting begins, if there is no text.
    """

    learns_from_text = True

    def __init__(self, coef: Coefficient) -> None:
        self.coef = check_coefficient("PretrainingLoss.coef", coef, above=0)

    def attach(self, module: Any) -> None:
        """Check that the module learns from samples, beside which there is text."""
        super().attach(module)
        if Experience not in module.batch_types:
            raise ValueError(
                f"PretrainingLoss is for modules that learn from their own samples, and {type(module).__name__} does "
                "not: mix the text into its data"
            )

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Check that there is text."""
        data = datamodule_of(trainer)
        if stage == "fit" and not (isinstance(data, PretrainingSource) and data.pretraining_data is not None):
            raise ValueError(
                f"PretrainingLoss({self.coef}) mixes in text, and there is none: give PromptDataModule("
                "pretraining_data=SFTDataModule(...))"
            )

    def auxiliary_loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """Cross-entropy of the text beside a micro-batch, exact over the optimizer step."""
        data = datamodule_of(self.module.trainer)
        assert isinstance(data, PretrainingSource)  # setup() has checked it
        text = data.pretraining_batch(self.module.trainer.fit_loop.total_batch_idx).to(self.module.device)
        found = policy_output(self.module.policy, text, text.loss_mask)
        loss = cross_entropy_loss(found.logprobs, text.loss_mask, denominator=text.token_denominator).loss
        return LossOutput(coefficient(self.coef, self.module) * loss, {"ptx/loss": weighted_metric(loss, 1.0)})
