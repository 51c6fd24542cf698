"""The pretraining mix of InstructGPT: text beside samples, so that the policy forgets less (PTX)."""

from typing import Any

from torch import Tensor

from rlhfkit.data.batch import TokenBatch
from rlhfkit.losses import cross_entropy_loss
from rlhfkit.models import policy_output


def check_pretraining_data(module: Any, coef: float) -> None:
    """Raise unless a module that mixes in text has some, and a DataModule that has some is asked for it.

    Args:
        module: The LightningModule, attached to a Trainer.
        coef: Its weight of the text.

    Raises:
        ValueError: Otherwise.
    """
    there = getattr(module.trainer.datamodule, "pretraining_data", None) is not None
    if bool(coef) == there:
        return
    raise ValueError(
        "PromptDataModule(pretraining_data=...) gives text that nothing learns from: set ptx_coef (0.05 in OpenRLHF)"
        if there
        else f"ptx_coef={coef} mixes in text, and there is none: give PromptDataModule(pretraining_data="
        "SFTDataModule(...))"
    )


def pretraining_loss(module: Any, batch_idx: int) -> Tensor:
    """Cross-entropy of the text that belongs to a micro-batch, at temperature 1.

    Its mean is over the text's tokens of the whole optimizer step, whatever the micro-batches and ranks.

    Args:
        module: The LightningModule with a ``policy``.
        batch_idx: Position of the micro-batch in the iteration.

    Returns:
        Scalar.
    """
    trainer = module.trainer
    number = trainer.current_epoch * trainer.num_training_batches + batch_idx
    batch: TokenBatch = trainer.datamodule.pretraining_batch(number).to(module.device)
    out = policy_output(module.policy, batch, batch.loss_mask)
    return cross_entropy_loss(out.logprobs, batch.loss_mask, denominator=batch.token_denominator).loss
