"""``PoolStream``: groups of a pool of remote engines, in the order in which they are finished."""

import math
import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from rlhfkit.data.types import FinishReason, Prompt, Sample
from rlhfkit.rollout.collector import Group, OpenGroups
from rlhfkit.rollout.engine import SamplingSpec, check_requests
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.partial_rollouts import CUT, continued
from rlhfkit.rollout.supervision.calls import Completion, Request
from rlhfkit.rollout.supervision.engines import Engines
from rlhfkit.rollout.supervision.scheduler import RequestScheduler, split_into_jobs

_CUT_SECONDS = 60.0
"""Time for engines to return what they have made; what takes longer is sampled again."""


class PoolStream:
    """A :class:`~rlhfkit.rollout.collector.GroupStream` of all engines, for one thread at a time.

    It is a :class:`~rlhfkit.rollout.partial_rollouts.ResumableStream` too, if the engines can be cut. Several may be
    open at once. ``make_request`` makes the request for one sample, given prompt, position in the group, ``iteration``
    and what it continues (``begun``). ``iteration`` is that of prompts submitted without one; ``timeout`` is in seconds
    without a finished request. Without ``knows_logprobs`` the samples' log-probs are NaN; without ``sees_images``
    prompts with images are refused.
    """

    def __init__(
        self,
        engines: Engines,
        sampling: SamplingSpec,
        make_request: Callable[..., Request],
        timeout: float,
        *,
        iteration: int,
        knows_logprobs: bool,
        sees_images: bool = False,
    ) -> None:
        self.scheduler = RequestScheduler(engines, timeout)
        self._engines = engines
        self._make_request = make_request
        self._iteration = iteration
        self._knows_logprobs = knows_logprobs
        self._sees_images = sees_images
        self._groups = OpenGroups(sampling)
        self._parts: dict[int, tuple[int, Sequence[int]]] = {}  # job -> number of the prompt and positions in its group

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Start these groups too; RequestError, before anything is sent, if a prompt cannot be sampled."""
        self._check(prompts)
        numbers, size = self._groups.open(prompts), self._groups.sampling.group_size
        for place, indices in split_into_jobs(len(prompts), size, self._engines.engines_per_rank):
            self._send(numbers[place], indices, iteration)

    def resume(self, groups: Sequence[Group], *, iteration: int | None = None) -> None:
        """Continue these groups; see :class:`~rlhfkit.rollout.partial_rollouts.ResumableStream`."""
        self._check([group[0].prompt for group in groups])
        for number, indices in self._groups.reopen(groups).items():
            if indices:
                self._send(number, indices, iteration)

    def _check(self, prompts: Sequence[Prompt]) -> None:
        limits = {"context": self._engines.max_model_len, "vocabulary": self._engines.vocabulary}
        check_requests(prompts, self._groups.sampling, **limits, sees_images=self._sees_images)

    def _send(self, number: int, indices: Sequence[int], iteration: int | None) -> None:
        prompt, begun = self._groups.prompts[number], self._groups.begun
        iteration = self._iteration if iteration is None else iteration
        requests = [
            self._make_request(prompt, index, iteration=iteration, begun=begun.get((number, index)))
            for index in indices
        ]
        self._parts[self.scheduler.submit(requests)] = (number, indices)

    def cut(self) -> list[Group]:
        for job, completions in self.scheduler.cut(_CUT_SECONDS).items():
            self._take(*self._parts.pop(job), completions, cut=True)
        groups = self._groups.take_all()  # with what was not begun again, or lost with its engine
        self.close()
        return groups

    def collect(self, most: int, *, wait: float | None = None) -> list[Group]:
        """Wait for groups, up to ``wait`` seconds; those of dead engines are sampled by the others.

        Raises RequestError if an engine refuses a request, EngineError if all are dead or nothing was finished in time.
        """
        deadline = None if wait is None else time.monotonic() + wait
        while not self._groups.complete:
            finished = self.scheduler.collect(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not finished:
                return []
            for job, completions in finished.items():
                self._take(*self._parts.pop(job), completions)
        return self._groups.take(most)

    def _take(self, number: int, indices: Sequence[int], completions: list[Completion], *, cut: bool = False) -> None:
        made = []
        for index, completion in zip(indices, completions, strict=True):
            sample = _to_sample(self._groups.prompts[number], index, completion, cut=cut)
            if not self._knows_logprobs:
                sample.logprobs = [math.nan] * sample.num_tokens
            begun = self._groups.begun.pop((number, index), None)
            made.append(sample if begun is None else continued(begun, sample))
        self._groups.add(number, made)

    def close(self) -> None:
        self.scheduler.close()
        self._groups.clear()


def _to_sample(prompt: Prompt, index: int, completion: Completion, *, cut: bool) -> Sample:
    """Make a sample, which copies the arrays: they lie in Ray's memory, which has to be freed.

    EngineError if it is not finished, unless it was ``cut``.
    """
    token_ids, logprobs, finish, runs = completion
    if finish not in ("stop", "length") and not (cut and finish == CUT):
        raise EngineError(f"the engine ended sample {index} of prompt {prompt.index} with {finish!r}")
    return Sample(
        prompt,
        index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=cast("FinishReason", finish),
        versions=np.repeat([version for version, _ in runs], np.array([count for _, count in runs], dtype=np.int64)),
    )
