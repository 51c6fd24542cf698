"""``SandboxedReward``: a reward in child processes, where it may hang, die or eat memory without harm to the run."""

import dataclasses
import importlib.util
import logging
import math
import os
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import Reward, reward_name
from rlhfkit.rewards.call_metrics import CallMetrics
from rlhfkit.rewards.failures import OnFailure, checked_on_failure, reward_after_failure
from rlhfkit.rewards.sandbox import START_TIMEOUT, Backend, Limits, Outcome, Sandbox, Work
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)

_SHOWN = 5  # failures that a warning describes; it names the prompts of all


class SandboxedReward:
    """Runs a reward of your own in child processes with limits, each call with a time limit that kills.

    The reward is imported in those processes and sees samples as plain objects with the attributes of
    :class:`~rlhfkit.data.types.Sample`; what it writes into them stays there. By default it can use the network,
    read what you can read, and write into its temporary folder only, and it gets none of your environment variables but
    those for paths and languages.

    Example::

        SandboxedReward("my_rewards.unit_tests", timeout=20, on_failure=0.0)
        SandboxedReward(MyJudge("strict"), environment={"JUDGE_KEY": key}, batch_size=16, on_failure="stop")
        WeightedSum(tests=SandboxedReward("my_rewards.unit_tests"), format=FormatReward(r"<answer>.*</answer>"))
    """

    bounded: ClassVar[bool] = True
    """Every call ends in time, so nobody need watch it."""

    def __init__(
        self,
        reward: str | Reward,
        *,
        timeout: float = 10.0,
        workers: int | None = None,
        batch_size: int = 1,
        on_failure: OnFailure = "mask",
        memory_gib: float = Limits.memory_gib,
        cpu_seconds: int = Limits.cpu_seconds,
        processes: int = Limits.processes,
        open_files: int = Limits.open_files,
        file_mib: int = Limits.file_mib,
        network: bool = True,
        fresh: bool = False,
        backend: Backend = "auto",
        environment: Mapping[str, str] | None = None,
        start_timeout: float = START_TIMEOUT,
        name: str | None = None,
    ) -> None:
        """Say what to run; nothing is started before the first call.

        Args:
            reward: Dotted name of a reward function (sync or async), or a reward that can be pickled. It must be
                importable: what the running script or notebook defines is not.
            timeout: Seconds for one call, which scores ``batch_size`` samples.
            workers: Processes; ``None``: one per core, at most 4.
            batch_size: Samples per call. A call that fails fails for all of them, so 1 unless the reward is much faster
                on several.
            on_failure: What becomes of the samples of a call that did not come back in time, ended its process, raised,
                or returned anything but one finite number or ``None`` each: ``"mask"`` (not trained on), ``"stop"`` (an
                error), or a number, their reward. A warning names their prompts.
            memory_gib: Address space of each process in GiB, and memory of all processes of a call together.
            cpu_seconds: Seconds of computing of each process in one call.
            processes: Processes and threads of a worker.
            open_files: Open files of each process.
            file_mib: MiB that can be written.
            network: Whether it may use the network.
            fresh: A new process for each call, which costs its imports each time. For rewards that run what the policy
                wrote in their own interpreter, where it could change what later calls find.
            backend: Who puts up the walls, see :class:`~rlhfkit.rewards.sandbox.Sandbox`.
            environment: Environment variables that it gets, such as keys of services.
            start_timeout: Seconds until a process has imported the reward.
            name: In logs; ``None``: the reward's.

        Raises:
            ValueError: If an argument is out of range, or the reward cannot be imported elsewhere.
        """
        check_integer("batch_size", batch_size, minimum=1)
        check_integer("workers", workers, minimum=1, optional=True)
        _check_importable(reward)
        self.name = name or (reward.rpartition(".")[2] if isinstance(reward, str) else reward_name(reward))
        self.batch_size = batch_size
        self.on_failure = checked_on_failure(on_failure)
        work = Work(
            name=f"reward {self.name!r}",
            program=Path(__file__).with_name("reward_worker.py"),
            factory="scorer",
            arguments=(reward,),
            environment=tuple((environment or {}).items()),
        )
        self.sandbox = Sandbox(
            work,
            workers=min(4, os.cpu_count() or 1) if workers is None else workers,
            timeout=timeout,
            limits=Limits(
                memory_gib=memory_gib,
                cpu_seconds=cpu_seconds,
                processes=processes,
                open_files=open_files,
                file_mib=file_mib,
                network=network,
            ),
            start_timeout=start_timeout,
            fresh=fresh,
            backend=backend,
        )
        self._metrics = CallMetrics(self.name)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score samples.

        Raises:
            RewardFailure: If a call failed and ``on_failure`` is ``"stop"``.
            RuntimeError: If no process can be started or the reward cannot be imported there.
        """
        size = self.batch_size
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        outcomes = self.sandbox.map([[_plain(sample) for sample in batch] for batch in batches])
        rewards: list[float | None] = []
        failures: list[tuple[Sequence[Sample], Outcome]] = []
        for batch, outcome in zip(batches, outcomes, strict=True):
            outcome = _checked(outcome, len(batch))
            self._metrics.add(outcome)
            if outcome.status == "ok":
                rewards += outcome.value
                continue
            failures.append((batch, outcome))
            rewards += [reward_after_failure(self.on_failure, self._described([failures[-1]]))] * len(batch)
        if failures:
            became = "are not trained on" if self.on_failure == "mask" else f"got the reward {self.on_failure}"
            count = sum(len(batch) for batch, _ in failures)
            log.warning("%d of %d samples %s: %s", count, len(samples), became, self._described(failures))
        return rewards

    def metrics(self) -> dict[str, float]:
        """Since it was last asked: how many calls failed and how long they took, see :class:`CallMetrics`."""
        return self._metrics.take()

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        self.sandbox.close()

    def _described(self, failures: Sequence[tuple[Sequence[Sample], Outcome]]) -> str:
        """Which samples failed and how, in words."""
        prompts = ", ".join(str(sample.prompt.index) for batch, _ in failures for sample in batch)
        lines = [
            f"prompt {batch[0].prompt.index}, sample {batch[0].sample_index}: {outcome.status}: {outcome.message}"
            for batch, outcome in failures[:_SHOWN]
        ]
        return f"reward {self.name!r} failed for samples of prompts {prompts}\n" + "\n".join(lines)


def _plain(sample: Sample) -> dict[str, Any]:
    """A sample as dictionaries: its class lies beside torch, which no child process need load."""
    row = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    prompt = {field.name: getattr(sample.prompt, field.name) for field in dataclasses.fields(sample.prompt)}
    return row | {"prompt": prompt}


def _checked(outcome: Outcome, count: int) -> Outcome:
    """The outcome, or an error if what came back is not one finite number or ``None`` for each sample."""
    if outcome.status != "ok":
        return outcome
    values = outcome.value
    good = isinstance(values, list) and len(values) == count
    if good and all(value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in values):
        return outcome
    shown = repr(values)[:200]
    message = f"returned {shown} for {count} samples, not one finite number or None for each"
    return Outcome("error", message=message, seconds=outcome.seconds)


def _check_importable(reward: str | Reward) -> None:
    """Refuse what another process could not import."""
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
