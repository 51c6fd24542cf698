"""``FrozenModel``: what a module asks of a frozen model that is elsewhere, on Ray actors or behind servers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.roles.model_pool import ModelPool
from rlhfkit.roles.pending_rows import EarlyRows, PendingNumbers
from rlhfkit.roles.replica import Role
from rlhfkit.roles.served_model import ServedModel


class FrozenModel(Protocol):
    """A frozen model elsewhere: :class:`~rlhfkit.roles.ModelPool` or :class:`~rlhfkit.roles.ServedModel`."""

    model: str
    """Folder or hub name."""
    waited: float
    """Seconds that this rank has waited for results: what was not hidden behind other work."""
    hidden: float
    """Seconds that it would have waited besides, had it asked for each result when it needed it."""
    version: int
    """How often the model has moved; 0 for one that cannot."""

    top: int
    """K: it is asked for the K likeliest tokens at each place, (B, T-1, 2 K) log-probs and ids; 0: for log-probs of the
    sequences' own tokens, (B, T-1)."""

    early: EarlyRows
    """What this rank has asked about groups of iterations that are being sampled."""

    def take_seconds(self) -> tuple[float, float]:
        """Seconds since the last call that this rank has waited, and that were hidden from it."""
        ...

    def refresh(self) -> None:
        """Send weights that have moved to replicas that were restarted. A collective."""
        ...

    @property
    def started(self) -> bool:
        """Whether it can be asked."""
        ...

    def plain(self) -> dict[str, Any]:
        """The arguments as plain values, for checkpoints and logs; :func:`frozen_model` restores from them."""
        ...

    def start(self, role: Role, *, weights: torch.dtype, compute: torch.dtype, policy: Any = "") -> None:
        """Start or connect, once, with weights of a type and matrix products of another. A collective.

        ``policy`` is the folder or hub name of the policy, for its tokenizer, or a tokenizer that it has instead.
        """
        ...

    def submit(self, experience: Experience, batches: Sequence[Tensor]) -> PendingNumbers:
        """Ask for some rows (b,) of B sequences of this rank; returns at once."""
        ...

    def close(self) -> None:
        """End or disconnect; :meth:`start` may be called again."""
        ...


def frozen_model(value: FrozenModel | Mapping[str, Any] | None) -> FrozenModel | None:
    """Restore from the dictionary of ``plain``; a model or ``None`` is returned as it is."""
    if not isinstance(value, Mapping):
        return value
    return ServedModel(**value) if "urls" in value else ModelPool(**value)
