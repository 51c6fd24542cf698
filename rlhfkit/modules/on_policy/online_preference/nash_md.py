"""``NashMDModule``: Nash learning from human feedback by mirror descent (Munos et al., 2023, arXiv:2312.00886)."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import (
    LossOutput,
    nash_md_loss,
    preference_advantages,
    sequence_logprobs,
    weighted_metric,
)
from rlhfkit.losses.preference.self_play import PreferenceLink
from rlhfkit.models import LoRA, PolicyOutput
from rlhfkit.modules.on_policy.online_preference.base import OnlinePreferenceModule, check_sampler
from rlhfkit.modules.on_policy.preparation.local_rows import local_rows
from rlhfkit.modules.optimizers.schedules import Schedule
from rlhfkit.parts import part_name
from rlhfkit.rollout.engine import RolloutEngine
from rlhfkit.rollout.wrappers.reference_samples import OtherSamples


class NashMDModule(OnlinePreferenceModule):
    """A policy that learns to be preferred to a mixture of itself and its reference, which leads to a Nash equilibrium.

    ``L = mean over prompts of -log π(y|x) sg(P(y ≻ y'|x) - 1/2 - β log(π(y|x) / π_ref(y|x)))`` with y of the policy and
    y' of the mixture; see :func:`~rlhfkit.losses.nash_md_loss`. Equally good answers count, since the tie to the
    reference is in the same term; a prompt whose answers could not be compared does not.

    The engine is a :class:`~rlhfkit.rollout.ReferenceMixture` (a ``LocalEngine``, as two models have to be mixed at
    every token), or :class:`~rlhfkit.rollout.ReferenceSamples` to be compared with the reference itself (the paper's
    best response, β = 1 there). Log-probs are at the temperature of sampling, and the gradient is that of answers of
    the policy as it is: with several updates per iteration the later ones are slightly off-policy.

    Example::

        RolloutCallback(PairwiseReward(judge), engine=ReferenceMixture(mixture_coef=0.5),
                        sampling=SamplingSpec(group_size=2))
        NashMDModule("Qwen/Qwen3-0.6B", beta=0.1)

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (5e-7: TRL's default).
        beta: β, strength of the tie to the reference (the paper's τ); 0.1 as in TRL.
        link: How two rewards become a preference: ``win-rate``: they are win rates in [0, 1], as of ``PairwiseReward``;
            ``bradley-terry``: scores of any size, as of a reward model.
        reward_model: Folder or hub name of a reward model whose score is added to the callback's reward.
        mask_truncated: Leave answers that the length limit cut off out of the comparison.
        weight_decay: Decoupled weight decay; ``sgd`` adds it to the gradient.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: After warm-up: ``constant``; ``linear`` or ``cosine`` decay to the end of training; ``wsd``:
            constant, then decay in the last part; ``inverse_sqrt``: as 1 / sqrt(step). See :class:`PolicyModule`.
        attention: ``None`` or ``auto``: packed with the first kernel that can run, where the model can be packed;
            ``varlen``, ``flash_attention_2``, ``flash_attention_3``, ``buckets``: packed with this one; else
            Transformers' ``attn_implementation`` (``sdpa``, ``eager``, ...), padded. See :class:`PolicyModule`.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters, not the model's own weights, which are then the reference; ``None``: all weights, or the
            adapter that ``model`` holds.
        **kwargs: As in :class:`OnlineDPOModule`.

    Raises:
        ValueError: If an argument is out of range or without effect.
    """

    def __init__(
        self,
        model: str,
        *,
        lr: float = 5e-7,
        beta: float = 0.1,
        link: PreferenceLink = "win-rate",
        reward_model: Any = None,
        mask_truncated: bool = False,
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
            beta=beta,
            reward_model=reward_model,
            mask_truncated=mask_truncated,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            lr_schedule=lr_schedule,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            **kwargs,
        )
        nothing = torch.zeros(0)
        preference_advantages(nothing, nothing, nothing, link=link)  # raises for an unknown one
        if any(part_name(part) == "MovingReference" for part in self.parts):
            raise ValueError("MovingReference moves the reference, and the engine's does not move: leave it out")
        if link == "win-rate" and "NormalizeRewards" in self.shaping:
            raise ValueError(
                "NormalizeRewards makes rewards of mean 0, and link='win-rate' takes win rates in "
                "[0, 1]: leave it out, or compare rewards of any size with link='bradley-terry'"
            )
        self.link: PreferenceLink = link

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError unless there are two samples per prompt, one of each sampler."""
        if group_size != 2:
            raise ValueError(
                "NashMDModule compares one answer of the policy with one of the mixture, got "
                f"group_size={group_size}: use SamplingSpec(group_size=2), and a larger "
                "PromptDataModule(rollout_batch_size=...) for more"
            )

    def check_engine(self, engine: RolloutEngine) -> None:
        """Raise ValueError unless the engine also samples from the mixture, or the reference."""
        check_sampler(type(self).__name__, engine, OtherSamples)

    # ------------------------------------------------------------------ before the updates of an iteration

    @local_rows
    def advantages(self, experience: Experience) -> Tensor:
        """(B,) ``P - 1/2`` of the policy's answers; NaN for the others', and where nothing could be compared."""
        rewards = experience.rewards
        if self.mask_truncated:
            rewards = rewards.masked_fill(experience.truncated, torch.nan)
        by_policy = self.gather_rows(experience, experience.by_policy)
        return self.over_iteration(
            lambda all_, group, _: preference_advantages(all_, group, by_policy, link=self.link), experience, rewards
        )

    def mask_uncompared(self, experience: Experience) -> Experience:
        """Mask all samples but the policy's that were compared."""
        assert experience.advantages is not None
        compared = ~experience.advantages.isnan()
        return dataclasses.replace(
            experience,
            action_mask=experience.action_mask & compared.any(-1, keepdim=True),
            advantages=experience.advantages.nan_to_num(),
        )

    # ------------------------------------------------------------------ one micro-batch

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """The loss of the policy's answers of a micro-batch; override it for another objective."""
        assert batch.advantages is not None
        mask = batch.action_mask
        counts = mask.any(-1)
        result = nash_md_loss(
            sequence_logprobs(out.logprobs, mask),
            sequence_logprobs(batch.columns["ref_logprobs"], mask),
            batch.advantages[:, 0],
            beta=self.beta,
            mask=counts,
            denominator=batch.sequence_denominator,
        )
        number = counts.sum()
        return LossOutput(result.loss, {name: weighted_metric(mean, number) for name, mean in result.metrics.items()})
