"""Log-probs and entropy of target tokens where each rank computes the logits of a part of the vocabulary.

As in Shoeybi et al. (2019, arXiv 1909.08053): of a token's softmax each rank of a tensor group knows the largest logit,
the sum of exponentials and the target's logit of its own part, which are joined over the group; so neither the (N, V)
logits nor their gradient are whole on a rank, and each rank does its part of the matrix products. The parts differ by
one vocabulary entry at most. All ranks have the whole weight, and get the whole gradient of it.

N are tokens, H the hidden size, V the vocabulary.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfkit.losses.fused_head.tiles import RunningSoftmax

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of hidden, weight and bias."""


class GroupVocabulary:
    """The ranks of a process group divide the vocabulary: ``linear_logprobs(division=GroupVocabulary(group))``.

    Its forward and backward passes are collectives then. All ranks give the same arguments, and get the same results
    and gradients.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def parts(self, vocabulary: int) -> list[slice]:
        """Rows of each rank."""
        return vocabulary_parts(vocabulary, dist.get_world_size(self.group))

    def part(self, vocabulary: int) -> slice:
        """Rows of this rank, perhaps none."""
        return self.parts(vocabulary)[dist.get_rank(self.group)]

    def join(self, state: RunningSoftmax, targets: Tensor, vocabulary: int) -> None:
        """Turn the statistics of each rank's part of the vocabulary into those of all of it, in place."""
        own, group = self.part(vocabulary), self.group
        peak = state.peak.clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        state.move_peak(peak)
        # A target is in one part; outside all of them its log-prob is NaN, as without a group.
        inside = (targets >= own.start) & (targets < own.stop)
        more = [] if state.weighted is None else [state.weighted]
        sums = torch.stack([state.total, torch.where(inside, state.chosen, 0.0), *more])
        dist.all_reduce(sums, group=group)
        state.total.copy_(sums[0])
        known = (targets >= 0) & (targets < vocabulary)
        state.chosen.copy_(torch.where(known, sums[1], float("nan")))
        for one, total in zip(more, sums[2:], strict=True):
            one.copy_(total)

    def whole(self, gradients: Gradients, weight: Tensor, bias: Tensor | None) -> Gradients:
        """Sum the ranks' gradients of hidden, and put those of their rows of weight and bias together."""
        to_hidden, to_weight, to_bias = gradients
        if to_hidden is not None:
            dist.all_reduce(to_hidden, group=self.group)
        return to_hidden, self._gathered(to_weight, weight), self._gathered(to_bias, bias)

    def _gathered(self, own: Tensor | None, like: Tensor | None) -> Tensor | None:
        if own is None or like is None:
            return None
        whole, parts = torch.empty_like(like), self.parts(len(like))
        whole[parts[dist.get_rank(self.group)]] = own
        for rank, part in enumerate(parts):
            if part.stop > part.start:
                dist.broadcast(whole[part], src=dist.get_global_rank(self.group, rank), group=self.group)
        return whole


def vocabulary_parts(vocabulary: int, ranks: int) -> list[slice]:
    """The part of the vocabulary of each rank; the first ones have one entry more where ``ranks`` do not divide it."""
    size, more = divmod(vocabulary, ranks)
    starts = [rank * size + min(rank, more) for rank in range(ranks + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]
