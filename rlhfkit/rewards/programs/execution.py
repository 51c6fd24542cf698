"""``CodeExecution``: does the program in a completion pass the tests of its row?"""

import logging
import math
import os
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rewards.call_metrics import CallMetrics
from rlhfkit.rewards.failures import OnFailure, checked_on_failure, reward_after_failure
from rlhfkit.rewards.programs.evaluation import SLACK, Ask, Examination, SandboxFailed
from rlhfkit.rewards.programs.parsing import ProgramTests, last_code_block, read_tests, same_output
from rlhfkit.rewards.sandbox.isolation import Backend
from rlhfkit.rewards.sandbox.pool import Sandbox
from rlhfkit.rewards.sandbox.process import Limits, Outcome, Work
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)


class CodeExecution:
    """The fraction of a row's tests that the Python program in the completion passes.

    Each program runs in a sandbox of its own that ends with it, each of its runs in a new interpreter. A program that
    does not come back, dies or eats memory fails its tests, as does a completion without a program.

    Tests are judged outside of the sandbox: the program gets inputs, or the arguments of one call at a time, and what
    it gives is compared here, as plain data, by type and value. Expected values never enter the sandbox. Assertions of
    the form ``assert f(arguments) == expected`` (and sets, ``sorted``, ``abs(... - x) < e``, ``math.isclose``,
    HumanEval's ``check``) are calls of this kind. **What is more than that runs inside the program's interpreter, where
    a program can forge its result**; a warning names the first such test.

    A program runs as a process of this machine's kernel, so a hole in the kernel is a hole here: run the trainer in a
    container or virtual machine that holds nothing of value if what is trained may attack. ``docs/security.md`` says
    what holds on which machine.

    Example::

        CodeExecution(tests="test_list", setup="test_setup_code")  # MBPP's columns
        CodeExecution(tests="input_output", all_or_nothing=True)  # APPS', those without function names
        # [{"function": "add", "arguments": [1, 2], "expected": 3}] is a column of calls
    """

    bounded: ClassVar[bool] = True
    """Every program ends in time."""

    def __init__(
        self,
        tests: str = "tests",
        *,
        setup: str | None = None,
        extract: Callable[[str], str | None] = last_code_block,
        compare: Callable[[str, str], bool] = same_output,
        all_or_nothing: bool = False,
        max_tests: int | None = None,
        timeout: float = 10.0,
        workers: int | None = None,
        on_failure: OnFailure = 0.0,
        memory_gib: float = 1.0,
        processes: int = 32,
        file_mib: int = 64,
        output_mib: float = 1.0,
        network: bool = False,
        backend: Backend = "auto",
        allow_weak: bool = False,
        name: str = "code_execution",
    ) -> None:
        """Name the columns and set the limits; nothing is started before the first call.

        Args:
            tests: Column of the tests, in a form that :func:`read_tests` reads.
            setup: Column of code that runs before the program, such as imports, in the same interpreter.
            extract: Finds the program in the completion; ``None`` where there is none.
            compare: Whether an output and the expected one agree.
            all_or_nothing: 1 if all tests pass, else 0, instead of the fraction.
            max_tests: Only the first so many.
            timeout: Seconds for one run: one input, or all calls together. After a run that took longer the other
                tests of the program count as failed.
            workers: Programs at a time; ``None``: one per core.
            on_failure: What becomes of samples whose program could not be run or whose result was lost, which a program
                can bring about: a number (0), ``"mask"`` or ``"stop"``.
            memory_gib: Address space of each process in GiB, and memory of all processes of a program together.
            processes: Processes and threads of a program.
            file_mib: MiB that a program may write.
            output_mib: MiB that a run may print, and a value may have as text.
            network: Whether programs may use the network.
            backend: Who puts up the walls: ``"bubblewrap"``, ``"namespaces"`` (our own), or ``"auto"``: bubblewrap
                where it is installed and allowed, else our own.
            allow_weak: Whether to run programs where this machine cannot keep them from the files that the trainer
                reads, from the trainer, or from the network. If not, that is an error that names the missing wall.
            name: In logs.

        Raises:
            ValueError: If an argument is out of range.
            RuntimeError: If bubblewrap is asked for and cannot be used.
        """
        check_number("timeout", timeout, above=0, why="it is in seconds")
        check_integer("max_tests", max_tests, minimum=1, optional=True)
        check_number("output_mib", output_mib, above=0)
        check_integer("workers", workers, minimum=1, optional=True)
        self.tests = tests
        self.setup = setup
        self.extract = extract
        self.compare = compare
        self.all_or_nothing = all_or_nothing
        self.max_tests = max_tests
        self.timeout = timeout
        self.on_failure = checked_on_failure(on_failure)
        self.name = name
        output_limit = int(output_mib * 2**20)
        packages = os.pathsep.join(dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib"))))
        work = Work(
            name=f"reward {name!r}",
            program=Path(__file__).with_name("worker.py"),
            factory="runner",
            arguments=(packages, output_limit),
            packages=False,
            trusted=False,
            files=(Path(__file__).with_name("driver.py"), Path(__file__).with_name("values.py")),
            required=("data", "trainer", "network"),
            largest_answer=6 * output_limit + 4096,  # a byte may take six as JSON
        )
        self.sandbox = Sandbox(
            work,
            workers=(os.cpu_count() or 1) if workers is None else workers,
            timeout=timeout + SLACK,
            limits=Limits(
                memory_gib=memory_gib,
                cpu_seconds=math.ceil(timeout + SLACK),
                processes=processes,
                file_mib=file_mib,
                network=network,
            ),
            fresh=True,
            backend=backend,
            allow_weak=allow_weak,
        )
        self._metrics = CallMetrics(name)
        self._warned = False

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score samples.

        Raises:
            ValueError: If a row has no tests, or tests of no known form.
            RewardFailure: If a program could not be run and ``on_failure`` is ``"stop"``.
            WeakSandbox: If walls are missing here and ``allow_weak`` is not set.
            RuntimeError: If no process can be started.
        """
        tests = [self._tests(sample.prompt) for sample in samples]
        self._warn_of_free_assertions(samples, tests)
        programs = [self.extract(sample.text) for sample in samples]
        examined = iter(
            self.sandbox.sessions(
                [
                    partial(self._examine, sample, test, program)
                    for sample, test, program in zip(samples, tests, programs, strict=True)
                    if program is not None
                ]
            )
        )
        return [0.0 if program is None else next(examined) for program in programs]

    def _examine(self, sample: Sample, tests: ProgramTests, program: str, ask: Ask) -> float | None:
        """The reward of one program; called in a thread of its own, with a sandbox of its own."""
        alone = "processes" in (self.sandbox.walls or ())
        examination = Examination(ask, self._code(sample.prompt, program), self.timeout, alone)
        try:
            passed = examination.passed(tests, self.compare)
        except SandboxFailed as failure:
            self._metrics.add(failure.outcome)
            return self._after_failure(sample, failure.outcome)
        self._metrics.add(Outcome("timeout" if examination.late else "ok", seconds=examination.seconds))
        return float(passed == tests.count) if self.all_or_nothing else passed / tests.count

    def _warn_of_free_assertions(self, samples: Sequence[Sample], tests: Sequence[ProgramTests]) -> None:
        """Say once that there are tests whose result the program can forge."""
        for sample, test in zip(samples, tests, strict=True):
            free = [code for code, judged in zip(test.assertions, test.judged, strict=True) if judged is None]
            if free and not self._warned:
                self._warned = True
                log.warning(
                    "reward %r: %d of the %d tests of prompt %d are more than calls with plain values, so they run "
                    "inside the program's interpreter, where a program can make them pass without being right (an "
                    "object that equals everything is enough): %r. Write tests as `assert f(arguments) == expected`, "
                    "or as inputs and outputs; those are judged outside",
                    *(self.name, len(free), test.count, sample.prompt.index, free[0][:200]),
                )

    def metrics(self) -> dict[str, float]:
        """Since it was last asked, see :class:`CallMetrics`: the programs, those with a run out of time, seconds."""
        return self._metrics.take()

    def close(self) -> None:
        """End the processes."""
        self.sandbox.close()

    def _after_failure(self, sample: Sample, outcome: Outcome) -> float | None:
        """The reward of a sample whose program was not run to its end."""
        which = f"prompt {sample.prompt.index}, sample {sample.sample_index}"
        how = f"could not be run to its end: {outcome.status}: {outcome.message}"
        message = f"reward {self.name!r}: the program of {which} {how}"
        reward = reward_after_failure(self.on_failure, message)
        log.warning("%s; its reward is %s", message, reward)
        return reward

    def _tests(self, prompt: Prompt) -> ProgramTests:
        """The tests of a row."""
        if self.tests not in prompt.metadata:
            columns = ", ".join(sorted(prompt.metadata)) or "none"
            raise ValueError(
                f"reward {self.name!r} reads tests from column {self.tests!r}, which prompt {prompt.index} does not "
                f"have; it has {columns}: CodeExecution(tests=...)"
            )
        try:
            tests = read_tests(prompt.metadata[self.tests])
        except ValueError as error:
            raise ValueError(
                f"reward {self.name!r}, column {self.tests!r} of prompt {prompt.index}: {error}"
            ) from error
        return tests.first(self.max_tests)

    def _code(self, prompt: Prompt, program: str) -> str:
        before = str(prompt.metadata.get(self.setup) or "") if self.setup is not None else ""
        return f"{before}\n{program}" if before else program
