"""``GRPOModule``: group relative policy optimization (Shao et al., 2024, arXiv:2402.03300) and its relatives."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.experience import Experience
from rlhfkit.losses import AdvantageScale, discounted_returns, group_advantages, whiten
from rlhfkit.modules.functions import function_name, resolve_function
from rlhfkit.modules.on_policy import OnPolicyModule

Estimator = Callable[[Tensor, Tensor], Tensor]
"""Rewards (B,), NaN where missing, and group ids (B,) of a whole iteration to advantages (B,)."""


class GRPOModule(OnPolicyModule):
    """A policy that learns from the rewards of groups of samples: no critic, the group is the baseline.

    The advantage of a sample is its reward's standard score within its group; the loss is PPO's clipped surrogate with
    that advantage on every token, plus an optional KL penalty towards the model it started from.

    Published relatives (Dr.GRPO, DAPO, RLOO, REINFORCE++, GSPO, CISPO ...) are other arguments, collected in
    :mod:`rlhfkit.modules.presets`::

        GRPOModule("Qwen/Qwen3-0.6B", **presets.CISPO)
        GRPOModule("Qwen/Qwen3-0.6B", estimator=my_function_of_rewards_and_groups)

    Override :meth:`advantages` where the estimator needs more than rewards, and :meth:`loss` for another objective.

    Args:
        model: Folder or hub name of the policy.
        estimator: Advantage of each sample: a function of rewards (B,) and group ids (B,), or its dotted name;
            ``None``: :func:`~rlhfkit.losses.group_advantages`.
        advantage_scale: What the centred reward is divided by: the standard deviation of its ``group``, of the
            ``batch``, or ``none`` (Dr.GRPO, Liu et al., 2025, arXiv:2503.20783). Only for the estimator ``None``.
        gamma: Discount of later tokens' rewards, in [0, 1].
        whiten_advantages: Make the advantages of all tokens of the iteration mean 0 and deviation 1 (REINFORCE++).
        token_level_rewards: Where samples say which token earned what (``Sample.token_rewards``), the advantage of a
            token is what is earned from it on, not that of its sample. For estimators in units of the reward.
        **kwargs: See :class:`OnPolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        estimator: str | Estimator | None = None,
        advantage_scale: AdvantageScale = "group",
        gamma: float = 1.0,
        whiten_advantages: bool = False,
        token_level_rewards: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), scale=advantage_scale)  # checks the scale
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must be in [0, 1], got {gamma}")
        if token_level_rewards and estimator is None and advantage_scale != "none":
            raise ValueError(
                "token_level_rewards takes what was earned before a token from its sample's advantage, which has to be "
                f"in units of the reward: advantage_scale={advantage_scale!r} has others, use 'none' or an estimator"
            )
        self._estimator: Estimator | None = None if estimator is None else resolve_function(estimator, "estimator")
        self.hparams["estimator"] = None if self._estimator is None else function_name(self._estimator)

    def estimate(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Advantage of each sample from rewards alone.

        Args:
            rewards: (B,), NaN where missing.
            group: (B,) int64, equal for samples of one prompt.

        Returns:
            (B,).
        """
        if self._estimator is None:
            return group_advantages(rewards, group, scale=self.hparams["advantage_scale"])
        return self._estimator(rewards, group)

    def advantages(self, experience: Experience) -> Tensor:
        """Advantage of each sample or token; override it for an estimator that needs more than rewards and groups.

        Args:
            experience: The whole iteration, B sequences, the same on every rank.

        Returns:
            (B,), or (B, T-1) when tokens differ; 0 where the reward is missing.
        """
        scores = self.estimate(experience.rewards, experience.group)
        in_reward = self.hparams["kl_coef"] and self.hparams["kl_in_reward"]
        earned = experience.token_rewards if self.hparams["token_level_rewards"] else None
        of_samples = earned is None and not in_reward and self.hparams["gamma"] == 1.0
        if of_samples and not self.hparams["whiten_advantages"]:
            return scores
        mask = experience.action_mask
        rewards = self.token_rewards(experience, scores, earned=earned)
        returns = discounted_returns(rewards, mask, gamma=self.hparams["gamma"])
        return whiten(returns, mask) if self.hparams["whiten_advantages"] else returns

    def check_group_size(self, group_size: int) -> None:
        """Called by ``RolloutCallback`` before training.

        Args:
            group_size: Samples per prompt.

        Raises:
            ValueError: If there is nothing to compare a sample with.
        """
        alone = self.estimate(torch.ones(1), torch.zeros(1, dtype=torch.int64))
        if group_size < 2 and not bool(alone.any()):
            raise ValueError(
                f"{type(self).__name__} compares the samples of a prompt, and with group_size={group_size} every "
                "advantage is 0: use SamplingSpec(group_size=2) or more (8 is usual)"
            )
