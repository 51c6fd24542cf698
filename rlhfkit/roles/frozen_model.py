"""``FrozenModel``: what a module asks of a frozen model that is elsewhere, on Ray actors or behind servers.

``EarlyRows``: what that was asked about samples as soon as their group was finished, while others were sampled.
"""

import hashlib
import threading
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.parts import Configured
from rlhfkit.roles.replica import Role


class ModelPoolError(RuntimeError):
    """No replica is left, or none answered in time."""


_CHANGING = threading.Lock()
"""Guards the samples of all :class:`EarlyRows`. Not an attribute of a pool, as pools are copied."""


class PendingNumbers(Protocol):
    """Numbers of rows that are being computed elsewhere."""

    def result(self, columns: int | None = None) -> Tensor:
        """Wait for them: (B, columns) float32 on the CPU, for ``None`` (B, T-1); 0 in rows that were not asked for."""
        ...


class _Asked(NamedTuple):
    """Where the numbers of one sample will be."""

    iteration: int
    pending: PendingNumbers
    row: int
    steps: int
    """Tokens after the first."""


class EarlyRows:
    """Samples that one rank has asked about early, by :func:`row_keys`. Any thread may add some."""

    def __init__(self) -> None:
        self._asked: dict[bytes, _Asked] = {}

    def add(self, experience: Experience, pending: PendingNumbers, iteration: int) -> None:
        """Remember that an experience of B samples was asked about; those of the same tokens are replaced."""
        lengths = (experience.lengths - 1).tolist()
        with _CHANGING:
            for row, key in enumerate(row_keys(experience)):
                self._asked[key] = _Asked(iteration, pending, row, lengths[row])

    def drop_before(self, iteration: int) -> None:
        """Forget the samples of earlier iterations, groups that were not selected among them."""
        with _CHANGING:
            self._asked = {key: asked for key, asked in self._asked.items() if asked.iteration >= iteration}

    def keys(self) -> set[bytes]:
        """The samples."""
        with _CHANGING:
            return set(self._asked)

    def result(self, keys: Collection[bytes], columns: int | None = None) -> dict[bytes, Tensor]:
        """Wait for the numbers of some samples, (T-1,) or (columns,) each.

        Raises what :meth:`PendingRows.result` raises.
        """
        with _CHANGING:
            wanted = {key: self._asked[key] for key in keys}
        tables: dict[int, Tensor] = {}
        found = {}
        for key, asked in wanted.items():
            if id(asked.pending) not in tables:
                tables[id(asked.pending)] = asked.pending.result(columns)
            found[key] = tables[id(asked.pending)][asked.row, : asked.steps if columns is None else columns]
        return found


class FrozenModel(Configured):
    """A frozen model elsewhere: :class:`~rlhfkit.roles.ModelPool` or :class:`~rlhfkit.roles.ServedModel`.

    Args:
        model: Folder or hub name.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.top = 0
        """K: log-probs and ids of the K likeliest tokens at each place are asked for, (B, T-1, 2 K); 0: log-probs of
        the sequences' own tokens, (B, T-1)."""
        self.waited = 0.0
        """Seconds that this rank has waited for results: what was not hidden behind other work."""
        self.hidden = 0.0
        """Seconds that it would have waited besides, had it asked for each result when it needed it."""
        self.early = EarlyRows()
        """What this rank has asked about groups of iterations that are being sampled."""

    @property
    def started(self) -> bool:
        """Whether it can be asked."""
        raise NotImplementedError

    def start(self, role: Role, *, weights: torch.dtype, compute: torch.dtype, policy: Any = "") -> None:
        """Start or connect, once, with weights of a type and matrix products of another. A collective.

        ``policy`` is the folder or hub name of the policy, for its tokenizer, or a tokenizer that it has instead.
        """
        raise NotImplementedError

    def submit(self, experience: Experience, batches: Sequence[Tensor]) -> PendingNumbers:
        """Ask for some rows (b,) of B sequences of this rank; returns at once."""
        raise NotImplementedError

    def take_seconds(self) -> tuple[float, float]:
        """Seconds since the last call that this rank has waited, and that were hidden from it."""
        raise NotImplementedError

    def close(self) -> None:
        """End or disconnect; :meth:`start` may be called again."""
        raise NotImplementedError


def row_keys(experience: Experience) -> list[bytes]:
    """A key of each of B samples, by its tokens, group and number and what is attached, the same on every rank."""
    keys = []
    ids, lengths = experience.input_ids.to("cpu", torch.int32), experience.lengths.tolist()
    attached = experience.attachments or ((),) * len(lengths)
    for row, place in enumerate(zip(experience.group.tolist(), experience.sample_index.tolist(), strict=True)):
        tokens = hashlib.blake2b(ids[row, : lengths[row]].numpy().tobytes(), digest_size=16)
        tokens.update(repr((place, [one.key for one in attached[row]])).encode())
        keys.append(tokens.digest())
    return keys
