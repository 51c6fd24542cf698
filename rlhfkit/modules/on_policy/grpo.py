"""``GRPOModule``: group relative policy optimization (Shao et al., 2024, arXiv:2402.03300) and its relatives."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import AdvantageScale, LossOutput, dapo_loss, discounted_returns, group_advantages, whiten
from rlhfkit.modules.functions import refuse_without_effect
from rlhfkit.modules.on_policy.advantages import AdvantageFunction
from rlhfkit.modules.on_policy.base import KLPlace, OnPolicyModule
from rlhfkit.validation import check_number


class GRPOModule(OnPolicyModule):
    """A policy that learns from the rewards of groups of samples: no critic, the group is the baseline.

    The advantage of a sample is its reward's standard score within its group; the loss is PPO's clipped surrogate with
    that advantage on every token, plus an optional KL penalty towards the model it started from.

    Published relatives (Dr.GRPO, DAPO, RLOO, REINFORCE++, GSPO, CISPO ...) are other arguments, collected in
    :mod:`rlhfkit.presets <rlhfkit.modules.on_policy.presets>`::

        GRPOModule("Qwen/Qwen3-0.6B", **presets.CISPO)
        GRPOModule("Qwen/Qwen3-0.6B", advantages="rloo_advantages", policy_loss="sapo_loss")

    Override :meth:`loss` for an objective that is no policy loss.

    Args:
        model: Folder or hub name of the policy.
        advantages: As in :class:`OnPolicyModule`; ``None``: :func:`~rlhfkit.losses.group_advantages`. To what a
            function of rewards and groups returns, ``gamma``, ``whiten_advantages`` and ``token_level_rewards`` are
            applied as to that; what a function of the experience returns is used as it is.
        advantage_scale: What the centred reward is divided by: the standard deviation of its ``group``, of the
            ``batch``, or ``none`` (Dr.GRPO, Liu et al., 2025, arXiv:2503.20783). Only without ``advantages``.
        policy_loss: As in :class:`OnPolicyModule`. The default is DAPO's, with its clip (0.2 and 0.28: Yu et al., 2025,
            arXiv:2503.14476) and its aggregation (``token-mean``, TRL's default too); ``grpo_loss`` has the clip (0.2)
            and the aggregation of the GRPO paper.
        gamma: Discount of later tokens' rewards, in [0, 1].
        whiten_advantages: Make the advantages of all tokens of the iteration mean 0 and deviation 1 (REINFORCE++).
        token_level_rewards: Where samples say which token earned what (``Sample.token_rewards``), the advantage of a
            token is what is earned from it on, not that of its sample. For estimators in units of the reward.
        **kwargs: See :class:`OnPolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    usual_kl_place: ClassVar[KLPlace] = "sequence"

    def __init__(
        self,
        model: str,
        *,
        advantages: str | Callable[..., Tensor] | None = None,
        advantage_scale: AdvantageScale = "group",
        policy_loss: str | Callable[..., LossOutput] = dapo_loss,
        gamma: float = 1.0,
        whiten_advantages: bool = False,
        token_level_rewards: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, advantages=advantages, policy_loss=policy_loss, **kwargs)
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), scale=advantage_scale)  # checks the scale
        check_number("gamma", gamma, minimum=0, maximum=1)
        if token_level_rewards and advantages is None and advantage_scale != "none":
            raise ValueError(
                "token_level_rewards takes what was earned before a token from its sample's advantage, which has to be "
                f"in units of the reward: advantage_scale={advantage_scale!r} has others, use 'none' or advantages=..."
            )
        self._estimator: AdvantageFunction | None = None
        given = self.advantage_function
        if given is not None:
            without_effect = {"advantage_scale": advantage_scale != "group"}
            if not given.of_rewards:
                without_effect |= {"gamma": gamma != 1.0, "whiten_advantages": whiten_advantages}
                without_effect |= {"token_level_rewards": token_level_rewards}
            refuse_without_effect(without_effect, f"advantages={given.name}")
        if given is not None and given.of_rewards:
            # A part of advantages(), which discounts and whitens, and not in its place.
            self._estimator, self.advantage_function = given, None

    def estimate(self, rewards: Tensor, group: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Advantage of each sample from rewards alone.

        Args:
            rewards: (B,), NaN where missing.
            group: (B,) int64, equal for samples of one prompt.
            lengths: (B,) actions of each sample; 1 when ``None``.

        Returns:
            (B,).
        """
        if self._estimator is None:
            return group_advantages(rewards, group, scale=self.hparams["advantage_scale"])
        return self._estimator.estimate(rewards, group, torch.ones_like(group) if lengths is None else lengths)

    def advantages(self, experience: Experience) -> Tensor:
        """Advantage of each sample or token; override it for an estimator that needs more than rewards and groups.

        Args:
            experience: The whole iteration, B sequences, the same on every rank.

        Returns:
            (B,), or (B, T-1) when tokens differ; 0 where the reward is missing.
        """
        mask = experience.action_mask
        scores = self.estimate(self.sample_rewards(experience), experience.group, mask.sum(-1))
        earned = experience.token_rewards if self.hparams["token_level_rewards"] else None
        of_samples = earned is None and self.kl_in_reward != "token" and self.hparams["gamma"] == 1.0
        if of_samples and not self.hparams["whiten_advantages"]:
            return scores
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
        if self.advantage_function is not None:
            return  # it may not compare samples at all
        alone = self.estimate(torch.ones(1), torch.zeros(1, dtype=torch.int64))
        if group_size < 2 and not bool(alone.any()):
            raise ValueError(
                f"{type(self).__name__} compares the samples of a prompt, and with group_size={group_size} every "
                "advantage is 0: use SamplingSpec(group_size=2) or more (8 is usual)"
            )
