"""Losses whose gradient with respect to the log-probs is known in the forward pass: one pass, 3 matrix products.

``d loss / d logprob`` is ``-1 / tokens`` in supervised fine-tuning and ``-advantage / tokens`` in the first on-policy
update of a policy gradient; in :func:`linear_single_pass` it is any function of the log-probs of a block of tokens. All
gradients are computed with the logits of that block, which keeps all its V logits; backward only scales them. The
weight gradient exists from forward on. N are tokens, H the hidden size, V the vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhfkit.losses.aggregation import check_same_shape
from rlhfkit.losses.arguments import HEAD_ARGUMENTS, share_arguments
from rlhfkit.losses.fused_head.logprobs import linear_logprobs, make_tiles
from rlhfkit.losses.fused_head.tiles import (
    LogitTransform,
    OutputGradient,
    RunningSoftmax,
    accumulate,
    add_product,
    check_head_arguments,
    exponential_gradient,
    matmul_dtype,
    retained_rows,
    set_product,
    slices,
    tile_columns,
)

TokenGradients = Callable[[Tensor, Tensor | None, slice], tuple[Tensor, Tensor | None]]
"""``d loss / d logprob`` and ``d loss / d entropy`` (or ``None``) of a block of tokens, (n,) each.

Called with its log-probs (n,), its entropies (n,) or ``None``, and its slice of the N tokens, blocks in order.
"""


class SinglePassLogprobs(NamedTuple):
    """The result of :func:`linear_single_pass`.

    Attributes:
        gradient: Scalar 0, to be added to the loss: its backward, once, gives the gradients of hidden, weight and bias.
        logprobs: Shape of ``targets``, detached, nats; float32 (float64 for float64 inputs).
        entropy: Likewise; ``None`` unless asked for.
    """

    gradient: Tensor
    logprobs: Tensor
    entropy: Tensor | None


class SinglePassOutput(NamedTuple):
    """The result of the single-pass losses.

    Attributes:
        loss: Scalar to call ``backward`` on, once.
        logprobs: Shape of ``targets``, detached, nats; float32 (float64 for float64 inputs).
        entropy: Likewise; ``None`` unless asked for.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None


@share_arguments(HEAD_ARGUMENTS)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    denominator: Tensor | float | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk: int | None = None,
) -> SinglePassOutput:
    """Token cross-entropy of a language-model head, with all gradients computed in forward.

    ``loss = -sum_masked logprob / denominator``; the logits are those of :func:`linear_logprobs`. Same value and
    gradients as ``cross_entropy_loss(linear_logprobs(...).logprobs, mask)``, with 3 matrix products instead of 4.

    Args:
        hidden: (..., H) final hidden states. Masked rows may hold NaN, but are computed all the same, so select first.
        targets: (...) int64 token ids in [0, V); anything (-100) where masked.
        mask: (...), true where a token is trained.
        denominator: Trained tokens of the whole optimizer step divided by the number of micro-batches averaged; the
            local count when ``None``.

    Returns:
        Loss, detached log-probs and, if asked for, detached entropy; the latter two have no meaning where masked.

    Raises:
        ValueError: If shapes or dtypes do not fit, or an argument is out of range, see :func:`linear_logprobs`.
        RuntimeError: When ``backward`` runs a second time.
    """
    check_same_shape(targets=targets, mask=mask)
    if hidden.shape[:-1] != targets.shape:
        check_head_arguments(hidden, weight, targets, bias)  # raises, and says what does not fit
    selected = mask.bool()
    dtype = torch.promote_types(matmul_dtype(hidden, weight), torch.float32)
    count = selected.sum().clamp(min=1) if denominator is None else denominator
    coefficients = torch.where(selected, -1.0, 0.0).to(dtype) / count
    return linear_policy_gradient(
        # A masked NaN must not reach the sums over tokens, and a masked target may be no token at all.
        torch.where(selected[..., None], hidden, torch.zeros((), dtype=hidden.dtype, device=hidden.device)),
        weight,
        torch.where(selected, targets, torch.zeros_like(targets)),
        coefficients,
        bias=bias,
        temperature=temperature,
        entropy=entropy,
        logit_softcap=logit_softcap,
        logit_scale=logit_scale,
        chunk=chunk,
    )


