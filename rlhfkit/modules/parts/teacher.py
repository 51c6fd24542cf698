"""``Teacher`` and ``TeacherAdvantages``: log-probs of the student's tokens by a teacher, and advantages from them."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import discounted_returns, mean_metric, on_policy_distillation_advantages
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.on_policy.placed_models import AskedRows, ask, pool_result
from rlhfkit.modules.parts.advantages import with_advantages
from rlhfkit.modules.teachers import TeacherDomains, check_teacher_tokens, load_teacher
from rlhfkit.parts import Child, Part, Stage
from rlhfkit.roles import FrozenModel, ModelPool, ServedModel, frozen_model
from rlhfkit.roles.replica import Role
from rlhfkit.trainer_parts import datamodule_of
from rlhfkit.validation import check_number


class Teacher(Part):
    """Gives a teacher's log-probs of the tokens that the student has sampled.

    A subclass overrides :meth:`build` to wrap or change a model in the module.

    Args:
        model: Folder or hub name of the teacher, a frozen child. A :class:`~rlhfkit.roles.ModelPool`: on machines of
            its own; a :class:`~rlhfkit.roles.ServedModel`: behind ``vllm serve``. A mapping of domains to names:
            several teachers, of which ``column`` chooses one for each prompt; each computes its own prompts' samples
            only.
        column: Column of the prompts that names the domain, with several teachers.
        compared: Whether whole next-token distributions are compared in the loss: one elsewhere gives its likeliest
            tokens (columns ``teacher_top_logprobs`` and ``teacher_top_ids``), one in the module nothing before it.

    Raises:
        ValueError: If an argument is out of range; when models are loaded, if their tokens are not the student's.
    """

    stage = Stage.MODELS

    def __init__(
        self,
        model: str | ModelPool | ServedModel | Mapping[str, Any],
        *,
        column: str = "source",
        compared: bool = False,
    ) -> None:
        self.domains = TeacherDomains(model, column)
        """Several teachers; false if there is one."""
        named = isinstance(model, str) or bool(self.domains)
        self.pool = None if named else frozen_model(cast(Any, model))
        """The teacher's replicas; ``None``: it is a child."""
        self.model: Any = (dict(self.domains.names) if self.domains else model) if named else self.pool
        self.column, self.compared = column, compared
        self.names = list(self.domains.names.values()) if self.domains else [str(model)] if named else []
        """Of the teachers in the module."""
        self.writes = ("teacher_logprobs",)
        if compared:
            self.writes = () if self.pool is None else ("teacher_top_logprobs", "teacher_top_ids")
        self._asked: AskedRows | None = None

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
            self._asked = ask(self.pool, "logprobs", self.module, rows)

    def prepare(self, rows: Experience) -> Experience:
        """Add its log-probs."""
        if self.pool is not None:
            asked, self._asked = self._asked, None
            assert asked is not None
            found = pool_result(asked, self.pool)
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
    """Makes ``log q - log p``, teacher minus student, the advantage of each token, beside the reward's.

    This is minus the one-sample reverse KL (Lu and Thinking Machines Lab, "On-Policy Distillation", 2025), whose mean
    is logged as ``distillation/reverse_kl``.

    Args:
        coef: Weight.
        gamma: Discount of later tokens' advantages, in [0, 1]; 0 (Thinking Machines' default): only each token's own;
            1: the gradient of the reverse KL of whole answers (MiniLLM, arXiv:2306.08543).
        reward_coef: Weight of the advantages before it, those of the reward; 0: there are none.

    Raises:
        ValueError: If an argument is out of range.
    """

    stage, writes = Stage.CREDIT, ("advantages",)
    of_samples = False

    def __init__(self, coef: float = 1.0, *, gamma: float = 0.0, reward_coef: float = 0.0) -> None:
        check_number("TeacherAdvantages.coef", coef, above=0)
        check_number("TeacherAdvantages.gamma", gamma, minimum=0, maximum=1)
        check_number("TeacherAdvantages.reward_coef", reward_coef, minimum=0)
        self.coef, self.gamma, self.reward_coef = coef, gamma, reward_coef
        self.reads = ("old_logprobs", "teacher_logprobs", *(["advantages"] if reward_coef else []))

    def prepare(self, rows: Experience) -> Experience:
        """Add them; 0 outside the mask."""
        mask, old = rows.action_mask, rows.old_logprobs
        assert old is not None
        total = torch.zeros(mask.shape)
        if self.reward_coef:
            assert rows.advantages is not None
            total += self.reward_coef * rows.advantages * mask
        now = on_policy_distillation_advantages(old, rows.columns["teacher_logprobs"], mask)
        return with_advantages(rows, total + self.coef * discounted_returns(now, mask, gamma=self.gamma))

    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Mapping[str, Any]:
        """The reverse KL of the policy before the iteration."""
        mask = batch.action_mask
        gap = (old - batch.columns["teacher_logprobs"]).where(mask, 0.0)
        return {"distillation/reverse_kl": mean_metric(gap, mask)}


class ScaledAdvantages(Part):
    """Multiplies the advantages of the reward, beside a divergence from a teacher.

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
