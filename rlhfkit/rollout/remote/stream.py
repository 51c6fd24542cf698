"""``PoolStream``: groups of a pool of remote engines, in the order in which they are finished."""

import math
import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from rlhfkit.data.types import FinishReason, Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec, check_requests
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.partial_rollouts import CUT, continued, is_usable
from rlhfkit.rollout.remote.scheduler import RequestScheduler, split_into_jobs
from rlhfkit.rollout.supervision.calls import Completion, Request
from rlhfkit.rollout.supervision.engines import Engines

_CUT_SECONDS = 60.0
"""Time for engines to return what they have made; what takes longer is sampled again."""


class PoolStream:
    """A :class:`~rlhfkit.rollout.collector.GroupStream` of all engines, for one thread at a time.

    It is a :class:`~rlhfkit.rollout.partial_rollouts.ResumableStream` too, if the engines can be cut. Several may be
    open at once. ``make_request`` makes the request for one sample, given prompt, position in the group, ``iteration``
    and, if it continues one, ``begun``. ``iteration`` is that of prompts submitted without one; ``timeout`` is in
    seconds without a finished request. Without ``knows_logprobs`` the samples' log-probs are NaN; without
    ``sees_images`` prompts with images are refused.
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
        self._sampling = sampling
        self._make_request = make_request
        self._iteration = iteration
        self._knows_logprobs = knows_logprobs
        self._sees_images = sees_images
        self._num_rows = 0  # prompts that were submitted
        self._prompts: dict[int, Prompt] = {}  # by row, until the group is complete
        self._parts: dict[int, tuple[int, Sequence[int]]] = {}  # job -> row of the prompt and positions in its group
        self._begun: dict[tuple[int, int], Sample] = {}  # by row and position: what is continued
        self._samples: dict[int, list[Sample]] = {}  # by row
        self._complete: list[int] = []  # rows

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Start these groups too; RequestError, before anything is sent, if a prompt cannot be sampled."""
        engines, group_size, first = self._engines, self._sampling.group_size, self._num_rows
        iteration = self._iteration if iteration is None else iteration
        self._check(prompts)
        self._prompts |= dict(enumerate(prompts, first))
        self._num_rows += len(prompts)
        for row, indices in split_into_jobs(len(prompts), group_size, engines.engines_per_rank):
            requests = [self._make_request(prompts[row], index, iteration=iteration) for index in indices]
            self._parts[self.scheduler.submit(requests)] = (first + row, indices)

    def _check(self, prompts: Sequence[Prompt]) -> None:
        limits = {"context": self._engines.max_model_len, "vocabulary": self._engines.vocabulary}
        check_requests(prompts, self._sampling, **limits, sees_images=self._sees_images)

    def resume(self, groups: Sequence[list[Sample]], *, iteration: int | None = None) -> None:
        """Continue these groups; see :class:`~rlhfkit.rollout.partial_rollouts.ResumableStream`."""
        iteration = self._iteration if iteration is None else iteration
        prompts = [group[0].prompt for group in groups]
        self._check(prompts)
        for row, group in enumerate(groups, self._num_rows):
            begun = {sample.sample_index: sample for sample in group if is_usable(sample, self._sampling)}
            finished = [sample for sample in begun.values() if sample.finish_reason != CUT]
            missing = sorted({*range(self._sampling.group_size)} - {sample.sample_index for sample in finished})
            self._prompts[row] = prompt = group[0].prompt
            self._begun |= {(row, index): begun[index] for index in missing if index in begun}
            self._add(row, finished)
            requests = [
                self._make_request(prompt, index, iteration=iteration, begun=begun.get(index)) for index in missing
            ]
            if requests:
                self._parts[self.scheduler.submit(requests)] = (row, missing)
        self._num_rows += len(groups)

    def cut(self) -> list[list[Sample]]:
        for job, completions in self.scheduler.cut(_CUT_SECONDS).items():
            self._take(*self._parts.pop(job), completions, cut=True)
        for row, indices in self._parts.values():  # what was not begun, or lost with its engine
            self._add(row, [self._begun[row, index] for index in indices if (row, index) in self._begun])
        groups = [[sample for sample in group if sample.num_tokens] for _, group in sorted(self._samples.items())]
        self.close()
        return [group for group in groups if group]

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

    def _take(self, row: int, indices: Sequence[int], completions: list[Completion], *, cut: bool = False) -> None:
        made = []
        for index, completion in zip(indices, completions, strict=True):
            sample = _to_sample(self._prompts[row], index, completion, cut=cut)
            if not self._knows_logprobs:
                sample.logprobs = [math.nan] * sample.num_tokens
            begun = self._begun.pop((row, index), None)
            made.append(sample if begun is None else continued(begun, sample))
        self._add(row, made)

    def _add(self, row: int, made: Sequence[Sample]) -> None:
        group = self._samples.setdefault(row, [])
        group += made
        if len(group) == self._sampling.group_size:
            del self._prompts[row]
            self._complete.append(row)

    def close(self) -> None:
        self.scheduler.close()
        self._complete, self._samples, self._prompts, self._begun = [], {}, {}, {}


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
