"""``PoolStream``: groups of a pool of remote engines, in the order in which they are finished."""

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec, check_requests
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.remote.scheduler import RequestScheduler, split_into_jobs
from rlhfkit.rollout.supervision.remote_engine import Completion, Request
from rlhfkit.rollout.supervision.router import EngineRouter


class RequestFactory(Protocol):
    """Makes the request for one sample."""

    def __call__(self, prompt: Prompt, index: int, *, iteration: int) -> Request:
        """Return the request for sample ``index`` of a prompt's group, with its seed of an iteration."""
        ...


class PoolStream:
    """A :class:`~rlhfkit.rollout.collector.GroupStream` of all engines, for one thread at a time.

    Several may be open at once. ``iteration`` is that of prompts submitted without one; ``timeout`` is in seconds
    without a finished request. Without ``knows_logprobs`` the samples' log-probs are NaN.
    """

    def __init__(
        self,
        router: EngineRouter[Any],
        sampling: SamplingSpec,
        make_request: RequestFactory,
        timeout: float,
        *,
        iteration: int,
        knows_logprobs: bool,
    ) -> None:
        self.scheduler = RequestScheduler(router, timeout)
        self._router = router
        self._sampling = sampling
        self._make_request = make_request
        self._iteration = iteration
        self._knows_logprobs = knows_logprobs
        self._num_rows = 0  # prompts that were submitted
        self._prompts: dict[int, Prompt] = {}  # by row, until the group is complete
        self._parts: dict[int, tuple[int, range]] = {}  # job -> row of the prompt and positions in its group
        self._samples: dict[int, list[Sample]] = {}  # by row
        self._complete: list[int] = []  # rows

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Start these groups too; RequestError, before anything is sent, if a prompt cannot be sampled."""
        router, group_size, first = self._router, self._sampling.group_size, self._num_rows
        iteration = self._iteration if iteration is None else iteration
        check_requests(prompts, self._sampling, context=router.max_model_len, vocabulary=router.vocabulary)
        self._prompts |= dict(enumerate(prompts, first))
        self._num_rows += len(prompts)
        for row, indices in split_into_jobs(len(prompts), group_size, router.engines_per_rank):
            requests = [self._make_request(prompts[row], index, iteration=iteration) for index in indices]
            self._parts[self.scheduler.submit(requests)] = (first + row, indices)

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        """Wait for groups, up to ``wait`` seconds; those of dead engines are sampled by the others.

        Raises RequestError if an engine refuses a request, EngineError if all are dead or nothing was finished in time.
        """
        deadline = None if wait is None else time.monotonic() + wait
        while not self._complete:
            finished = self.scheduler.collect(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not finished:
                return []
            for job, completions in finished.items():
                self._take(*self._parts.pop(job), completions)
        self._complete.sort()
        rows, self._complete = self._complete[:most], self._complete[most:]
        return [sorted(self._samples.pop(row), key=lambda sample: sample.sample_index) for row in rows]

    def _take(self, row: int, indices: range, completions: list[Completion]) -> None:
        group = self._samples.setdefault(row, [])
        for index, completion in zip(indices, completions, strict=True):
            sample = _to_sample(self._prompts[row], index, completion)
            if not self._knows_logprobs:
                sample.logprobs = [math.nan] * sample.num_tokens
            group.append(sample)
        if len(group) == self._sampling.group_size:
            del self._prompts[row]
            self._complete.append(row)

    def close(self) -> None:
        """Cancel what is not finished; a second call does nothing."""
        self.scheduler.close()
        self._complete, self._samples, self._prompts = [], {}, {}


def _to_sample(prompt: Prompt, index: int, completion: Completion) -> Sample:
    """Make a sample, which copies the arrays: they lie in Ray's memory, which has to be freed."""
    token_ids, logprobs, finish, runs = completion
    if finish not in ("stop", "length"):
        raise EngineError(f"the engine ended sample {index} of prompt {prompt.index} with {finish!r}")
    return Sample.from_arrays(
        prompt,
        index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason="stop" if finish == "stop" else "length",
        version_runs=runs,
    )
