"""``SandboxedReward`` and ``SubprocessReward``: rewards in child processes, with limits or only out of the way.

Python runs one thread of a process at a time, so a reward in plain Python that scores in the thread of
``Ahead`` takes its time from the training loop; in a process of its own it does not, and one that hangs can be
killed. Both use :class:`~rlhfkit.rewards.sandbox.SandboxPool`; samples go there as plain values, answers come back as
JSON.
"""

import importlib.util
import logging
import math
import os
import pickle
import pickletools
import pkgutil
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import (
    TIMEOUT,
    CompositeReward,
    OnFailure,
    Reward,
    RewardWrapper,
    check_on_failure,
    mean_metrics,
    part_names,
    reward_after_failure,
    reward_name,
)
from rlhfkit.rewards.sandbox import START_TIMEOUT, CallResult, ResourceLimits, SandboxPool, WorkerSpec
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)

_SHOWN = 5  # failures that a warning describes; it names the prompts of all
_LARGEST_ANSWER = 64 << 20  # bytes, of all samples of a call


class CallMetrics:
    """Count calls, from any thread, until :meth:`take`; ``name`` is the prefix of each metric."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._outcomes: list[tuple[str, float]] = []
        self._own: list[Mapping[str, float]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the counts."""
        return CallMetrics, (self.name,)

    def add(self, outcome: CallResult, own: Mapping[str, float] | None = None) -> None:
        """Count one call, and keep the reward's ``own`` metrics of it."""
        with self._lock:
            self._outcomes.append((outcome.status, outcome.seconds))
            self._own += [own] if own else []

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call of this method; empty if nothing was counted.

        The reward's own, averaged over calls; ``<name>/timeout_fraction``, ``<name>/failed_fraction`` (timeouts
        included), and the quantiles ``<name>/seconds_p50`` and ``<name>/seconds_p99``.
        """
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
            own, self._own = self._own, []
        if not outcomes:
            return {}
        seconds = torch.tensor([seconds for _, seconds in outcomes], dtype=torch.float64)
        count = len(outcomes)
        return mean_metrics(own) | {
            f"{self.name}/timeout_fraction": sum(status == "timeout" for status, _ in outcomes) / count,
            f"{self.name}/failed_fraction": sum(status != "ok" for status, _ in outcomes) / count,
            f"{self.name}/seconds_p50": float(seconds.quantile(0.5)),
            f"{self.name}/seconds_p99": float(seconds.quantile(0.99)),
        }


class RewardInProcesses(RewardWrapper):
    """A reward that runs in child processes; here it has the reward's parts, metrics, progress and answers.

    Args:
        reward: What runs there; of a reward that is given by its name only, parts and answers are not known.
        pool: The processes.
        on_failure: What happens to the samples of a call that failed.
        name: Name in logs.
        calls: Prefix of the metrics of the calls.

    Raises:
        ValueError: If ``on_failure`` is invalid.
    """

    retries: ClassVar[bool] = False
    """Whether samples of a process that ended are scored once more in a new one."""

    def __init__(
        self, reward: str | Reward, pool: SandboxPool, on_failure: OnFailure, *, name: str, calls: str
    ) -> None:
        self.reward = reward
        self.sandbox = pool
        self.on_failure = check_on_failure(on_failure)
        self.name = name
        self._calls = CallMetrics(calls)
        self._progress: dict[str, int] | None = None
        if isinstance(reward, CompositeReward):  # only then is this a CompositeReward too
            self.part_names = partial(part_names, reward)

    def divide(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Rows of the samples of each call."""
        raise NotImplementedError

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score samples; a composite reward sets their ``reward_parts``.

        Raises:
            RewardError: If a call failed and ``on_failure`` is ``"stop"``.
            RuntimeError: If no process can be started, or the reward cannot be imported there.
        """
        divided = self.divide(samples)
        batches = [[samples[row] for row in rows] for rows in divided]
        # As dictionaries, since unpickling the class would import torch in the child process.
        jobs = [([sample.plain() for sample in batch], self._progress) for batch in batches]
        outcomes = self.sandbox.map(jobs)
        again = [index for index, one in enumerate(outcomes) if one.status == "died"] if self.retries else []
        for index, outcome in zip(again, self.sandbox.map([jobs[index] for index in again]), strict=True):
            log.warning("reward %r: %s; its samples were scored once more", self.name, outcomes[index].message)
            outcomes[index] = outcome
        rewards: list[float | None] = [None] * len(samples)
        failures: list[tuple[Sequence[Sample], CallResult]] = []
        for rows, batch, outcome in zip(divided, batches, outcomes, strict=True):
            outcome = _checked(outcome, len(batch))
            answer = outcome.value if outcome.status == "ok" else {}
            self._calls.add(outcome, answer.get("metrics"))
            self._set_parts(batch, answer.get("parts"))
            if outcome.status != "ok":
                failures.append((batch, outcome))
                fallback = reward_after_failure(self.on_failure, self._describe([failures[-1]]))
            for place, row in enumerate(rows):
                rewards[row] = answer["values"][place] if outcome.status == "ok" else fallback
        if failures:
            became = "are not trained on" if self.on_failure == "mask" else f"got the reward {self.on_failure}"
            count = sum(len(batch) for batch, _ in failures)
            log.warning("%d of %d samples %s: %s", count, len(samples), became, self._describe(failures))
        return rewards

    def inner_rewards(self) -> list[Any]:
        """Return the reward, which runs in the processes; none if it was given by name."""
        return [] if isinstance(self.reward, str) else [self.reward]

    def set_progress(self, *, step: int, epoch: int) -> None:
        """Tell the reward in the processes, if it wants to know, with the next samples."""
        self._progress = {"step": step, "epoch": epoch}

    def metrics(self) -> dict[str, float]:
        """The reward's own metrics and those of the calls since this was last called, see :class:`CallMetrics`."""
        return self._calls.take()

    def close(self) -> None:
        """Stop the processes; the next call starts new ones."""
        self.sandbox.close()

    def _set_parts(self, samples: Sequence[Sample], parts: Sequence[Mapping[str, float]] | None) -> None:
        """Set ``reward_parts`` where the reward sets them; ``None``: the call failed, and they are missing (NaN)."""
        if not isinstance(self, CompositeReward):
            return
        missing = dict.fromkeys(self.part_names() or (), math.nan)
        for sample, found in zip(samples, parts if parts is not None else [missing] * len(samples), strict=True):
            sample.reward_parts |= found

    def _describe(self, failures: Sequence[tuple[Sequence[Sample], CallResult]]) -> str:
        indices = (sample.prompt.index for batch, _ in failures for sample in batch)
        prompts = ", ".join(map(str, dict.fromkeys(indices)))
        lines = [
            f"prompt {batch[0].prompt.index}, sample {batch[0].sample_index}: {outcome.status}: {outcome.message}"
            for batch, outcome in failures[:_SHOWN]
        ]
        return f"reward {self.name!r} failed for samples of prompts {prompts}\n" + "\n".join(lines)


