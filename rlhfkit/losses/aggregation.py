"""Masked reductions: every sum, mean and whitening of this package selects with its mask and never multiplies by it.

:func:`select` replaces masked entries, which may be NaN (``nan * 0`` is ``nan``), before any arithmetic, which keeps
them out of the value *and* the gradient.
Shapes: B sequences, T positions on the next-token axis (``x[:, t]`` belongs to token ``t + 1``).
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant-length"]
"""How token losses become one number; see :func:`aggregate`."""


class LossOutput(NamedTuple):
    """The result of every loss.

    Attributes:
        loss: Scalar to call ``backward`` on.
        metrics: Detached scalars by their published name (``policy/approx_kl``), ready to be logged.
        tokens: Detached (B, T) values of single tokens, for whoever saves or plots them: of policy losses
            ``loss``, which includes the weights and is 0 where masked, and ``ratio`` to the old policy.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    tokens: Mapping[str, Tensor] = {}


def sum_losses(*outputs: LossOutput) -> LossOutput:
    """Add losses: a policy loss, a KL penalty, an entropy bonus.

    Args:
        *outputs: At least one. Of a metric or value of tokens that two report, the later one is kept.

    Raises:
        ValueError: If there is none.
    """
    if not outputs:
        raise ValueError("sum_losses needs at least one loss, got none")
    loss = outputs[0].loss
    for output in outputs[1:]:
        loss = loss + output.loss
    metrics = {name: value for output in outputs for name, value in output.metrics.items()}
    return LossOutput(loss, metrics, {name: value for output in outputs for name, value in output.tokens.items()})


def check_loss_output(what: str, given: object) -> None:
    """Raise TypeError unless a loss that somebody wrote returned a :class:`LossOutput`; ``what`` names it."""
    if not isinstance(given, LossOutput):
        raise TypeError(f"{what} returned {type(given).__name__}: return rlhfkit.LossOutput(loss, {{name: metric}})")


def check_same_shape(**tensors: Tensor | None) -> None:
    """Raise unless all that are given are tensors of one shape; the message names them by their keywords.

    Raises:
        TypeError: If one is no tensor.
        ValueError: If the shapes differ.
    """
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}: torch.tensor(...) makes one")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"these tensors must have the same shape, got {listed}")


