"""``Metric``: a scalar to be logged that knows how to reduce over micro-batches, optimizer steps and ranks.

A plain tensor among ``LossOutput.metrics`` is a mean over what the loss counts. Anything else (a maximum, a perplexity,
a sum) is made by a function of this file; inside ``torch.compile`` these return plain tensors, which reduce as means.
K are the numbers that a metric is computed from.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import full_precision, masked_sum, select

Combination = Literal["sum", "max", "min"]
"""How the states of two parts of the data are combined."""


class Metric(Tensor):
    """A detached scalar with the state it was computed from; a subclass of Tensor whose arithmetic gives plain tensors.

    Args:
        state: (K,) sums, or one extreme value, of this part of the data.
        finish: Computes the scalar from a state; must be picklable.
        combine: How states of several parts are combined.
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
        """Do nothing; ``__new__`` has set everything."""

    def merge(self, other: "Metric") -> "Metric":
        """Combine with the same metric of another part of the data."""
        return Metric(combined(self.state, other.state, self.combine), self.finish, self.combine)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Metric":
        """Copy state and reduction."""
        return Metric(self.state.clone(), self.finish, self.combine)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle state and reduction."""
        return Metric, (self.state, self.finish, self.combine)


def combined(first: Tensor, second: Tensor, combine: Combination) -> Tensor:
    """Combine two (K,) states."""
    if combine == "sum":
        return first + second
    return torch.maximum(first, second) if combine == "max" else torch.minimum(first, second)


def _metric(state: Tensor, finish: Callable[[Tensor], Tensor], combine: Combination = "sum") -> Tensor:
    """A :class:`Metric`, or its value inside ``torch.compile``, which does not trace tensor subclasses."""
    return finish(state) if torch.compiler.is_compiling() else Metric(state, finish, combine)


def sums_metric(finish: Callable[[Tensor], Tensor], *sums: Tensor) -> Tensor:
    """Metric that is a function of sums over the data: a variance, a ratio, an effective sample size.

    Args:
        finish: Computes the scalar from the K sums of all data; must be picklable.
        *sums: K scalars, of this part of the data.
    """
    return _metric(torch.stack([full_precision(one.detach()) for one in sums]), finish)


def mean_metric(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the selected entries of ``values``, over all data; 0 where nothing is selected."""
    return sums_metric(_ratio, masked_sum(full_precision(values.detach()), mask), mask.bool().sum())


def weighted_metric(value: Tensor | float, weight: Tensor | float) -> Tensor:
    """Mean that is already computed for this part of the data.

    Args:
        value: Scalar; may be anything where the weight is 0.
        weight: Scalar, number of items (tokens, pairs) in the mean.
    """
    value = full_precision(torch.as_tensor(value).detach())
    # A number is filled in on the device: a copy would make the host wait.
    weight = weight.to(value.device) if isinstance(weight, Tensor) else torch.full((), weight, device=value.device)
    return sums_metric(_ratio, select(value * weight, weight > 0), weight)


def share_metric(
    value: Tensor, count: Tensor | float, denominator: Tensor | float | None, *, exponential: bool = False
) -> Tensor:
    """Mean over all data of a loss that is divided by the ``denominator`` of its optimizer step.

    The plain mean of such losses over micro-batches is wrong where there are fewer of them than the denominator was
    divided by, as in the last window of an epoch.

    Args:
        value: Scalar, the sum over this part of the data divided by ``denominator``.
        count: Scalar, number of items (tokens, pairs) in that sum.
        denominator: Items of the optimizer step per averaged micro-batch; ``None``: ``count``.
        exponential: The exponential of the mean instead, e.g. a perplexity.
    """
    total = full_precision(value.detach()) * (count if denominator is None else denominator)
    items = count.to(total.device) if isinstance(count, Tensor) else total.new_full((), count)
    return sums_metric(_exp_ratio if exponential else _ratio, total, items)


def exp_mean_metric(values: Tensor, mask: Tensor) -> Tensor:
    """Exponential of the mean of the selected entries over all data (a perplexity); 1 where nothing is selected."""
    return sums_metric(_exp_ratio, masked_sum(full_precision(values.detach()), mask), mask.bool().sum())


def sum_metric(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of the selected entries over all data."""
    return sums_metric(_first, masked_sum(full_precision(values.detach()), mask))


def max_metric(values: Tensor, mask: Tensor, *, empty: float = 0.0) -> Tensor:
    """Largest of the selected entries over all data; ``empty`` where nothing is selected."""
    kept = select(full_precision(values.detach()), mask, -math.inf)
    largest = kept.amax() if kept.numel() else kept.new_tensor(-math.inf)
    return _metric(largest[None], partial(_filled, bound=-math.inf, empty=empty), "max")


def min_metric(values: Tensor, mask: Tensor, *, empty: float = 0.0) -> Tensor:
    """Smallest of the selected entries over all data; ``empty`` where nothing is selected."""
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
