"""Published relatives of GRPO as arguments of :class:`~rlhfkit.modules.grpo.GRPOModule`.

``GRPOModule(model, **presets.DAPO)``; change a knob with ``**presets.DAPO | {"clip_high": 0.3}``. They are plain
dictionaries, so every knob is an ordinary hyperparameter of the module and shows in ``module.hparams``.

What a paper does to sampling and rewards is not the module's: DAPO's dynamic sampling is
``RolloutCallback(dynamic_sampling=...)``, its length penalty :class:`~rlhfkit.rewards.LengthPenalty`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rlhfkit.losses import group_advantages

Preset = Mapping[str, Any]


def no_baseline(rewards: Tensor, group: Tensor) -> Tensor:
    """The rewards as they are, 0 where missing: the estimator of REINFORCE++, whose baseline is the batch.

    Args:
        rewards: (B,), NaN where missing.
        group: Not used.

    Returns:
        (B,).
    """
    return rewards.nan_to_num(nan=0.0)


def centred(rewards: Tensor, group: Tensor) -> Tensor:
    """Reward minus the mean of its group.

    Args:
        rewards: (B,), NaN where missing.
        group: (B,) ids.

    Returns:
        (B,).
    """
    return group_advantages(rewards, group, scale="none")


def _preset(**arguments: Any) -> Preset:
    return MappingProxyType(arguments)


GRPO = _preset(clip_high=0.2, aggregation="sequence-mean-token-mean", kl_coef=0.04)
"""As published: Shao et al. (2024, arXiv:2402.03300)."""
DR_GRPO = _preset(clip_high=0.2, advantage_scale="none", aggregation="constant-length")
"""No division by deviation or length: Liu et al. (2025, arXiv:2503.20783). Needs ``max_length``, the longest answer."""
DAPO = _preset(clip_low=0.2, clip_high=0.28, aggregation="token-mean")
"""Clip-higher and token mean: Yu et al. (2025, arXiv:2503.14476)."""
RLOO = _preset(
    estimator="rlhfkit.losses.rloo_advantages",
    surrogate_arguments={"ratio_level": "sequence-sum"},
    clip_high=0.2,
    aggregation="sequence-mean-token-mean",
    kl_coef=0.05,
    kl_estimator="k1",
    kl_in_reward=True,
)
"""Leave-one-out baseline: Ahmadian et al. (2024, arXiv:2402.14740); clip and KL of TRL. The KL penalty acts on each
token's return here, on the whole answer's reward there."""
REINFORCE_PLUS_PLUS = _preset(
    estimator="rlhfkit.modules.presets.no_baseline",
    whiten_advantages=True,
    token_level_rewards=True,
    clip_high=0.2,
    kl_coef=0.01,
    kl_estimator="k1",
    kl_in_reward=True,
)
"""No group at all: Hu et al. (2025, arXiv:2501.03262); ``SamplingSpec(group_size=1)`` works. KL as in OpenRLHF."""
REINFORCE_PLUS_PLUS_BASELINE = _preset(
    estimator="rlhfkit.modules.presets.centred",
    whiten_advantages=True,
    clip_high=0.2,
    kl_coef=0.01,
    kl_estimator="k2",
)
"""Group mean as baseline, batch deviation as scale: same paper; KL in the loss, k2, as its authors advise."""
GSPO = _preset(
    surrogate="rlhfkit.losses.gspo_loss", clip_low=3e-4, clip_high=4e-4, aggregation="sequence-mean-token-mean"
)
"""Ratio and clip of the whole sequence: Zheng et al. (2025, arXiv:2507.18071)."""
CISPO = _preset(
    surrogate="rlhfkit.losses.cispo_loss", surrogate_arguments={"ratio_max": 5.0}, clip_low=None, clip_high=None
)
"""Clipped importance weights, no token without gradient: MiniMax-M1 (2025, arXiv:2506.13585), cap of ScaleRL."""
SAPO = _preset(
    surrogate="rlhfkit.losses.sapo_loss", clip_low=None, clip_high=None, aggregation="sequence-mean-token-mean"
)
"""A smooth gate in place of the clip."""

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": GRPO,
        "dr_grpo": DR_GRPO,
        "dapo": DAPO,
        "rloo": RLOO,
        "reinforce++": REINFORCE_PLUS_PLUS,
        "reinforce++-baseline": REINFORCE_PLUS_PLUS_BASELINE,
        "gspo": GSPO,
        "cispo": CISPO,
        "sapo": SAPO,
    }
)
"""All of them by name."""
