"""``FrozenCritic``: the critic of a ``PPOModule`` that a :class:`~rlhfkit.roles.ModelPool` holds and nobody trains."""

import inspect
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import value_loss
from rlhfkit.modules.on_policy.preparation.placed_models import AskedRows, PlacedModule, ask, pool_result
from rlhfkit.roles import ModelPool


class FrozenCritic:
    """Asks a pool for the values of this rank's rows.

    Args:
        pool: Replicas of the critic.
    """

    def __init__(self, pool: ModelPool) -> None:
        self.pool = pool
        self._asked: AskedRows | None = None
        self._rows = torch.zeros(0, dtype=torch.bool)  # (B,), those that were asked for

    def ask_values(self, module: PlacedModule, experience: Experience, rows: Tensor | None = None) -> None:
        """Ask for the values of this rank's rows, (B,) bool of which may be chosen; returns at once. A collective."""
        self._rows = torch.ones(len(experience), dtype=torch.bool) if rows is None else rows
        wanted = experience if rows is None else experience.select(rows.nonzero()[:, 0])
        self._asked = ask(self.pool, "values", module, wanted)

    def values(self, experience: Experience) -> Tensor:
        """(B, T-1) float32 values that were asked for, on the CPU; 0 in other rows. A collective."""
        asked, self._asked = self._asked, None
        assert asked is not None
        found = pool_result(asked, self.pool)
        values = torch.zeros(experience.action_mask.shape)
        values[self._rows, : found.shape[1]] = found
        return values


def check_frozen_settings(kind: type, **given: Any) -> None:
    """Raise ValueError if an argument of ``kind``'s constructor says how a critic is trained that is not."""
    # mypy warns of __init__ of a class that may be a subclass; that of exactly this class is meant.
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    changed = [name for name, value in given.items() if value != parameters[name].default]
    if changed:
        raise ValueError(
            f"critic=ModelPool(...) is not trained, so {', '.join(changed)} would have no effect: leave out what is "
            "about training it, or train it elsewhere with critic=CriticPool(...)"
        )


@torch.no_grad()
def value_metrics(batch: Experience) -> dict[str, Any]:
    """How well the values predict the returns; those of :func:`~rlhfkit.losses.value_loss` that need no training."""
    found = value_loss(batch.columns["values"], None, batch.columns["returns"], batch.action_mask, clip=None)
    return {name: value for name, value in found.metrics.items() if name != "value/clip_fraction"}
