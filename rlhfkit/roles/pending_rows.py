"""``PendingRows``: rows that the replicas of a pool are computing for one rank.

``FrozenModel``: what a module asks of a frozen model that is elsewhere, on Ray actors or behind servers; and
``EarlyRows``: what that was asked about samples as soon as their group was finished, while others were sampled.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import get_rank, get_world_size
from rlhfkit.parts import Configured
from rlhfkit.ray_calls import cause_of
from rlhfkit.roles.replica import Role, TokenRows

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_STATUS_SECONDS = 10.0
"""Time in which a process that lives says when it has finished something."""
_COUNTING = threading.RLock()
"""Guards the replicas' counts of requests, as sampling threads ask too. Not a pool's attribute: pools are copied."""


class ModelPoolError(RuntimeError):
    """No replica is left, or none answered in time."""


class Replica:
    """One replica, as this rank sees it; ``actor`` is its handle in Ray."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.tokens = 0
        """Of requests that are not finished."""
        self.last_finished = 0.0
        self.lost = ""
        """Why it gets no more requests."""

    def works(self, limit: float) -> bool:
        """Whether it has finished a request of any rank in the last ``limit`` seconds, and answers at all."""
        import ray

        try:
            asked = self.actor.idle_seconds.options(max_task_retries=0).remote()
            idle: float = ray.get(asked, timeout=min(limit, _STATUS_SECONDS))
        except ray.exceptions.RayError:
            return False
        self.last_finished = max(self.last_finished, time.monotonic() - idle)
        return idle <= limit


class Replicas(Protocol):
    """What pending rows ask of their pool."""

    model: str
    request_timeout: float
    top: int
    waited: float
    computed: dict[str, float]
    _replicas: list[Replica]


class PendingRows:
    """Rows that replicas are computing: ``batches`` of an experience, one request each."""

    def __init__(self, pool: Replicas, experience: Experience, batches: Sequence[Tensor]) -> None:
        self._pool = pool
        self._shape = experience.action_mask.shape
        self._requests = {number: TokenRows.of(experience, rows, pool.top) for number, rows in enumerate(batches)}
        self._rows = list(batches)
        self._running: dict[Any, tuple[int, Replica]] = {}
        self._found: dict[int, Tensor] = {}
        self._failure: ModelPoolError | None = None  # of a thread that asked; raised where it is waited for
        try:
            for number in self._requests:
                self._send(number)
        except ModelPoolError as error:
            self._failure = error

    def _send(self, number: int) -> None:
        """Give a request to the replica with the fewest tokens to compute; ranks begin at different ones."""
        pool = self._pool
        with _COUNTING:
            left = [replica for replica in pool._replicas if not replica.lost]
            if not left:
                reasons = "; ".join(f"{replica.name}: {replica.lost}" for replica in pool._replicas)
                raise ModelPoolError(
                    f"no replica of {pool.model} is left ({reasons}). The run can be resumed from its last checkpoint"
                )
            start = get_rank() * len(left) // get_world_size()
            replica = min(left[start:] + left[:start], key=lambda replica: replica.tokens)
            if not replica.tokens:
                replica.last_finished = time.monotonic()
            rows = self._requests[number]
            replica.tokens += int(rows.lengths.sum())
            self._running[replica.actor.compute.remote(rows)] = (number, replica)

    def result(self, columns: int | None = None) -> Tensor:
        """Wait for all of them.

        Args:
            columns: Numbers of each row; ``None``: T-1, log-probs.

        Returns:
            (B, T-1), (B, T-1, 2 K) of a pool with ``top``, or (B, columns) float32 on the CPU; 0 in rows that were not
            asked for.

        Raises:
            ModelPoolError: If no replica is left, or the model cannot compute them.
        """
        if self._failure is not None:
            raise self._failure
        started = time.monotonic()
        for _, replica in self._running.values():  # nobody has looked at what it finished while others were computing
            replica.last_finished = max(replica.last_finished, started)
        while self._running:
            self._take(_POLL_SECONDS)
            self._check_progress()
        self._pool.waited += time.monotonic() - started
        last = () if columns is not None or not self._pool.top else (2 * self._pool.top,)
        values = torch.zeros(self._shape[0], self._shape[1] if columns is None else columns, *last)
        for number, found in self._found.items():
            values[self._rows[number], : found.shape[1]] = found
        return values

    def _forget(self, ref: Any) -> tuple[int, Replica]:
        """Take a request off its replica."""
        number, replica = self._running.pop(ref)
        with _COUNTING:
            replica.tokens -= int(self._requests[number].lengths.sum())
        return number, replica

    def _take(self, timeout: float) -> None:
        """Take the results that are ready, after waiting for one of them."""
        import ray

        running = list(self._running)
        ready, _ = ray.wait(running, num_returns=1, timeout=timeout)
        if ready:  # all that are, so that no replica seems to have finished nothing
            ready, _ = ray.wait(running, num_returns=len(running), timeout=0)
        for ref in ready:
            number, replica = self._forget(ref)
            try:
                answer = ray.get(ref)
            except (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError) as error:
                self._give_up(replica, cause_of(error))
                self._send(number)
                continue
            except ray.exceptions.RayError as error:
                raise ModelPoolError(
                    f"{replica.name} could not compute {self._pool.model}: {cause_of(error)}"
                ) from error
            replica.last_finished = time.monotonic()
            self._found[number] = answer.values
            self._pool.computed[replica.name] = self._pool.computed.get(replica.name, 0.0) + answer.seconds

    def _check_progress(self) -> None:
        """Send what a stuck replica has to others."""
        limit = self._pool.request_timeout
        for replica in {id(one): one for _, one in self._running.values()}.values():
            # It may be computing what other ranks have asked for before.
            stuck = time.monotonic() - replica.last_finished > limit and not replica.works(limit)
            if stuck:
                self._give_up(replica, f"it finished nothing for {limit:g} s")
            if stuck or replica.lost:
                for ref in [ref for ref, (_, one) in self._running.items() if one is replica]:
                    self._send(self._forget(ref)[0])

    def _give_up(self, replica: Replica, reason: str) -> None:
        if not replica.lost:
            log.warning("replica %s of %s gets no more requests: %s", replica.name, self._pool.model, reason)
        replica.lost = replica.lost or reason


# ---------------------------------------------------------------- asked early

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
    """A key of each of B samples, by its tokens, group and number, the same on every rank."""
    keys = []
    ids, lengths = experience.input_ids.to("cpu", torch.int32), experience.lengths.tolist()
    for row, place in enumerate(zip(experience.group.tolist(), experience.sample_index.tolist(), strict=True)):
        tokens = hashlib.blake2b(ids[row, : lengths[row]].numpy().tobytes(), digest_size=16)
        tokens.update(repr(place).encode())
        keys.append(tokens.digest())
    return keys
