"""Pure loss functions on tensors. Importing this package loads torch and nothing else."""

from rlhfkit.losses.masked import Aggregation, LossOutput, aggregate, masked_mean, masked_sum, select, whiten

__all__ = ["Aggregation", "LossOutput", "aggregate", "masked_mean", "masked_sum", "select", "whiten"]
