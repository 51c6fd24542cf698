"""``RewardedModule``: the rewards that are learned from, with a KL penalty in them or in the loss."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import (
    KLEstimator,
    kl_estimate,
    masked_sum,
    token_rewards,
)
from rlhfkit.modules.on_policy.preparation.placed_models import PlacedModule
from rlhfkit.roles import FrozenModel, ModelPool, ServedModel, frozen_model
from rlhfkit.roles.replica import Role
from rlhfkit.validation import check_number

KLPlace = Literal["token", "sequence"]
"""Which reward a KL penalty is subtracted from."""


class RewardedModule(PlacedModule):
    """A policy whose samples are rewarded, by a function of the callback, a reward model of the module, or both.

    Args:
        model: Folder or hub name of the policy.
        reference: Where the reference model of the KL penalty is: ``None``: a frozen child, or the policy without its
            adapters; a :class:`~rlhfkit.roles.ModelPool`: on machines of its own, where it works while the policy
            computes its old log-probs; a :class:`~rlhfkit.roles.ServedModel`: behind a running ``vllm serve``.
        reward_model: Scores samples, in addition to the callback's reward, see
            :class:`~rlhfkit.modules.parts.reward_model.RewardModel`: a folder or hub name, a
            :class:`~rlhfkit.roles.ModelPool`, or a mapping of several by name.
        reward_weights: Factors of the scores of several reward models, by name; 1 for those that are left out.
        mask_truncated: Learn nothing from answers that the length limit cut off, see
            :class:`~rlhfkit.modules.parts.rewards.MaskTruncated`; other parts of that file shape rewards.
        kl_coef: Weight of the KL penalty; 0 (TRL's default) loads no reference model.
        kl_estimator: ``k1``, ``k2`` or ``k3``; ``None``: k1 in the reward (InstructGPT), k3 in the loss (GRPO). In the
            loss k1 has a gradient of mean 0 and is refused, except with the ratio as its weight
            (``policy_loss="grpo_loss", policy_loss_arguments={"kl_importance_weight": True}``).
        kl_in_reward: Subtract the penalty from the reward instead of adding it to the loss: ``token``, from the reward
            of each token (InstructGPT, OpenRLHF's default for PPO), after any baseline of its sample; ``sequence``, the
            answer's total from the reward of the sample, before the baseline (RLOO; TRL's, and verl's for estimators
            that compare samples). ``True``: ``token`` for PPO, ``sequence`` for GRPO. ``None``: ``token`` for PPO, in
            the loss for others.
        **kwargs: See :class:`~rlhfkit.modules.on_policy.preparation.iteration.IterationModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    batch_types = (Experience,)
    kl_in_reward_by_default: ClassVar[bool] = False
    """Whether the KL penalty is in the reward with ``kl_in_reward=None``."""
    default_kl_place: ClassVar[KLPlace] = "token"
    """The meaning of ``kl_in_reward=True``."""

    def __init__(
        self,
        model: str,
        *,
        reference: ModelPool | ServedModel | None = None,
        reward_model: str | ModelPool | Mapping[str, str | ModelPool] | None = None,
        reward_weights: Mapping[str, float] | None = None,
        mask_truncated: bool = False,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator | None = None,
        kl_in_reward: bool | KLPlace | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        check_number("kl_coef", kl_coef, minimum=0, why="0 is no reference model")
        self.reference_pool = frozen_model(reference)
        if reward_model is not None:
            from rlhfkit.modules.parts.reward_model import RewardModel

            scores = RewardModel(reward_model, reward_weights)
            self.own_parts.append(scores)
            self.hparams.update(reward_model=scores.plain()["init_args"]["models"])
        elif reward_weights:
            raise ValueError(
                f"reward_weights are those of reward_model={{name: ...}}, got {dict(reward_weights)} for none"
            )
        self.mask_truncated = mask_truncated
        if mask_truncated:
            from rlhfkit.modules.parts.rewards import MaskTruncated

            self.own_parts.append(MaskTruncated())
        self.initial_kl_coef = kl_coef
        self.kl_coef = kl_coef
        """Weight of the KL penalty now; moves with :class:`~rlhfkit.modules.parts.kl_control.KLTarget`."""
        if kl_estimator is not None and not kl_coef:
            raise ValueError(
                f"kl_estimator={kl_estimator!r} says how the KL penalty is estimated, and kl_coef=0 that there is "
                "none: give a kl_coef (0.01 in OpenRLHF's PPO, 0.04 in the GRPO paper) or leave kl_estimator out"
            )
        self.kl_in_reward = self._kl_place(kl_coef, kl_in_reward)
        """What the KL penalty is subtracted from; ``None``: it is in the loss, or there is none."""
        self.kl_estimator: KLEstimator = kl_estimator or ("k3" if self.kl_in_reward is None else "k1")
        if self.reference_pool is not None:
            self.hparams.update(reference=self.reference_pool.plain())
        if self.reference_pool is not None and not self.kl_coef:
            raise ValueError(
                f"reference={type(self.reference_pool).__name__}(...) is a model that nothing asks: give a kl_coef "
                "(0.01 is OpenRLHF's), or leave reference out"
            )

    def _kl_place(self, kl_coef: float, kl_in_reward: bool | KLPlace | None) -> KLPlace | None:
        if kl_in_reward not in (None, True, False, *get_args(KLPlace)):
            raise ValueError(
                f"kl_in_reward must be true, false, {' or '.join(map(repr, get_args(KLPlace)))}, got {kl_in_reward!r}"
            )
        if kl_in_reward and not kl_coef:
            raise ValueError(
                f"kl_in_reward={kl_in_reward!r} says where the KL penalty goes, and kl_coef=0 that there is none: give "
                "a kl_coef (0.01 in OpenRLHF's PPO, 0.05 in TRL's RLOO) or leave kl_in_reward out"
            )
        wanted = self.kl_in_reward_by_default if kl_in_reward is None else kl_in_reward
        if not wanted or not kl_coef:
            return None
        return self.default_kl_place if wanted is True else wanted

    def placed_models(self) -> dict[str, tuple[FrozenModel, Role]]:
        """The models on machines of their own, by the name of the role, and what they are asked for."""
        placed: dict[str, tuple[FrozenModel, Role]] = {}
        if self.reference_pool is not None:
            placed["reference"] = self.reference_pool, "logprobs"
        return placed | dict(super().placed_models())

    # ------------------------------------------------------------------ the KL penalty

    @property
    def needs_reference(self) -> bool:
        """Whether the module has a reference model, as a KL penalty needs."""
        return bool(self.initial_kl_coef) and self.reference_pool is None

    @property
    def has_reference(self) -> bool:
        """Whether a reference model is asked during training, here or elsewhere."""
        return self.needs_reference or self.reference_pool is not None

    @property
    def has_kl_penalty(self) -> bool:
        """Whether ``kl_coef`` is the weight of a KL penalty."""
        return bool(self.initial_kl_coef)

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether advantages need the old log-probs of all samples, the first update's too."""
        return self.kl_in_reward is not None

    def sample_rewards(self, experience: Experience) -> Tensor:
        """(B,) rewards, minus the KL penalty of the whole answer with ``kl_in_reward="sequence"``."""
        return self.penalized_rewards(experience) if self.kl_in_reward == "sequence" else experience.rewards

    def penalized_rewards(self, experience: Experience) -> Tensor:
        """(B,) rewards, minus the KL penalty of the whole answer if it is in the reward."""
        if self.kl_in_reward is None:
            return experience.rewards
        return experience.rewards - self.kl_coef * masked_sum(self.reference_kl(experience), experience.action_mask, -1)

    def token_rewards(self, experience: Experience, rewards: Tensor, *, earned: Tensor | None = None) -> Tensor:
        """(B, T-1) rewards of tokens: the sample's on its last one, minus the KL penalty with ``kl_in_reward="token"``.

        ``rewards``, (B,), are NaN where missing; ``earned``, (B, T-1), is the part that each token earned, in the same
        units (``None``: the last token earned all). 0 outside the mask.
        """
        kl, kl_coef = None, 0.0
        if self.kl_in_reward == "token":
            kl, kl_coef = self.reference_kl(experience), self.kl_coef
        return token_rewards(rewards, experience.action_mask, kl=kl, kl_coef=kl_coef, earned=earned)

    def reference_kl(self, experience: Experience) -> Tensor:
        """(B, T-1) estimate of the KL to the reference of the policy before the iteration."""
        old, reference = experience.old_logprobs, experience.columns["ref_logprobs"]
        assert old is not None
        return kl_estimate(old, reference, estimator=self.kl_estimator, mask=experience.action_mask)