@share_arguments(HEAD_ARGUMENTS)
def linear_policy_gradient(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    *,
    entropy_coefficients: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk: int | None = None,
) -> SinglePassOutput:
    """A loss that is linear in the log-probs, with all gradients computed in forward.

    ``loss = sum_i coefficients_i logprob_i + sum_i entropy_coefficients_i entropy_i``.

    For the first update after a rollout, every clipped importance-ratio objective has the gradient of this loss with
    ``coefficients = -advantages * mask / denominator``; an entropy bonus has
    ``entropy_coefficients = -bonus * mask / denominator``. Where a ratio or KL term depends on the log-probs, use
    :func:`linear_logprobs`.

    Args:
        hidden: (..., H) final hidden states.
        coefficients: (...) ``d loss / d logprob``, treated as constants. Where they are 0 the token adds exactly 0.
        entropy_coefficients: (...) ``d loss / d entropy``, constants too; no entropy term when ``None``.
        entropy: Also return the entropy, detached (always returned with ``entropy_coefficients``).

    Returns:
        Loss, detached log-probs and, if asked for, detached entropy.

    Raises:
        ValueError: If shapes or dtypes do not fit, or an argument is out of range, see :func:`linear_logprobs`.
        RuntimeError: When ``backward`` runs a second time.
    """
    check_head_arguments(hidden, weight, targets, bias)
    check_same_shape(targets=targets, coefficients=coefficients, entropy_coefficients=entropy_coefficients)
    reduction = torch.promote_types(matmul_dtype(hidden, weight), torch.float32)
    slopes = coefficients.detach().reshape(-1).to(reduction)
    entropy_slopes = None if entropy_coefficients is None else entropy_coefficients.detach().reshape(-1).to(reduction)
    output = linear_single_pass(
        hidden,
        weight,
        targets,
        lambda logprobs, entropies, row: (slopes[row], None if entropy_slopes is None else entropy_slopes[row]),
        bias=bias,
        temperature=temperature,
        entropy=entropy or entropy_coefficients is not None,
        logit_softcap=logit_softcap,
        logit_scale=logit_scale,
        chunk=chunk,
    )
    loss = _linear_loss(output.logprobs, output.entropy, coefficients, entropy_coefficients)
    return SinglePassOutput(loss + output.gradient, output.logprobs, output.entropy)


@share_arguments(HEAD_ARGUMENTS)
def linear_single_pass(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    gradients: TokenGradients,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk: int | None = None,
) -> SinglePassLogprobs:
    """Log-probs (and entropy) of target tokens and, in the same pass, all gradients of a loss of them.

    The loss is the caller's; ``gradients`` is asked for its derivatives as soon as the log-probs of a block are known.

    Args:
        hidden: (..., H) final hidden states.
        gradients: ``d loss / d logprob`` and ``d loss / d entropy`` of a block; see :func:`fits_one_block`. Not called
            where nothing is trained or gradients are off.
        entropy: Also return the entropy, detached.

    Returns:
        A scalar that carries the gradients, detached log-probs and, if asked for, detached entropy.

    Raises:
        ValueError: If shapes or dtypes do not fit, or an argument is out of range, see :func:`linear_logprobs`.
        RuntimeError: When ``backward`` runs a second time.
    """
    transform = LogitTransform(temperature, logit_scale, logit_softcap)
    check_head_arguments(hidden, weight, targets, bias)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is a number of tokens, at least 1, got {chunk}")
    trained = any(tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias))
    if not (trained and torch.is_grad_enabled()):
        output = linear_logprobs(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            entropy=entropy,
            logit_softcap=logit_softcap,
            logit_scale=logit_scale,
        )
        return SinglePassLogprobs(output.logprobs.new_zeros(()), *output)
    dtype = matmul_dtype(hidden, weight)
    zero, logprobs, entropies = cast(Any, _SinglePass).apply(  # torch leaves it without types
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        targets.reshape(-1),
        gradients,
        transform,
        entropy,
        chunk,
        dtype,
    )
    return SinglePassLogprobs(zero, logprobs.view(targets.shape), entropies.view(targets.shape) if entropy else None)


def fits_one_block(hidden: Tensor, weight: Tensor) -> bool:
    """Whether :func:`linear_single_pass` has the log-probs of all tokens (..., H) when it first asks for gradients."""
    tokens = hidden.numel() // hidden.shape[-1]
    return retained_rows(tokens, len(weight), None, matmul_dtype(hidden, weight), hidden.device.type) >= tokens


def _linear_loss(
    logprobs: Tensor, entropy: Tensor | None, coefficients: Tensor, entropy_coefficients: Tensor | None
) -> Tensor:
    """``sum c logprob + sum e entropy``; entries whose coefficient is 0 are masked, NaN included."""

    def dot(constants: Tensor, values: Tensor) -> Tensor:
        return torch.where(constants == 0, torch.zeros_like(values), constants * values).sum()

    loss = dot(coefficients, logprobs)
    if entropy_coefficients is not None and entropy is not None:
        loss = loss + dot(entropy_coefficients, entropy)
    return loss


