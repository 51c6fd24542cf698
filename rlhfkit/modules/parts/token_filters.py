"""``TopEntropy``, ``OffPolicyMask`` and ``Rejection``: which tokens of an iteration the policy learns from.

A token that is left out has weight 0 in the policy loss. It still counts in means and denominators, and in the KL
penalty and the entropy bonus, so that the gradients of other tokens stay as they are.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import all_reduce, cpu_group
from rlhfkit.losses import mean_metric, off_policy_sequence_mask, rejection_mask, top_entropy_mask
from rlhfkit.losses.importance_sampling import RejectionLevel
from rlhfkit.models import PolicyOutput
from rlhfkit.parts import Part, Stage
from rlhfkit.validation import check_number


class TokenFilter(Part):
    """A test that a token has to pass to be learned from; a subclass has :meth:`kept`.

    The share of tokens that pass is logged as ``policy/kept_fraction``, of a module's further filters with their names
    behind it.
    """

    def kept(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Tensor:
        """(B, T-1) bool, true where a token is learned from; what it is outside the mask does not matter. Abstract."""
        raise NotImplementedError

    def weigh(self, batch: Experience, out: PolicyOutput, old: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """1 for a token that passes, and 0 for others."""
        kept = self.kept(batch, out, old).float()
        first = next(part for part in self.module.parts if isinstance(part, TokenFilter))
        name = "policy/kept_fraction" + ("" if first is self else f"/{type(self).__name__}")
        return kept, {name: mean_metric(kept, batch.action_mask)}


class TopEntropy(TokenFilter):
    """Learns from the tokens at which the policy before the iteration has the highest entropy.

    They are chosen exactly over all trained tokens of the iteration and all ranks, see
    :func:`~rlhfkit.losses.top_entropy_mask`; TRL takes the quantile of each micro-batch, over all ranks. It needs a
    forward pass over the iteration, which is that of the old log-probs where there is one. Example::

        GRPOModule("Qwen/Qwen3-0.6B", parts=[TopEntropy(0.2)])

    Args:
        fraction: Share of the tokens that are learned from, in (0, 1] (0.2: Wang et al., 2025, arXiv:2506.01939).

    Raises:
        ValueError: If it is out of range.
    """

    stage, reads, writes = Stage.SELECT, ("entropy", "action_mask"), ("high_entropy",)

    def __init__(self, fraction: float) -> None:
        check_number("TopEntropy.fraction", fraction, above=0, maximum=1)
        self.fraction = fraction

    def prepare(self, rows: Experience) -> Experience:
        """Choose the tokens; answers that an earlier part has masked are not compared. A collective."""
        return rows.with_columns(high_entropy=highest_entropies(rows, rows.columns["entropy"], self.fraction))

    def kept(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Tensor:
        """The chosen tokens."""
        return batch.columns["high_entropy"] | ~batch.action_mask


class OffPolicyMask(TokenFilter):
    """Leaves out answers with a negative advantage that the policy has drifted away from.

    See :func:`~rlhfkit.losses.off_policy_sequence_mask` (DeepSeek-V3.2, 2025, arXiv:2512.02556).

    Args:
        threshold: How much the engine's log-probs may be above the policy's, in nats per token.

    Raises:
        ValueError: If it is negative.
    """

    reads = ("rollout_logprobs",)

    def __init__(self, threshold: float) -> None:
        check_number("OffPolicyMask.threshold", threshold, minimum=0)
        self.threshold = threshold

    def kept(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Tensor:
        """All tokens of an answer, or none; a token without a log-prob of the engine counts as one that agrees."""
        assert batch.advantages is not None
        logprobs = out.logprobs.detach()
        known = batch.rollout_logprobs.where(~batch.rollout_logprobs.isnan(), logprobs)
        return off_policy_sequence_mask(batch.advantages, logprobs, known, batch.action_mask, threshold=self.threshold)


class Rejection(TokenFilter):
    """Leaves out tokens or answers at which the log-probs of engine and trainer differ.

    See :func:`~rlhfkit.losses.rejection_mask`, which has the arguments. Example::

        GRPOModule("Qwen/Qwen3-0.6B", parts=[Rejection("sequence-mean", divergence="k3", high=0.01)])

    Args:
        level: ``token``, ``sequence-mean``, ``sequence-sum`` or ``sequence-max``.
        divergence: ``k1``, ``k2`` or ``k3``.
        low: Only for ``k1``: lower bound of the ratio, ``1 / high`` when ``None``.
        high: Upper bound: of the ratio for ``k1``, of the divergence in nats for ``k2`` and ``k3``.

    Raises:
        ValueError: If a name is unknown, or bounds are crossed or without effect.
    """

    reads = ("rollout_logprobs",)

    def __init__(
        self,
        level: RejectionLevel,
        *,
        high: float,
        divergence: Literal["k1", "k2", "k3"] = "k3",
        low: float | None = None,
    ) -> None:
        check_number("high", high, above=0, infinite=True)
        check_number("low", low, above=0, optional=True)
        self.level: RejectionLevel = level
        self.divergence: Literal["k1", "k2", "k3"] = divergence
        self.low, self.high = low, high
        probe = torch.zeros(1, 1)
        self._mask(probe, probe, probe == 0)

    def _mask(self, old: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
        return rejection_mask(
            old, engine, mask, level=self.level, divergence=self.divergence, low=self.low, high=self.high
        )

    def kept(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Tensor:
        """Tokens, or all those of an answer, within the bounds."""
        return self._mask(old, batch.rollout_logprobs, batch.action_mask)


# ---------------------------------------------------------------------- the choice over all ranks

_BINS = 1 << 16
_TIE = 1e-5


def highest_entropies(experience: Experience, entropy: Tensor, fraction: float) -> Tensor:
    """(B, T-1) bool, true at the trained tokens of highest entropy among those of the iteration. A collective.

    Tokens within 1e-5 nats of the last one are chosen too: the first tokens of a prompt's samples have one entropy, and
    rounding, which depends on the rows beside them, shall not choose among them.

    Args:
        experience: B sequences of this rank.
        entropy: (B, T-1) float32 of the policy before the iteration, in nats.
        fraction: Share of the tokens of all ranks, see :func:`~rlhfkit.losses.top_entropy_mask`.
    """
    mask = experience.action_mask
    values = entropy[mask]
    total = int(all_reduce(torch.tensor(values.numel()), group=cpu_group()))
    place = int(fraction * max(total - 1, 0) + 1e-4)  # as in top_entropy_mask
    threshold = nth_largest_of_all(values, place) - _TIE
    return top_entropy_mask(entropy, mask, fraction=fraction, threshold=threshold)


def nth_largest_of_all(values: Tensor, place: int) -> float:
    """The ``place``-th largest, counted from 0, of the float32 values of all ranks. A collective.

    Found by two histograms of 65,536 bins, of the first and of the last 16 bits of numbers that are ordered as the
    values are, so that ranks exchange 1 MiB whatever the number of values. Minus infinity if there are fewer.
    """
    bits = values.detach().float().contiguous().cpu().view(torch.int32).long()
    order = torch.where(bits >= 0, bits + (1 << 31), -1 - bits)  # unsigned, as the values are ordered
    high, left = _bin_of(order >> 16, place)
    if high < 0:
        return -torch.inf
    low, _ = _bin_of(order[order >> 16 == high] & (_BINS - 1), left)
    found = (high << 16) + low
    original = found - (1 << 31) if found >= 1 << 31 else -1 - found
    return float(torch.tensor(original, dtype=torch.int32).view(torch.float32))


def _bin_of(numbers: Tensor, place: int) -> tuple[int, int]:
    """The bin of the ``place``-th largest of all ranks' numbers, and its place in that bin; -1 if there are fewer."""
    counts = all_reduce(torch.bincount(numbers, minlength=_BINS), group=cpu_group())
    above = counts.flip(0).cumsum(0)  # numbers in the last bin, the last two bins ...
    behind = int((above <= place).sum())
    if behind == _BINS:
        return -1, 0
    return _BINS - 1 - behind, place - (int(above[behind - 1]) if behind else 0)
