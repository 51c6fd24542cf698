"""Published relatives of GRPO as arguments of :class:`~rlhfkit.modules.on_policy.grpo.GRPOModule`.

``GRPOModule(model, preset="dapo")``, or with a change ``GRPOModule(model, preset="dapo", clip_high=0.3)``. Clip and
aggregation are the defaults of the policy loss; advantages are GRPO's unless named. Sampling and rewards are set
elsewhere: ``RolloutCallback(parts=[DynamicSampling()])``, :class:`~rlhfkit.rewards.LengthPenalty`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import group_advantages, optimal_token_advantages

Preset = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce++",
    "reinforce++-baseline",
    "gpg",
    "remax",
    "gspo",
    "luspo",
    "gmpo",
    "cispo",
    "sapo",
    "vespo",
    "clip_cov",
    "kl_cov",
    "dppo",
    "decoupled_ppo",
]
"""Names of :data:`PRESETS`."""


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


def with_preset(name: Preset | None, **given: Any) -> dict[str, Any]:
    """Arguments of :class:`GRPOModule`: those that were given, in place of ``None`` those of the preset, if it has any.

    ``parts`` are those of the preset.

    Raises:
        ValueError: If there is no such preset.
    """
    if name is not None and name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    preset: Mapping[str, Any] = {} if name is None else PRESETS[name]
    if given["advantages"] is not None:  # which takes the place of how the preset's are scaled
        preset = {key: value for key, value in preset.items() if key != "advantage_scale"}
    chosen = {key: preset.get(key) if value is None else value for key, value in given.items()}
    return chosen | {"parts": preset.get("parts", ())}


def _part(path: str, **arguments: Any) -> Mapping[str, Any]:
    return {"class_path": f"rlhfkit.modules.parts.{path}", "init_args": arguments}


PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    # The GRPO of the paper: Shao et al. (2024, arXiv:2402.03300).
    "grpo": {"policy_loss": "grpo_loss", "kl_coef": 0.04},
    # No division by deviation or length: Liu et al. (2025, arXiv:2503.20783). Needs the longest answer:
    # `policy_loss_arguments={"max_length": 1024}`.
    "dr_grpo": {"policy_loss": "dr_grpo_loss", "advantage_scale": "none"},
    # Clip-higher and token mean: Yu et al. (2025, arXiv:2503.14476).
    "dapo": {"policy_loss": "dapo_loss"},
    # Leave-one-out baseline: Ahmadian et al. (2024, arXiv:2402.14740); clip and KL of TRL. The KL penalty is
    # subtracted from the reward before the baseline.
    "rloo": {
        "policy_loss": "rloo_loss",
        "advantages": "rloo_advantages",
        "parts": [_part("kl_penalty.KLInReward", coef=0.05, place="sequence")],
    },
    # No groups: Hu et al. (2025, arXiv:2501.03262); `SamplingSpec(group_size=1)` works. KL as in OpenRLHF.
    "reinforce++": {
        "policy_loss": "ppo_loss",
        "advantages": "rlhfkit.modules.on_policy.presets.no_baseline",
        "parts": [
            _part("advantages.TokenCredit", earned=True),
            _part("advantages.WhitenAdvantages"),
            _part("kl_penalty.KLInReward", coef=0.01, place="token"),
        ],
    },
    # Group mean as baseline, batch deviation as scale (Hu et al.); KL in the loss, k2, as the authors advise.
    "reinforce++-baseline": {
        "policy_loss": "ppo_loss",
        "advantages": "rlhfkit.modules.on_policy.presets.group_mean_baseline",
        "parts": [_part("advantages.WhitenAdvantages"), _part("kl_penalty.KLPenalty", coef=0.01, estimator="k2")],
    },
    # REINFORCE with the group mean as baseline, no ratio and no clip: Chu et al. (2025, arXiv:2504.02546).
    "gpg": {"policy_loss": "gpg_loss", "advantages": "gpg_advantages"},
    # The reward of the greedy answer as baseline: Li et al. (2023, arXiv:2310.10505), without its KL penalty. One
    # sample a prompt is enough: `SamplingSpec(group_size=1)`.
    "remax": {"policy_loss": "reinforce_loss", "advantages": "remax_advantages"},
    # Ratio and clip of the whole sequence: Zheng et al. (2025, arXiv:2507.18071).
    "gspo": {"policy_loss": "gspo_loss"},
    # GSPO whose sequences count by their length: Liu et al. (2026, arXiv:2602.05261).
    "luspo": {"policy_loss": "luspo_loss"},
    # Geometric mean of the tokens' clipped ratios: Zhao et al. (2025, arXiv:2507.20673).
    "gmpo": {"policy_loss": "gmpo_loss"},
    # Clipped importance weights, no token without gradient: MiniMax-M1 (2025, arXiv:2506.13585), cap of ScaleRL.
    "cispo": {"policy_loss": "cispo_loss"},
    # A smooth gate in place of the clip: Gao et al. (2025, arXiv:2511.20347).
    "sapo": {"policy_loss": "sapo_loss"},
    # A smooth kernel of the sequence's importance weight: Shen et al. (2026, arXiv:2602.10693).
    "vespo": {"policy_loss": "vespo_loss"},
    # No gradient for a few tokens that lower the entropy most: Cui et al. (2025, arXiv:2505.22617).
    "clip_cov": {"policy_loss": "clip_cov_loss"},
    # A KL penalty on a few tokens that lower the entropy most: Cui et al. (2025, arXiv:2505.22617).
    "kl_cov": {"policy_loss": "kl_cov_loss"},
    # A bound on the difference of probabilities to the engine's: Qi et al. (2026, arXiv:2602.04879), in prime-rl's
    # form, whose advantages are centred and not scaled.
    "dppo": {"policy_loss": "dppo_loss", "advantage_scale": "none"},
    # For samples of older policies (`Ahead`): the clip is around the policy before the iteration, and
    # weights correct from the policy that sampled to that one. AReaL (Fu et al., 2025, arXiv:2505.24298): no
    # critic, advantages whitened over the batch.
    "decoupled_ppo": {
        "policy_loss": "decoupled_ppo_loss",
        "advantages": "rlhfkit.modules.on_policy.presets.no_baseline",
        "parts": [_part("advantages.WhitenAdvantages")],
    },
}
"""Arguments of all presets by name, and where each was published. ``kl_coef``, or a KL penalty among the parts that are
given, takes the place of a KL penalty in ``parts``."""
