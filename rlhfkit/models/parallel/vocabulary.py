"""Log-probs and entropy of target tokens where each rank computes the logits of a part of the vocabulary.

As in Shoeybi et al. (2019, arXiv 1909.08053): of a token's softmax each rank of a tensor group knows the largest logit,
the sum of exponentials and the target's logit of its own part, which are joined over the group; so neither the (N, V)
logits nor their gradient are whole on a rank, and each rank does its part of the matrix products. The parts differ by
one vocabulary entry at most. All ranks have the whole weight, and get the whole gradient of it.

N are tokens, H the hidden size, V the vocabulary.
"""

from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhfkit.losses.fused_head.logprobs import (
    LogprobsOutput,
    head_gradients,
    head_statistics,
)
from rlhfkit.losses.fused_head.tiles import (
    LogitTransform,
    OutputGradient,
    RunningSoftmax,
    check_head_arguments,
    matmul_dtype,
    tile_shape,
)


def vocabulary_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: Any,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk: int | None = None,
) -> LogprobsOutput:
    """:func:`~rlhfkit.losses.linear_logprobs`, with the same results, by all ranks of a group together.

    A collective, as is its backward pass. All ranks give the same arguments, and get the same gradients.

    Args:
        group: Process group whose ranks divide the vocabulary; all other arguments are those of ``linear_logprobs``.

    Returns:
        Log-probs and entropy of the shape of ``targets``.

    Raises:
        ValueError: As ``linear_logprobs``.
    """
    transform = LogitTransform(temperature, logit_scale, logit_softcap)
    check_head_arguments(hidden, weight, targets, bias)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is a number of vocabulary entries, at least 1, got {chunk}")
    logprobs, entropies = cast(Any, _VocabularyParallelLogprobs).apply(  # torch leaves it without types
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        targets.reshape(-1),
        transform,
        entropy,
        chunk,
        matmul_dtype(hidden, weight),
        group,
    )
    return LogprobsOutput(logprobs.view(targets.shape), entropies.view(targets.shape) if entropy else None)


def vocabulary_parts(vocabulary: int, ranks: int) -> list[slice]:
    """The part of the vocabulary of each rank; the first ones have one entry more where ``ranks`` do not divide it."""
    size, more = divmod(vocabulary, ranks)
    starts = [rank * size + min(rank, more) for rank in range(ranks + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]


class _VocabularyParallelLogprobs(torch.autograd.Function):
    """Forward and backward of :func:`vocabulary_parallel_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        entropy: bool,
        chunk: int | None,
        dtype: torch.dtype,
        group: Any,
    ) -> tuple[Tensor, Tensor | None]:
        state, shape = _joined_statistics(hidden, weight, bias, targets, transform, entropy, chunk, dtype, group)
        parts = vocabulary_parts(weight.shape[0], dist.get_world_size(group))
        here = targets - parts[dist.get_rank(group)].start
        normalizer, entropies = state.log_normalizer(), state.entropy()
        ctx.save_for_backward(hidden, weight, bias, here, normalizer, entropies)
        ctx.settings = (transform, shape, dtype)
        ctx.parts, ctx.group = parts, group
        ctx.set_materialize_grads(False)
        return state.chosen - normalizer, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprobs: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, here, normalizer, entropies = ctx.saved_tensors
        gradient = OutputGradient(to_logprobs, to_entropy, normalizer, entropies)
        if gradient.logprobs is None and gradient.entropy is None:
            return (None,) * 9
        own = ctx.parts[dist.get_rank(ctx.group)]
        needed = ctx.needs_input_grad[:3]
        own_bias = None if bias is None else bias[own]
        with torch.autocast(hidden.device.type, enabled=False):
            found = head_gradients(hidden, weight[own], own_bias, here, gradient, needed, *ctx.settings)
        to_hidden, to_weight, to_bias = found
        if to_hidden is not None:
            dist.all_reduce(to_hidden, group=ctx.group)
        return (
            to_hidden,
            _gathered(to_weight, weight, ctx.parts, ctx.group),
            _gathered(to_bias, bias, ctx.parts, ctx.group),
            *(None,) * 6,
        )


def _joined_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    entropy: bool,
    chunk: int | None,
    dtype: torch.dtype,
    group: Any,
) -> tuple[RunningSoftmax, tuple[int, int]]:
    """Softmax statistics over the whole vocabulary, and the shape of the tiles of this rank's part. A collective."""
    own = vocabulary_parts(weight.shape[0], dist.get_world_size(group))[dist.get_rank(group)]
    size = max(1, own.stop - own.start)  # a part may be empty
    shape = tile_shape(hidden.shape[0], size, chunk, dtype, hidden.device.type)
    here, own_bias = targets - own.start, None if bias is None else bias[own]
    state = head_statistics(hidden, weight[own], own_bias, here, transform, entropy, shape, dtype)
    inside = (targets >= own.start) & (targets < own.stop)
    _join(state, inside, (targets >= 0) & (targets < weight.shape[0]), group)
    return state, shape


def _join(state: RunningSoftmax, inside: Tensor, known: Tensor, group: Any) -> None:
    """Turn the statistics of each rank's part of the vocabulary into those of all of it, in place. A collective."""
    peak = state.peak.clone()
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    state.move_peak(peak)
    # A target is in one part; outside all of them its log-prob is NaN, as without a group.
    more = [] if state.weighted is None else [state.weighted]
    sums = torch.stack([state.total, torch.where(inside, state.chosen, 0.0), *more])
    dist.all_reduce(sums, group=group)
    state.total.copy_(sums[0])
    state.chosen.copy_(torch.where(known, sums[1], float("nan")))
    for one, total in zip(more, sums[2:], strict=True):
        one.copy_(total)


def _gathered(own: Tensor | None, like: Tensor | None, parts: list[slice], group: Any) -> Tensor | None:
    """The gradient of a whole weight from that of each rank's rows. A collective."""
    if own is None or like is None:
        return None
    whole = torch.empty_like(like)
    whole[parts[dist.get_rank(group)]] = own
    for rank, part in enumerate(parts):
        if part.stop > part.start:
            dist.broadcast(whole[part], src=dist.get_global_rank(group, rank), group=group)
    return whole
