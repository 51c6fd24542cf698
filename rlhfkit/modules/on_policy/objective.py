"""``PolicyLossModule``: the objective of a policy on one micro-batch of an iteration, and its options."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import (
    Aggregation,
    LossOutput,
    gspo_loss,
    kl_loss,
    luspo_loss,
    policy_tokens,
    ppo_loss,
    rloo_loss,
    sum_losses,
)
from rlhfkit.losses.policy.sequence import check_advantages_of_sequences
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.arguments import refuse_without_effect
from rlhfkit.modules.on_policy.advantages import AdvantageModule
from rlhfkit.modules.on_policy.functions import PolicyLoss
from rlhfkit.modules.on_policy.preparation.iteration import two_tokens
from rlhfkit.validation import check_number


class PolicyLossModule(AdvantageModule):
    """A policy whose loss is a policy loss (PPO's by default), with a KL penalty and an entropy bonus where asked for.

    :meth:`loss` is the method to override for another objective.

    Args:
        model: Folder or hub name of the policy.
        policy_loss: A function of :mod:`rlhfkit.losses`, your own of the same form
            ``(logprobs, old_logprobs, advantages, mask, *, weights, aggregation, denominator, max_length, ...)``, or
            its name: ``"gspo_loss"``, ``"my_package.my_loss"``. It gets the arguments that its signature names, also
            ``rollout_logprobs`` or ``ref_logprobs``, and keeps its own defaults unless another argument differs.
        policy_loss_arguments: More keyword arguments of the policy loss.
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss.
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss.
        aggregation: How token losses become one number, see :func:`~rlhfkit.losses.aggregate`; ``None``: the default of
            the policy loss.
        max_length: Tokens; the constant of the ``constant-length`` aggregation.
        entropy_coef: Weight of an :class:`~rlhfkit.modules.parts.entropy.EntropyBonus`;
            :class:`~rlhfkit.modules.parts.entropy.EntropyTarget` has one that follows the entropy.
        correction: Importance correction for differences between engine and trainer: a name of
            :data:`~rlhfkit.losses.CORRECTION_PRESETS` or arguments of :func:`~rlhfkit.losses.importance_weights`.
            ``None``: none, but ``"tis"`` if the engine is quantized or samples are replayed; ``"none"``: none with any
            engine. Not for policy losses that are given the engine's log-probs (``decoupled_ppo_loss``, ``dppo_loss``).
        proximal: Which log-probs the ratio is taken to in later updates of an iteration: ``"recompute"``: those of the
            policy before it, by a forward pass; ``"log-linear"``: an approximation without one, see
            :class:`~rlhfkit.modules.parts.old_policy.LogLinear`.
        kl_clamp: Limit in nats of each token's KL in the loss (10 in OpenRLHF, and in verl for k3); ``None``: none.
        kl_importance_weight: Multiply each token's KL in the loss by its ratio, with its gradient (unbiased off-policy:
            DeepSeek-V3.2, 2025, arXiv:2512.02556; on in TRL).
        log_entropy: Compute the policy's entropy in each step, for the log and for subclasses.
        **kwargs: See :class:`~rlhfkit.modules.on_policy.advantages.AdvantageModule`.

    Raises:
        ValueError: If an argument is out of range, or has no effect beside the others.
    """

    weighing: Sequence[Callable[..., tuple[Tensor, Mapping[str, Any]]]] = ()
    """:meth:`Part.weigh` of the parts that override it."""
    approximations: Sequence[Callable[..., Tensor]] = ()
    """:meth:`Part.old_logprobs` of the part that overrides it."""

    def __init__(
        self,
        model: str,
        *,
        policy_loss: str | Callable[..., LossOutput] = ppo_loss,
        policy_loss_arguments: Mapping[str, Any] | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        aggregation: Aggregation | None = None,
        max_length: int | None = None,
        entropy_coef: float = 0.0,
        correction: str | Mapping[str, Any] | None = None,
        proximal: Literal["recompute", "log-linear"] = "recompute",
        kl_clamp: float | None = None,
        kl_importance_weight: bool = False,
        log_entropy: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        check_number("entropy_coef", entropy_coef)
        self.policy_loss = PolicyLoss(
            policy_loss,
            policy_loss_arguments,
            clip_low=clip_low,
            clip_high=clip_high,
            aggregation=aggregation,
            max_length=max_length,
        )
        self.max_length = max_length
        self.entropy_coef = entropy_coef
        if entropy_coef:
            from rlhfkit.modules.parts.entropy import EntropyBonus

            self.own_parts.append(EntropyBonus(entropy_coef))
        self.correction = correction
        if correction not in (None, "none"):
            from rlhfkit.modules.parts.correction import Correction

            self.own_parts.append(Correction(correction))
        if proximal not in ("recompute", "log-linear"):
            raise ValueError(f"proximal must be recompute or log-linear, got {proximal!r}")
        self.proximal = proximal
        if proximal == "log-linear":
            from rlhfkit.modules.parts.old_policy import LogLinear

            self.own_parts.append(LogLinear())
        check_number("kl_clamp", kl_clamp, above=0, optional=True)
        self.kl_clamp = kl_clamp
        self.kl_importance_weight = kl_importance_weight
        self.log_entropy = log_entropy
        self.hparams.update(policy_loss=self.policy_loss.name)
        self._check_combinations()
        self._check_loss()

    def _check_combinations(self) -> None:
        """Refuse combinations in which an argument has no effect, or a wrong one."""
        in_loss = bool(self.kl_coef) and self.kl_in_reward is None
        weighted = self.kl_importance_weight or self.policy_loss.arguments.get("kl_importance_weight")
        if in_loss and self.kl_estimator == "k1" and not weighted:
            raise ValueError(
                "kl_estimator='k1' in the loss has a gradient of mean 0, which is noise and no penalty: use 'k2' or "
                "'k3', or kl_in_reward=True, or kl_importance_weight=True"
            )
        given = {"kl_clamp": self.kl_clamp is not None, "kl_importance_weight": self.kl_importance_weight}
        if not in_loss:
            own = self.policy_loss.arguments if self.policy_loss.penalizes_kl else {}
            of_loss = {name: chosen or bool(own.get(name)) for name, chosen in given.items()}
            refuse_without_effect(of_loss, "a KL penalty that is not in the loss (kl_coef, kl_in_reward)")
        elif self.policy_loss.penalizes_kl:
            unknown = {name: chosen and not self.policy_loss.takes(name) for name, chosen in given.items()}
            refuse_without_effect(unknown, f"{self.policy_loss.name}, which adds the KL penalty and does not take it")
        twice = [name for name, chosen in given.items() if chosen and name in self.policy_loss.arguments]
        if twice:
            raise ValueError(f"{', '.join(twice)} is given twice, to the module and in policy_loss_arguments: keep one")

    def _check_loss(self) -> None:
        """Compute the loss of one token, so that bad arguments raise before training."""
        probe = torch.zeros(1, 1)
        batch = dataclasses.replace(two_tokens(), advantages=probe)
        batch = batch.with_columns(ref_logprobs=probe)
        try:
            PolicyLossModule.loss(self, batch, PolicyOutput(probe, probe))
        except TypeError as error:
            raise ValueError(f"{self.policy_loss.name} does not take what it is given: {error}") from error

    def _check_own_advantages(self, experience: Experience) -> None:
        """Also refuse advantages of tokens with a policy loss that takes those of sequences."""
        super()._check_own_advantages(experience)
        if self.policy_loss.function in (gspo_loss, luspo_loss, rloo_loss) and experience.advantages is not None:
            check_advantages_of_sequences(experience.advantages, experience.action_mask, self.policy_loss.name)

    @property
    def uses_rollout_logprobs(self) -> bool:
        """Whether the loss needs the engine's log-probs; ``RolloutCallback`` checks that they can be compared."""
        reading = any("rollout_logprobs" in part.reads for part in self.parts)
        return reading or self.policy_loss.takes("rollout_logprobs")

    @property
    def needs_entropy(self) -> bool:
        """Whether entropy is logged or rewarded."""
        return self.log_entropy or any("entropy" in part.outputs for part in self.parts)

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """Compute the policy's loss on one micro-batch of B sequences; override it for another objective."""
        assert batch.advantages is not None
        mask, old, reduction = batch.action_mask, self.old_logprobs(batch, out), self.aggregation_arguments(batch)
        reference = batch.columns.get("ref_logprobs")
        offered: dict[str, Any] = {
            "weights": None,
            "rollout_logprobs": batch.rollout_logprobs,
            "ref_logprobs": reference,
            "denominator": reduction["denominator"],
        }
        metrics: Mapping[str, Tensor] = {}
        for weigh in self.weighing:
            factor, measured = weigh(batch, out, old)
            offered["weights"] = factor if offered["weights"] is None else factor * offered["weights"]
            metrics = {**metrics, **measured}
        kl_coef = 0.0 if reference is None or self.kl_in_reward is not None else self.kl_coef
        if self.policy_loss.penalizes_kl:
            offered |= {"kl_coef": kl_coef, "kl_estimator": self.kl_estimator}
            offered |= {"kl_clamp": self.kl_clamp} if self.kl_clamp is not None else {}
            offered |= {"kl_importance_weight": True} if self.kl_importance_weight else {}
        parts = [self.policy_loss(out.logprobs, old, batch.advantages, mask, **offered)]
        if reference is not None and not self.policy_loss.penalizes_kl:
            estimator, more = self.kl_estimator, {"clamp": self.kl_clamp} | reduction
            if self.kl_importance_weight:
                more["importance_weight"] = policy_tokens(out.logprobs, old, batch.advantages, mask).ratio
            parts.append(kl_loss(out.logprobs, reference, mask, coef=kl_coef, estimator=estimator, **more))
        result = sum_losses(*parts, *(term(batch, out, old) for term in self.terms))
        return LossOutput(result.loss, {**result.metrics, **metrics})

    def aggregation_arguments(self, batch: Experience) -> dict[str, Any]:
        """Arguments of the terms of the loss, exact over the optimizer step.

        ``aggregation`` (:func:`~rlhfkit.losses.aggregate` itself calls it ``mode``), ``denominator``, ``max_length``.
        """
        aggregation = self.policy_loss.aggregation
        # As aggregate() counts: the divisor of constant-length does not depend on how many rows are trained on.
        counts = {"token-mean": batch.token_denominator, "constant-length": batch.row_denominator}
        return {
            "aggregation": aggregation,
            "denominator": counts.get(aggregation, batch.sequence_denominator),
            "max_length": self.max_length,
        }

    def old_logprobs(self, batch: Experience, out: PolicyOutput) -> Tensor:
        """(B, T-1) log-probs before the iteration, which are the policy's own in its first update."""
        if batch.old_logprobs is not None:
            return batch.old_logprobs
        return self.approximations[0](batch, out) if self.approximations else out.logprobs.detach()

    @property
    def recomputes_old_logprobs(self) -> bool:
        """Whether a forward pass gives the old log-probs of later updates, and no part approximates them."""
        return not self.approximations
