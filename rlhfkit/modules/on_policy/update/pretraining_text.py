"""``PretrainingTextModule``: the cross-entropy of pretraining text beside the loss of samples (PTX)."""

from typing import Any

from torch import Tensor

from rlhfkit.losses import cross_entropy_loss
from rlhfkit.models import policy_output
from rlhfkit.modules.base import PolicyModule
from rlhfkit.protocols import PretrainingSource
from rlhfkit.trainer_parts import datamodule_of
from rlhfkit.validation import check_number


class PretrainingTextModule(PolicyModule):
    """A policy that also learns from text in every update.

    Args:
        model: Folder or hub name of the policy.
        ptx_coef: Weight of the cross-entropy of ``PromptDataModule(pretraining_data=...)`` in every update (PTX:
            InstructGPT, Ouyang et al., 2022, arXiv:2203.02155, section 3.5; 0.05 in OpenRLHF).
        **kwargs: See :class:`PolicyModule`.

    Raises:
        ValueError: If ``ptx_coef`` is negative.
    """

    def __init__(self, model: str, *, ptx_coef: float = 0.0, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        check_number("ptx_coef", ptx_coef, minimum=0, why="0 is no text")
        self.ptx_coef = ptx_coef

    def setup(self, stage: str) -> None:
        """Raise ValueError unless there is pretraining text exactly if ``ptx_coef`` is not 0."""
        super().setup(stage)
        data = datamodule_of(self.trainer)
        has_text = isinstance(data, PretrainingSource) and data.pretraining_data is not None
        if stage != "fit" or has_text == bool(self.ptx_coef):
            return
        raise ValueError(
            "PromptDataModule(pretraining_data=...) gives text that nothing learns from: set ptx_coef (0.05 in "
            "OpenRLHF)"
            if has_text
            else f"ptx_coef={self.ptx_coef} mixes in text, and there is none: give PromptDataModule(pretraining_data="
            "SFTDataModule(...))"
        )

    def pretraining_loss(self) -> Tensor:
        """Cross-entropy, at temperature 1, of the text of a micro-batch, exact over the optimizer step."""
        data = datamodule_of(self.trainer)
        assert isinstance(data, PretrainingSource)  # setup() has checked it
        batch = data.pretraining_batch(self.trainer.fit_loop.total_batch_idx).to(self.device)
        out = policy_output(self.policy, batch, batch.loss_mask)
        return cross_entropy_loss(out.logprobs, batch.loss_mask, denominator=batch.token_denominator).loss
