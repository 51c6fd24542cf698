"""``SandboxedReward``: a reward in child processes, where it can hang, crash or use up memory without harm."""

import dataclasses
import importlib.util
import logging
import math
import os
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import OnFailure, Reward, reward_after_failure, reward_name
from rlhfkit.rewards.call_metrics import RewardElsewhere
from rlhfkit.rewards.sandbox import START_TIMEOUT, Backend, CallResult, ResourceLimits, SandboxPool, WorkerSpec
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)

_SHOWN = 5  # failures that a warning describes; it names the prompts of all


class SandboxedReward(RewardElsewhere):
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
        backend: Backend = "auto",
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
            backend: What sets up the isolation, see :data:`~rlhfkit.rewards.sandbox.isolation.Backend`.
            environment: Environment variables that it gets, such as keys of services.
            start_timeout: Seconds until a process has imported the reward.
            name: Name in logs; ``None``: the reward's.

        Raises:
            ValueError: If an argument is out of range, or the reward cannot be imported by another process.
        """
        check_integer("batch_size", batch_size, minimum=1)
        check_integer("workers", workers, minimum=1, optional=True)
        check_importable(reward)
        super().__init__(reward, on_failure, name=name)
        self.batch_size = batch_size
        work = WorkerSpec(
            name=f"reward {self.name!r}",
            program=Path(__file__).with_name("reward_worker.py"),
            factory="scorer",
            arguments=(reward, timeout),
            environment=tuple((environment or {}).items()),
        )
        self.sandbox = SandboxPool(
            work,
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
            backend=backend,
        )

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score samples.

        Raises:
            RewardError: If a call failed and ``on_failure`` is ``"stop"``.
            RuntimeError: If no process can be started, or the reward cannot be imported there.
        """
        size = self.batch_size
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        outcomes = self.sandbox.map([([_plain(sample) for sample in batch], self._progress) for batch in batches])
        rewards: list[float | None] = []
        failures: list[tuple[Sequence[Sample], CallResult]] = []
        for batch, outcome in zip(batches, outcomes, strict=True):
            outcome = _checked(outcome, len(batch))
            answer = outcome.value if outcome.status == "ok" else {}
            self._calls.add(outcome, answer.get("metrics"))
            self.set_parts(batch, answer.get("parts"))
            if outcome.status == "ok":
                rewards += answer["values"]
                continue
            failures.append((batch, outcome))
            rewards += [reward_after_failure(self.on_failure, self._describe([failures[-1]]))] * len(batch)
        if failures:
            became = "are not trained on" if self.on_failure == "mask" else f"got the reward {self.on_failure}"
            count = sum(len(batch) for batch, _ in failures)
            log.warning("%d of %d samples %s: %s", count, len(samples), became, self._describe(failures))
        return rewards

    def close(self) -> None:
        """Stop the processes; the next call starts new ones."""
        self.sandbox.close()

    def _describe(self, failures: Sequence[tuple[Sequence[Sample], CallResult]]) -> str:
        prompts = ", ".join(str(sample.prompt.index) for batch, _ in failures for sample in batch)
        lines = [
            f"prompt {batch[0].prompt.index}, sample {batch[0].sample_index}: {outcome.status}: {outcome.message}"
            for batch, outcome in failures[:_SHOWN]
        ]
        return f"reward {self.name!r} failed for samples of prompts {prompts}\n" + "\n".join(lines)


def _plain(sample: Sample) -> dict[str, Any]:
    """Return a sample as dictionaries, since unpickling the class would import torch in the child process."""
    row = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    prompt = {field.name: getattr(sample.prompt, field.name) for field in dataclasses.fields(sample.prompt)}
    return row | {"prompt": prompt}


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