def select(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Keep ``values`` where ``mask`` is true and put ``fill`` elsewhere, in value and in gradient.

    Args:
        values: Any shape.
        mask: Same shape (or broadcastable); bool, or numbers of which non-zero means true.
        fill: Value of masked entries.

    Returns:
        Tensor of the shape of ``values``.
    """
    return torch.where(mask.bool(), values, torch.full((), fill, dtype=values.dtype, device=values.device))


def full_precision(values: Tensor) -> Tensor:
    """Cast to at least float32 for sums: bfloat16 keeps 8 bits. Gradients return in the dtype of the input."""
    return values if values.dtype == torch.float64 else values.float()


def scalar_like(value: Tensor | float, like: Tensor) -> Tensor:
    """A detached scalar with the dtype and device of ``like``; a number is filled in there, a copy would wait."""
    return value.detach().to(like) if isinstance(value, Tensor) else like.new_full((), value)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the selected entries, over ``dim`` or over all dimensions."""
    selected = select(values, mask)
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the selected entries, over ``dim`` or over all dimensions; 0 where nothing is selected."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def sequence_logprobs(logprobs: Tensor, mask: Tensor, *, mean: bool = False) -> Tensor:
    """Log-prob of each sequence: the sum (or the mean) of the log-probs of its selected tokens.

    ``log π(y|x) = Σ_t m_t log π(y_t | x, y_<t)``

    Masked tokens get gradient 0. (TRL sums all positions and relies on masked log-probs being constant zeros.)

    Args:
        logprobs: (B, T) token log-probs on the next-token axis. Masked entries may hold anything.
        mask: (B, T), true where a token belongs to the completion.
        mean: Divide by the number of selected tokens; 0 for a sequence without any.

    Returns:
        (B,) in at least float32.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(logprobs=logprobs, mask=mask)
    reduce = masked_mean if mean else masked_sum
    return reduce(full_precision(logprobs), mask, -1)


def masked_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of the selected entries, to be summed over ranks for :func:`whiten`.

    ``moments = masked_moments(advantages, mask); torch.distributed.all_reduce(moments)``

    Returns:
        (3,) detached; float64 where the device has it, because a variance from sums of squares cancels digits.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(values=values, mask=mask)
    precise = values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)
    kept = select(precise, mask)
    return torch.stack([mask.bool().sum().to(kept.dtype), kept.sum(), kept.square().sum()])


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    scale_std: bool = True,
    unbiased: bool = False,
    eps: float = 1e-8,
    moments: Tensor | tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Whiten the selected entries to mean 0 and standard deviation 1; masked entries become 0.

    ``(x - mean) / sqrt(max(var, eps))``, plus the mean again unless ``shift_mean``. Biased variance as in REINFORCE++
    (Hu et al., 2025, arXiv:2501.03262) and OpenRLHF; TRL and verl add ``eps`` to the unbiased one. OpenRLHF leaves
    masked entries at ``-mean / std``. Every entry has the same weight, so long sequences weigh more.

    Args:
        values: (B, T) or any other shape.
        mask: Same shape.
        shift_mean: Move the mean to 0; otherwise entries are scaled about their mean.
        scale_std: Divide by the standard deviation.
        unbiased: Divide the squares by ``count - 1``.
        eps: Floor of the variance (OpenRLHF's default).
        moments: Sum over ranks of :func:`masked_moments`, (3,) or three scalars; of ``values`` when ``None``.

    Returns:
        Tensor of the shape of ``values``, in at least float32.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(values=values, mask=mask)
    kept = select(full_precision(values), mask)
    if moments is None:
        count = mask.bool().sum()
        mean = kept.sum() / count.clamp(min=1)
        squares = select(kept - mean, mask).square().sum()
    else:
        count, total, raw_squares = moments
        mean = total / count.clamp(min=1)
        squares = raw_squares - count * mean.square()
        mean, squares = mean.to(kept.dtype), squares.to(kept.dtype)
    variance = squares / (count - 1 if unbiased else count).clamp(min=1)
    whitened = kept - mean
    if scale_std:
        whitened = whitened * variance.clamp(min=eps).rsqrt().to(kept.dtype)
    return select(whitened if shift_mean else whitened + mean, mask)


def aggregate(
    token_loss: Tensor,
    mask: Tensor,
    mode: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    *,
    max_length: int | None = None,
) -> Tensor:
    """Reduce token losses to one scalar.

    With ``l`` the loss, ``m`` the mask and ``D`` the denominator:

    ============================  ============================================  ===========================  =========
    mode                          value                                         ``D`` when ``None``          used by
    ============================  ============================================  ===========================  =========
    ``token-mean``                ``sum_it l_it m_it / D``                      selected tokens              DAPO, PPO
    ``sequence-mean-token-mean``  ``sum_i (sum_t l_it m_it / sum_t m_it) / D``  sequences with such a token  GRPO
    ``sequence-mean-token-sum``   ``sum_i (sum_t l_it m_it) / D``               the same                     REINFORCE
    ``constant-length``           ``sum_it l_it m_it / (D * max_length)``       sequences B                  Dr.GRPO
    ============================  ============================================  ===========================  =========

    Nothing is reduced over ranks or micro-batches. For a gradient that does not depend on how an optimizer step is
    split, pass the count of the *whole* step divided by the number of micro-batches (times ranks) that are averaged.

    Args:
        token_loss: (B, T).
        mask: (B, T), true where a token counts.
        mode: One of the four above.
        denominator: ``D``: tokens for ``token-mean``, sequences otherwise.
        max_length: Tokens; the constant of ``constant-length``, e.g. the generation limit.

    Returns:
        Scalar in at least float32.

    Raises:
        ValueError: If the shapes differ, the mode is unknown, ``max_length`` is missing or given where it has no
            effect, or a number that divides is not positive.
    """
    check_same_shape(token_loss=token_loss, mask=mask)
    if mode not in get_args(Aggregation):
        raise ValueError(f"mode must be one of {', '.join(get_args(Aggregation))}, got {mode!r}")
    if (mode == "constant-length") != (max_length is not None):
        raise ValueError(
            "mode 'constant-length' divides by max_length, the generation limit in tokens, which no other mode takes: "
            f"got mode {mode!r} and max_length {max_length}"
        )
    if max_length is not None and not max_length > 0:
        raise ValueError(f"max_length must be positive, got {max_length}")
    if isinstance(denominator, (int, float)) and denominator <= 0:
        raise ValueError(f"denominator must be positive, got {denominator}; use max(count, 1) for an empty step")
    token_loss, mask = full_precision(token_loss), mask.bool()
    if mode == "token-mean":
        total = masked_sum(token_loss, mask)
        return total / (mask.sum().clamp(min=1) if denominator is None else denominator)
    if mode == "constant-length":
        assert max_length is not None
        return masked_sum(token_loss, mask) / (
            (max(token_loss.shape[0], 1) if denominator is None else denominator) * max_length
        )
    reduce = masked_mean if mode == "sequence-mean-token-mean" else masked_sum
    total = reduce(token_loss, mask, -1).sum()
    return total / (mask.any(-1).sum().clamp(min=1) if denominator is None else denominator)
