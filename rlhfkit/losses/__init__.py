"""Pure loss functions on tensors. Importing this package loads torch and nothing else."""

from rlhfkit.losses.logprobs import LogprobsOutput, linear_logprobs, logits_logprobs
from rlhfkit.losses.masked import Aggregation, LossOutput, aggregate, masked_mean, masked_sum, select, whiten
from rlhfkit.losses.supervised import cross_entropy_loss, dft_loss

__all__ = [
    "Aggregation",
    "LogprobsOutput",
    "LossOutput",
    "aggregate",
    "cross_entropy_loss",
    "dft_loss",
    "linear_logprobs",
    "logits_logprobs",
    "masked_mean",
    "masked_sum",
    "select",
    "whiten",
]
