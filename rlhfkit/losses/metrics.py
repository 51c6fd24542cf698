"""``Metric``: a number to be logged that says how it reduces over micro-batches, optimizer steps and ranks.

A mean over tokens weighs a micro-batch by its tokens, a maximum is a maximum, and a perplexity is the exponential of a
mean. A plain tensor among ``LossOutput.metrics`` is a mean over what the loss counts (tokens, or pairs); whatever is
something else is made by a function of this file, and is a scalar tensor all the same (inside ``torch.compile`` a plain
one, which reduces as a mean).

Shapes: B sequences, T positions, K numbers that a metric is computed from.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import full_precision, masked_sum, select

Combination = Literal["sum", "max", "min"]
"""How the states of two parts of the data become that of both."""


class Metric(Tensor):
    """A detached scalar that knows what it was computed from, as ``nn.Parameter`` knows that it is one.

    Arithmetic with it gives plain tensors, which have forgotten how to reduce.

    Args:
        state: (K,) sums, or one extreme value, of this part of the data.
        finish: Makes the scalar of a state; a function that can be pickled.
        combine: How states of several parts are put together.
    """

    state: Tensor
    finish: Callable[[Tensor], Tensor]
    combine: Combination

    # As in nn.Parameter: what is computed from it is no Metric.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, state: Tensor, finish: Callable[[Tensor], Tensor], combine: Combination = "sum") -> Self:
        """Compute the value."""
        state = state.detach()
        made: Self = Tensor._make_subclass(cls, finish(state))
        made.state, made.finish, made.combine = state, finish, combine
        return made

    def __init__(self, state: Tensor, finish: Callable[[Tensor], Tensor], combine: Combination = "sum") -> None:
        """Nothing is left to do."""

    def merge(self, other: "Metric") -> "Metric":
        """The metric of this part of the data and another.

        Args:
            other: Of the same kind.
        """
        return Metric(combined(self.state, other.state, self.combine), self.finish, self.combine)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Metric":
        """A copy that reduces alike."""
        return Metric(self.state.clone(), self.finish, self.combine)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle what it is made of."""
        return Metric, (self.state, self.finish, self.combine)


def combined(first: Tensor, second: Tensor, combine: Combination) -> Tensor:
    """Put two states together.

    Args:
        first: (K,).
        second: (K,).
        combine: How.
    """
    if combine == "sum":
        return first + second
    return torch.maximum(first, second) if combine == "max" else torch.minimum(first, second)


def _metric(state: Tensor, finish: Callable[[Tensor], Tensor], combine: Combination = "sum") -> Tensor:
    """A :class:`Metric`, or its value where ``torch.compile`` traces, which knows no tensors of other types."""
    return finish(state) if torch.compiler.is_compiling() else Metric(state, finish, combine)


def sums_metric(finish: Callable[[Tensor], Tensor], *sums: Tensor) -> Tensor:
    """Any function of sums over the data: a variance, a ratio, an effective sample size.

    Args:
        finish: Makes the scalar of the K sums of all data; a function that can be pickled.
        *sums: K scalars, of this part of the data.
    """
    return _metric(torch.stack([full_precision(one.detach()) for one in sums]), finish)


def mean_metric(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the selected entries: of tokens, sequences, pairs, whatever the mask selects. 0 where it selects nothing.

    Args:
        values: Any shape, e.g. (B, T).
        mask: Same shape.
    """
    return sums_metric(_ratio, masked_sum(full_precision(values.detach()), mask), mask.bool().sum())


def weighted_metric(value: Tensor | float, weight: Tensor | float) -> Tensor:
    """A mean that was computed already.

    Args:
        value: Scalar; may be anything where the weight is 0.
        weight: Scalar, what it is the mean of (tokens, pairs). 1: a share of the loss, as every loss with the
            ``denominator`` of its optimizer step is: micro-batches count alike.
    """
    value, weight = torch.as_tensor(value), torch.as_tensor(weight)
    value = full_precision(value.detach())
    weight = weight.to(value.device)
    return sums_metric(_ratio, select(value * weight, weight > 0), weight)


def exp_mean_metric(values: Tensor, mask: Tensor) -> Tensor:
    """Exponential of the mean of the selected entries, as a perplexity is. 1 where nothing is selected.

    Args:
        values: Any shape, e.g. (B, T).
        mask: Same shape.
    """
    return sums_metric(_exp_ratio, masked_sum(full_precision(values.detach()), mask), mask.bool().sum())


def sum_metric(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of the selected entries.

    Args:
        values: Any shape, e.g. (B, T).
        mask: Same shape.
    """
    return sums_metric(_first, masked_sum(full_precision(values.detach()), mask))


def max_metric(values: Tensor, mask: Tensor, *, empty: float = 0.0) -> Tensor:
    """Largest of the selected entries.

    Args:
        values: Any shape, e.g. (B, T).
        mask: Same shape.
        empty: The value where nothing is selected.
    """
    kept = select(full_precision(values.detach()), mask, -math.inf)
    largest = kept.amax() if kept.numel() else kept.new_tensor(-math.inf)
    return _metric(largest[None], partial(_filled, bound=-math.inf, empty=empty), "max")


def min_metric(values: Tensor, mask: Tensor, *, empty: float = 0.0) -> Tensor:
    """Smallest of the selected entries.

    Args:
        values: Any shape, e.g. (B, T).
        mask: Same shape.
        empty: The value where nothing is selected.
    """
    kept = select(full_precision(values.detach()), mask, math.inf)
    smallest = kept.amin() if kept.numel() else kept.new_tensor(math.inf)
    return _metric(smallest[None], partial(_filled, bound=math.inf, empty=empty), "min")


def _ratio(state: Tensor) -> Tensor:
    return state[0] / torch.where(state[1] == 0, 1.0, state[1])


def _exp_ratio(state: Tensor) -> Tensor:
    return _ratio(state).exp()


def _first(state: Tensor) -> Tensor:
    return state[0]


def _filled(state: Tensor, *, bound: float, empty: float) -> Tensor:
    return torch.where(state[0] == bound, empty, state[0])
