"""``GRPOModule``: group relative policy optimization (Shao et al., 2024, arXiv:2402.03300) and its relatives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhfkit.losses import AdvantageScale, Aggregation, LossOutput, dapo_loss
from rlhfkit.models import LoRA, ModelLoading
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.on_policy.functions import AdvantageFunction, GivenAdvantages
from rlhfkit.modules.on_policy.presets import Preset, with_preset
from rlhfkit.modules.optim import Optimization
from rlhfkit.parts import GivenPart, make_part
from rlhfkit.validation import check_number, refuse_without_effect


class GRPOModule(OnPolicyModule):
    """A policy that learns from the rewards of groups of samples, with the group as baseline instead of a critic.

    The advantage of a sample is its reward's standard score within its group; the loss is PPO's clipped surrogate with
    that advantage on every token, plus an optional KL penalty towards the initial model. A ``preset`` is a published
    relative (Dr.GRPO, DAPO, RLOO, GSPO ...)::

        GRPOModule("Qwen/Qwen3-0.6B", preset="cispo")
        GRPOModule("Qwen/Qwen3-0.6B", advantages="rloo_advantages", policy_loss="sapo_loss")

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate of AdamW (1e-6: TRL's and OpenRLHF's default).
        preset: Name of a published algorithm of :data:`~rlhfkit.modules.on_policy.presets.PRESETS`, which gives the
            arguments below that are left out (``None``), and parts before those of ``parts``.
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss.
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss.
        kl_coef: Weight of a :class:`~rlhfkit.modules.parts.kl_penalty.KLPenalty` towards the initial model, in the
            loss; 0 (default, and TRL's) loads no reference model. Another one, or a
            :class:`~rlhfkit.modules.parts.kl_penalty.KLInReward` (RLOO, REINFORCE++), among ``parts`` takes its place.
        advantages: Function of rewards and groups used in place of :func:`~rlhfkit.losses.group_advantages`, such as
            ``"rloo_advantages"`` or ``functools.partial(pass_at_k_advantages, k=4)``, see
            :class:`~rlhfkit.modules.parts.advantages.AdvantagesBy`; ``gamma``, ``whiten_advantages`` and
            ``token_level_rewards`` apply to its result. The result of a function of the whole
            :class:`~rlhfkit.data.Experience` is used as it is.
        advantage_scale: What the centred reward is divided by: the standard deviation of its ``group`` (default), of
            the ``batch``, or ``none`` (Dr.GRPO, Liu et al., 2025, arXiv:2503.20783). Only without ``advantages``.
        gamma: Discount of later tokens' rewards, in [0, 1].
        whiten_advantages: Make the advantages of all tokens of the iteration mean 0 and deviation 1 (REINFORCE++);
            default: false.
        token_level_rewards: With ``Sample.token_rewards``, the advantage of a token counts only what is earned from it
            on; default: false. For estimators in units of the reward.
        policy_loss: A function of :mod:`rlhfkit.losses`, its name (``"gspo_loss"``), or your own, see
            :class:`OnPolicyModule`. The default is DAPO's, with its clip (0.2 and 0.28: Yu et al., 2025,
            arXiv:2503.14476) and its aggregation (``token-mean``, TRL's default too); ``grpo_loss`` has the clip (0.2)
            and the aggregation of the GRPO paper.
        policy_loss_arguments: More arguments of the policy loss, see :class:`OnPolicyModule`.
        aggregation: How token losses become one number, see :class:`OnPolicyModule`.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, each a :class:`~rlhfkit.Part` or a function of an iteration's rows, see
            :class:`OnPolicyModule`. One takes the place of a part of the preset that writes the same.

    Raises:
        ValueError: If an argument is out of range, or there is no such preset.
    """

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        preset: Preset | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        kl_coef: float | None = None,
        advantages: GivenAdvantages | None = None,
        advantage_scale: AdvantageScale | None = None,
        gamma: float = 1.0,
        whiten_advantages: bool | None = None,
        token_level_rewards: bool | None = None,
        policy_loss: str | Callable[..., LossOutput] | None = None,
        policy_loss_arguments: Mapping[str, Any] | None = None,
        aggregation: Aggregation | None = None,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        from rlhfkit.modules.parts.advantages import AdvantagesBy, GroupAdvantages, TokenCredit, WhitenAdvantages
        from rlhfkit.modules.parts.kl_penalty import KLPart, KLPenalty, own_penalty

        given = [make_part(one) for one in parts]
        chosen = with_preset(
            preset,
            advantages=advantages,
            advantage_scale=advantage_scale,
            whiten_advantages=whiten_advantages,
            token_level_rewards=token_level_rewards,
            policy_loss=policy_loss,
            kl_coef=kl_coef,
            parts=None,
        )
        function, whitens = chosen["advantages"], bool(chosen["whiten_advantages"])
        scale: AdvantageScale = chosen["advantage_scale"] or "group"
        by_earning = bool(chosen["token_level_rewards"])
        check_number("gamma", gamma, minimum=0, maximum=1)
        estimator = None if function is None else AdvantageFunction(function)
        of_samples = estimator is None or estimator.takes_rewards
        if estimator is not None:
            ignored = {"advantage_scale": advantage_scale not in (None, "group")}
            if not of_samples:
                ignored |= {"gamma": gamma != 1.0, "whiten_advantages": whitens, "token_level_rewards": by_earning}
            refuse_without_effect(ignored, f"advantages={estimator.name}")
        elif by_earning and scale != "none":
            raise ValueError(
                "token_level_rewards takes what was earned before a token from its sample's advantage, which has to be "
                f"in units of the reward: advantage_scale={scale!r} has others, use 'none' or advantages=..."
            )
        penalties = [make_part(one) for one in chosen["parts"] or ()] if kl_coef is None else []
        penalties = [] if any(isinstance(part, KLPart) for part in given) else penalties
        self.own_parts = [*own_penalty(chosen["kl_coef"] or 0.0, [*given, *penalties], KLPenalty), *penalties]
        self.credit = [GroupAdvantages(scale) if function is None else AdvantagesBy(function)]
        by_token = by_earning or any("token_penalty" in part.writes for part in (*given, *penalties))
        if of_samples and (by_token or gamma != 1.0):
            self.credit.append(TokenCredit(gamma, earned=by_earning))
        self.credit += [WhitenAdvantages()] if whitens else []
        loss = chosen["policy_loss"] or dapo_loss
        super().__init__(
            model,
            lr=lr,
            advantages=function,
            policy_loss=loss,
            policy_loss_arguments=policy_loss_arguments,
            clip_low=clip_low,
            clip_high=clip_high,
            aggregation=aggregation,
            optimization=optimization,
            lora=lora,
            loading=loading,
            parts=given,
        )
        self.preset, self.kl_coef, self.advantage_scale, self.gamma = preset, chosen["kl_coef"] or 0.0, scale, gamma
        self.whiten_advantages, self.token_level_rewards = whitens, by_earning