class SandboxedReward(RewardInProcesses):
    """Runs a reward of your own in child processes with resource limits; a call that takes too long is killed.

    The reward is imported in those processes. If that imports rlhfkit, it gets each :class:`~rlhfkit.data.types.Sample`
    as it is, so that rewards of the library which call others work (:class:`~rlhfkit.rewards.WeightedSum` and the
    like); else plain objects with the same attributes. Its parts and its metrics are what they are in the training
    process; other changes to samples are lost. By default it can use the network, read what you can read, and write
    into its temporary folder only; of your environment variables it gets only those for paths and languages.

    Example::

        SandboxedReward("my_rewards.unit_tests", timeout=20, on_failure=0.0)
        SandboxedReward(MyJudge("strict"), environment={"JUDGE_KEY": key}, batch_size=16, on_failure="stop")
        SandboxedReward(CosineLength(my_rewards.unit_tests, max_length=4096))
        WeightedSum(tests=SandboxedReward("my_rewards.unit_tests"), format=FormatReward(r"<answer>.*</answer>"))
    """

    def __init__(
        self,
        reward: str | Reward,
        *,
        timeout: float = 10.0,
        workers: int | None = None,
        batch_size: int = 1,
        on_failure: OnFailure = "mask",
        memory_gib: float = ResourceLimits.memory_gib,
        cpu_seconds: int = ResourceLimits.cpu_seconds,
        processes: int = ResourceLimits.processes,
        open_files: int = ResourceLimits.open_files,
        file_mib: int = ResourceLimits.file_mib,
        network: bool = True,
        fresh_process: bool = False,
        environment: Mapping[str, str] | None = None,
        start_timeout: float = START_TIMEOUT,
        name: str | None = None,
    ) -> None:
        """Set what to run; no process is started before the first call.

        Args:
            reward: Dotted name of a reward function (sync or async), or a reward that can be pickled and imported, so
                not one that the running script or notebook defines. A name is imported in the processes only, so of
                its reward neither parts nor answers (``val/maj@k``) are known here.
            timeout: Time limit in seconds of one call, which scores ``batch_size`` samples.
            workers: Number of processes; ``None``: one per core, at most 4.
            batch_size: Samples per call; all of them fail together. Use 1 unless the reward is much faster on several.
            on_failure: What happens to the samples of a call that timed out, ended its process, raised, or did not
                return one finite number or ``None`` per sample: ``"mask"`` (not trained on), ``"stop"`` (an error), or
                a number (their reward). A warning names their prompts.
            memory_gib: Address space of each process in GiB, and memory of all processes of a call together.
            cpu_seconds: CPU time of each process in one call.
            processes: Processes and threads of a worker.
            open_files: Open files of each process.
            file_mib: MiB that can be written.
            network: Whether it may use the network.
            fresh_process: Start a new process, with its imports, for each call: for rewards that run generated code in
                their own interpreter, where it could affect later calls.
            environment: Environment variables that it gets, such as keys of services.
            start_timeout: Seconds until a process has imported the reward.
            name: Name in logs; ``None``: the reward's.

        Raises:
            ValueError: If an argument is out of range, or the reward cannot be imported by another process.
        """
        check_integer("batch_size", batch_size, minimum=1)
        check_integer("workers", workers, minimum=1, optional=True)
        check_importable(reward)
        self.batch_size = batch_size
        name = name or _name(reward)
        pool = SandboxPool(
            _work(reward, name, timeout, environment=tuple((environment or {}).items())),
            workers=min(4, os.cpu_count() or 1) if workers is None else workers,
            timeout=timeout,
            limits=ResourceLimits(
                memory_gib=memory_gib,
                cpu_seconds=cpu_seconds,
                processes=processes,
                open_files=open_files,
                file_mib=file_mib,
                network=network,
            ),
            start_timeout=start_timeout,
            fresh_process=fresh_process,
        )
        super().__init__(reward, pool, on_failure, name=name, calls=name)

    def divide(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Rows of ``batch_size`` samples each."""
        size, count = self.batch_size, len(samples)
        return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


class SubprocessReward(RewardInProcesses):
    """Runs any importable reward in child processes like the trainer: neither confined nor limited but in time.

    They have the trainer's environment, working directory and rights. The reward, its parts and its metrics are what
    they are in the training process; other changes to samples are lost. All samples of a prompt go to the same process
    in one call, so rewards that compare them work. A process that ends is replaced, and its samples are scored once
    more.

    Example::

        RolloutCallback(SubprocessReward("my_rewards.grade"), parts=[Ahead(1)], sampling=sampling)
        SubprocessReward(WeightedSum(correct=exact_match, style=Style("strict")), workers=4, timeout=60)
    """

    retries = True

    def __init__(
        self,
        reward: str | Reward,
        *,
        workers: int = 1,
        timeout: float = TIMEOUT,
        on_failure: OnFailure = "stop",
        start_timeout: float = START_TIMEOUT,
        name: str | None = None,
    ) -> None:
        """Set what to run; no process is started before the first call.

        Args:
            reward: Dotted name of a reward (sync or async), or a reward that can be pickled and imported, so not one
                that the running script or notebook defines.
            workers: Number of processes, among which the prompts of a call are divided.
            timeout: Time limit in seconds of a process for its part of a call; then it is killed.
            on_failure: What happens to the samples of a process that took too long, ended twice, or whose reward
                raised: ``"stop"`` (an error), ``"mask"`` (not trained on), or a number (their reward).
            start_timeout: Seconds until a process has imported the reward.
            name: Name in logs; ``None``: the reward's.

        Raises:
            ValueError: If an argument is out of range, or the reward cannot be imported by another process.
        """
        if isinstance(reward, str):
            try:
                reward = pkgutil.resolve_name(reward)
            except (ImportError, AttributeError, ValueError) as error:
                raise ValueError(
                    f"reward={reward!r} cannot be imported ({error}): give a name like 'my_rewards.grade'"
                ) from error
        check_importable(reward)
        name = name or _name(reward)
        work = _work(reward, name, timeout, confined=False, max_answer_bytes=_LARGEST_ANSWER)
        pool = SandboxPool(work, workers=workers, timeout=timeout, start_timeout=start_timeout)
        super().__init__(reward, pool, on_failure, name=name, calls=f"{name}/worker")

    def divide(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Rows in as many parts as there are processes, of about equal size; those of a prompt stay together."""
        groups: dict[int, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.prompt.index, []).append(row)
        parts: list[list[int]] = [[] for _ in range(min(self.sandbox.workers, len(groups)))]
        for rows in sorted(groups.values(), key=len, reverse=True):
            min(parts, key=len).extend(rows)
        return parts


def _name(reward: str | Reward) -> str:
    return reward.rpartition(".")[2] if isinstance(reward, str) else reward_name(reward)


def _work(reward: str | Reward, name: str, timeout: float, **options: Any) -> WorkerSpec:
    """What the processes run; one that is not confined imports rlhfkit as the trainer does, and gets whole samples."""
    return WorkerSpec(
        name=f"reward {name!r}",
        program=Path(__file__).with_name("subprocess_worker.py"),
        factory="scorer",
        arguments=(reward, timeout, not options.get("confined", True)),
        **options,
    )


def _checked(outcome: CallResult, count: int) -> CallResult:
    """Return the result, or an error unless it holds one finite number or ``None`` per sample."""
    match outcome.value:
        case {"values": list() as values, "parts": list() as parts, "metrics": dict() as metrics} if (
            outcome.status == "ok"
            and len(values) == len(parts) == count
            and all(value is None or (_number(value) and math.isfinite(value)) for value in values)
            and all(isinstance(part, dict) and all(map(_number, part.values())) for part in parts)
            and all(map(_number, metrics.values()))
        ):
            return outcome
    if outcome.status != "ok":
        return outcome
    shown = outcome.value.get("values") if isinstance(outcome.value, dict) else outcome.value
    message = f"returned {repr(shown)[:200]} for {count} samples, not one finite number or None for each"
    return CallResult("error", message=message, seconds=outcome.seconds)


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def check_importable(reward: str | Reward) -> None:
    """Raise ``ValueError`` if another process could not import the reward."""
    advice = "define it at the top of a module of its own (my_rewards.py) and pass it or its dotted name"
    if isinstance(reward, str):
        package = reward.partition(":")[0].partition(".")[0]
        if not all(part.isidentifier() for part in reward.replace(":", ".").split(".")) or package == reward:
            raise ValueError(f"reward must be a dotted name such as 'my_rewards.correct', got {reward!r}")
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"reward={reward!r}: there is no module {package!r}")
        return
    if not callable(reward):
        raise ValueError(f"reward must be callable or a dotted name, got {type(reward).__name__}")
    try:
        pickled = pickle.dumps(reward)
    except Exception as error:  # whatever an object raises when it is pickled
        raise ValueError(
            f"reward {reward_name(reward)!r} cannot be sent to another process ({error}): {advice}"
        ) from error
    if any(argument == "__main__" for _, argument, _ in pickletools.genops(pickled)):
        raise ValueError(f"reward {reward_name(reward)!r} is defined in the script that is running: {advice}")
