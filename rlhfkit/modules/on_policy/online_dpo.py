"""``OnlineDPOModule``: direct preference optimization of pairs that are sampled and judged during training."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import (
    LossOutput,
    best_and_worst,
    dpo_loss,
    pair_partners,
    rejected_values,
    sequence_logprobs,
    weighted_metric,
)
from rlhfkit.losses.preference.dpo import SORTS_THE_BATCH, Divergence, LossTypes
from rlhfkit.models import LoRA, PolicyOutput
from rlhfkit.modules.arguments import drop_hyperparameters, refuse_without_effect, take_out
from rlhfkit.modules.on_policy.base import ModuleStep, OnPolicyModule
from rlhfkit.modules.on_policy.ranks import local_rows
from rlhfkit.modules.optimizers.schedules import Schedule
from rlhfkit.parts import Part, Stage, overriding, part_name
from rlhfkit.validation import check_number, function_name, resolve_function

OF_POLICY_LOSSES = (
    "advantages",
    "policy_loss",
    "policy_loss_arguments",
    "clip_low",
    "clip_high",
    "aggregation",
    "max_length",
    "entropy_coef",
    "correction",
    "proximal",
)
"""Arguments of :class:`OnPolicyModule` that a loss of pairs does not have."""


class OnlineDPOModule(OnPolicyModule):
    """Direct preference optimization on pairs of the policy's own answers, judged while it learns.

    ``L = mean over prompts of -log σ(β (log π(y_c|x)/π_ref(y_c|x) - log π(y_r|x)/π_ref(y_r|x)))``, where ``y_c`` and
    ``y_r`` are the samples of a prompt with the largest and the smallest reward.

    OAIF, "Direct Language Model Alignment from Online AI Feedback", Guo et al. (2024, arXiv:2402.04792, algorithm 1),
    with two samples per prompt; the best and the worst of more are those of OpenRLHF's iterative DPO. Rewards come from
    any reward of ``RolloutCallback``, from a ``reward_model``, or from judges that compare answers
    (:class:`~rlhfkit.rewards.PairwiseReward`). A prompt whose rewards are all equal, or of whose samples fewer than two
    could be scored, teaches nothing and does not count in the mean; ``rollout/...`` metrics say how many there are.

    Log-probs are at the temperature of sampling. The mean is over the pairs of the whole optimizer step, so that it
    does not depend on micro-batches and ranks; a pair is always in one micro-batch. Metrics are those of
    :func:`~rlhfkit.losses.dpo_loss`.

    Example::

        RolloutCallback(reward=PairwiseReward(ChatJudge("http://judge:8000/v1", model="judge")),
                        sampling=SamplingSpec(group_size=2))
        OnlineDPOModule("Qwen/Qwen3-0.6B", beta=0.1)

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (5e-7: TRL's default for online DPO and that of OAIF).
        beta: β, strength of the regularization towards the reference; 0.1 as in the paper and TRL.
        loss_type: As in :class:`DPOModule`; not ``sft`` (see ``nll_coef``), ``aot`` and ``aot_unpaired``.
        label_smoothing: ε in [0, 0.5), the probability that a judgement is wrong.
        divergence: Divergence of f-DPO, see :func:`~rlhfkit.losses.divergence_score`.
        divergence_alpha: α of ``divergence="alpha"``.
        discopop_temperature: τ of ``discopop``.
        nll_coef: Weight of the negative log-likelihood per token of each chosen answer.
        reward_model: Folder or hub name of a reward model whose score is added to the callback's reward, see
            :class:`GRPOModule`.
        mask_truncated: Leave answers that the length limit cut off out of the comparison.
        weight_decay: Decoupled weight decay; ``sgd`` adds it to the gradient.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: After warm-up: ``constant``; ``linear`` or ``cosine`` decay to the end of training; ``wsd``:
            constant, then decay in the last part; ``inverse_sqrt``: as 1 / sqrt(step). See :class:`PolicyModule`.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters, not the model's own weights, which are then the reference; ``None``: all weights, or the
            adapter that ``model`` holds.
        **kwargs: Rewards and reference: see :class:`OnPolicyModule`; model: see :class:`PolicyModule`. Arguments of
            policy losses and advantages are refused.

    Raises:
        ValueError: If an argument is out of range or without effect.
    """

    keeps_groups_together = True

    def __init__(
        self,
        model: str,
        *,
        lr: float = 5e-7,
        beta: float = 0.1,
        loss_type: LossTypes = "sigmoid",
        label_smoothing: float = 0.0,
        divergence: Divergence = "reverse_kl",
        divergence_alpha: float = 0.5,
        discopop_temperature: float = 0.05,
        nll_coef: float = 0.0,
        reward_model: Any = None,
        mask_truncated: bool = False,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        lr_schedule: Schedule = "constant",
        gradient_checkpointing: bool = False,
        lora: LoRA | None = None,
        **kwargs: Any,
    ) -> None:
        refused = take_out(OF_POLICY_LOSSES, kwargs, OnPolicyModule)
        if refused:
            raise ValueError(f"{', '.join(refused)} has no effect on a loss of pairs, which has a beta: leave it out")
        check_number("beta", beta, above=0)
        if kwargs.get("reference") is None:
            from rlhfkit.modules.parts.reference import Reference

            self.own_parts = [Reference()]
        super().__init__(
            model,
            lr=lr,
            reward_model=reward_model,
            mask_truncated=mask_truncated,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            lr_schedule=lr_schedule,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            **kwargs,
        )
        drop_hyperparameters(OF_POLICY_LOSSES, self, OnPolicyModule)
        self.beta = beta
        in_loss = [part_name(one) for one in self.parts if overriding([one], "weigh") or overriding([one], "term")]
        if in_loss:
            raise ValueError(
                f"{', '.join(in_loss)} takes part in a policy loss, and a loss of pairs has none: leave it out, or "
                "override loss()"
            )
        if mask_truncated:
            of_truncated = {name: name in self.shaping for name in ("StopProperly", "MissingEndPenalty")}
            refuse_without_effect(of_truncated, "mask_truncated, which compares no answer that was cut off")
        check_number("label_smoothing", label_smoothing, minimum=0, below=0.5)
        check_number("divergence_alpha", divergence_alpha)
        check_number("discopop_temperature", discopop_temperature, above=0)
        check_number("nll_coef", nll_coef, minimum=0)
        mixture = loss_type if isinstance(loss_type, Mapping) else {loss_type: 1.0}
        self.loss_types = {
            resolve_function(name, "loss_type") if isinstance(name, str) and "." in name else name: float(weight)
            for name, weight in mixture.items()
        }
        unfit = {"sft", *SORTS_THE_BATCH}.intersection(self.loss_types)
        if unfit:
            raise ValueError(
                f"loss_type {sorted(map(str, unfit))} depends on how many pairs a micro-batch or a step has, and "
                "prompts whose answers are equally good have none: take another one, nll_coef in place of 'sft'"
            )
        if "NormalizeRewards" in self.shaping:
            raise ValueError("NormalizeRewards changes no comparison of two rewards: leave it out")
        self.hparams.update(
            loss_type={name if isinstance(name, str) else function_name(name): w for name, w in self.loss_types.items()}
        )
        self.label_smoothing = label_smoothing
        self.divergence: Divergence = divergence
        self.divergence_alpha = divergence_alpha
        self.discopop_temperature = discopop_temperature
        self.nll_coef = nll_coef
        zero, one = torch.zeros(1), torch.ones(1)
        self._pair_loss(zero, zero, zero, zero, chosen_lengths=one, rejected_lengths=one)

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError unless there are two samples per prompt or more."""
        if group_size < 2:
            raise ValueError(
                f"{type(self).__name__} compares the samples of a prompt, got group_size={group_size}: use "
                "SamplingSpec(group_size=2) or more"
            )

    def steps(self) -> list[Part]:
        """The steps of :class:`OnPolicyModule`, and that only compared samples are learned from."""
        return [*super().steps(), self.compared]

    @property
    def compared(self) -> Part:
        """That only samples of pairs are learned from, which the loss compares with the reference."""
        reads = ("ref_logprobs", "action_mask")
        return ModuleStep(self.mask_uncompared, Stage.SELECT, reads=reads, writes=("action_mask",))

    def correct_off_policy(self) -> bool:
        """Return False: the loss has no weights of tokens, so that replayed samples are refused."""
        return False

    # ------------------------------------------------------------------ before the updates of an iteration

    @local_rows
    def advantages(self, experience: Experience) -> Tensor:
        """(B,) 1 for the better answer of a pair, -1 for the worse one, 0 for the other samples."""
        rewards = experience.rewards
        if self.mask_truncated:
            rewards = rewards.masked_fill(experience.truncated, torch.nan)
        return self.ranks.over_iteration(lambda all_, group, _: best_and_worst(all_, group), experience, rewards)

    def mask_uncompared(self, experience: Experience) -> Experience:
        """Mask all samples that are in no pair; cut off ones are in none with ``mask_truncated``."""
        assert experience.advantages is not None
        paired = (experience.advantages != 0).any(-1, keepdim=True)
        return dataclasses.replace(experience, action_mask=experience.action_mask & paired)

    # ------------------------------------------------------------------ one micro-batch

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """The loss of the pairs of a micro-batch; override it for another objective."""
        assert batch.advantages is not None
        mask = batch.action_mask
        logps = sequence_logprobs(out.logprobs, mask)
        reference = sequence_logprobs(batch.columns["ref_logprobs"], mask)
        # At the rows of the chosen answers; others are masked. Ranks without rows have a batch without pairs.
        partners, pairs = pair_partners(batch.advantages.sum(-1).sign() * mask.any(-1), batch.group)
        lengths, counted = mask.sum(-1), batch.sequence_denominator
        result = self._pair_loss(
            logps,
            rejected_values(partners, logps),
            reference,
            rejected_values(partners, reference),
            chosen_lengths=lengths,
            rejected_lengths=rejected_values(partners, lengths),
            mask=pairs,
            denominator=None if counted is None else counted / 2,  # two sequences a pair
        )
        number = pairs.sum()
        return LossOutput(result.loss, {name: weighted_metric(mean, number) for name, mean in result.metrics.items()})

    def _pair_loss(
        self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, **arguments: Any
    ) -> LossOutput:
        return dpo_loss(
            chosen,
            rejected,
            ref_chosen,
            ref_rejected,
            beta=self.beta,
            loss_type=self.loss_types,
            label_smoothing=self.label_smoothing,
            divergence=self.divergence,
            divergence_alpha=self.divergence_alpha,
            discopop_temperature=self.discopop_temperature,
            nll_coef=self.nll_coef,
            **arguments,
        )
