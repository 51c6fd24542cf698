"""``PoolStream``: groups of a pool of remote engines, in the order in which they are finished."""

import math
from collections.abc import Callable, Sequence

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec, check_requests
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.remote.scheduler import RequestScheduler, split_into_jobs
from rlhfkit.rollout.supervision.manager import EngineManager
from rlhfkit.rollout.supervision.remote_engine import Completion, Request


class PoolStream:
    """A :class:`~rlhfkit.rollout.collector.GroupStream` of all engines.

    ``make_request`` takes a prompt and a position in its group. ``timeout`` is in seconds without a finished request.
    Without ``knows_logprobs`` the samples' log-probs are NaN.
    """

    def __init__(
        self,
        manager: EngineManager,
        sampling: SamplingSpec,
        make_request: Callable[[Prompt, int], Request],
        timeout: float,
        *,
        knows_logprobs: bool,
    ) -> None:
        self.scheduler = RequestScheduler(manager, timeout)
        self._manager = manager
        self._sampling = sampling
        self._make_request = make_request
        self._knows_logprobs = knows_logprobs
        self._prompts: list[Prompt] = []
        self._parts: dict[int, tuple[int, range]] = {}  # job -> row of the prompt and positions in its group
        self._samples: dict[int, list[Sample]] = {}  # by row
        self._complete: list[int] = []  # rows

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Start these groups too; RequestError, before anything is sent, if a prompt cannot be sampled."""
        manager, group_size, first = self._manager, self._sampling.group_size, len(self._prompts)
        check_requests(prompts, self._sampling, context=manager.max_model_len, vocabulary=manager.vocabulary)
        self._prompts += prompts
        for row, indices in split_into_jobs(len(prompts), group_size, manager.num_engines):
            requests = [self._make_request(prompts[row], index) for index in indices]
            self._parts[self.scheduler.submit(requests)] = (first + row, indices)

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        """Wait for groups; those of dead engines are sampled by the others.

        Raises RequestError if an engine refuses a request, EngineError if all are dead or nothing was finished in time.
        """
        while not self._complete:
            finished = self.scheduler.collect()
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
                sample.logprobs = [math.nan] * len(sample.logprobs)
            group.append(sample)
        if len(group) == self._sampling.group_size:
            self._complete.append(row)

    def close(self) -> None:
        """Cancel what is not finished; a second call does nothing."""
        self.scheduler.close()
        self._complete, self._samples = [], {}


def _to_sample(prompt: Prompt, index: int, completion: Completion) -> Sample:
    token_ids, logprobs, finish, spans = completion
    if finish not in ("stop", "length"):
        raise EngineError(f"the engine ended sample {index} of prompt {prompt.index} with {finish!r}")
    versions = [int(label) for label, start, end in spans for _ in range(start, end)]
    return Sample(prompt, index, token_ids, logprobs, versions, "stop" if finish == "stop" else "length")
