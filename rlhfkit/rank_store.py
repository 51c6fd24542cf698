"""``RankStore``: how ranks leave messages for one another and wait without a collective.

A collective that starts with a long wait (for samples, for rewards) ends with the process group's time limit and does
not say which rank is missing. Here ranks wait on the store of the default process group: with a limit of their own,
woken at once by a rank that fails, and told which rank died. Imports torch only.
"""

import hmac
import math
import pickle
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in its __all__ (torch 2.13)

from rlhfkit.distributed import Failure, error_of_all, failure_of, gather_objects, get_rank, get_world_size

T = TypeVar("T")

HEARTBEAT_SECONDS = 1.0
"""Interval in which each rank tells the store that it lives."""
DEAD_AFTER_SECONDS = 20.0
"""A rank whose last heartbeat is older than this is dead. Longer than any pause in which Python runs no thread."""
_LONGEST_POLL_SECONDS = 0.05
_MANY_RANKS = 64
"""More ranks look less often, in proportion, so that rank 0 is not busy with answering them."""
_SIGNATURE_BYTES = 32  # of SHA-256
_GRACE_SECONDS = 5.0
"""Time that other ranks have to read an error before rank 0 ends and the store with it."""
_REQUEST_TIMEOUT = timedelta(seconds=60)


class RankError(RuntimeError):
    """A rank has died or failed, or the store of the ranks cannot be trusted.

    Also the cause, with the remote traceback, of an error of a rank on Ray that is raised again by the driver.
    """


class RankStore:
    """Messages between ranks; made by :func:`rank_store`. May be used from several threads."""

    def __init__(self, store: Any, key: bytes, *, rank: int, world_size: int) -> None:
        """Start the heartbeats; ``store`` is torch's, whose requests here never wait for a key."""
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._key = key
        self._lock = threading.Lock()
        self._logs_made: dict[str, int] = {}  # by name, the number of the last log
        self._beats: dict[int, tuple[bytes, float]] = {}  # rank -> its last heartbeat, and when it was seen to change
        self._closed = threading.Event()
        self._looked = 0.0
        self._set(f"alive/{rank}", b"0")
        threading.Thread(target=self._beat, name="rank heartbeat", daemon=True).start()

    def _request(self, send: Callable[[Any], T]) -> T:
        try:
            return send(self._store)
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError
            raise RankError(f"rank 0, which holds the store that ranks wait on, does not answer: {error}") from error

    def _set(self, key: str, value: bytes) -> None:
        self._request(lambda store: store.set(key, value))

    def _sealed(self, value: Any) -> bytes:
        """Pickle and sign a value: a store takes entries from anybody who can reach its port."""
        pickled = pickle.dumps(value)
        return hmac.digest(self._key, pickled, "sha256") + pickled

    def _opened(self, sealed: bytes) -> Any:
        signature, pickled = sealed[:_SIGNATURE_BYTES], sealed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, hmac.digest(self._key, pickled, "sha256")):
            raise RankError("the store that ranks wait on has an entry that no rank of this run has written")
        return pickle.loads(pickled)

    def log(self, name: str, *, keep: int = 2) -> "RankLog":
        """Return a new log; the n-th that each rank asks for by a name is the same one.

        Rank 0 deletes those of a name that are older than the last ``keep``: by then no rank may read them any more.
        """
        with self._lock:
            number = self._logs_made[name] = self._logs_made.get(name, -1) + 1
        if self.rank == 0 and number >= keep:
            self.forget(f"{name}/{number - keep}")
        return RankLog(self, f"{name}/{number}")

    # ------------------------------------------------------------------ used by logs

    def append(self, name: str, entry: Any) -> None:
        """Append a picklable entry to a log."""
        number = self._request(lambda store: store.add(f"log/{name}/count", 1)) - 1
        self._set(f"log/{name}/{number}", self._sealed(entry))

    def entries(self, name: str, first: int) -> list[Any]:
        """Return the entries of a log from number ``first`` on that were written so far."""
        count = self._request(lambda store: store.add(f"log/{name}/count", 0))
        keys = [f"log/{name}/{number}" for number in range(first, count)]
        # Several ranks append at a time: a number may be taken whose entry is not written yet.
        while keys and not self._request(lambda store: store.check(keys)):
            keys.pop()
        return [self._opened(value) for value in self._request(lambda store: store.multi_get(keys))] if keys else []

    def wait_for_readers(self, name: str) -> None:
        """Say that this rank has read a log to its end; rank 0, whose end closes the store, waits for the others."""
        count = self._request(lambda store: store.add(f"log/{name}/readers", 1))
        deadline = time.monotonic() + _GRACE_SECONDS
        while self.rank == 0 and count < self.world_size and time.monotonic() < deadline:
            time.sleep(_LONGEST_POLL_SECONDS)
            count = self._request(lambda store: store.add(f"log/{name}/readers", 0))

    def forget(self, name: str) -> None:
        """Delete a log that no rank reads any more."""
        count = self._request(lambda store: store.add(f"log/{name}/count", 0))
        for key in [*(f"log/{name}/{number}" for number in range(count)), f"log/{name}/count"]:
            self._request(partial(_delete, key))

    # ------------------------------------------------------------------ ranks that died

    def _beat(self) -> None:
        number = 0
        while not self._closed.wait(HEARTBEAT_SECONDS):
            number += 1
            try:
                self._set(f"alive/{self.rank}", str(number).encode())
            except RankError:
                return  # whoever waits learns it from a request of its own

    def check_ranks(self, waiting_for: str) -> None:
        """Raise RankError if a rank's heartbeats have stopped; cheap to call often."""
        now = time.monotonic()
        if self.world_size == 1 or now - self._looked < HEARTBEAT_SECONDS * max(1.0, self.world_size / _MANY_RANKS):
            return
        self._looked = now
        keys = [f"alive/{rank}" for rank in range(self.world_size)]
        for rank, beat in enumerate(self._request(lambda store: store.multi_get(keys))):
            before = self._beats.get(rank)
            if before is None or before[0] != beat:
                self._beats[rank] = beat, now
            elif now - before[1] > DEAD_AFTER_SECONDS and rank != self.rank:
                raise RankError(
                    f"rank {rank} has given no sign of life for {now - before[1]:.0f} s, while rank {self.rank} "
                    f"waited for it ({waiting_for}): its process was killed or stopped, or its machine is lost"
                )

    def close(self) -> None:
        """Stop the heartbeats."""
        self._closed.set()


