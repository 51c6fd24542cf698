"""A teacher, and what a student learns from it: ``TeacherAdvantages`` of sampled tokens, or a ``DivergenceLoss``.

``Teacher`` gives a teacher's log-probs of the tokens that the student has sampled, wherever the teacher is.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import lightning as L
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
    ppo_loss,
)
from rlhfkit.losses.distillation import Divergence, Remainder, token_divergence
from rlhfkit.models import PolicyOutput
from rlhfkit.models.distillation import TeacherRows, compare_logits, teacher_logits
from rlhfkit.modules.parts.advantages import with_advantages
from rlhfkit.modules.teachers import (
    ComparedOutput,
    TeacherDomains,
    check_teacher_tokens,
    checked_divergence,
    load_teacher,
)
from rlhfkit.parts import Child, Part, Stage, model_elsewhere, overriding, part_name
from rlhfkit.roles import ModelPool, ServedModel
from rlhfkit.roles.frozen_model import FrozenModel
from rlhfkit.roles.replica import Role
from rlhfkit.trainer_parts import datamodule_of
from rlhfkit.validation import GivenFunction, check_number, refuse_without_effect


class Teacher(Part):
    """Gives a teacher's log-probs of the tokens that the student has sampled.

    Beside a :class:`DivergenceLoss`, which compares whole next-token distributions, one elsewhere gives its likeliest
    tokens (columns ``teacher_top_logprobs`` and ``teacher_top_ids``), and one in the module nothing before the loss.
    A subclass overrides :meth:`build` to wrap or change a model in the module.

    Args:
        model: Folder or hub name of the teacher, a frozen child. A :class:`~rlhfkit.roles.ModelPool`: on machines of
            its own; a :class:`~rlhfkit.roles.ServedModel`: behind ``vllm serve``. A mapping of domains to names:
            several teachers, of which ``column`` chooses one for each prompt; each computes its own prompts' samples
            only.
        column: Column of the prompts that names the domain, with several teachers; a mixture of data has ``source``.

    Raises:
        ValueError: If an argument is out of range or there is no model; when models are loaded, if their tokens are not
            the student's.
    """

    stage = Stage.MODELS
    writes: tuple[str, ...] = ("teacher_logprobs",)

    def __init__(
        self,
        model: str | ModelPool | ServedModel | Mapping[str, Any] | None,
        *,
        column: str = "source",
    ) -> None:
        self.domains = TeacherDomains(model, column)
        """Several teachers; false if there is one."""
        named = isinstance(model, str) or bool(self.domains)
        self.pool: FrozenModel | None = None if named else FrozenModel.of(model)
        """The teacher's replicas; ``None``: it is a child."""
        self.model: Any = (dict(self.domains.names) if self.domains else model) if named else self.pool
        self.column, self.compared = column, False
        self.names = list(self.domains.names.values()) if self.domains else [str(model)] if named else []
        """Of the teachers in the module."""

    def attach(self, module: Any) -> None:
        """Find out what is read of it."""
        super().attach(module)
        if self.model is None:
            raise ValueError("there is no teacher: give its name, a ModelPool or a ServedModel")
        self.compared = any(isinstance(part, DivergenceLoss) for part in module.parts)
        if self.compared:
            self.writes = () if self.pool is None else ("teacher_top_logprobs", "teacher_top_ids")

    def children(self) -> Mapping[str, Child]:
        """``module.teacher``, and of several ``teacher_1`` and so on."""
        return {_child(number): Child(partial(self.build, name)) for number, name in enumerate(self.names)}

    def build(self, name: str) -> nn.Module:
        """Load a teacher; ValueError if its tokens differ."""
        return load_teacher(name, self.module)

    def placed(self) -> Mapping[str, tuple[FrozenModel, Role]]:
        """The pool."""
        return {} if self.pool is None else {"teacher": (self.pool, "logprobs")}

    def loaded(self) -> None:
        """Check the tokens of a teacher elsewhere."""
        if self.pool is not None:
            check_teacher_tokens(self.pool.model, self.module)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Read the domain of each prompt; ValueError if one has no teacher."""
        if self.domains and stage == "fit":
            self.domains.read(datamodule_of(trainer))

    def begin(self, rows: Experience) -> None:
        """Ask a teacher elsewhere, which works while the student computes."""
        if self.pool is not None:
            self.module.placed.ask("teacher", rows)

    def prepare(self, rows: Experience) -> Experience:
        """Add its log-probs."""
        if self.pool is not None:
            found = self.module.placed.result("teacher")
            if not self.compared:
                return rows.with_columns(teacher_logprobs=found)
            top = self.pool.top
            found = found if len(rows) else torch.zeros(*rows.action_mask.shape, 2 * top)  # a rank may have no rows
            logprobs, ids = found[..., :top].contiguous(), found[..., top:].int()
            return rows.with_columns(teacher_top_logprobs=logprobs, teacher_top_ids=ids)
        return rows if self.compared else rows.with_columns(teacher_logprobs=self._of_children(rows))

    def _of_children(self, rows: Experience) -> Tensor:
        """(B, T-1) log-probs of the teacher; of several, of that of each prompt's domain. A collective."""
        logprobs, module = self.module.passes.logprobs, self.module
        if not self.domains:
            return cast(Tensor, logprobs(module.teacher, rows))
        total = torch.zeros(rows.action_mask.shape)
        for number, chosen in enumerate(self.domains.rows(rows)):
            total += logprobs(getattr(module, _child(number)), rows, chosen)
        return total


