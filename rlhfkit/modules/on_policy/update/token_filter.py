"""``TokenFilter``: which tokens and answers of an iteration the policy learns from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import off_policy_sequence_mask, rejection_mask
from rlhfkit.validation import check_number


@dataclass(frozen=True, kw_only=True)
class TokenFilter:
    """Tests that a token has to pass to be learned from; a token that fails has weight 0 in the policy loss.

    It still counts in means and denominators, and in the KL penalty and the entropy bonus. Example::

        GRPOModule("Qwen/Qwen3-0.6B", token_filter=TokenFilter(top_entropy=0.2))
    """

    top_entropy: float | None = None
    """Share of the iteration's trained tokens, of all ranks, that are learned from: those at which the policy before
    the iteration has the highest entropy (0.2 of a batch: Wang et al., 2025, arXiv:2506.01939), see
    :func:`~rlhfkit.losses.top_entropy_mask`; ``None``: all. Takes a forward pass over the iteration, that of the old
    log-probs where there is one. TRL takes the quantile of each micro-batch, over all ranks."""
    off_policy: float | None = None
    """Answers with a negative advantage are left out where the engine's log-probs are above the policy's by more than
    this, in nats per token (DeepSeek-V3.2, 2025, arXiv:2512.02556), see
    :func:`~rlhfkit.losses.off_policy_sequence_mask`; ``None``: never."""
    rejection: Mapping[str, Any] | None = None
    """Arguments of :func:`~rlhfkit.losses.rejection_mask`, by which tokens or answers are left out where the log-probs
    of engine and trainer differ: ``{"level": "sequence-mean", "divergence": "k3", "high": 0.01}``; ``None``: none."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_number("TokenFilter.top_entropy", self.top_entropy, above=0, maximum=1, optional=True)
        check_number("TokenFilter.off_policy", self.off_policy, minimum=0, optional=True)
        if self.rejection is not None:
            probe = torch.zeros(1, 1)
            try:
                rejection_mask(probe, probe, probe == 0, **self.rejection)
            except TypeError as error:
                raise ValueError(f"TokenFilter.rejection has arguments of rejection_mask: {error}") from error

    @property
    def is_active(self) -> bool:
        """Whether there is any test."""
        return self.top_entropy is not None or self.uses_rollout_logprobs

    @property
    def uses_rollout_logprobs(self) -> bool:
        """Whether a test compares log-probs with those of the engine."""
        return self.off_policy is not None or self.rejection is not None

    def kept(self, batch: Experience, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """(B, T-1) bool, true where all tests are passed, and outside the action mask.

        Args:
            batch: B sequences of T tokens, with advantages, and the choice of tokens for ``top_entropy``.
            logprobs: (B, T-1) of the policy now.
            old_logprobs: (B, T-1) of the policy before the iteration.
        """
        mask, kept = batch.action_mask, torch.ones_like(batch.action_mask)
        if self.top_entropy is not None:
            kept = kept & (batch.columns["high_entropy"] | ~mask)
        known = batch.rollout_logprobs.where(~batch.rollout_logprobs.isnan(), logprobs.detach())
        if self.off_policy is not None:
            assert batch.advantages is not None
            kept = kept & off_policy_sequence_mask(
                batch.advantages, logprobs.detach(), known, mask, threshold=self.off_policy
            )
        if self.rejection is not None:
            kept = kept & rejection_mask(old_logprobs, batch.rollout_logprobs, mask, **self.rejection)
        return kept