def _delete(key: str, store: Any) -> None:
    store.delete_key(key)


class LocalStore(RankStore):
    """The store of a single process: the same messages, in memory."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self._lock = threading.Lock()
        self._logs_made: dict[str, int] = {}
        self._logs: dict[str, list[Any]] = {}
        self._closed = threading.Event()

    def append(self, name: str, entry: Any) -> None:
        """Append an entry to a log."""
        self._logs.setdefault(name, []).append(entry)

    def entries(self, name: str, first: int) -> list[Any]:
        """Return the entries of a log from number ``first`` on."""
        return self._logs.get(name, [])[first:]

    def forget(self, name: str) -> None:
        """Delete a log."""
        self._logs.pop(name, None)

    def check_ranks(self, waiting_for: str) -> None:
        """Do nothing, as there is no other rank."""


class RankLog:
    """Entries that any rank appends and every rank reads in the same order."""

    def __init__(self, store: RankStore, name: str) -> None:
        self.store = store
        self.name = name
        self._next = 0
        self._unread: list[tuple[int, Any]] = []
        self._waiting_for, self._limit, self._deadline = "a message", math.inf, math.inf
        self._ended = False  # this rank's step
        self._ends: dict[int, Failure | None] = {}  # of the ranks that have ended

    def append(self, entry: Any) -> None:
        """Append a picklable entry."""
        self.store.append(self.name, (self.store.rank, entry))

    def read(self, seconds: float = 0.0) -> list[tuple[int, Any]]:
        """Return the new entries with the ranks that wrote them, after waiting up to ``seconds`` for one.

        Raises what :meth:`check` does.
        """
        deadline, pause = time.monotonic() + seconds, 0.001
        while True:
            ended = len(self._ends)
            self.check()
            left = deadline - time.monotonic()
            if self._unread or len(self._ends) > ended or left <= 0:
                entries, self._unread = self._unread, []
                return entries
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS * max(1.0, self.store.world_size / _MANY_RANKS))

    def check(self) -> None:
        """End the step of this rank, by an exception for :meth:`run`, if that of another has failed.

        Raises:
            RankError: If a rank has died.
            TimeoutError: If the time of :meth:`run` is over.
        """
        found = self.store.entries(self.name, self._next)
        self._next += len(found)
        self._unread += [(rank, entry) for rank, entry in found if not isinstance(entry, _End)]
        self._ends |= {rank: entry.failure for rank, entry in found if isinstance(entry, _End)}
        if not self._ended and any(failure is not None for failure in self._ends.values()):
            raise _OtherRankFailed
        if not self._ended and time.monotonic() > self._deadline:
            raise TimeoutError(f"{self._waiting_for} took longer than {self._limit:g} s on rank {self.store.rank}")
        if not found:
            self.store.check_ranks(self._waiting_for)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function that may block, in a thread that is left behind when another rank fails or time is over.

        Without other ranks the function is called in this thread.
        """
        if self.store.world_size == 1:
            return function()
        outcome, pause = call_in_thread(function, threading.current_thread().name), 0.001
        while not wait([outcome], pause).done:
            self.check()
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
        return outcome.result()

    def run(
        self,
        step: Callable[[], T],
        *,
        timeout: float,
        waiting_for: str,
        error_type: type[Exception] = RuntimeError,
    ) -> T:
        """Run a step on every rank and return this rank's result once all have finished; if one fails, all raise.

        Must be called once for a log, on every rank. A ``step`` that takes long must :meth:`read` or :meth:`check` the
        log now and then, or :meth:`call` what blocks, which ends it when another rank has failed.

        Args:
            step: Called once.
            timeout: Seconds, from the start of this rank's step, until all ranks must have finished; not used without
                other ranks.
            waiting_for: What the ranks do, for messages: "the samples of iteration 3".
            error_type: Raised on ranks whose own step succeeded.

        Raises:
            RecoverableError: On all ranks, if every failed rank raised one.
            TimeoutError: If a rank takes longer than ``timeout``.
            RankError: If a rank has died.
            Exception: Otherwise: the error of ``step`` on a failed rank, an ``error_type`` that names the
                rank and its error on others.
        """
        if self.store.world_size == 1:
            return step()
        self._waiting_for, self._limit, self._deadline = waiting_for, timeout, time.monotonic() + timeout
        result: Any = None
        error: Exception | None = None
        try:
            result = step()
        except _OtherRankFailed:
            pass
        except Exception as raised:  # the other ranks are told below, then it is raised here
            error = raised
        self._ended = True
        self.append(_End(failure_of(error)))
        try:
            self._wait_for_ends()
        except RankError:
            if self.store.rank == 0:
                time.sleep(_GRACE_SECONDS)  # the other ranks are about to find it out, too
            raise
        error = error_of_all(error, [self._ends[rank] for rank in range(self.store.world_size)], error_type)
        if error is not None:
            self.store.wait_for_readers(self.name)
            raise error
        return result  # type: ignore[no-any-return]

    def _wait_for_ends(self) -> None:
        # A rank that fails at the limit says so itself, a moment later.
        while len(self._ends) < self.store.world_size:
            self.read(1.0)
            if time.monotonic() > self._deadline + _GRACE_SECONDS:
                late = [rank for rank in range(self.store.world_size) if rank not in self._ends]
                raise TimeoutError(
                    f"{self._waiting_for}: rank(s) {', '.join(map(str, late))} of {self.store.world_size} did not "
                    f"finish within {self._limit:g} s"
                )