def _child(number: int) -> str:
    return f"teacher_{number}" if number else "teacher"


class TeacherAdvantages(Part):
    """Adds ``log q - log p``, teacher minus student, to the advantage of each token; without a reward it is all of it.

    This is minus the one-sample reverse KL (Lu and Thinking Machines Lab, "On-Policy Distillation", 2025), whose mean
    is logged as ``distillation/reverse_kl``.

    Args:
        coef: Weight.
        gamma: Discount of later tokens' advantages, in [0, 1]; 0 (Thinking Machines' default): only each token's own;
            1: the gradient of the reverse KL of whole answers (MiniLLM, arXiv:2306.08543).

    Raises:
        ValueError: If an argument is out of range.
    """

    stage, reads, writes = Stage.CREDIT, ("old_logprobs", "teacher_logprobs"), ("advantages",)
    may_read = ("advantages",)

    def __init__(self, coef: float = 1.0, *, gamma: float = 0.0) -> None:
        check_number("TeacherAdvantages.coef", coef, above=0)
        check_number("TeacherAdvantages.gamma", gamma, minimum=0, maximum=1)
        self.coef, self.gamma = coef, gamma

    def prepare(self, rows: Experience) -> Experience:
        """Add it; 0 outside the mask."""
        mask, old = rows.action_mask, rows.old_logprobs
        assert old is not None
        now = on_policy_distillation_advantages(old, rows.columns["teacher_logprobs"], mask)
        added = self.coef * discounted_returns(now, mask, gamma=self.gamma)
        return with_advantages(rows, added if rows.advantages is None else rows.advantages * mask + added)

    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Mapping[str, Any]:
        """The reverse KL of the policy before the iteration."""
        mask = batch.action_mask
        gap = (old - batch.columns["teacher_logprobs"]).where(mask, 0.0)
        return {"distillation/reverse_kl": mean_metric(gap, mask)}


