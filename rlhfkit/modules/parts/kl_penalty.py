"""``KLPenalty`` and ``KLInReward`` keep the policy near a ``Reference``, in the loss or in the rewards.

Both bring a :class:`Reference`, log ``policy/ref_kl`` in nats per token, and have a coefficient that
:class:`~rlhfkit.modules.parts.kl_control.KLTarget` moves.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import LossOutput, kl_estimate, kl_loss, masked_mean, masked_sum
from rlhfkit.losses.kl import KLEstimator
from rlhfkit.losses.policy.base import policy_tokens
from rlhfkit.models import PolicyOutput
from rlhfkit.parts import Coefficient, Part, Stage, check_coefficient, coefficient
from rlhfkit.roles import ModelPool, ServedModel
from rlhfkit.roles.frozen_model import FrozenModel
from rlhfkit.roles.replica import Role
from rlhfkit.validation import check_number


class Reference(Part):
    """Gives the log-probs of a reference model, which is the policy as it was loaded.

    Parts that read ``ref_logprobs``, such as a KL penalty, bring one; give it to say where the model is::

        GRPOModule("sft", kl_coef=0.01, parts=[Reference(ModelPool("sft", resources={"GPU": 1}))])

    Args:
        pool: ``None``: a frozen child of the module, or the policy without its adapters. A
            :class:`~rlhfkit.roles.ModelPool`: on machines of its own, where it works while the policy computes its old
            log-probs; a :class:`~rlhfkit.roles.ServedModel`: behind a running ``vllm serve``. Both also as plain
            values.

    Raises:
        ValueError: If a model elsewhere was given and no part asks it.
    """

    stage, writes = Stage.MODELS, ("ref_logprobs",)

    def __init__(self, pool: ModelPool | ServedModel | Mapping[str, Any] | None = None) -> None:
        self.pool: FrozenModel | None = FrozenModel.of(pool)
        self.loads_reference = self.pool is None

    def attach(self, module: Any) -> None:
        """Check that a model elsewhere is asked."""
        super().attach(module)
        if self.pool is not None and not any("ref_logprobs" in part.reads for part in module.parts):
            raise ValueError(
                f"Reference({type(self.pool).__name__}(...)) is a model that nothing asks: give a kl_coef (0.01 is "
                "OpenRLHF's) or KLPenalty, or leave Reference out"
            )

    def placed(self) -> Mapping[str, tuple[FrozenModel, Role]]:
        """The pool."""
        return {} if self.pool is None else {"reference": (self.pool, "logprobs")}

    def begin(self, rows: Experience) -> None:
        """Ask a model elsewhere, which works while the policy computes."""
        if self.pool is not None:
            self.module.placed.ask("reference", rows)

    def prepare(self, rows: Experience) -> Experience:
        """Add the log-probs."""
        if self.pool is not None:
            return rows.with_columns(ref_logprobs=self.module.placed.result("reference"))
        with self.module.reference_model() as reference:
            return rows.with_columns(ref_logprobs=self.module.passes.logprobs(reference, rows))


class KLPart(Part):
    """What both penalties have: a coefficient, an estimator, and the reference that they bring."""

    coef: float | Callable[[int], float]
    """Weight of the penalty, maybe a function of the step."""
    estimator: KLEstimator

    def brings(self) -> Sequence[Part]:
        """A reference."""
        return [Reference()]

    def attach(self, module: Any) -> None:
        """Check that it is the only one."""
        super().attach(module)
        penalties = [type(part).__name__ for part in module.parts if isinstance(part, KLPart)]
        if len(penalties) > 1:
            raise ValueError(f"a module has one KL penalty, got {' and '.join(penalties)}: leave one of them out")

    def _check(self, coef: Coefficient) -> None:
        name, why = f"{type(self).__name__}.coef", "without a penalty leave it out"
        self.coef = check_coefficient(name, coef, above=0, why=why)
        probe = torch.zeros(1, 1)
        kl_estimate(probe, probe, estimator=self.estimator, mask=probe == 0)


def own_penalty(coef: float, given: Sequence[Part], make: Callable[[float], Part]) -> list[Part]:
    """The penalty that ``kl_coef=`` of a module stands for; none if it is 0, or one was given among the parts.

    Raises:
        ValueError: If ``coef`` is negative.
    """
    check_number("kl_coef", coef, minimum=0, why="0 is no reference model")
    return [make(coef)] if coef and not any(isinstance(part, KLPart) for part in given) else []


class KLPenalty(KLPart):
    """Adds the KL to the reference to the policy loss, see :func:`~rlhfkit.losses.kl_loss`.

    It has the policy loss's aggregation, and is not multiplied by weights of tokens. ``GRPOModule(kl_coef=0.04)`` makes
    one; one among ``parts`` takes the place of the module's.

    Args:
        coef: Weight (0.04 in the GRPO paper, arXiv:2402.03300), see :data:`~rlhfkit.parts.Coefficient`.
        estimator: ``k2`` or ``k3`` (GRPO's); ``k1``, whose gradient has mean 0, with ``importance_weight`` only.
        clamp: Limit in nats of each token's KL (10 in OpenRLHF, and in verl for k3); ``None``: none.
        importance_weight: Multiply each token's KL by its ratio, with its gradient (unbiased off-policy: DeepSeek-V3.2,
            2025, arXiv:2512.02556; on in TRL).

    Raises:
        ValueError: If an argument is out of range, or the module has another KL penalty.
    """

    reads = ("ref_logprobs",)

    def __init__(
        self,
        coef: Coefficient,
        *,
        estimator: KLEstimator = "k3",
        clamp: float | None = None,
        importance_weight: bool = False,
    ) -> None:
        self.estimator, self.clamp, self.importance_weight = estimator, clamp, importance_weight
        self._check(coef)
        check_number("KLPenalty.clamp", clamp, above=0, optional=True)
        if estimator == "k1" and not importance_weight:
            raise ValueError(
                "estimator='k1' in the loss has a gradient of mean 0, which is noise and no penalty: use 'k2' or "
                "'k3', or importance_weight=True, or KLInReward"
            )

    def term(self, batch: Experience, out: PolicyOutput, old: Tensor) -> LossOutput:
        """The penalty."""
        mask, ratio = batch.action_mask, None
        if self.importance_weight:
            assert batch.advantages is not None
            ratio = policy_tokens(out.logprobs, old, batch.advantages, mask).ratio
        return kl_loss(
            out.logprobs,
            batch.columns["ref_logprobs"],
            mask,
            coef=coefficient(self.coef, self.module),
            estimator=self.estimator,
            clamp=self.clamp,
            importance_weight=ratio,
            **self.module.policy_loss.aggregation_arguments(batch),
        )


class KLInReward(KLPart):
    """Subtracts the KL of the policy before the iteration to the reference from rewards.

    ``PPOModule(kl_coef=0.01)`` makes one of tokens; one among ``parts`` takes the place of the module's.

    Args:
        coef: Weight (0.01: OpenRLHF's, 0.05: TRL's), see :data:`~rlhfkit.parts.Coefficient`.
        place: ``sequence``: the answer's total, from the reward of the sample, before the baseline (RLOO; TRL's, and
            verl's for estimators that compare samples). ``token``: from the reward of each token (InstructGPT,
            OpenRLHF's default for PPO), after any baseline of its sample.
        estimator: ``k1`` (InstructGPT), ``k2`` or ``k3``.

    Raises:
        ValueError: If an argument is out of range, the module has another KL penalty, or none of its parts gives tokens
            what each has earned.
    """

    stage = Stage.PENALIZE
    temporary: Mapping[str, str] = {
        "token_penalty": "TokenCredit (rlhfkit.modules.parts.advantages), or use place='sequence'"
    }
    reads = ("rewards", "old_logprobs", "ref_logprobs")

    def __init__(
        self, coef: Coefficient, *, place: Literal["sequence", "token"] = "sequence", estimator: KLEstimator = "k1"
    ) -> None:
        if place not in ("sequence", "token"):
            raise ValueError(f"KLInReward.place must be 'sequence' or 'token', got {place!r}")
        self.place, self.estimator = place, estimator
        self.writes = ("rewards",) if place == "sequence" else ("token_penalty",)
        self._check(coef)

    def prepare(self, rows: Experience) -> Experience:
        """Subtract it, or add the column ``token_penalty``, (B, T-1) in units of the reward."""
        old, reference, mask = rows.old_logprobs, rows.columns["ref_logprobs"], rows.action_mask
        assert old is not None
        kl, coef = kl_estimate(old, reference, estimator=self.estimator, mask=mask), coefficient(self.coef, self.module)
        if self.place == "token":
            return rows.with_columns(token_penalty=coef * kl)
        return dataclasses.replace(rows, rewards=rows.rewards - coef * masked_sum(kl, mask, -1))

    @torch.no_grad()
    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Mapping[str, Any]:
        """The KL of the policy now."""
        mask = batch.action_mask
        kl = kl_estimate(out.logprobs, batch.columns["ref_logprobs"], estimator=self.estimator, mask=mask)
        return {"policy/ref_kl": masked_mean(kl, mask)}