class _GradientSums:
    """Gradients summed over blocks, in the reduction dtype when there are several blocks."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: tuple[bool, bool, bool],
        dtype: torch.dtype,
        *,
        one_block: bool,
    ) -> None:
        self.reduction = torch.promote_types(dtype, torch.float32)
        weight_dtype = weight.dtype if one_block else self.reduction
        self.hidden = torch.zeros_like(hidden, dtype=self.reduction) if needed[0] else None
        self.weight = torch.empty_like(weight, dtype=weight_dtype) if needed[1] else None
        if self.weight is not None and hidden.shape[0] == 0:
            self.weight.zero_()
        self.bias = torch.zeros_like(weight[:, 0], dtype=self.reduction) if needed[2] else None

    def finish(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients in the dtypes of their tensors."""
        return (
            None if self.hidden is None else self.hidden.to(hidden.dtype),
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


class _Block:
    """The logits of a block of tokens, kept as tiles from the first sweep (statistics) to the second (gradients)."""

    def __init__(
        self,
        tokens: int,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        dtype: torch.dtype,
        *,
        entropy: bool,
    ) -> None:
        self._weight, self._bias, self._transform = weight, bias, transform
        device = weight.device
        self._columns = tile_columns(tokens, len(weight), dtype, device.type)
        self._logits = torch.empty(tokens * len(weight), dtype=dtype, device=device)
        # The exponentials of the first sweep can take the place of the logits, unless the second sweep needs the logits
        # or the dtype is too narrow: 1 - p of a sure token is lost when p is rounded to bfloat16.
        wide = dtype == torch.promote_types(dtype, torch.float32)
        self._exponentials = not entropy and transform.softcap is None and wide
        self._peaks: list[Tensor] = []
        self._work = make_tiles((tokens, self._columns), dtype, device, transform, entropy=entropy, keep_raw=True)

    def _tiles(self, tokens: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slice of the vocabulary, its weight in the dtype of the matrix products, and the place of its logits."""
        for column in slices(len(self._weight), self._columns):
            place = self._logits[tokens * column.start : tokens * column.stop].view(tokens, -1)
            yield column, self._weight[column].to(place.dtype), place

    def statistics(self, source: Tensor, targets: Tensor, state: RunningSoftmax) -> None:
        """First sweep: fill the block with the logits of ``source`` (n, H) and ``state`` with their statistics."""
        self._peaks = []
        for column, part, place in self._tiles(len(source)):
            bias = None if self._bias is None else self._bias[column].to(place.dtype)
            raw = self._work.product(source, part, bias, place)
            local = targets - column.start
            if self._exponentials:
                accumulate(state, raw, self._transform.factor, local, raw, None)
                self._peaks.append(state.peak.clone())
            else:
                self._work.accumulate(state, raw, local)

    def gradients(
        self, source: Tensor, targets: Tensor, outer: OutputGradient, sums: _GradientSums, row: slice
    ) -> None:
        """Second sweep: turn what the first one kept into gradients and add these to ``sums``."""
        for number, (column, part, raw) in enumerate(self._tiles(len(source))):
            local = targets - column.start
            if self._exponentials:
                tile = exponential_gradient(raw, self._peaks[number], self._transform.factor, local, outer)
            else:
                tile = self._work.gradient(raw, local, outer)
            if sums.bias is not None:
                sums.bias[column] += tile.sum(0, dtype=sums.reduction)
            if sums.hidden is not None:
                add_product(sums.hidden[row], tile, part)
            if sums.weight is not None and row.start == 0:
                set_product(sums.weight[column], tile.t(), source)
            elif sums.weight is not None:
                add_product(sums.weight[column], tile.t(), source)


class _SinglePass(torch.autograd.Function):
    """Forward computes loss and gradients, block of tokens by block of tokens; backward scales the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        gradients: TokenGradients,
        transform: LogitTransform,
        entropy: bool,
        chunk: int | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.autocast(hidden.device.type, enabled=False):
            size = retained_rows(len(hidden), len(weight), chunk, dtype, hidden.device.type)
            sums = _GradientSums(hidden, weight, bias, ctx.needs_input_grad[:3], dtype, one_block=size >= len(hidden))
            state = RunningSoftmax.empty(len(hidden), sums.reduction, hidden.device, entropy=entropy)
            block = _Block(size, weight, bias, transform, dtype, entropy=entropy)
            for row in slices(len(hidden), size):
                source, rows_state = hidden[row].to(dtype), state.rows(row)
                block.statistics(source, targets[row], rows_state)
                normalizer, row_entropies = rows_state.log_normalizer(), rows_state.entropy()
                to_logprobs, to_entropies = gradients(rows_state.chosen - normalizer, row_entropies, row)
                outer = OutputGradient(to_logprobs, to_entropies, normalizer, row_entropies)
                block.gradients(source, targets[row], outer, sums, row)
            logprobs, entropies = state.chosen - state.log_normalizer(), state.entropy()
            ctx.gradients = sums.finish(hidden, weight, bias)
        ctx.mark_non_differentiable(logprobs, *(() if entropies is None else (entropies,)))
        return logprobs.new_zeros(()), logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_zero: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "backward ran a second time through a single-pass loss, whose gradients exist once; "
                "use linear_logprobs where the graph is kept (retain_graph=True)"
            )
        gradients, ctx.gradients = ctx.gradients, None
        # In place, whatever to_zero is: asking whether it is 1 would make the host wait for the device.
        scaled = [None if gradient is None else gradient.mul_(to_zero) for gradient in gradients]
        return (*scaled, None, None, None, None, None, None)
