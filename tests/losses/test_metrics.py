"""A metric of all data is what the metrics of its parts are put together to, whatever the parts."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhfkit import losses
from rlhfkit.losses.metrics import Metric, exp_mean_metric, min_metric


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    """Twelve sequences of uneven lengths, one of them empty."""
    lengths = torch.tensor([9, 1, 4, 0, 7, 2, 9, 3, 5, 1, 8, 6])
    shape = (12, 9)
    data = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in ("a", "b", "c", "d")}
    return data | {"mask": torch.arange(9) < lengths[:, None]}


def of_losses(part: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every metric of losses that is no mean over tokens, and some that are."""
    a, b, mask = -part["a"].abs(), -part["b"].abs(), part["mask"]
    return {
        **losses.ppo_loss(a, b, part["c"], mask).metrics,
        **losses.cross_entropy_loss(a, mask).metrics,
        **losses.importance_weights(a, b, mask, level="sequence", mode="truncate", high=2.0).metrics,
        **losses.mismatch_metrics(a, b, mask),
        **losses.value_loss(part["c"], part["a"], part["d"] + 5.0, mask).metrics,
    }


KINDS = {"mean": losses.mean_metric, "max": losses.max_metric, "sum": losses.sum_metric, "min": min_metric}


def of_functions(part: dict[str, Tensor]) -> dict[str, Tensor]:
    a, mask = part["a"], part["mask"]
    made = {name: make(a, mask) for name, make in KINDS.items()}
    return made | {"sequences": losses.mean_metric(a[:, 0], mask.any(-1)), "exp": exp_mean_metric(a, mask)}


@pytest.mark.parametrize("compute", [of_losses, of_functions])
@pytest.mark.parametrize("parts", [2, 4, 12])
def test_the_parts_make_the_whole(compute: Any, parts: int) -> None:
    data = rows(torch.Generator().manual_seed(0))
    whole, merged = compute(data), {}
    for chunk in range(parts):
        part = {name: tensor[chunk::parts] for name, tensor in data.items()}
        for name, metric in compute(part).items():
            if not isinstance(metric, Metric):  # a mean over tokens
                metric = losses.weighted_metric(metric, part["mask"].sum())
            merged[name] = metric if name not in merged else merged[name].merge(metric)
    assert whole.keys() == merged.keys()
    for name, metric in merged.items():  # shares of tokens are float32
        torch.testing.assert_close(metric.as_subclass(Tensor), whole[name].as_subclass(Tensor), rtol=1e-6, atol=2e-7)


def test_values_are_those_of_the_definition() -> None:
    values, mask = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, 3.0]]), torch.tensor([[1, 1, 0], [1, 0, 1]]) > 0
    expected = {"mean": 3, "max": 6, "sum": 12, "min": 1}
    assert {name: float(make(values, mask)) for name, make in KINDS.items()} == expected
    assert float(exp_mean_metric(values, mask)) == pytest.approx(math.exp(3.0))
    nothing = torch.zeros_like(mask)
    assert not any(make(values, nothing) for make in KINDS.values())
    assert math.isnan(losses.max_metric(values, nothing, empty=math.nan))
    assert float(losses.weighted_metric(math.nan, 0).merge(losses.weighted_metric(2.0, 3))) == 2.0  # type: ignore[attr-defined]


def test_a_metric_is_a_scalar_tensor_without_gradient_that_can_be_copied_and_pickled() -> None:
    values = torch.tensor([1.0, 3.0], requires_grad=True)
    metric = losses.mean_metric(values, values > 0)
    assert isinstance(metric, Tensor)
    assert metric.shape == ()
    assert not metric.requires_grad
    assert type(metric + 1) is Tensor
    for again in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert float(again.merge(losses.mean_metric(torch.tensor([8.0]), torch.tensor([True])))) == 4.0
