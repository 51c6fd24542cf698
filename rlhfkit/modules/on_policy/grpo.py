"""``GRPOModule``: group relative policy optimization (Shao et al., 2024, arXiv:2402.03300) and its relatives."""

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from rlhfkit.losses import Aggregation, dapo_loss
from rlhfkit.losses.advantages.group import AdvantageScale
from rlhfkit.models import LoRA, ModelLoading
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.on_policy.functions import AdvantageFunction
from rlhfkit.modules.on_policy.presets import Preset, with_preset
from rlhfkit.modules.optim import Optimization
from rlhfkit.parts import GivenPart, Stage, make_part
from rlhfkit.validation import GivenFunction, refuse_without_effect


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
            :class:`~rlhfkit.modules.parts.advantages.AdvantagesBy`. What changes its result is a part:
            ``WhitenAdvantages()``, or ``TokenCredit(gamma)``, which spreads the advantage of a sample over its tokens.
        advantage_scale: What the centred reward is divided by: the standard deviation of its ``group`` (default), of
            the ``batch``, or ``none`` (Dr.GRPO, Liu et al., 2025, arXiv:2503.20783). Only without ``advantages``.
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
            :class:`OnPolicyModule`. One takes the place of a part of the preset of its class.

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
        advantages: GivenFunction | None = None,
        advantage_scale: AdvantageScale | None = None,
        policy_loss: GivenFunction | None = None,
        policy_loss_arguments: Mapping[str, Any] | None = None,
        aggregation: Aggregation | None = None,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        from rlhfkit.modules.parts.advantages import AdvantagesBy, GroupAdvantages, TokenCredit
        from rlhfkit.modules.parts.kl_penalty import KLPart, KLPenalty, own_penalty

        given = [make_part(one) for one in parts]
        chosen = with_preset(
            preset, advantages=advantages, advantage_scale=advantage_scale, policy_loss=policy_loss, kl_coef=kl_coef
        )
        of_preset = [make_part(one) for one in chosen["parts"]]
        if kl_coef is not None or any(isinstance(part, KLPart) for part in given):
            of_preset = [part for part in of_preset if not isinstance(part, KLPart)]
        function, scale = chosen["advantages"], cast(AdvantageScale, chosen["advantage_scale"] or "group")
        if scale not in get_args(AdvantageScale):
            raise ValueError(f"advantage_scale must be one of {', '.join(get_args(AdvantageScale))}, got {scale!r}")
        if function is not None:
            ignored = {"advantage_scale": advantage_scale not in (None, "group")}
            refuse_without_effect(ignored, f"advantages={AdvantageFunction(function).name}")
        first = GroupAdvantages(scale) if function is None else AdvantagesBy(function)
        changed = [part for part in of_preset if part.stage == Stage.CREDIT]
        by_token = (isinstance(part, TokenCredit) or "token_penalty" in part.writes for part in (*given, *of_preset))
        if first.of_samples and any(by_token) and not any(isinstance(part, TokenCredit) for part in changed):
            changed.insert(0, TokenCredit())
        self.credit = [first, *changed]
        self.own_parts = own_penalty(chosen["kl_coef"] or 0.0, [*given, *of_preset], KLPenalty)
        self.own_parts += [part for part in of_preset if part not in changed]
        replaced = any("advantages" in part.creates for part in given)
        super().__init__(
            model,
            lr=lr,
            advantages=advantages if replaced else function,
            policy_loss=chosen["policy_loss"] or dapo_loss,
            policy_loss_arguments=policy_loss_arguments,
            clip_low=clip_low,
            clip_high=clip_high,
            aggregation=aggregation,
            optimization=optimization,
            lora=lora,
            loading=loading,
            parts=given,
        )
        self.preset, self.kl_coef, self.advantage_scale = preset, chosen["kl_coef"] or 0.0, scale
