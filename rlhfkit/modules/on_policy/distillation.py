"""``OnPolicyDistillationModule``: a student learns from a teacher on its own samples (Agarwal et al., 2023)."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import (
    LossOutput,
    aggregate,
    dapo_loss,
    logits_logprobs,
    mean_metric,
)
from rlhfkit.losses.distillation import Divergence, Remainder, token_divergence
from rlhfkit.models import LoRA, PolicyOutput
from rlhfkit.models.distillation import TeacherRows, compare_logits, teacher_logits
from rlhfkit.modules.arguments import refuse_without_effect
from rlhfkit.modules.on_policy.grpo import GRPOModule
from rlhfkit.modules.optimizers.schedules import Schedule
from rlhfkit.modules.teachers import (
    ComparedOutput,
    ask_for_likeliest,
    check_comparison,
)
from rlhfkit.parts import Part, Stage
from rlhfkit.roles import ModelPool, ServedModel
from rlhfkit.validation import check_number, function_name, resolve_function


class OnPolicyDistillationModule(GRPOModule):
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
            machines of its own; a :class:`~rlhfkit.roles.ServedModel`: behind ``vllm serve``; both need ``top_k``
            with a ``divergence``. A mapping of domains to names: several teachers with the student's tokens, each a
            frozen child, of which ``teacher_column`` chooses one for each prompt; without a ``divergence`` only. Every
            teacher computes its own prompts' samples, so that they cost one pass in all.
        teacher_column: Column of the prompts that names the domain, with several teachers; a mixture of data has
            ``source``.
        lr: Peak learning rate (1e-6: TRL's and OpenRLHF's default for reinforcement learning).
        divergence: ``None``: reverse KL of the sampled token, as an advantage. Else ``forward_kl``, ``reverse_kl``,
            ``jsd``, a function of the log-probs of student and teacher, or its dotted name; see
            :func:`~rlhfkit.losses.distillation_loss`.
        distillation_coef: Weight of the teacher's advantage or of the divergence.
        distillation_gamma: Discount of the teacher's later advantages, in [0, 1]; 0 (Thinking Machines' default): only
            each token's own; 1: the gradient of the reverse KL of whole answers (MiniLLM, arXiv:2306.08543).
        reward_coef: Weight of the reward's advantage; 0: a reward is logged only.
        teacher_weight: w of ``jsd``; 0.5 as in TRL's GKD.
        top_k: Compare the teacher's K likeliest tokens only; ``None``: all. Only with a ``divergence``.
        remainder: Treatment of the other tokens: ``bucket`` makes them one category, ``renormalize`` leaves them out.
        chunk_size: Sampled tokens whose logits exist at a time, with a ``divergence``; changes memory and speed only.
        policy_loss: See :class:`GRPOModule`.
        policy_loss_arguments: More keyword arguments of the policy loss.
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss (0.2).
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss (0.28).
        kl_coef: Weight of a KL penalty towards the initial model; 0 loads no reference model.
        correction: Importance correction for differences between engine and trainer, see :class:`GRPOModule`.
        weight_decay: Decoupled weight decay; ``sgd`` adds it to the gradient.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: After warm-up: ``constant``; ``linear`` or ``cosine`` decay to the end of training; ``wsd``:
            constant, then decay in the last part; ``inverse_sqrt``: as 1 / sqrt(step). See :class:`PolicyModule`.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters, not the model's own weights; ``None``: all weights, or the adapter that ``model``
            holds.
        **kwargs: See :class:`GRPOModule`. Arguments without effect are refused: without a ``reward_coef`` those of the
            reward's advantage, and with a ``divergence`` then also ``policy_loss``, its arguments, and ``correction``.

    Raises:
        ValueError: If an argument is out of range; when the models are loaded, if their tokens differ.
    """

    teacher: nn.Module

    def __init__(
        self,
        model: str,
        teacher: str | ModelPool | ServedModel | Mapping[str, str],
        *,
        teacher_column: str = "source",
        lr: float = 1e-6,
        divergence: Divergence | Callable[[Tensor, Tensor], Tensor] | str | None = None,
        distillation_coef: float = 1.0,
        distillation_gamma: float = 0.0,
        reward_coef: float = 0.0,
        teacher_weight: float = 0.5,
        top_k: int | None = None,
        remainder: Remainder = "bucket",
        chunk_size: int = 1024,
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
        **kwargs: Any,
    ) -> None:
        from rlhfkit.modules.parts.teacher import ScaledAdvantages, Teacher, TeacherAdvantages

        check_number("distillation_coef", distillation_coef, above=0, why="GRPOModule has no teacher")
        check_number("reward_coef", reward_coef, minimum=0, why="0 logs the reward only")
        check_number("distillation_gamma", distillation_gamma, minimum=0, maximum=1)
        self.teacher_part = Teacher(teacher, column=teacher_column, compared=divergence is not None)
        """The teacher, or several."""
        self.divergence: Any = divergence
        self.reward_coef = reward_coef
        self.own_parts = [self.teacher_part]
        if divergence is None:
            gap = TeacherAdvantages(distillation_coef, gamma=distillation_gamma, reward_coef=reward_coef)
            self.own_parts.append(gap)
        elif reward_coef:
            self.own_parts.append(ScaledAdvantages(reward_coef))
        super().__init__(
            model,
            lr=lr,
            policy_loss=policy_loss,
            policy_loss_arguments=policy_loss_arguments,
            clip_low=clip_low,
            clip_high=clip_high,
            kl_coef=kl_coef,
            correction=correction,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            lr_schedule=lr_schedule,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            **kwargs,
        )
        check_comparison(
            divergence,
            teacher_weight=teacher_weight,
            top_k=top_k,
            remainder=remainder,
            chunk_size=chunk_size,
        )
        pool = self.teacher_part.pool
        if self.teacher_part.domains and divergence is not None:
            raise ValueError("several teachers give log-probs of sampled tokens only: leave divergence out")
        self.hparams.update(teacher=self.teacher_part.plain()["init_args"]["model"])
        if pool is not None and divergence is not None:
            ask_for_likeliest(pool, top_k, reference=self.reference_pool)
        self.distillation_coef = distillation_coef
        self.distillation_gamma = distillation_gamma
        self.teacher_weight = teacher_weight
        self.top_k = top_k
        self.remainder: Remainder = remainder
        self.chunk_size = chunk_size
        self._check_effects(divergence)
        if divergence is not None and not reward_coef:  # nothing is left of the policy loss
            of_policy_loss = {
                "policy_loss": self.policy_loss.function is not dapo_loss,
                "policy_loss_arguments": bool(policy_loss_arguments),
                "clip_low": clip_low is not None,
                "clip_high": clip_high is not None,
                "correction": correction is not None,
                "proximal": self.proximal != "recompute",
            }
            refuse_without_effect(of_policy_loss, f"divergence={divergence!r} without a reward_coef")
        named = divergence is None or (isinstance(divergence, str) and "." not in divergence)
        self.divergence = divergence if named else resolve_function(cast(Any, divergence), "divergence")
        self.hparams.update(divergence=function_name(divergence) if callable(divergence) else divergence)
        if divergence is not None:
            rows = torch.zeros(1, max(top_k or 0, 2))
            self.compare(rows, rows, 1.0)  # so that bad arguments raise before training

    def _check_effects(self, divergence: object) -> None:
        """Refuse arguments that have no effect with a divergence, or without a reward."""
        given = self.advantage_function
        if given is not None and not given.takes_rewards:
            raise ValueError(
                "advantages=... of the whole experience would take the place of the teacher's; for the reward's give a "
                "function of rewards and groups"
            )
        if any(part.stage == Stage.PENALIZE for part in self.parts) and not self.reward_coef:
            raise ValueError("KLInReward needs a reward_coef, or the penalty is lost: use KLPenalty")
        if divergence is not None:
            unused = {"distillation_gamma": self.distillation_gamma != 0.0, "router_replay": self.router_replay}
            reason = "which makes no advantages of tokens and replays no choice of experts"
            refuse_without_effect(unused, f"divergence={divergence!r}, {reason}")
        if not self.reward_coef:
            of_rewards = {
                "advantages": self.advantage_function is not None,
                "advantage_scale": self.advantage_scale != "group",
                "gamma": self.gamma != 1.0,
                "whiten_advantages": self.whiten_advantages,
                "token_level_rewards": self.token_level_rewards,
                ", ".join(self.shaping): bool(self.shaping),
            }
            refuse_without_effect(of_rewards, "reward_coef=0, they belong to the reward's advantage")

    def attach_parts(self) -> None:
        """Attach the parts; without a reward in the loss none computes the reward's advantages."""
        if not self.reward_coef:
            self.credit = []
        super().attach_parts()

    def steps(self) -> list[Part]:
        """What the module itself does with an iteration: no advantages if the loss is the divergence alone."""
        steps = super().steps()
        alone = self.divergence is not None and not self.reward_coef
        return [step for step in steps if not (alone and step.stage == Stage.CREDIT)]

    def correct_off_policy(self) -> bool:
        """Use truncated importance sampling where there is a policy loss; see :class:`OnPolicyModule`."""
        return (self.divergence is None or bool(self.reward_coef)) and super().correct_off_policy()

    @property
    def needs_reward(self) -> bool:
        """Whether ``RolloutCallback`` must have a reward: only if rewards are part of the loss."""
        return bool(self.reward_coef) and super().needs_reward

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if rewards are part of the loss and there is only one sample per prompt."""
        if self.reward_coef:
            super().check_group_size(group_size)

    # ------------------------------------------------------------------ one micro-batch

    def policy_output(self, batch: Experience) -> PolicyOutput:
        """Run the policy and, with a divergence, the teacher, and compare both at each sampled token."""
        if self.divergence is None:
            return super().policy_output(batch)
        mask, temperature = batch.action_mask, batch.temperature
        wanted = self.needs_entropy

        def compare(logits: Tensor, teacher: Any, tokens: Tensor, _: float) -> Tensor:
            chosen = logits_logprobs(logits, tokens, temperature=temperature, entropy=wanted)
            if teacher[1] is None:
                divergence = self.compare(logits, teacher[0], temperature)
            else:
                divergence = self.compare_likeliest(logits, teacher[0], teacher[1], temperature)
            columns = [chosen.logprobs, divergence, chosen.entropy]
            return torch.stack([column for column in columns if column is not None], -1)

        values, balance = compare_logits(
            self.policy,
            batch,
            mask,
            compare,
            self._teacher_of(batch),
            chunk_size=self.chunk_size,
            by_token=True,
            router_aux_loss=self.balances_routers,
        )
        empty = torch.zeros(mask.shape, dtype=values.dtype, device=mask.device)
        columns = [empty.masked_scatter(mask, column) for column in values.unbind(-1)]
        return ComparedOutput.of(columns[0], columns[2] if wanted else None, columns[1], balance)

    def _teacher_of(self, batch: Experience) -> TeacherRows | tuple[Tensor, Tensor]:
        """The teacher at the sampled tokens, for a divergence."""
        mask = batch.action_mask
        if self.teacher_part.pool is None:
            return teacher_logits(self.teacher, batch, mask)
        top_logprobs, top_ids = (batch.columns[name] for name in ("teacher_top_logprobs", "teacher_top_ids"))
        return top_logprobs[mask], top_ids[mask].long()

    def compare(self, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """(m,) divergences in nats from logits (m, V) of student and teacher; override it for another objective.

        ``temperature``, that of sampling, divides both.
        """
        size = min(student.shape[-1], teacher.shape[-1])  # one family pads its vocabulary to different sizes
        return token_divergence(
            student[None, :, :size],
            teacher[None, :, :size],
            torch.ones(1, len(student), dtype=torch.bool, device=student.device),
            divergence=self.divergence,
            temperature=temperature,
            teacher_weight=self.teacher_weight,
            top_k=self.top_k,
            remainder=self.remainder,
        )[0]

    def compare_likeliest(self, student: Tensor, teacher: Tensor, ids: Tensor, temperature: float) -> Tensor:
        """(m,) divergences in nats from logits (m, V) of the student and K tokens of a teacher elsewhere.

        Args:
            student: (m, V) logits.
            teacher: (m, K) log-probs, at the temperature of sampling.
            ids: (m, K) int64, their tokens; those that the student's output layer does not have are left out.
            temperature: That of sampling, which divides the student's logits.
        """
        known = ids < student.shape[-1]  # one family pads its vocabulary to different sizes
        return token_divergence(
            student[None] / temperature,
            teacher.masked_fill(~known, -torch.inf)[None],
            torch.ones(1, len(student), dtype=torch.bool, device=student.device),
            divergence=self.divergence,
            teacher_weight=self.teacher_weight,
            teacher_ids=ids.where(known, 0)[None],
            remainder=self.remainder,
        )[0]

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """Add the divergence, if there is one, to the policy loss."""
        mask = batch.action_mask
        if batch.advantages is None:
            batch = dataclasses.replace(batch, advantages=torch.zeros_like(batch.rollout_logprobs))
        base = super().loss(batch, out)
        if not isinstance(out, ComparedOutput):
            return base
        sizes = self.aggregation_arguments(batch)
        divergence = aggregate(
            out.divergence, mask, sizes["aggregation"], sizes["denominator"], max_length=sizes["max_length"]
        )
        metrics = {**base.metrics, "distillation/divergence": mean_metric(out.divergence, mask)}
        return LossOutput(base.loss + self.distillation_coef * divergence, metrics)
