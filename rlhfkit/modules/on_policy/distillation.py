"""``OnPolicyDistillationModule``: a student learns from a teacher on its own samples (Agarwal et al., 2023)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rlhfkit.losses import Aggregation
from rlhfkit.losses.distillation import Divergence
from rlhfkit.models import LoRA, ModelLoading
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.optim import Optimization
from rlhfkit.parts import GivenPart, given_or, make_part, plain_value
from rlhfkit.roles import ModelPool, ServedModel
from rlhfkit.validation import GivenFunction, check_number, refuse_without_effect


class OnPolicyDistillationModule(OnPolicyModule):
    """A student that learns from a teacher on samples of its own, unlike :class:`DistillationModule`.

    Without a ``divergence`` the advantage of each token is ``log q - log p``, teacher minus student, which is minus the
    one-sample reverse KL, and the loss is the policy loss of :class:`GRPOModule` (Lu and Thinking Machines Lab,
    "On-Policy Distillation", 2025). With one, whole next-token distributions are compared at each sampled token (GKD,
    Agarwal et al., 2023, arXiv:2306.13649), with less noise and one more output layer to compute. Student and teacher
    must have the same tokens; both are compared at the temperature of sampling. No reward is needed; one that is given
    is logged, and with a ``reward_coef`` its advantage is added.

    Example::

        OnPolicyDistillationModule("Qwen/Qwen3-0.6B", teacher="Qwen/Qwen3-8B", lr=1e-5)
        OnPolicyDistillationModule("Qwen/Qwen3-0.6B", teacher="Qwen/Qwen3-8B", divergence="jsd")  # GKD

    Args:
        model: Folder or hub name of the student.
        teacher: Folder or hub name of the teacher, which is a frozen child. A :class:`~rlhfkit.roles.ModelPool`: on
            machines of its own; a :class:`~rlhfkit.roles.ServedModel`: behind ``vllm serve``; with a divergence both
            need the ``top_k`` of a :class:`~rlhfkit.modules.parts.teacher.DivergenceLoss`. A mapping of domains to
            names: several teachers with the student's tokens, each a frozen child, of which the prompts' column
            ``source`` chooses one for each; without a divergence only. Every teacher computes its own prompts' samples,
            so that they cost one pass in all. ``None``: that of a :class:`~rlhfkit.modules.parts.teacher.Teacher` among
            ``parts``, which has more arguments, such as another column.
        lr: Peak learning rate (1e-6: TRL's and OpenRLHF's default for reinforcement learning).
        divergence: ``None``: reverse KL of the sampled token, as an advantage. Else ``forward_kl``, ``reverse_kl``,
            ``jsd``, a function of the log-probs of student and teacher, or its dotted name, for a
            :class:`~rlhfkit.modules.parts.teacher.DivergenceLoss`.
        reward_coef: Weight of the reward's advantage; 0: a reward is logged only.
        kl_coef: Weight of a KL penalty towards the initial model; 0 loads no reference model.
        advantages: Function of the reward's advantage in place of :func:`~rlhfkit.losses.group_advantages`, with a
            ``reward_coef`` only.
        policy_loss: See :class:`GRPOModule`. Without effect, and refused, as are its arguments,
            with a divergence and without a ``reward_coef``.
        policy_loss_arguments: More arguments of the policy loss, see :class:`OnPolicyModule`.
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss.
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss.
        aggregation: How token losses become one number, see :class:`OnPolicyModule`.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features. A :class:`~rlhfkit.modules.parts.teacher.DivergenceLoss` or
            :class:`~rlhfkit.modules.parts.teacher.TeacherAdvantages` among them takes the place of the module's, and
            has more arguments, such as a weight beside that of the reward.

    Raises:
        ValueError: If an argument is out of range; when the models are loaded, if their tokens differ.
    """

    teacher: nn.Module

    def __init__(
        self,
        model: str,
        teacher: str | ModelPool | ServedModel | Mapping[str, str] | None = None,
        *,
        lr: float = 1e-6,
        divergence: Divergence | GivenFunction | None = None,
        reward_coef: float = 0.0,
        kl_coef: float = 0.0,
        advantages: GivenFunction | None = None,
        policy_loss: GivenFunction = "dapo_loss",
        policy_loss_arguments: Mapping[str, Any] | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        aggregation: Aggregation | None = None,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        from rlhfkit.modules.parts.advantages import GroupAdvantages
        from rlhfkit.modules.parts.kl_penalty import KLPenalty, own_penalty
        from rlhfkit.modules.parts.teacher import DivergenceLoss, ScaledAdvantages, Teacher, TeacherAdvantages

        check_number("reward_coef", reward_coef, minimum=0, why="0 logs the reward only")
        given = [make_part(one) for one in parts]
        self.teacher_part = given_or(Teacher(teacher), given, teacher=teacher is not None)
        """The teacher, or several."""
        made = TeacherAdvantages() if divergence is None else DivergenceLoss(divergence)
        learned = [one for one in given if isinstance(one, DivergenceLoss | TeacherAdvantages)]
        if learned:
            refuse_without_effect({"divergence": divergence is not None}, f"{learned[0]!r} among parts")
        if not reward_coef:
            refuse_without_effect({"advantages": advantages is not None}, "reward_coef=0")
        if advantages is None:
            self.credit = [GroupAdvantages()] if reward_coef else []
        scaled = [ScaledAdvantages(reward_coef)] if reward_coef else []
        self.own_parts = [*own_penalty(kl_coef, given, KLPenalty), self.teacher_part, *scaled, *(learned or [made])]
        super().__init__(
            model,
            lr=lr,
            advantages=advantages,
            policy_loss=policy_loss,
            policy_loss_arguments=policy_loss_arguments,
            clip_low=clip_low,
            clip_high=clip_high,
            aggregation=aggregation,
            optimization=optimization,
            lora=lora,
            loading=loading,
            parts=given,
        )
        self.divergence, self.reward_coef, self.kl_coef = divergence, reward_coef, kl_coef
        self.keep_plain(teacher=plain_value(teacher, "teacher"), divergence=plain_value(divergence, "divergence"))
