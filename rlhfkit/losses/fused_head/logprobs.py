"""Log-probs and entropy of target tokens, from hidden states or from logits, without an (N, V) matrix of their own.

:func:`linear_logprobs` goes over the vocabulary in tiles (tens of megabytes), keeps running softmax statistics per
token, and recomputes the tiles in backward: 4 matrix products instead of 3. Each slice of the weight's gradient is
finished in one product over all tokens, so no float32 copy of a bfloat16 gradient is needed. N are tokens, H the hidden
size, V the vocabulary.
"""

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhfkit.losses.fused_head.tiles import (
    LogitTransform,
    OutputGradient,
    RunningSoftmax,
    Tiles,
    add_product,
    block_rows,
    check_head_arguments,
    check_targets,
    matmul_dtype,
    set_product,
    slices,
    tile_gradient,
    tile_shape,
    tile_statistics,
)


class LogprobsOutput(NamedTuple):
    """Log-probs of the targets and, if asked for, the entropy of their distributions.

    Attributes:
        logprobs: Shape of ``targets``; nats; float32 (float64 for float64 inputs).
        entropy: Same shape and dtype, nats; ``None`` unless ``entropy=True``.
    """

    logprobs: Tensor
    entropy: Tensor | None


class VocabularyDivision(Protocol):
    """How several processes divide the vocabulary: each computes the logits of its part of the weight's rows."""

    def part(self, vocabulary: int) -> slice:
        """Rows of this process, perhaps none."""
        ...

    def join(self, state: RunningSoftmax, targets: Tensor, vocabulary: int) -> None:
        """Turn the statistics of this part into those of the whole vocabulary, in place."""
        ...

    def whole(
        self, gradients: tuple[Tensor | None, Tensor | None, Tensor | None], weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden, weight and bias from those that this part has and gets."""
        ...


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk: int | None = None,
    division: VocabularyDivision | None = None,
) -> LogprobsOutput:
    """Log-probs (and entropy) of target tokens from hidden states, without the (N, V) logits in memory.

    ``logits = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature``, ``logprob = logits[target] - log Z``,
    ``entropy = log Z - sum_v p_v logits_v``. Both have gradients, with respect to hidden, weight and bias.

    Matrix products run in the dtype of autocast when it is on, as in ``torch.nn.functional.linear``; otherwise in the
    wider of the dtypes of ``hidden`` and ``weight``. Softmax statistics are at least float32.

    The weight itself is saved for backward, no copy or view: DeepSpeed ZeRO-3 may release its data after forward and
    gather it again before backward.

    Args:
        hidden: (..., H) final hidden states; select the tokens you need first, every row costs 2·V·H operations.
        weight: (V, H) of the head, or of the tied embedding.
        targets: (...) int64 token ids in [0, V).
        bias: (V,).
        temperature: The sampling temperature, which divides the logits; 1 by default.
        entropy: Also compute the entropy, with gradient.
        logit_softcap: Cap of Gemma 2's final logits; none by default.
        logit_scale: Factor on the head's output (Cohere); 1 by default.
        chunk: Vocabulary entries per tile, which does not change the result; chosen by the tile's size when ``None``.
        division: Processes that divide the vocabulary, all with the same other arguments and results; ``None``: this
            one computes all of it.

    Returns:
        Log-probs and entropy of the shape of ``targets``.

    Raises:
        ValueError: If shapes or dtypes do not fit, an argument is not a finite number above 0, or a target is not in
            [0, V); that is checked on CPU only, elsewhere it would need a sync and the log-prob is NaN.
    """
    transform = LogitTransform(temperature, logit_scale, logit_softcap)
    check_head_arguments(hidden, weight, targets, bias)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is a number of vocabulary entries, at least 1, got {chunk}")
    dtype = matmul_dtype(hidden, weight)
    flat = hidden.reshape(-1, hidden.shape[-1])
    logprobs, entropies = cast(Any, _LinearLogprobs).apply(  # torch leaves it without types
        flat, weight, bias, targets.reshape(-1), transform, entropy, chunk, dtype, division
    )
    return LogprobsOutput(logprobs.view(targets.shape), entropies.view(targets.shape) if entropy else None)


def logits_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> LogprobsOutput:
    """Log-probs (and entropy) of target tokens from logits that exist anyway.

    ``logprob = (logits / temperature)[target] - log Z``. No other (..., V) tensor is held than the logits and their
    gradient; logits that are not contiguous (``logits[:, :-1]``) are copied first.

    Args:
        logits: (..., V) before the temperature.
        entropy: Also compute the entropy, with gradient.

    Returns:
        Log-probs and entropy of the shape of ``targets``, float32 (float64 for float64 logits).

    Raises:
        ValueError: If shapes or dtypes do not fit, ``temperature`` is not a finite number above 0, or a target is not
            in [0, V), which is checked on CPU only.
    """
    transform = LogitTransform(temperature)
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    if logits.ndim < 1 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have the shape of logits without its last dimension, {tuple(logits.shape[:-1])}, "
            f"got {tuple(targets.shape)}"
        )
    check_targets(targets, logits.shape[-1])
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropies = cast(Any, _LogitsLogprobs).apply(  # torch leaves it without types
        flat, targets.reshape(-1), transform, entropy
    )
    return LogprobsOutput(logprobs.view(targets.shape), entropies.view(targets.shape) if entropy else None)


class _LinearLogprobs(torch.autograd.Function):
    """Forward and backward of :func:`linear_logprobs`."""

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
        division: VocabularyDivision | None,
    ) -> tuple[Tensor, Tensor | None]:
        own = _part(division, weight, bias, targets)
        shape = tile_shape(hidden.shape[0], max(1, own[0].shape[0]), chunk, dtype, hidden.device.type)
        state = head_statistics(hidden, *own, transform, entropy, shape, dtype)
        if division is not None:
            division.join(state, targets, weight.shape[0])
        normalizer, entropies = state.log_normalizer(), state.entropy()
        logprobs = state.chosen - normalizer
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropies)
        ctx.settings = (transform, shape, dtype)
        ctx.division = division
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprobs: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropies = ctx.saved_tensors
        gradient = OutputGradient(to_logprobs, to_entropy, normalizer, entropies)
        if gradient.logprobs is None and gradient.entropy is None:
            return (None,) * 9
        if weight.ndim != 2:
            raise RuntimeError(
                f"the head's weight has shape {tuple(weight.shape)} in backward: DeepSpeed ZeRO-3 did not gather it "
                "again; call linear_logprobs inside the forward of the module that owns the weight"
            )
        with torch.autocast(hidden.device.type, enabled=False):
            own = _part(ctx.division, weight, bias, targets)
            found = head_gradients(hidden, *own, gradient, ctx.needs_input_grad[:3], *ctx.settings)
        if ctx.division is not None:
            found = ctx.division.whole(found, weight, bias)
        return (*found, *(None,) * 6)


def _part(
    division: VocabularyDivision | None, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weight and bias of this process, and the targets relative to its first row."""
    if division is None:
        return weight, bias, targets
    own = division.part(weight.shape[0])
    return weight[own], None if bias is None else bias[own], targets - own.start


def head_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    entropy: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> RunningSoftmax:
    """Softmax statistics of the logits of all vocabulary entries in ``weight``, by tiles of ``shape``."""
    rows, columns = shape
    device = hidden.device
    with torch.autocast(device.type, enabled=False):
        tiles = Tiles(shape, dtype, device, transform, entropy=entropy)
        state = RunningSoftmax.empty(hidden.shape[0], tiles.reduction, device, entropy=entropy)
        source = hidden.to(dtype)
        for column in slices(weight.shape[0], columns):
            part = weight[column].to(dtype)
            part_bias = None if bias is None else bias[column].to(dtype)
            for row in slices(hidden.shape[0], rows):
                raw = tiles.product(source[row], part, part_bias)
                tiles.accumulate(state.rows(row), raw, targets[row] - column.start)
    return state


def head_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    gradient: OutputGradient,
    needed: tuple[bool, bool, bool],
    transform: LogitTransform,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Recompute every tile of logits and propagate its gradient to hidden, weight and bias."""
    rows, columns = shape
    tiles = Tiles(shape, dtype, hidden.device, transform, entropy=gradient.entropy is not None)
    source = hidden.to(dtype)
    to_hidden = torch.zeros_like(hidden, dtype=tiles.reduction) if needed[0] else None
    # Written tile by tile; with no tokens at all there are no tiles.
    to_weight = torch.empty_like(weight) if needed[1] else None
    if to_weight is not None and hidden.shape[0] == 0:
        to_weight.zero_()
    to_bias = torch.zeros_like(weight[:, 0], dtype=tiles.reduction) if needed[2] else None
    several = hidden.shape[0] > rows
    for column in slices(weight.shape[0], columns):
        part = weight[column].to(dtype)
        part_bias = None if bias is None else bias[column].to(dtype)
        # Over several blocks of tokens the sum is kept in the reduction dtype, for this slice of the vocabulary only.
        total = torch.zeros_like(part, dtype=tiles.reduction) if several and to_weight is not None else None
        for row in slices(hidden.shape[0], rows):
            raw = tiles.product(source[row], part, part_bias)
            tile = tiles.gradient(raw, targets[row] - column.start, gradient.rows(row))
            if to_bias is not None:
                to_bias[column] += tile.sum(0, dtype=tiles.reduction)
            if to_hidden is not None:
                add_product(to_hidden[row], tile, part)
            if total is not None:
                add_product(total, tile.t(), source[row])
            elif to_weight is not None:
                set_product(to_weight[column], tile.t(), source[row])
        if total is not None and to_weight is not None:
            to_weight[column] = total
    return (
        None if to_hidden is None else to_hidden.to(hidden.dtype),
        to_weight,
        None if to_bias is None or bias is None else to_bias.to(bias.dtype),
    )


class _LogitsLogprobs(torch.autograd.Function):
    """Forward and backward of :func:`logits_logprobs`, in blocks of tokens over the whole vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, transform: LogitTransform, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens, vocabulary = logits.shape
        reduction = torch.promote_types(logits.dtype, torch.float32)
        state = RunningSoftmax.empty(tokens, reduction, logits.device, entropy=entropy)
        rows = block_rows(logits.shape[1], logits.device.type)
        work = torch.empty(min(rows, tokens), vocabulary, dtype=reduction, device=logits.device)
        spare = torch.empty_like(work) if entropy else None
        for row in slices(tokens, rows):
            part, known = logits[row], state.rows(row)
            buffers = (work[: len(part)], None if spare is None else spare[: len(part)])
            statistics = known.peak, known.total, known.chosen, known.weighted
            known.update(*tile_statistics(part, targets[row], *statistics, transform.factor, None, *buffers))
        normalizer, entropies = state.log_normalizer(), state.entropy()
        ctx.save_for_backward(logits, targets, normalizer, entropies)
        ctx.transform = transform
        ctx.set_materialize_grads(False)
        return state.chosen - normalizer, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprobs: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, normalizer, entropies = ctx.saved_tensors
        gradient = OutputGradient(to_logprobs, to_entropy, normalizer, entropies)
        if gradient.logprobs is None and gradient.entropy is None:
            return None, None, None, None
        result = torch.empty_like(logits)
        rows = block_rows(logits.shape[1], logits.device.type)
        block = (min(rows, logits.shape[0]), logits.shape[1])
        narrow = logits.dtype != normalizer.dtype
        buffer = torch.empty(block, dtype=normalizer.dtype, device=logits.device) if narrow else None
        spare = None if gradient.entropy is None else torch.empty_like(buffer if buffer is not None else result[:rows])
        for row in slices(logits.shape[0], rows):
            part, outer, target = logits[row], gradient.rows(row), result[row]
            work = target if buffer is None else buffer[: len(part)]
            saved = outer.logprobs, outer.entropy, outer.log_normalizer, outer.entropy_value
            second = None if spare is None else spare[: len(part)]
            found = tile_gradient(part, targets[row], *saved, ctx.transform.factor, None, work, second)
            if found is not target:
                target.copy_(found)
        return result, None, None, None
