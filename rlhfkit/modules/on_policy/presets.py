"""Published relatives of GRPO as arguments of :class:`~rlhfkit.modules.on_policy.grpo.GRPOModule`.

``GRPOModule(model, **presets.DAPO)``, or with a change ``**presets.DAPO | {"clip_high": 0.3}``. Clip and aggregation
are the defaults of the policy loss; advantages are GRPO's unless named. Sampling and rewards are set elsewhere:
``RolloutCallback(parts=[DynamicSampling()])``, :class:`~rlhfkit.rewards.LengthPenalty`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import group_advantages, optimal_token_advantages

Preset = Mapping[str, Any]


def no_baseline(rewards: Tensor, group: Tensor) -> Tensor:
    """Return the rewards (B,), with 0 where they are missing (NaN): for estimators that whiten over the batch."""
    return rewards.nan_to_num(nan=0.0)


def group_mean_baseline(rewards: Tensor, group: Tensor) -> Tensor:
    """Subtract the mean of its group from each reward (B,); 0 where the reward is missing (NaN)."""
    return group_advantages(rewards, group, scale="none")


def optimal_token_baseline(experience: Experience) -> Tensor:
    """Subtract a baseline for each position, (B, T-1); see :func:`~rlhfkit.losses.optimal_token_advantages`.

    From the engine's log-probs, without a forward pass.
    """
    one = experience
    return optimal_token_advantages(one.rewards, one.group, one.action_mask, one.rollout_logprobs)


def _preset(**arguments: Any) -> Preset:
    return MappingProxyType(arguments)


def _kl(kind: str, **arguments: Any) -> Mapping[str, Any]:
    return {"class_path": f"rlhfkit.modules.parts.kl_penalty.{kind}", "init_args": arguments}


GRPO = _preset(policy_loss="grpo_loss", kl_coef=0.04)
"""The GRPO of the paper: Shao et al. (2024, arXiv:2402.03300)."""
DR_GRPO = _preset(policy_loss="dr_grpo_loss", advantage_scale="none")
"""No division by deviation or length: Liu et al. (2025, arXiv:2503.20783). Needs ``max_length``, the longest answer."""
DAPO = _preset(policy_loss="dapo_loss")
"""Clip-higher and token mean: Yu et al. (2025, arXiv:2503.14476)."""
RLOO = _preset(
    policy_loss="rloo_loss", advantages="rloo_advantages", parts=(_kl("KLInReward", coef=0.05, place="sequence"),)
)
"""Leave-one-out baseline: Ahmadian et al. (2024, arXiv:2402.14740); clip and KL of TRL. The KL penalty is subtracted
from the reward before the baseline."""
REINFORCE_PLUS_PLUS = _preset(
    policy_loss="ppo_loss",
    advantages="rlhfkit.modules.on_policy.presets.no_baseline",
    whiten_advantages=True,
    token_level_rewards=True,
    parts=(_kl("KLInReward", coef=0.01, place="token"),),
)
"""No groups: Hu et al. (2025, arXiv:2501.03262); ``SamplingSpec(group_size=1)`` works. KL as in OpenRLHF."""
REINFORCE_PLUS_PLUS_BASELINE = _preset(
    policy_loss="ppo_loss",
    advantages="rlhfkit.modules.on_policy.presets.group_mean_baseline",
    whiten_advantages=True,
    parts=(_kl("KLPenalty", coef=0.01, estimator="k2"),),
)
"""Group mean as baseline, batch deviation as scale (Hu et al.); KL in the loss, k2, as the authors advise."""
GPG = _preset(policy_loss="gpg_loss", advantages="gpg_advantages")
"""REINFORCE with the group mean as baseline, no ratio and no clip: Chu et al. (2025, arXiv:2504.02546)."""
REMAX = _preset(policy_loss="reinforce_loss", advantages="remax_advantages")
"""The reward of the greedy answer as baseline: Li et al. (2023, arXiv:2310.10505), without its KL penalty. One sample a
prompt is enough: ``SamplingSpec(group_size=1)``."""
GSPO = _preset(policy_loss="gspo_loss")
"""Ratio and clip of the whole sequence: Zheng et al. (2025, arXiv:2507.18071)."""
LUSPO = _preset(policy_loss="luspo_loss")
"""GSPO whose sequences count by their length: Liu et al. (2026, arXiv:2602.05261)."""
GMPO = _preset(policy_loss="gmpo_loss")
"""Geometric mean of the tokens' clipped ratios: Zhao et al. (2025, arXiv:2507.20673)."""
CISPO = _preset(policy_loss="cispo_loss")
"""Clipped importance weights, no token without gradient: MiniMax-M1 (2025, arXiv:2506.13585), cap of ScaleRL."""
SAPO = _preset(policy_loss="sapo_loss")
"""A smooth gate in place of the clip: Gao et al. (2025, arXiv:2511.20347)."""
VESPO = _preset(policy_loss="vespo_loss")
"""A smooth kernel of the sequence's importance weight: Shen et al. (2026, arXiv:2602.10693)."""
CLIP_COV = _preset(policy_loss="clip_cov_loss")
"""No gradient for a few tokens that lower the entropy most: Cui et al. (2025, arXiv:2505.22617)."""
KL_COV = _preset(policy_loss="kl_cov_loss")
"""A KL penalty on a few tokens that lower the entropy most: Cui et al. (2025, arXiv:2505.22617)."""
DPPO = _preset(policy_loss="dppo_loss", advantage_scale="none")
"""A bound on the difference of probabilities to the engine's: Qi et al. (2026, arXiv:2602.04879), in prime-rl's form,
whose advantages are centred and not scaled."""
DECOUPLED_PPO = _preset(
    policy_loss="decoupled_ppo_loss", advantages="rlhfkit.modules.on_policy.presets.no_baseline", whiten_advantages=True
)
"""For samples of older policies (``Ahead``): the clip is around the policy before the iteration, and weights
correct from the policy that sampled to that one. AReaL (Fu et al., 2025, arXiv:2505.24298): no critic, advantages
whitened over the batch."""

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": GRPO,
        "dr_grpo": DR_GRPO,
        "dapo": DAPO,
        "rloo": RLOO,
        "reinforce++": REINFORCE_PLUS_PLUS,
        "reinforce++-baseline": REINFORCE_PLUS_PLUS_BASELINE,
        "gpg": GPG,
        "remax": REMAX,
        "gspo": GSPO,
        "luspo": LUSPO,
        "gmpo": GMPO,
        "cispo": CISPO,
        "sapo": SAPO,
        "vespo": VESPO,
        "clip_cov": CLIP_COV,
        "kl_cov": KL_COV,
        "dppo": DPPO,
        "decoupled_ppo": DECOUPLED_PPO,
    }
)
"""All presets by name."""
