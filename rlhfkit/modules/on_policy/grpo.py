"""``GRPOModule``: group relative policy optimization (Shao et al., 2024, arXiv:2402.03300) and its relatives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhfkit.data.types import Experience
from rlhfkit.losses import AdvantageScale, LossOutput, dapo_loss
from rlhfkit.models import LoRA
from rlhfkit.modules.arguments import refuse_without_effect
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.on_policy.functions import AdvantageFunction, GivenAdvantages
from rlhfkit.modules.optimizers.schedules import Schedule
from rlhfkit.parts import Part, make_part
from rlhfkit.validation import check_number


class GRPOModule(OnPolicyModule):
    """A policy that learns from the rewards of groups of samples, with the group as baseline instead of a critic.

    The advantage of a sample is its reward's standard score within its group; the loss is PPO's clipped surrogate with
    that advantage on every token, plus an optional KL penalty towards the initial model. :mod:`rlhfkit.presets
    <rlhfkit.modules.on_policy.presets>` has the arguments of published relatives (Dr.GRPO, DAPO, RLOO, GSPO ...)::

        GRPOModule("Qwen/Qwen3-0.6B", **presets.CISPO)
        GRPOModule("Qwen/Qwen3-0.6B", advantages="rloo_advantages", policy_loss="sapo_loss")

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate of AdamW (1e-6: TRL's and OpenRLHF's default).
        advantages: Function of rewards and groups used in place of :func:`~rlhfkit.losses.group_advantages`, such as
            ``"rloo_advantages"`` or ``functools.partial(pass_at_k_advantages, k=4)``, see
            :class:`~rlhfkit.modules.parts.advantages.AdvantagesBy`; ``gamma``, ``whiten_advantages`` and
            ``token_level_rewards`` apply to its result. The result of a function of the whole
            :class:`~rlhfkit.data.Experience` is used as it is.
        advantage_scale: What the centred reward is divided by: the standard deviation of its ``group``, of the
            ``batch``, or ``none`` (Dr.GRPO, Liu et al., 2025, arXiv:2503.20783). Only without ``advantages``.
        gamma: Discount of later tokens' rewards, in [0, 1].
        whiten_advantages: Make the advantages of all tokens of the iteration mean 0 and deviation 1 (REINFORCE++).
        token_level_rewards: With ``Sample.token_rewards``, the advantage of a token counts only what is earned from it
            on. For estimators in units of the reward.
        policy_loss: A function of :mod:`rlhfkit.losses`, its name (``"gspo_loss"``), or your own, see
            :class:`OnPolicyModule`. The default is DAPO's, with its clip (0.2 and 0.28: Yu et al., 2025,
            arXiv:2503.14476) and its aggregation (``token-mean``, TRL's default too); ``grpo_loss`` has the clip (0.2)
            and the aggregation of the GRPO paper.
        policy_loss_arguments: More keyword arguments of the policy loss.
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss.
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss.
        kl_coef: Weight of a :class:`~rlhfkit.modules.parts.kl_penalty.KLPenalty` towards the initial model, in the
            loss; 0 (TRL's default) loads no reference model. Another one, or a
            :class:`~rlhfkit.modules.parts.kl_penalty.KLInReward` (RLOO, REINFORCE++), among ``parts`` takes its place.
        correction: Importance correction for differences between engine and trainer: ``"tis"``, ``"icepop"``, ``"mis"``
            and others of :data:`~rlhfkit.losses.CORRECTION_PRESETS`, or arguments of
            :func:`~rlhfkit.losses.importance_weights`.
        weight_decay: Decoupled weight decay; ``sgd`` adds it to the gradient.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: After warm-up: ``constant``; ``linear`` or ``cosine`` decay to the end of training; ``wsd``:
            constant, then decay in the last part; ``inverse_sqrt``: as 1 / sqrt(step). See :class:`PolicyModule`.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters, not the model's own weights, which are then the reference; ``None``: all weights, or the
            adapter that ``model`` holds.
        parts: More features, each a :class:`~rlhfkit.Part` or a function of an iteration's rows, see
            :class:`OnPolicyModule`.
        **kwargs: Loss and rewards: see :class:`OnPolicyModule`; model: see :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        advantages: GivenAdvantages | None = None,
        advantage_scale: AdvantageScale = "group",
        gamma: float = 1.0,
        whiten_advantages: bool = False,
        token_level_rewards: bool = False,
        policy_loss: str | Callable[..., LossOutput] = dapo_loss,
        policy_loss_arguments: Mapping[str, Any] | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        kl_coef: float = 0.0,
        correction: str | Mapping[str, Any] | None = None,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        lr_schedule: Schedule = "constant",
        gradient_checkpointing: bool = False,
        lora: LoRA | None = None,
        parts: Sequence[Part | Mapping[str, Any] | Callable[[Experience], Experience] | str] = (),
        **kwargs: Any,
    ) -> None:
        check_number("gamma", gamma, minimum=0, maximum=1)
        of_samples = advantages is None or AdvantageFunction(advantages).takes_rewards
        if advantages is not None:
            ignored = {"advantage_scale": advantage_scale != "group"}
            if not of_samples:
                ignored |= {"gamma": gamma != 1.0, "whiten_advantages": whiten_advantages}
                ignored |= {"token_level_rewards": token_level_rewards}
            refuse_without_effect(ignored, f"advantages={AdvantageFunction(advantages).name}")
        elif token_level_rewards and advantage_scale != "none":
            raise ValueError(
                "token_level_rewards takes what was earned before a token from its sample's advantage, which has to be "
                f"in units of the reward: advantage_scale={advantage_scale!r} has others, use 'none' or advantages=..."
            )
        from rlhfkit.modules.parts.advantages import AdvantagesBy, GroupAdvantages, TokenCredit, WhitenAdvantages

        self.credit = [GroupAdvantages(advantage_scale) if advantages is None else AdvantagesBy(advantages)]
        given = [make_part(one) for one in parts]
        by_token = token_level_rewards or any("token_penalty" in part.writes for part in given)
        if of_samples and (by_token or gamma != 1.0):
            self.credit.append(TokenCredit(gamma, earned=token_level_rewards))
        if whiten_advantages:
            self.credit.append(WhitenAdvantages())
        check_number("kl_coef", kl_coef, minimum=0, why="0 is no reference model")
        if kl_coef:
            from rlhfkit.modules.parts.kl_penalty import KLPart, KLPenalty

            chosen = any(isinstance(part, KLPart) for part in given)
            own: list[Part] = [*vars(self).get("own_parts", ())]
            self.own_parts = own if chosen else [KLPenalty(kl_coef), *own]
        super().__init__(
            model,
            lr=lr,
            advantages=advantages,
            policy_loss=policy_loss,
            policy_loss_arguments=policy_loss_arguments,
            clip_low=clip_low,
            clip_high=clip_high,
            correction=correction,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            lr_schedule=lr_schedule,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            parts=given,
            **kwargs,
        )
        self.kl_coef = kl_coef
        self.advantage_scale = advantage_scale
        self.gamma = gamma
        self.whiten_advantages = whiten_advantages
        self.token_level_rewards = token_level_rewards
