"""Pure loss functions on tensors. Importing this package loads torch and nothing else."""

from rlhfkit.losses.advantages import AdvantageScale, group_advantages
from rlhfkit.losses.distillation import (
    distillation_loss,
    on_policy_distillation_advantages,
    on_policy_distillation_loss,
)
from rlhfkit.losses.kl import KLEstimator, kl_estimate
from rlhfkit.losses.kto import kto_kl_estimate, kto_kl_sums, kto_loss, kto_paired_loss
from rlhfkit.losses.logprobs import LogprobsOutput, linear_logprobs, logits_logprobs
from rlhfkit.losses.masked import Aggregation, LossOutput, aggregate, masked_mean, masked_sum, select, whiten
from rlhfkit.losses.policy import grpo_loss, ppo_loss
from rlhfkit.losses.preference import dpo_loss
from rlhfkit.losses.preference_divergences import divergence_score
from rlhfkit.losses.preference_pairs import PAIR_LOSSES, PreferencePairs
from rlhfkit.losses.preference_reference_free import alphapo_loss, cpo_loss, orpo_loss, simpo_loss, slic_loss
from rlhfkit.losses.reward import bradley_terry_loss, pairwise_accuracy, process_reward_loss
from rlhfkit.losses.sequences import length_desensitized_logprobs, sequence_logprobs, wpo_weights
from rlhfkit.losses.single_pass import SinglePassOutput, linear_cross_entropy, linear_policy_gradient
from rlhfkit.losses.supervised import cross_entropy_loss, dft_loss

__all__ = [
    "PAIR_LOSSES",
    "AdvantageScale",
    "Aggregation",
    "KLEstimator",
    "LogprobsOutput",
    "LossOutput",
    "PreferencePairs",
    "SinglePassOutput",
    "aggregate",
    "alphapo_loss",
    "bradley_terry_loss",
    "cpo_loss",
    "cross_entropy_loss",
    "dft_loss",
    "distillation_loss",
    "divergence_score",
    "dpo_loss",
    "group_advantages",
    "grpo_loss",
    "kl_estimate",
    "kto_kl_estimate",
    "kto_kl_sums",
    "kto_loss",
    "kto_paired_loss",
    "length_desensitized_logprobs",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_policy_gradient",
    "logits_logprobs",
    "masked_mean",
    "masked_sum",
    "on_policy_distillation_advantages",
    "on_policy_distillation_loss",
    "orpo_loss",
    "pairwise_accuracy",
    "ppo_loss",
    "process_reward_loss",
    "select",
    "sequence_logprobs",
    "simpo_loss",
    "slic_loss",
    "whiten",
    "wpo_weights",
]
