"""``PoolStream``: groups of a ``VLLMPool`` as they are finished."""

import math
from collections.abc import Sequence

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec, check_requests
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.remote.scheduler import RequestScheduler, sample_request, split_into_jobs
from rlhfkit.rollout.supervision.manager import EngineManager
from rlhfkit.rollout.vllm.actor import Completion


class PoolStream:
    """A :class:`~rlhfkit.rollout.collector.GroupStream` over a manager: engines work on all that was submitted at once.

    Args:
        manager: The engines.
        sampling: How to sample.
        iteration: Goes into each sample's seed.
        stops: The model's end-of-sequence tokens.
        timeout: Seconds without anything being finished.
        knows_logprobs: Whether the engines report log-probs before truncation; else the samples have NaN.
    """

    def __init__(
        self,
        manager: EngineManager,
        sampling: SamplingSpec,
        iteration: int,
        stops: tuple[int, ...],
        timeout: float,
        *,
        knows_logprobs: bool,
    ) -> None:
        self._manager = manager
        self._sampling = sampling
        self._iteration = iteration
        self._stops = stops
        self._knows_logprobs = knows_logprobs
        self._jobs = RequestScheduler(manager, timeout)
        self._prompts: list[Prompt] = []
        self._parts: dict[int, tuple[int, range]] = {}  # job -> prompt and positions in its group
        self._samples: dict[int, list[Sample]] = {}  # by prompt
        self._complete: list[int] = []

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """See :class:`~rlhfkit.rollout.collector.GroupStream`.

        Raises:
            RequestError: If a prompt cannot be sampled; nothing is sent then.
        """
        spec, first, manager = self._sampling, len(self._prompts), self._manager
        check_requests(prompts, spec, context=manager.max_model_len, vocabulary=manager.vocabulary)
        self._prompts += prompts
        for row, indices in split_into_jobs(len(prompts), spec.group_size, len(self._manager.handles)):
            requests = [sample_request(prompts[row], index, spec, self._iteration, self._stops) for index in indices]
            self._parts[self._jobs.add(requests)] = (first + row, indices)

    def collect(self, most: int) -> list[list[Sample]]:
        """See :class:`~rlhfkit.rollout.collector.GroupStream`.

        Raises:
            RequestError: If vLLM refuses a request.
            EngineError: If no engine is left, or nothing was finished in time. What an engine that dies has not
                finished is made by the others.
        """
        while not self._complete:
            finished = self._jobs.collect()
            if not finished:
                return []
            for job, completions in finished.items():
                self._take(*self._parts.pop(job), completions)
        self._complete.sort()
        given, self._complete = self._complete[:most], self._complete[most:]
        return [sorted(self._samples.pop(place), key=lambda sample: sample.sample_index) for place in given]

    def _take(self, place: int, indices: range, completions: list[Completion]) -> None:
        group = self._samples.setdefault(place, [])
        for index, completion in zip(indices, completions, strict=True):
            sample = _sample(self._prompts[place], index, completion)
            if not self._knows_logprobs:
                sample.logprobs = [math.nan] * len(sample.logprobs)
            group.append(sample)
        if len(group) == self._sampling.group_size:
            self._complete.append(place)

    def close(self) -> None:
        """See :class:`~rlhfkit.rollout.collector.GroupStream`."""
        self._jobs.close()
        self._complete, self._samples = [], {}


def _sample(prompt: Prompt, index: int, completion: Completion) -> Sample:
    """A completion as a record."""
    token_ids, logprobs, finish, spans = completion
    if finish not in ("stop", "length"):
        raise EngineError(f"vLLM ended sample {index} of prompt {prompt.index} with {finish!r}")
    versions = [int(label) for label, start, end in spans for _ in range(start, end)]
    return Sample(prompt, index, token_ids, logprobs, versions, "stop" if finish == "stop" else "length")