def call_in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function in a thread of its own, which can be left behind: it does not keep the process from ending."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # raised again by result()
            outcome.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return outcome


class _End(NamedTuple):
    """Written by each rank when its step has ended."""

    failure: Failure | None


class _OtherRankFailed(Exception):
    """Ends the step of a rank, as that of another rank has failed; :meth:`RankLog.run` replaces it."""


_stores: dict[Any, RankStore] = {}  # by process group; a key stays alive, so no later group can be equal to it


def rank_store() -> RankStore:
    """Return the store of this run's ranks, which the first call opens. The first call is a collective."""
    if get_world_size() == 1:
        return LocalStore()
    group = dist.group.WORLD
    if group not in _stores:
        for store in _stores.values():
            store.close()
        _stores.clear()
        _stores[group] = _open_store()
    return _stores[group]


def _open_store() -> RankStore:
    # An earlier process group may have had the same store.
    name, key = gather_objects((secrets.token_hex(8), secrets.token_bytes(32)))[0]
    # A connection of its own, as requests of others may wait for a key.
    default: Any = dist.distributed_c10d._get_default_store()  # torch's stubs lack clone
    store = PrefixStore(f"rlhfkit/{name}", default.clone())
    store.set_timeout(_REQUEST_TIMEOUT)
    opened = RankStore(store, key, rank=get_rank(), world_size=get_world_size())
    gather_objects(None)  # every rank's first heartbeat is there
    return opened
