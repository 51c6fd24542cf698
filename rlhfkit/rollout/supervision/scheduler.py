"""``RequestScheduler``: sends one caller's requests to the engines, and requeues what dead engines lose.

A job is the requests of one prompt's group, or a part of them: what is sent to one engine in one call.
"""

import contextlib
import logging
import math
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from rlhfkit.rollout.errors import CURE, EngineError, EngineFailure, StallError, WeightsNeededError
from rlhfkit.rollout.supervision.calls import Completion, Request, fetch
from rlhfkit.rollout.supervision.engines import Engine, Engines
from rlhfkit.rollout.supervision.health import State

log = logging.getLogger(__name__)


def split_into_jobs(num_prompts: int, group_size: int, num_engines: int) -> list[tuple[int, range]]:
    """Split groups into jobs; returns the prompt and positions in its group of each job.

    A group is one job, as its samples share the prompt's cache, unless engines would be idle.
    """
    parts = min(group_size, max(1, -(-num_engines // max(1, num_prompts))))
    cuts = [group_size * part // parts for part in range(parts + 1)]
    return [(row, range(cuts[part], cuts[part + 1])) for row in range(num_prompts) for part in range(parts)]


class StallDetector:
    """Reports when no request is finished for long, and ends the wait at a limit.

    Without progress the report is logged every ``report_after`` seconds, and waiting ends after ``timeout`` seconds.
    ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        report: Callable[[], str],
        *,
        report_after: float,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.report_after = report_after
        self.timeout = timeout
        self.num_reports = 0
        """Reports since the last progress."""
        self._report = report
        self._clock = clock
        self._last = clock()

    @property
    def idle(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._last

    def progress(self) -> None:
        self._last, self.num_reports = self._clock(), 0

    def check(self, waiting_for: str) -> None:
        """Log the report if it is due; StallError, with the report, at the limit. Call at least once a second.

        ``waiting_for`` is for messages: "12 of 64 requests".
        """
        idle = self.idle
        if idle >= self.timeout:
            raise StallError(
                f"no request was finished for {self.timeout:g} s; waiting for {waiting_for}: engines are stopped, "
                "overloaded, or the limit is too low (VLLMPool(generate_timeout=...)).\n"
                f"{self._report()}\n{CURE}"
            )
        if idle >= self.report_after * (self.num_reports + 1):
            self.num_reports = int(idle // self.report_after)
            log.warning(
                "no request was finished for %.0f s; waiting for %s, at most until %g s have passed.\n%s",
                *(idle, waiting_for, self.timeout, self._report()),
            )


class RequestScheduler:
    """Requests of one caller: pending, then in flight on an engine, then finished.

    Other callers, also of other threads, may use ``engines`` at the same time; a scheduler belongs to one thread at a
    time. ``timeout`` is in seconds without a finished job, not counting the time in which the caller works on the
    results of :meth:`collect`; ``clock`` is monotonic, in seconds.
    """

    def __init__(self, engines: Engines, timeout: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines = engines
        self._clock = clock
        self._name = f"{threading.current_thread().name}-{uuid.uuid4().hex[:8]}"
        self._num_jobs = 0
        self._jobs: dict[int, list[Request]] = {}  # not finished
        self._attempts: Counter[int] = Counter()  # failed attempts of each job
        self._pending: deque[int] = deque()
        self._in_flight: dict[Any, tuple[int, Engine, str]] = {}  # Ray's reference -> job, engine, key
        self._results: dict[int, list[Completion]] = {}  # not collected yet
        self._unserved_since: float | None = None
        self._registration = contextlib.ExitStack()
        self._registration.enter_context(engines.reporting(self._describe))
        self._waiting = False  # since the caller's last call, which returned nothing
        self.stall_detector = StallDetector(
            engines.report, report_after=engines.policy.report_after, timeout=timeout, clock=clock
        )

    def submit(self, requests: list[Request]) -> int:
        """Queue a job of at least one request and return its number."""
        job = self._num_jobs
        self._num_jobs += 1
        self._jobs[job] = requests
        self._pending.append(job)
        self._engines.update()
        self._dispatch()
        return job

    def collect(self, wait: float | None = None) -> dict[int, list[Completion]]:
        """Wait for finished jobs, up to ``wait`` seconds (``None``: no limit); returns each new one's completions.

        They are by number; none if the time is over or no job is left.

        Raises:
            RequestError: If the engine refuses a request.
            StallError: If nothing was finished in time.
            WeightsNeededError: If no engine serves any more, and some wait for weights or are starting.
            EngineError: If all engines are dead, or several died while they worked on one job.
        """
        if not self._waiting:
            self.stall_detector.progress()
        deadline = math.inf if wait is None else time.monotonic() + wait
        while not self._results and (self._pending or self._in_flight):
            self._engines.update()
            self._dispatch()
            self._requeue_lost()
            self.check()
            left = max(0.0, deadline - time.monotonic())
            self._collect_ready(left)
            if left <= 0:
                break
        results, self._results = self._results, {}
        self._waiting = not results and bool(self._pending or self._in_flight)
        return results

    def cut(self, timeout: float) -> dict[int, list[Completion]]:
        """End the requests in flight and close; returns what was made of those that were not collected, by job.

        Jobs of engines that fail or do not answer within ``timeout`` seconds are left out.
        """
        import ray

        self._pending.clear()
        for handle, keys in self._keys_in_flight().items():
            handle.actor.cut.remote(keys)
        deadline = time.monotonic() + timeout
        while self._in_flight and time.monotonic() < deadline:
            self._engines.update()
            lost = [ref for ref, (_, handle, _) in self._in_flight.items() if handle.state is State.DEAD]
            ready, _ = ray.wait([*self._in_flight], num_returns=len(self._in_flight), timeout=0.05)
            for ref in {*lost, *ready}:
                job, handle, _ = self._in_flight.pop(ref)
                self._engines.release(handle, len(self._jobs[job]))
                if ref in ready:
                    with contextlib.suppress(EngineError):  # nothing of this job is needed
                        self._results[job] = fetch(ref, handle, "ending what is sampled")
        made, self._results = self._results, {}
        self.close()
        return made

    def close(self) -> None:
        """Cancel what is not finished; a second call does nothing."""
        self._pending.clear()
        self._cancel()
        self._registration.close()

    def _describe(self) -> str:
        finished, idle = self._num_jobs - len(self._jobs), self.stall_detector.idle
        return (
            f"queue of {self._name}: {len(self._pending)} jobs are pending, {len(self._in_flight)} in flight, "
            f"{finished} of {self._num_jobs} finished, the last {idle:.0f} s ago"
        )

    def _dispatch(self) -> None:
        while self._pending:
            requests = self._jobs[self._pending[0]]
            handle = self._engines.acquire(len(requests))
            if handle is None:
                return
            job = self._pending.popleft()
            key = f"{self._name}-{job}-{self._attempts[job]}"
            self._in_flight[handle.actor.generate.remote(key, requests)] = (job, handle, key)

    def _requeue_lost(self) -> None:
        """Requeue the jobs of dead engines, without waiting for Ray to notice that they are dead."""
        for ref, (job, handle, _) in list(self._in_flight.items()):
            if handle.state is State.DEAD:
                del self._in_flight[ref]
                self._requeue(job, handle, handle.reason)

    def _requeue(self, job: int, handle: Engine, reason: str) -> None:
        self._engines.release(handle, len(self._jobs[job]))
        self._attempts[job] += 1
        limit = self._engines.policy.request_attempts
        if self._attempts[job] >= limit:
            raise EngineError(
                f"{limit} engines failed while they worked on the same {len(self._jobs[job])} request(s), which is as "
                f"many as HealthPolicy(request_attempts=...) allows; the last was {handle}: {reason}. {CURE}"
            )
        self._pending.appendleft(job)

    def check(self) -> None:
        """Raise if no result can be expected, for one of the reasons of :meth:`collect`."""
        engines = self._engines
        if engines.closed:
            raise EngineError("the pool was closed while requests were in flight")
        self.stall_detector.check(f"{len(self._jobs)} of {self._num_jobs} jobs of {self._name}")
        if engines.expects_service:
            self._unserved_since = None
            return
        now = self._clock()
        self._unserved_since = now if self._unserved_since is None else self._unserved_since
        limit = engines.policy.recovery_timeout
        if engines.all_dead:
            raise EngineError(f"no {engines.engine_name} serves, and none is restarted:\n{engines.report()}\n{CURE}")
        if now - self._unserved_since >= limit:
            raise WeightsNeededError(
                f"no {engines.engine_name} serves, and none was brought back by a weight sync within {limit:g} s "
                f"(HealthPolicy(recovery_timeout=...)):\n{engines.report()}\n{CURE}"
            )

    def _collect_ready(self, wait: float) -> None:
        """Collect the results that are ready, after waiting up to ``wait`` seconds, and no more than one."""
        import ray

        if not self._in_flight:
            if self._pending:
                self._engines.wait(min(wait, 0.2))
            return
        ready, _ = ray.wait(list(self._in_flight), num_returns=1, timeout=min(wait, 1.0))
        if ready:  # also collect whatever else has arrived
            ready, _ = ray.wait(list(self._in_flight), num_returns=len(self._in_flight), timeout=0)
        for ref in ready:
            job, handle, _ = self._in_flight.pop(ref)
            try:
                self._results[job] = fetch(ref, handle, "generating")
            except EngineFailure as error:
                self._engines.mark_dead(handle, str(error), cause=error.cause)
                self._requeue(job, handle, str(error))
                continue
            except BaseException:
                self._engines.release(handle, len(self._jobs[job]))
                raise
            self._engines.has_worked(handle)
            self._engines.release(handle, len(self._jobs.pop(job)))
            self._attempts.pop(job, None)
            self.stall_detector.progress()

    def _keys_in_flight(self) -> dict[Engine, list[str]]:
        """Keys of the requests in flight, by engine."""
        keys: dict[Engine, list[str]] = {}
        for _, handle, key in self._in_flight.values():
            keys.setdefault(handle, []).append(key)
        return keys

    def _cancel(self) -> None:
        keys, in_flight, self._in_flight = self._keys_in_flight(), list(self._in_flight.values()), {}
        for job, handle, _ in in_flight:
            self._engines.release(handle, len(self._jobs[job]))
        for handle, own in keys.items():
            with contextlib.suppress(Exception):
                handle.actor.abort.remote(own)
