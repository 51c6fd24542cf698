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
from rlhfkit.losses.aggregation import (
    Aggregation,
    LossOutput,
    aggregate,
    masked_mean,
    masked_sum,
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
    max_metric,
    mean_metric,
    sum_metric,
    weighted_metric,
)
from rlhfkit.losses.policy.entropy import entropy_bonus, top_entropy_mask
from rlhfkit.losses.policy.ppo import bnpo_loss, dapo_loss, dr_grpo_loss, grpo_loss, ppo_loss
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
    PreferencePairs,
    dpo_loss,
    length_desensitized_logprobs,
    wpo_weights,
)
from rlhfkit.losses.preference.reference_free import cpo_loss, orpo_loss, simpo_loss
from rlhfkit.losses.preference.reward_model import bradley_terry_loss, process_reward_loss
from rlhfkit.losses.preference.unpaired import (
    bco_loss,
    kto_kl_estimate,
    kto_loss,
)
from rlhfkit.losses.supervised import cross_entropy_loss, dft_loss
from rlhfkit.losses.value import value_loss

__all__ = [
    "CORRECTION_PRESETS",
    "Aggregation",
    "LossOutput",
    "PreferencePairs",
    "aggregate",
    "bco_loss",
    "best_of_group_advantages",
    "bnpo_loss",
    "bradley_terry_loss",
    "cispo_loss",
    "clip_cov_loss",
    "cpo_loss",
    "cross_entropy_loss",
    "dapo_loss",
    "decoupled_ppo_loss",
    "dft_loss",
    "discounted_returns",
    "distillation_loss",
    "dpo_loss",
    "dppo_loss",
    "dr_grpo_loss",
    "entropy_bonus",
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
    "kto_loss",
    "length_adaptive_lambda",
    "length_desensitized_logprobs",
    "linear_logprobs",
    "log_linear_proximal_logprobs",
    "logits_logprobs",
    "luspo_loss",
    "masked_mean",
    "masked_sum",
    "max_metric",
    "mean_metric",
    "mismatch_metrics",
    "off_policy_sequence_mask",
    "on_policy_distillation_advantages",
    "opo_advantages",
    "optimal_token_advantages",
    "orpo_loss",
    "pass_at_k_advantages",
    "ppo_loss",
    "process_reward_loss",
    "reinforce_loss",
    "rejection_mask",
    "remax_advantages",
    "rloo_advantages",
    "rloo_loss",
    "sapo_loss",
    "sequence_logprobs",
    "simpo_loss",
    "sum_losses",
    "sum_metric",
    "top_entropy_mask",
    "turn_advantages",
    "value_loss",
    "vespo_loss",
    "weighted_metric",
    "whiten",
    "wpo_weights",
]
