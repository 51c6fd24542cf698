"""Metrics of micro-batches, reduced over an optimizer step or an epoch and over all ranks."""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torchmetrics
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import all_reduce
from rlhfkit.losses.metrics import Combination, Metric, combined, weighted_metric

_START: dict[Combination, float] = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}


class EpochMetric(torchmetrics.Metric):
    """A :class:`~rlhfkit.losses.metrics.Metric` reduced over the micro-batches of an epoch, for Lightning's ``log``.

    ``example``, the metric of the first micro-batch, gives the reduction and the device.
    """

    full_state_update = False
    state: Tensor

    def __init__(self, example: Metric) -> None:
        super().__init__(sync_on_compute=False)
        self.combine, self.finish = example.combine, example.finish
        start = torch.full_like(_precise(example.state), _START[example.combine])
        self.add_state("state", default=start, dist_reduce_fx=example.combine)

    def update(self, metric: Metric) -> None:
        """Add one micro-batch."""
        self.state = combined(self.state, metric.state.to(self.state), self.combine)

    def compute(self) -> Tensor:
        """The value over all micro-batches and ranks. A collective."""
        return self.finish(all_reduce(self.state.clone(), self.combine)).float()


class StepMetrics:
    """Metrics of the micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._step: object = None

    def add(self, step: object, metrics: Mapping[str, Metric]) -> None:
        """Add one micro-batch, with the same names in each.

        ``step`` identifies the optimizer step; metrics of another, interrupted step are dropped.
        """
        if step != self._step:
            self._step, self._metrics = step, {}
        for name, metric in metrics.items():
            before = self._metrics.get(name)
            self._metrics[name] = metric if before is None else before.merge(metric)

    def take(self) -> dict[str, Tensor]:
        """Return the values over all ranks and reset. A collective with one exchange per kind of reduction."""
        metrics, self._metrics = self._metrics, {}
        values: dict[str, Tensor] = {}
        for combine in _START:
            chosen = {name: one for name, one in metrics.items() if one.combine == combine}
            if not chosen:
                continue
            states = all_reduce(torch.cat([_precise(one.state) for one in chosen.values()]), combine)
            parts = torch.split(states, [len(one.state) for one in chosen.values()])
            values |= {name: one.finish(part).float() for (name, one), part in zip(chosen.items(), parts, strict=True)}
        return {name: values[name] for name in metrics}


class StepMean:
    """The mean over the trained tokens of one optimizer step, of all its micro-batches and ranks."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0

    def add(self, total: Tensor, batch: Experience) -> None:
        """Add the sum over the tokens of one micro-batch."""
        self._total = self._total + total / max(batch.step_tokens or float(batch.action_mask.sum()), 1.0)

    def take(self, module: Any) -> float:
        """Return the mean and start the next step. A collective."""
        total, self._total = torch.as_tensor(self._total, dtype=torch.float32, device=module.device), 0.0
        return float(module.trainer.strategy.reduce(total, reduce_op="sum"))


def as_metrics(metrics: Mapping[str, Any], weight: Tensor | float, device: torch.device) -> dict[str, Metric]:
    """Make metrics of plain scalars, averaged with ``weight`` (tokens, pairs), and move all metrics to a device."""
    found = {}
    for name, value in metrics.items():
        metric = cast(Metric, value if isinstance(value, Metric) else weighted_metric(value, weight))
        if metric.state.device != device:
            metric = Metric(metric.state.to(device), metric.finish, metric.combine)
        found[name] = metric
    return found


def _precise(state: Tensor) -> Tensor:
    """Convert to float64 where the device has it, as an epoch has many tokens."""
    return state if state.device.type == "mps" else state.double()