class DivergenceLoss(Part):
    """Adds the divergence of whole next-token distributions of student and teacher at each sampled token (GKD).

    Agarwal et al. (2023, arXiv:2306.13649). Student and teacher are computed together, some tokens at a time, and
    compared at the temperature of sampling; the mean is logged as ``distillation/divergence``. It has the aggregation
    of the policy loss. A subclass overrides :meth:`compare` and :meth:`compare_likeliest` for another objective.

    Args:
        divergence: ``forward_kl``, ``reverse_kl``, ``jsd``, a function of the log-probs of student and teacher, such as
            ``JensenShannon(0.1)``, or its dotted name; see :func:`~rlhfkit.losses.distillation_loss`.
        coef: Weight.
        top_k: Compare the teacher's K likeliest tokens only, which a teacher elsewhere needs; ``None``: all.
        remainder: Treatment of the other tokens: ``bucket`` makes them one category, ``renormalize`` leaves them out.
        chunk_size: Sampled tokens whose logits exist at a time; changes memory and speed only.

    Raises:
        ValueError: If an argument is out of range or has no effect beside the others, or there is no :class:`Teacher`
            that it can be compared with.
    """

    def __init__(
        self,
        divergence: Divergence | GivenFunction,
        coef: float = 1.0,
        *,
        top_k: int | None = None,
        remainder: Remainder = "bucket",
        chunk_size: int = 1024,
    ) -> None:
        check_number("DivergenceLoss.coef", coef, above=0)
        self.divergence = checked_divergence(divergence, top_k=top_k, remainder=remainder, chunk_size=chunk_size)
        self.coef, self.top_k = coef, top_k
        self.remainder: Remainder = remainder
        self.chunk_size = chunk_size
        rows = torch.zeros(1, max(top_k or 0, 2))
        self.compare(rows, rows, 1.0)  # so that bad arguments raise before training

    def attach(self, module: Any) -> None:
        """Find the teacher, and check what is left of the policy loss."""
        super().attach(module)
        self._teacher = next((part for part in module.parts if isinstance(part, Teacher)), None)
        if self._teacher is None:
            raise ValueError("DivergenceLoss compares with a teacher: add Teacher(...)")
        if self._teacher.domains:
            raise ValueError("several teachers give log-probs of sampled tokens only: leave divergence out")
        if self._teacher.pool is not None:
            self._ask_for_likeliest(self._teacher.pool, model_elsewhere(module.parts, "reference"))
        replayed = [part_name(part) for part in module.parts if "routing" in part.reads]
        refuse_without_effect(
            dict.fromkeys(replayed, True), f"divergence={self.divergence!r}, which replays no choice of experts"
        )
        if any("advantages" in part.writes for part in module.parts):
            return
        hooks = ("weigh", "old_logprobs")
        unused = {part_name(part): any(overriding([part], hook) for hook in hooks) for part in module.parts}
        unused |= dict.fromkeys(module.policy_loss.arguments.keys() - {"aggregation", "max_length"}, True)
        unused["policy_loss"] = module.policy_loss.function not in (dapo_loss, ppo_loss)  # the defaults of modules
        refuse_without_effect(unused, f"divergence={self.divergence!r} without a reward_coef")

    def _ask_for_likeliest(self, teacher: FrozenModel, reference: FrozenModel | None) -> None:
        """Have a teacher elsewhere give its likeliest tokens; ValueError if their number is missing."""
        if self.top_k is None:
            raise ValueError(
                "a divergence compares the teacher's probabilities of all tokens, and a model elsewhere gives those of "
                "its likeliest: give top_k, as in top_k=20, or the teacher's name, so that it is a child"
            )
        if teacher is reference:
            raise ValueError(
                "the teacher is asked for its likeliest tokens and the reference for the sampled ones: give each a "
                "ModelPool or ServedModel of its own"
            )
        teacher.top = self.top_k

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Experience, batch_idx: int) -> None:
        """Leave nothing of the policy loss if no advantages were computed."""
        if batch.advantages is None:
            batch.advantages = torch.zeros_like(batch.rollout_logprobs)

    def policy_output(self, batch: Experience) -> ComparedOutput:
        """Run student and teacher, and compare both at each sampled token."""
        module, mask, temperature = self.module, batch.action_mask, batch.temperature
        wanted = "entropy" in module.outputs

        def compare(logits: Tensor, teacher: Any, tokens: Tensor, _: float) -> Tensor:
            chosen = logits_logprobs(logits, tokens, temperature=temperature, entropy=wanted)
            if teacher[1] is None:
                divergence = self.compare(logits, teacher[0], temperature)
            else:
                divergence = self.compare_likeliest(logits, teacher[0], teacher[1], temperature)
            columns = [chosen.logprobs, divergence, chosen.entropy]
            return torch.stack([column for column in columns if column is not None], -1)

        values, balance = compare_logits(
            module.policy,
            batch,
            mask,
            compare,
            self._teacher_of(batch),
            chunk_size=self.chunk_size,
            by_token=True,
            router_aux_loss=module.balances_routers,
        )
        empty = torch.zeros(mask.shape, dtype=values.dtype, device=mask.device)
        columns = [empty.masked_scatter(mask, column) for column in values.unbind(-1)]
        return ComparedOutput.of(columns[0], columns[2] if wanted else None, columns[1], balance)

    def _teacher_of(self, batch: Experience) -> TeacherRows | tuple[Tensor, Tensor]:
        """The teacher at the sampled tokens."""
        mask = batch.action_mask
        assert self._teacher is not None
        if self._teacher.pool is None:
            return teacher_logits(self.module.teacher, batch, mask)
        top_logprobs, top_ids = (batch.columns[name] for name in ("teacher_top_logprobs", "teacher_top_ids"))
        return top_logprobs[mask], top_ids[mask].long()

    def compare(self, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """(m,) divergences in nats from logits (m, V) of student and teacher.

        ``temperature``, that of sampling, divides both.
        """
        size = min(student.shape[-1], teacher.shape[-1])  # one family pads its vocabulary to different sizes
        return token_divergence(
            student[None, :, :size],
            teacher[None, :, :size],
            torch.ones(1, len(student), dtype=torch.bool, device=student.device),
            divergence=self.divergence,
            temperature=temperature,
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
            teacher_ids=ids.where(known, 0)[None],
            remainder=self.remainder,
        )[0]

    def term(self, batch: Experience, out: PolicyOutput, old: Tensor) -> LossOutput:
        """The divergence."""
        mask, sizes = batch.action_mask, self.module.policy_loss.aggregation_arguments(batch)
        token_divergences = cast(ComparedOutput, out).divergence
        divergence = aggregate(
            token_divergences, mask, sizes["aggregation"], sizes["denominator"], max_length=sizes["max_length"]
        )
        return LossOutput(self.coef * divergence, {"distillation/divergence": mean_metric(token_divergences, mask)})


class ScaledAdvantages(Part):
    """Multiplies the advantages of the reward, beside what is learned from a teacher.

    Args:
        coef: Factor.

    Raises:
        ValueError: If it is not positive.
    """

    stage, reads, writes = Stage.CREDIT, ("advantages",), ("advantages",)

    def __init__(self, coef: float) -> None:
        check_number("ScaledAdvantages.coef", coef, above=0)
        self.coef = coef

    def prepare(self, rows: Experience) -> Experience:
        """Multiply them; 0 outside the mask."""
        assert rows.advantages is not None
        return dataclasses.replace(rows, advantages=self.coef * rows.advantages * rows.action_mask)
