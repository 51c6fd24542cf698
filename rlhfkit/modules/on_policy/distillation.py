"""``OnPolicyDistillationModule``: a student learns from a teacher on its own samples (Agarwal et al., 2023)."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import (
    LossOutput,
    aggregate,
    dapo_loss,
    discounted_returns,
    logits_logprobs,
    mean_metric,
    on_policy_distillation_advantages,
)
from rlhfkit.losses.distillation import Divergence, Remainder, token_divergence
from rlhfkit.models import HeadLoss, LoRA, PolicyOutput
from rlhfkit.models.distillation import compare_logits, teacher_logits
from rlhfkit.modules.arguments import function_name, refuse_without_effect, resolve_function
from rlhfkit.modules.on_policy.grpo import GRPOModule
from rlhfkit.modules.on_policy.preparation.local_rows import local_rows
from rlhfkit.modules.on_policy.preparation.placed_models import ask, pool_result
from rlhfkit.modules.optimizers.schedules import Schedule
from rlhfkit.modules.supervised.teacher import check_teacher_tokens, load_teacher
from rlhfkit.protocols import HasPromptColumns, datamodule_of
from rlhfkit.roles import FrozenModel, ModelPool, ServedModel, frozen_model
from rlhfkit.roles.replica import Role
from rlhfkit.validation import check_integer, check_number

MAX_TEACHERS = 16
"""Teachers of one student at most: each is a child of its own."""


class ComparedOutput(PolicyOutput):
    """The policy's output for a batch, with its divergence from a teacher's.

    A named tuple takes no further fields, so the divergence is an attribute that ``_replace`` does not keep.
    """

    divergence: Tensor
    """(B, T-1) float32 in nats, with gradient; 0 where the mask is false."""

    @classmethod
    def of(cls, logprobs: Tensor, entropy: Tensor | None, divergence: Tensor, router_aux_loss: Tensor | None) -> Self:
        """Make an output of tensors (B, T-1) and the router's loss, a scalar."""
        made = cls(logprobs, entropy, router_aux_loss)
        made.divergence = divergence
        return made


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
            machines of its own; a :class:`~rlhfkit.roles.ServedModel`: behind ``vllm serve``; both without a
            ``divergence`` only. A mapping of domains to names: several teachers with the
            student's tokens, each a frozen child, of which ``teacher_column`` chooses one for each prompt; without a
            ``divergence`` only. Every teacher computes its own prompts' samples, so that they cost one pass in all.
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
        teacher_weight: w of ``jsd``; 0.5 as in GKD and TRL.
        top_k: Compare the teacher's K likeliest tokens only; ``None``: all. Only with a ``divergence``.
        remainder: Treatment of the other tokens: ``bucket`` makes them one category, ``renormalize`` leaves them out.
        chunk_size: Sampled tokens whose logits exist at a time, with a ``divergence``; changes memory and speed only.
        policy_loss: See :class:`GRPOModule`.
        policy_loss_arguments: More keyword arguments of the policy loss.
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss (0.2).
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss (0.28).
        kl_coef: Weight of a KL penalty towards the initial model; 0 loads no reference model.
        correction: Importance correction for differences between engine and trainer, see :class:`GRPOModule`.
        weight_decay: AdamW's decoupled weight decay.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: After warm-up: ``constant``, ``linear`` or ``cosine``.
        attention: Transformers' ``attn_implementation``.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters only.
        **kwargs: See :class:`GRPOModule`. Arguments without effect are refused: without a ``reward_coef`` those of the
            reward's advantage, and with a ``divergence`` then also ``policy_loss``, its arguments, and ``correction``.

    Raises:
        ValueError: If an argument is out of range; when the models are loaded, if their tokens differ.
    """

    teacher: nn.Module
    frozen_children = (*GRPOModule.frozen_children, "teacher", *(f"teacher_{n}" for n in range(1, MAX_TEACHERS)))

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
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        lora: LoRA | None = None,
        **kwargs: Any,
    ) -> None:
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
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            **kwargs,
        )
        check_number("distillation_coef", distillation_coef, above=0, why="GRPOModule has no teacher")
        check_number("reward_coef", reward_coef, minimum=0, why="0 logs the reward only")
        check_number("distillation_gamma", distillation_gamma, minimum=0, maximum=1)
        check_number("teacher_weight", teacher_weight, minimum=0, maximum=1)
        check_integer("top_k", top_k, minimum=1, optional=True)
        check_integer("chunk_size", chunk_size, minimum=1, why="it is in tokens")
        if divergence is None and top_k is not None:
            raise ValueError("without a divergence only the sampled token is compared: leave top_k out, or give one")
        self.domains = self._several(teacher, divergence)
        """Names of teachers by domain; empty: there is one teacher."""
        if self.domains:
            self.hparams.update(teacher=dict(self.domains))
            teacher = next(iter(self.domains.values()))
        self.teacher_column = teacher_column
        self._domain_of: Mapping[int, str] = {}
        self.teacher_pool = None if isinstance(teacher, str) else frozen_model(cast(Any, teacher))
        """The replicas of the teacher; ``None``: it is a child."""
        self.teacher_name = str(teacher) if self.teacher_pool is None else self.teacher_pool.model
        if self.teacher_pool is not None:
            self.hparams.update(teacher=self.teacher_pool.plain())
            if divergence is not None:
                raise ValueError(
                    "a divergence compares the teacher's probabilities of all tokens, and a model elsewhere has those "
                    "of the sampled ones: leave divergence out, or give the teacher's name, so that it is a child"
                )
        self.distillation_coef = distillation_coef
        self.distillation_gamma = distillation_gamma
        self.reward_coef = reward_coef
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
            }
            refuse_without_effect(of_policy_loss, f"divergence={divergence!r} without a reward_coef")
        named = divergence is None or (isinstance(divergence, str) and "." not in divergence)
        self.divergence: Any = divergence if named else resolve_function(cast(Any, divergence), "divergence")
        self.hparams.update(divergence=function_name(divergence) if callable(divergence) else divergence)
        if divergence is not None:
            rows = torch.zeros(1, max(top_k or 0, 2))
            self.compare(rows, rows, 1.0)  # so that bad arguments raise before training

    @staticmethod
    def _several(teacher: object, divergence: object) -> dict[str, str]:
        """Names of teachers by domain; empty if there is one."""
        plain = isinstance(teacher, Mapping) and all(isinstance(name, str) for name in teacher.values())
        if not isinstance(teacher, Mapping) or "model" in teacher or not plain:
            return {}  # a name, or a ModelPool as an object or from YAML
        if divergence is not None:
            raise ValueError("several teachers give log-probs of sampled tokens only: leave divergence out")
        if not 1 <= len(teacher) <= MAX_TEACHERS:
            raise ValueError(f"teacher must name 1 to {MAX_TEACHERS} teachers by domain, got {len(teacher)}")
        return {str(domain): str(name) for domain, name in teacher.items()}

    def setup(self, stage: str) -> None:
        """With several teachers read the domain of each prompt; ValueError if one has no teacher."""
        super().setup(stage)
        if not self.domains or stage != "fit":
            return
        data = datamodule_of(self.trainer)
        if not isinstance(data, HasPromptColumns):
            raise TypeError("several teachers need a DataModule with prompt_column(), such as PromptDataModule")
        found = {index: str(value) for index, value in data.prompt_column(self.teacher_column).items()}
        missing = sorted(set(found.values()) - set(self.domains))
        if missing:
            raise ValueError(
                f"column {self.teacher_column!r} of the prompts names {', '.join(missing)}, and there are teachers for "
                f"{', '.join(self.domains)}: give teacher={{...}} a name for each"
            )
        self._domain_of = found

    def _check_effects(self, divergence: object) -> None:
        """Refuse arguments that have no effect with a divergence, or without a reward."""
        if self.replaces_advantages:
            raise ValueError(
                "advantages=... of the whole experience would take the place of the teacher's; for the reward's give a "
                "function of rewards and groups"
            )
        if self.kl_in_reward is not None and not self.reward_coef:
            raise ValueError("kl_in_reward needs a reward_coef, or the penalty is lost: use kl_in_reward=False")
        if divergence is not None:
            discount = {"distillation_gamma": self.distillation_gamma != 0.0}
            refuse_without_effect(discount, f"divergence={divergence!r}, which makes no advantages of tokens")
        if not self.reward_coef:
            of_rewards = {
                "advantages": self.advantage_function is not None,
                "advantage_scale": self.advantage_scale != "group",
                "gamma": self.gamma != 1.0,
                "whiten_advantages": self.whiten_advantages,
                "token_level_rewards": self.token_level_rewards,
            }
            refuse_without_effect(of_rewards, "reward_coef=0, they belong to the reward's advantage")

    def placed_models(self) -> dict[str, tuple[FrozenModel, Role]]:
        """The models on machines of their own, the teacher among them."""
        placed = super().placed_models()
        return placed if self.teacher_pool is None else placed | {"teacher": (self.teacher_pool, "logprobs")}

    def correct_quantization(self) -> bool:
        """Use truncated importance sampling where there is a policy loss; see :class:`OnPolicyModule`."""
        return (self.divergence is None or bool(self.reward_coef)) and super().correct_quantization()

    def configure_model(self) -> None:
        """Build the student, reference and reward model if needed, and the teacher."""
        super().configure_model()
        if self.teacher_pool is not None:
            check_teacher_tokens(self.teacher_name, self)
        elif not hasattr(self, "teacher"):
            self.teacher = self.build_teacher()
            for number, name in enumerate(list(self.domains.values())[1:], 1):
                setattr(self, f"teacher_{number}", load_teacher(name, self))

    def build_teacher(self) -> nn.Module:
        """Load the teacher, frozen; raises ValueError if its tokens differ. Override to wrap or change it."""
        return load_teacher(self.teacher_name, self)

    @property
    def needs_reward(self) -> bool:
        """Whether ``RolloutCallback`` must have a reward: only if rewards are part of the loss."""
        return bool(self.reward_coef) and super().needs_reward

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether advantages need the old log-probs of all samples, as the teacher's do."""
        return self.divergence is None or super().needs_old_logprobs

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if rewards are part of the loss and there is only one sample per prompt."""
        if self.reward_coef:
            super().check_group_size(group_size)

    # ------------------------------------------------------------------ before the updates of an iteration

    def add_logprobs(self, experience: Experience) -> Experience:
        """Add old and reference log-probs and, without a divergence, the teacher's."""
        pool = self.teacher_pool
        asked = None if pool is None else ask(pool, "logprobs", self, experience)  # while the student computes
        experience = super().add_logprobs(experience)
        if self.divergence is not None:
            return experience
        found = self.teacher_logprobs(experience) if pool is None or asked is None else pool_result(asked, pool)
        return dataclasses.replace(experience, teacher_logprobs=found)

    def teacher_logprobs(self, experience: Experience) -> Tensor:
        """(B, T-1) log-probs of the teacher; of several, of that of each prompt's domain. A collective."""
        if not self.domains:
            return self.distributed_logprobs(self.teacher, experience)
        domains = [self._domain_of[index] for index in experience.group.tolist()]
        total = torch.zeros(experience.action_mask.shape)
        for number, domain in enumerate(self.domains):
            rows = torch.tensor([each == domain for each in domains], dtype=torch.bool)
            model = getattr(self, f"teacher_{number}" if number else "teacher")
            total += self.distributed_logprobs(model, experience, rows)
        return total

    def compute_advantages(self, experience: Experience) -> Experience:
        """Add advantages, unless the loss is the divergence alone."""
        if self.divergence is not None and not self.reward_coef:
            return experience
        return super().compute_advantages(experience)

    @local_rows
    def advantages(self, experience: Experience) -> Tensor:
        """(B, T-1) advantages of the teacher, plus the reward's; 0 outside the mask."""
        mask = experience.action_mask
        total = torch.zeros(mask.shape)
        if self.reward_coef:
            scores = super().advantages(experience)
            total += self.reward_coef * (scores[:, None] if scores.dim() == 1 else scores) * mask
        if self.divergence is None:
            assert experience.old_logprobs is not None
            assert experience.teacher_logprobs is not None
            now = on_policy_distillation_advantages(experience.old_logprobs, experience.teacher_logprobs, mask)
            later = discounted_returns(now, mask, gamma=self.distillation_gamma)
            total += self.distillation_coef * later
        return total

    # ------------------------------------------------------------------ one micro-batch

    def policy_output(self, batch: Experience, head_loss: HeadLoss | None = None) -> PolicyOutput:
        """Run the policy and, with a divergence, the teacher, and compare both at each sampled token."""
        if self.divergence is None:
            return super().policy_output(batch, head_loss)
        mask, temperature = batch.action_mask, batch.temperature
        wanted = self.needs_entropy
        teacher = teacher_logits(self.teacher, batch, mask)

        def compare(logits: Tensor, teacher: tuple[Tensor, Tensor | None], tokens: Tensor, _: float) -> Tensor:
            chosen = logits_logprobs(logits, tokens, temperature=temperature, entropy=wanted)
            columns = [chosen.logprobs, self.compare(logits, teacher[0], temperature), chosen.entropy]
            return torch.stack([column for column in columns if column is not None], -1)

        values, balance = compare_logits(
            self.policy,
            batch,
            mask,
            compare,
            teacher,
            chunk_size=self.chunk_size,
            by_token=True,
            router_aux_loss=self.balances_routers,
        )
        empty = torch.zeros(mask.shape, dtype=values.dtype, device=mask.device)
        columns = [empty.masked_scatter(mask, column) for column in values.unbind(-1)]
        return ComparedOutput.of(columns[0], columns[2] if wanted else None, columns[1], balance)

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

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """Add the divergence, if there is one, to the policy loss."""
        mask = batch.action_mask
        if batch.advantages is None:
            batch = dataclasses.replace(batch, advantages=torch.zeros_like(batch.rollout_logprobs))
        base = super().loss(batch, out)
        if not isinstance(out, ComparedOutput):
            assert batch.teacher_logprobs is not None
            gap = (self.old_logprobs(batch, out) - batch.teacher_logprobs).where(mask, 0.0)
            return LossOutput(base.loss, {**base.metrics, "distillation/reverse_kl": mean_metric(gap, mask)})
        sizes = self.aggregation_arguments(batch)
        divergence = aggregate(
            out.divergence, mask, sizes["aggregation"], sizes["denominator"], max_length=sizes["max_length"]
        )
        mean = mean_metric(out.divergence, mask)
        loss = base.loss + self.distillation_coef * divergence
        return LossOutput(loss, {**base.metrics, "distillation/divergence": mean})
