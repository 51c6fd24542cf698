"""Pure loss functions on tensors; importing this package loads torch and nothing else.

May import: torch.
Start at :mod:`rlhfkit.losses.aggregation` (how token losses become one number), then ``policy/`` or ``preference/``.
"""

from rlhfkit.losses.advantages.gae import (
    discounted_returns,
    gae,
    length_adaptive_lambda,
    optimal_token_advantages,
    turn_advantages,
)
from rlhfkit.losses.advantages.group import (
    best_of_group_advantages,
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    opo_advantages,
    pass_at_k_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlhfkit.losses.advantages.rewards import (
    RewardMoments,
    normalize_rewards,
    token_rewards,
)
from rlhfkit.losses.aggregation import (
    Aggregation,
    LossOutput,
    aggregate,
    masked_mean,
    masked_moments,
    masked_sum,
    select,
    sequence_logprobs,
    sum_losses,
    whiten,
)
from rlhfkit.losses.distillation import (
    distillation_loss,
    on_policy_distillation_advantages,
)
from rlhfkit.losses.fused_head.logprobs import linear_logprobs, logits_logprobs
from rlhfkit.losses.importance_sampling import (
    CORRECTION_PRESETS,
    importance_weights,
    mismatch_metrics,
    off_policy_sequence_mask,
    rejection_mask,
)
from rlhfkit.losses.kl import kl_estimate, kl_loss
from rlhfkit.losses.metrics import (
    Metric,
    exp_mean_metric,
    max_metric,
    mean_metric,
    min_metric,
    sum_metric,
    sums_metric,
    weighted_metric,
)
from rlhfkit.losses.policy.base import (
    clipped_surrogate,
    policy_loss_output,
    policy_tokens,
)
from rlhfkit.losses.policy.entropy import entropy_bonus, top_entropy_mask
from rlhfkit.losses.policy.grpo import bnpo_loss, dapo_loss, dr_grpo_loss, grpo_loss
from rlhfkit.losses.policy.ppo import ppo_loss
from rlhfkit.losses.policy.reinforce import cispo_loss, gpg_loss, reinforce_loss, sapo_loss
from rlhfkit.losses.policy.sequence import gmpo_loss, gspo_loss, gspo_token_loss, luspo_loss, rloo_loss, vespo_loss
from rlhfkit.losses.policy.trust_region import (
    clip_cov_loss,
    decoupled_ppo_loss,
    dppo_loss,
    kl_cov_loss,
    log_linear_proximal_logprobs,
)
from rlhfkit.losses.preference.dpo import (
    PAIR_LOSSES,
    PreferencePairs,
    best_and_worst,
    divergence_score,
    dpo_loss,
    length_desensitized_logprobs,
    pair_partners,
    rejected_values,
    wpo_weights,
)
from rlhfkit.losses.preference.reference_free import cpo_loss, orpo_loss, simpo_loss
from rlhfkit.losses.preference.reward_model import bradley_terry_loss, process_reward_loss
from rlhfkit.losses.preference.unpaired import (
    bco_loss,
    density_ratio_weights,
    kto_kl_estimate,
    kto_kl_sums,
    kto_loss,
)
from rlhfkit.losses.supervised import cross_entropy_loss, dft_loss
from rlhfkit.losses.value import value_loss

__all__ = [
    "CORRECTION_PRESETS",
    "PAIR_LOSSES",
    "Aggregation",
    "LossOutput",
    "Metric",
    "PreferencePairs",
    "RewardMoments",
    "aggregate",
    "bco_loss",
    "best_and_worst",
    "best_of_group_advantages",
    "bnpo_loss",
    "bradley_terry_loss",
    "cispo_loss",
    "clip_cov_loss",
    "clipped_surrogate",
    "cpo_loss",
    "cross_entropy_loss",
    "dapo_loss",
    "decoupled_ppo_loss",
    "density_ratio_weights",
    "dft_loss",
    "discounted_returns",
    "distillation_loss",
    "divergence_score",
    "dpo_loss",
    "dppo_loss",
    "dr_grpo_loss",
    "entropy_bonus",
    "exp_mean_metric",
    "gae",
    "gdpo_advantages",
    "gmpo_loss",
    "gpg_advantages",
    "gpg_loss",
    "group_advantages",
    "grpo_loss",
    "gspo_loss",
    "gspo_token_loss",
    "importance_weights",
    "kl_cov_loss",
    "kl_estimate",
    "kl_loss",
    "kto_kl_estimate",
    "kto_kl_sums",
    "kto_loss",
    "length_adaptive_lambda",
    "length_desensitized_logprobs",
    "linear_logprobs",
    "log_linear_proximal_logprobs",
    "logits_logprobs",
    "luspo_loss",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "max_metric",
    "mean_metric",
    "min_metric",
    "mismatch_metrics",
    "normalize_rewards",
    "off_policy_sequence_mask",
    "on_policy_distillation_advantages",
    "opo_advantages",
    "optimal_token_advantages",
    "orpo_loss",
    "pair_partners",
    "pass_at_k_advantages",
    "policy_loss_output",
    "policy_tokens",
    "ppo_loss",
    "process_reward_loss",
    "reinforce_loss",
    "rejected_values",
    "rejection_mask",
    "remax_advantages",
    "rloo_advantages",
    "rloo_loss",
    "sapo_loss",
    "select",
    "sequence_logprobs",
    "simpo_loss",
    "sum_losses",
    "sum_metric",
    "sums_metric",
    "token_rewards",
    "top_entropy_mask",
    "turn_advantages",
    "value_loss",
    "vespo_loss",
    "weighted_metric",
    "whiten",
    "wpo_weights",
]
