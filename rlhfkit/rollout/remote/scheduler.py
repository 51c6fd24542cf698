"""Which engine makes which samples, and what exactly it is asked."""

import contextlib
import threading
import time
import uuid
from collections import deque
from typing import Any

from rlhfkit.data.types import Prompt
from rlhfkit.rollout.engine import SamplingSpec, sample_seed
from rlhfkit.rollout.errors import CURE, EngineError, EngineFailure, WeightsNeededError
from rlhfkit.rollout.supervision.handle import EngineHandle, fetch
from rlhfkit.rollout.supervision.health import State
from rlhfkit.rollout.supervision.manager import EngineManager
from rlhfkit.rollout.vllm.actor import Completion, Request
from rlhfkit.rollout.vllm.stall_detector import StallDetector

# Requests given to an engine ahead of time. More than any engine runs at once, so none waits for work; few enough that
# the last ones go to whichever engine is done first.
_REQUESTS_AHEAD = 2048


def split_into_jobs(num_prompts: int, group_size: int, num_engines: int) -> list[tuple[int, range]]:
    """What is routed as one: a prompt's group, as its samples share the cached prompt; cut up when groups are too few.

    Args:
        num_prompts: Prompts.
        group_size: Samples of each.
        num_engines: Engines to keep busy.

    Returns:
        Prompt and positions in its group, for each job.
    """
    parts = min(group_size, max(1, -(-num_engines // max(1, num_prompts))))
    cuts = [group_size * part // parts for part in range(parts + 1)]
    return [(row, range(cuts[part], cuts[part + 1])) for row in range(num_prompts) for part in range(parts)]


def sample_request(prompt: Prompt, index: int, spec: SamplingSpec, iteration: int, stops: tuple[int, ...]) -> Request:
    """One sample as vLLM is asked for it: every parameter that matters is named, none is left to a default.

    Args:
        prompt: The prompt.
        index: Position in its group.
        spec: How to sample.
        iteration: Goes into the seed.
        stops: The model's end-of-sequence tokens.
    """
    return prompt.token_ids, {
        "n": 1,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "min_p": spec.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": sample_seed(spec.seed, iteration, prompt.index, index),
        "max_tokens": spec.max_new_tokens,
        "min_tokens": spec.min_new_tokens,
        "stop": list(spec.stop),
        "stop_token_ids": [*stops, *spec.stop_token_ids],
        "ignore_eos": True,  # the end-of-sequence tokens are among the stop tokens
        "logprobs": 0,  # that of the sampled token alone
        "detokenize": bool(spec.stop),  # stop texts are looked for in text; nothing else needs it
        "skip_special_tokens": True,
    }


class RequestScheduler:
    """One caller's requests on their way through a manager: given out, taken back from engines that die, and finished.

    Args:
        manager: The engines; other callers may use them at the same time.
        timeout: Seconds without any job being finished, while somebody waits for one.
    """

    def __init__(self, manager: EngineManager, timeout: float) -> None:
        self._manager = manager
        self._jobs: list[list[Request]] = []
        self._name = f"{threading.current_thread().name}-{uuid.uuid4().hex[:8]}"
        self._results: dict[int, list[Completion]] = {}  # not asked for yet
        self._finished = 0
        self._failures: list[int] = []
        self._todo: deque[int] = deque()
        self._queued = contextlib.ExitStack()
        self._queued.enter_context(manager.queue(self._describe))
        self._given: dict[Any, tuple[int, EngineHandle, str]] = {}  # result -> job, engine, key
        self._unserved: float | None = None  # since when no engine serves
        self._watchdog = StallDetector(manager.report, report_after=manager.policy.report_after, timeout=timeout)

    def add(self, requests: list[Request]) -> int:
        """Queue requests that stay together.

        Args:
            requests: At least one.

        Returns:
            The number of the job.
        """
        self._jobs.append(requests)
        self._failures.append(0)
        self._todo.append(len(self._jobs) - 1)
        self._give_out()
        return len(self._jobs) - 1

    def collect(self) -> dict[int, list[Completion]]:
        """Wait until a job is finished.

        Returns:
            The completions of every job that is, by number; each once; nothing when no job is left.

        Raises:
            RequestError: If vLLM refuses a request.
            StallError: If nothing was finished in time.
            WeightsNeededError: If no engine serves any more, and some wait for weights or are starting.
            EngineError: If no engine is left, or several failed while they worked on one job.
        """
        self._watchdog.progress()  # nobody has waited since the last call
        while not self._results and (self._todo or self._given):
            self._give_out()
            self._take_back()
            self._check()
            self._collect()
        results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Have engines forget what is not finished; a second call does nothing."""
        self._todo.clear()
        self._drop()
        self._queued.close()

    def _describe(self) -> str:
        return (
            f"queue of {self._name}: {len(self._todo)} jobs wait for an engine, {len(self._given)} are with one, "
            f"{self._finished} of {len(self._jobs)} are finished, the last {self._watchdog.idle:.0f} s ago"
        )

    def _give_out(self) -> None:
        """Hand jobs to engines while these take any."""
        while self._todo:
            requests = self._jobs[self._todo[0]]
            handle = self._manager.acquire(len(requests), _REQUESTS_AHEAD)
            if handle is None:
                return
            job = self._todo.popleft()
            key = f"{self._name}-{job}-{self._failures[job]}"
            self._given[handle.actor.generate.remote(key, requests)] = (job, handle, key)

    def _take_back(self) -> None:
        """Queue again what dead engines had, without waiting for Ray to notice that they are."""
        for ref, (job, handle, _) in list(self._given.items()):
            if handle.state is State.DEAD:
                del self._given[ref]
                self._failed(job, handle, handle.reason)

    def _failed(self, job: int, handle: EngineHandle, reason: str) -> None:
        self._manager.release(handle, len(self._jobs[job]))
        self._failures[job] += 1
        limit = self._manager.policy.request_attempts
        if self._failures[job] >= limit:
            raise EngineError(
                f"{limit} engines failed while they worked on the same {len(self._jobs[job])} request(s), which is as "
                f"many as HealthPolicy(request_attempts=...) allows; the last was {handle}: {reason}. {CURE}"
            )
        self._todo.appendleft(job)

    def _check(self) -> None:
        """End the waiting when it has become pointless."""
        manager = self._manager
        if manager.closed:
            raise EngineError("the pool was closed while requests were under way")
        self._watchdog.check(f"{len(self._jobs) - self._finished} of {len(self._jobs)} jobs of {self._name}")
        if manager.expects_service:
            self._unserved = None
            return
        now = time.monotonic()
        self._unserved = now if self._unserved is None else self._unserved
        limit = manager.policy.recovery_timeout
        if manager.hopeless:
            raise EngineError(f"no vLLM engine serves, and all are dead for good:\n{manager.report()}\n{CURE}")
        if now - self._unserved >= limit:
            raise WeightsNeededError(
                f"no vLLM engine serves, and none was brought back by a weight sync within {limit:g} s "
                f"(HealthPolicy(recovery_timeout=...)):\n{manager.report()}\n{CURE}"
            )

    def _collect(self) -> None:
        """Take results, waiting a second at most."""
        import ray

        if not self._given:
            if self._todo:
                self._manager.wait(0.2)
            return
        ready, _ = ray.wait(list(self._given), num_returns=1, timeout=1.0)
        if ready:  # and whatever else has come meanwhile
            ready, _ = ray.wait(list(self._given), num_returns=len(self._given), timeout=0)
        for ref in ready:
            job, handle, _ = self._given.pop(ref)
            try:
                self._results[job] = fetch(ref, handle, "generating")
            except EngineFailure as error:
                self._manager.mark_dead(handle, str(error))
                self._failed(job, handle, str(error))
                continue
            except BaseException:
                self._manager.release(handle, len(self._jobs[job]))
                raise
            self._manager.release(handle, len(self._jobs[job]))
            self._finished += 1
            self._watchdog.progress()

    def _drop(self) -> None:
        """Tell engines to forget what nobody waits for any more."""
        given = list(self._given.values())
        self._given = {}
        keys: dict[EngineHandle, list[str]] = {}
        for job, handle, key in given:
            self._manager.release(handle, len(self._jobs[job]))
            keys.setdefault(handle, []).append(key)
        for handle, own in keys.items():
            with contextlib.suppress(Exception):
                handle.actor.abort.remote(own)
