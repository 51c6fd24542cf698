"""``GRPOModule``: group relative policy optimization (Shao et al., 2024, arXiv:2402.03300)."""

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from rlhfkit.data.experience import Experience
from rlhfkit.losses import (
    AdvantageScale,
    Aggregation,
    KLEstimator,
    LossOutput,
    group_advantages,
    grpo_loss,
    masked_mean,
)
from rlhfkit.models import PolicyOutput, policy_output
from rlhfkit.models.load import disable_dropout
from rlhfkit.modules.base import PolicyModule


class GRPOModule(PolicyModule):
    """A policy that learns from the rewards of groups of samples: no critic, the group is the baseline.

    The advantage of a sample is its reward's standard score within its group; the loss is PPO's clipped surrogate with
    that advantage on every token, plus an optional KL penalty towards the model it started from.

    Override :meth:`advantages` for another estimator and :meth:`loss` for another objective::

        class DrGRPO(GRPOModule):
            def advantages(self, experience):
                return group_advantages(experience.rewards, experience.group, scale="none")

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's and OpenRLHF's default).
        clip_low: The ratio is clipped at 1 - clip_low from below (PPO's 0.2).
        clip_high: The ratio is clipped at 1 + clip_high from above (0.28: DAPO, Yu et al., 2025, arXiv:2503.14476).
        advantage_scale: What the centred reward is divided by: the standard deviation of its ``group``, of the
            ``batch``, or ``none`` (Dr.GRPO, Liu et al., 2025, arXiv:2503.20783).
        aggregation: How token losses become one number (``token-mean``: DAPO and TRL's default); see
            :func:`~rlhfkit.losses.aggregate`.
        max_length: Tokens; the constant of the ``constant-length`` aggregation.
        kl_coef: Weight of the KL penalty in the loss; 0 (TRL's default) loads no reference model.
        kl_estimator: ``k1``, ``k2`` or ``k3`` (the paper's).
        log_entropy: Compute the policy's entropy in each step, for the log and for subclasses.
        **kwargs: See :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    reference: nn.Module
    frozen_children = ("reference",)

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        advantage_scale: AdvantageScale = "group",
        aggregation: Aggregation = "token-mean",
        max_length: int | None = None,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        log_entropy: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, lr=lr, **kwargs)
        if kl_coef < 0:
            raise ValueError(f"kl_coef must be 0 (no reference model) or more, got {kl_coef}")
        # One tiny evaluation shows every bad knob of the loss here, not an hour into the run.
        probe = torch.zeros(1, 1)
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), scale=advantage_scale)
        self._surrogate(probe, probe, probe, probe.bool(), probe if kl_coef else None, None)

    def check_group_size(self, group_size: int) -> None:
        """Called by ``RolloutCallback`` before training.

        Args:
            group_size: Samples per prompt.

        Raises:
            ValueError: If there is nothing to compare a sample with.
        """
        if group_size < 2:
            raise ValueError(
                f"{type(self).__name__} compares the samples of a prompt, and with group_size={group_size} every "
                "advantage is 0: use SamplingSpec(group_size=2) or more (8 is usual)"
            )

    def build_policy(self) -> nn.Module:
        """Load the policy without dropout: the ratio compares it with itself, which dropout would make noise."""
        policy = super().build_policy()
        disable_dropout(policy)
        return policy

    def configure_model(self) -> None:
        """Build the policy, and a frozen copy of where it starts if the KL penalty needs one."""
        super().configure_model()
        if self.hparams["kl_coef"] and not hasattr(self, "reference"):
            self.reference = self.build_policy().requires_grad_(False).eval()
            # Lightning 2.6 warns of every module in eval mode when fitting starts; this one is meant to be.
            warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")

    # ------------------------------------------------------------------ one iteration

    def advantages(self, experience: Experience) -> Tensor:
        """Advantage of each sample; the one method to override for another estimator.

        Args:
            experience: The whole iteration, B sequences, the same on every rank.

        Returns:
            (B,), or (B, T-1) when tokens differ; 0 where the reward is missing.
        """
        return group_advantages(experience.rewards, experience.group, scale=self.hparams["advantage_scale"])

    def prepare(self, experience: Experience) -> Experience:
        """Fill in what the loss needs and only the policy before the iteration's first update can tell.

        Args:
            experience: The whole iteration, the same on every rank.

        Returns:
            A copy with advantages, and, where needed, old log-probs (for all but the first update, whose own log-probs
            are the old ones) and reference log-probs.
        """
        advantages = self.advantages(experience)
        if advantages.dim() == 1:
            advantages = advantages[:, None].expand_as(experience.action_mask)
        later = experience.update > 0
        return dataclasses.replace(
            experience,
            advantages=advantages,
            old_logprobs=self.sharded_logprobs(self.policy, experience, later) if bool(later.any()) else None,
            ref_logprobs=self.sharded_logprobs(self.reference, experience) if self.hparams["kl_coef"] else None,
        )

    def policy_output(self, batch: Experience) -> PolicyOutput:
        """Log-probs, and entropy if it is logged, of the tokens the policy chose."""
        return policy_output(
            self.policy,
            batch,
            batch.action_mask,
            temperature=batch.temperature,
            entropy=self.hparams["log_entropy"],
        )

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """The objective of one micro-batch; the one method to override for another.

        Args:
            batch: B sequences of one update.
            out: What the current policy says about them.
        """
        assert batch.advantages is not None
        old = out.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        by_tokens = self.hparams["aggregation"] == "token-mean"
        denominator = batch.token_denominator if by_tokens else batch.sequence_denominator
        return self._surrogate(out.logprobs, old, batch.advantages, batch.action_mask, batch.ref_logprobs, denominator)

    def _surrogate(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        ref_logprobs: Tensor | None,
        denominator: float | None,
    ) -> LossOutput:
        return grpo_loss(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            clip_low=self.hparams["clip_low"],
            clip_high=self.hparams["clip_high"],
            ref_logprobs=ref_logprobs,
            kl_coef=self.hparams["kl_coef"],
            kl_estimator=self.hparams["kl_estimator"],
            aggregation=self.hparams["aggregation"],
            denominator=denominator,
            max_length=self.hparams["max_length"],
        )

    def training_step(self, batch: Experience, batch_idx: int) -> Tensor:
        """One micro-batch of an iteration."""
        out = self.policy_output(batch)
        result = self.loss(batch, out)
        self.log_means({"loss": result.loss.detach(), **result.metrics, **self._rollout_metrics(batch, out)})
        return result.loss

    def _rollout_metrics(self, batch: Experience, out: PolicyOutput) -> dict[str, Tensor]:
        """Entropy, and how far the engine's log-probs are from the trainer's for the same policy."""
        with torch.no_grad():
            before = out.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            difference = (before - batch.rollout_logprobs).abs()
            metrics = {"rollout/logprob_difference": masked_mean(difference, batch.action_mask)}
            if out.entropy is not None:
                metrics["policy/entropy"] = self.token_mean(out.entropy.detach(), batch)
        return metrics

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Validation generates and scores; ``RolloutCallback`` does both and logs the result."""
