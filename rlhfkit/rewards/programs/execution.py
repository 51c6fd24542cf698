"""``CodeExecution``: run the program in a completion on the tests of its row."""

import logging
import math
import os
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rewards.base import Needs, OnFailure, check_on_failure, reward_after_failure
from rlhfkit.rewards.programs.evaluation import STARTUP_SECONDS, CallWorker, ProgramEvaluation, SandboxError
from rlhfkit.rewards.programs.parsing import ProgramTests, last_code_block, parse_tests, same_output
from rlhfkit.rewards.sandbox.pool import SandboxPool
from rlhfkit.rewards.sandbox.process import CallResult, ResourceLimits, WorkerSpec
from rlhfkit.rewards.subprocesses import CallMetrics
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

_TYPES_WARNED_OF = 10
"""Number of type names in warnings."""


class CodeExecution:
    """The fraction of a row's tests that the Python program in the completion passes.

    Each program has its own sandbox, and each of its runs a new interpreter. A program that hangs, crashes or exceeds a
    limit fails its tests, as does a completion without a program.

    Tests are evaluated outside of the sandbox: the program gets inputs, or the arguments of one call at a time, and its
    results are compared as plain data, by value, in another process that is stopped at the same time limit. Expected
    values never enter the sandbox. This covers assertions of the form ``assert f(arguments) == expected`` (and sets,
    ``sorted``, ``abs(... - x) < e``, ``math.isclose``, HumanEval's ``check``). A warning names the types of results
    that are no plain data, which fail their tests. **Any other assertion runs inside the program's interpreter, where a
    program can forge its result**; a warning names the first such test.

    Programs use this machine's kernel and can exploit its vulnerabilities: if the trained model may attack the trainer,
    run it in a container or virtual machine that holds nothing of value. ``docs/security.md`` lists the isolation that
    each machine provides.

    Example::

        CodeExecution(tests="test_list", setup="test_setup_code")  # MBPP's columns
        CodeExecution(tests="input_output", all_or_nothing=True)  # APPS', those without function names
        # [{"function": "add", "arguments": [1, 2], "expected": 3}] is a column of calls
    """

    has_timeout: ClassVar[bool] = True
    """Every call returns in time."""

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
        allow_partial_isolation: bool = False,
        name: str = "code_execution",
    ) -> None:
        """Set the columns and limits; no process is started before the first call.

        Args:
            tests: Column of the tests, in a form that :func:`~rlhfkit.rewards.programs.parsing.parse_tests` reads.
            setup: Column of code, such as imports, that runs before the program in the same interpreter.
            extract: Finds the program in the completion; returns ``None`` if there is none.
            compare: Whether an output equals the expected one; runs in the trainer's process, without a limit, on
                texts of at most ``output_mib`` that the policy has chosen.
            all_or_nothing: 1 if all tests pass, else 0, instead of the fraction.
            max_tests: Use the first tests only; ``None``: all.
            timeout: Time limit in seconds of one run: one input, or all calls together, and judging what they return.
                After a timeout the program's other tests count as failed.
            workers: Programs that run concurrently; ``None``: one per core.
            on_failure: Reward where a program could not be run or its result was lost, which a program can cause: a
                number, ``"mask"`` (not trained on) or ``"stop"`` (an error).
            memory_gib: Address space of each process in GiB, and memory of all processes of a program together.
            processes: Processes and threads of a program.
            file_mib: MiB that a program may write.
            output_mib: MiB that a run may print, and size limit of a returned value as text.
            network: Whether programs may use the network.
            allow_partial_isolation: Run programs even if this machine cannot isolate them from the trainer, the files
                it reads, or the network, instead of raising an error that names the missing layer.
            name: Name in logs.

        Raises:
            ValueError: If an argument is out of range.
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
        self.on_failure = check_on_failure(on_failure)
        self.name = name
        output_limit = int(output_mib * 2**20)
        packages = os.pathsep.join(dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib"))))
        work = WorkerSpec(
            name=f"reward {name!r}",
            program=Path(__file__).with_name("worker.py"),
            factory="runner",
            arguments=(packages, output_limit),
            packages=False,
            trusted=False,
            files=(Path(__file__).with_name("driver.py"), Path(__file__).with_name("values.py")),
            required=("reads", "trainer", "network"),
            max_answer_bytes=6 * output_limit + 4096,  # JSON writes some bytes as six characters
        )
        self.sandbox = SandboxPool(
            work,
            workers=(os.cpu_count() or 1) if workers is None else workers,
            timeout=timeout + STARTUP_SECONDS,
            limits=ResourceLimits(
                memory_gib=memory_gib,
                cpu_seconds=math.ceil(timeout + STARTUP_SECONDS),
                processes=processes,
                file_mib=file_mib,
                network=network,
            ),
            fresh_process=True,
            allow_partial_isolation=allow_partial_isolation,
        )
        self.judge = SandboxPool(
            WorkerSpec(
                name=f"judge of reward {name!r}",
                program=Path(__file__).with_name("judge.py"),
                factory="judge",
                packages=False,
                trusted=False,
                files=(Path(__file__).with_name("assertions.py"), Path(__file__).with_name("values.py")),
                max_answer_bytes=64 << 20,  # arguments of calls, which the data or other answers give
            ),
            workers=self.sandbox.workers,
            timeout=timeout,
            limits=ResourceLimits(memory_gib=1.0, cpu_seconds=math.ceil(timeout) + 1, processes=processes),
        )
        self._metrics = CallMetrics(name)
        self._warned = False
        self._warned_of: set[str] = set()

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score samples.

        Raises:
            ValueError: If a row has no tests, or its tests have an unknown form.
            RewardError: If a program could not be run and ``on_failure`` is ``"stop"``.
            InsufficientIsolationError: If a layer is missing and ``allow_partial_isolation`` is not set.
            RuntimeError: If no process can be started.
        """
        tests = [self._tests(sample.prompt) for sample in samples]
        self._warn_of_forgeable_tests(samples, tests)
        programs = [self.extract(sample.text) for sample in samples]
        evaluated = iter(
            self.sandbox.run_sessions(
                [
                    partial(self._evaluate, sample, test, program)
                    for sample, test, program in zip(samples, tests, programs, strict=True)
                    if program is not None
                ]
            )
        )
        return [0.0 if program is None else next(evaluated) for program in programs]

    def _evaluate(self, sample: Sample, tests: ProgramTests, program: str, call_worker: CallWorker) -> float | None:
        """Return the reward of one program; runs in a thread and a sandbox of its own."""
        setup = str(sample.prompt.metadata.get(self.setup) or "") if self.setup is not None else ""

        def call_judge(job: Any, timeout: float) -> CallResult:
            return self.judge.run(job, timeout=timeout)

        evaluation = ProgramEvaluation(call_worker, call_judge, [setup, program], self.timeout)
        try:
            passed = evaluation.count_passed(tests, self.compare)
        except SandboxError as failure:
            self._metrics.add(failure.outcome)
            return self._after_failure(sample, failure.outcome)
        self._warn_of_opaque_answers(sample, evaluation.opaque)
        self._metrics.add(CallResult("timeout" if evaluation.timed_out else "ok", seconds=evaluation.seconds))
        return float(passed == tests.count) if self.all_or_nothing else passed / tests.count

    def _warn_of_forgeable_tests(self, samples: Sequence[Sample], tests: Sequence[ProgramTests]) -> None:
        """Warn once if there are tests whose result the program can forge."""
        for sample, test in zip(samples, tests, strict=True):
            free = [code for code, assertions in zip(test.assertions, test.parsed, strict=True) if assertions is None]
            if free and not self._warned:
                self._warned = True
                log.warning(
                    "reward %r: %d of the %d tests of prompt %d are more than calls with plain values, so they run "
                    "inside the program's interpreter, where a program can make them pass without being right (an "
                    "object that equals everything is enough): %r. Write tests as `assert f(arguments) == expected`, "
                    "or as inputs and outputs; those are evaluated outside",
                    *(self.name, len(free), test.count, sample.prompt.index, free[0][:200]),
                )

    @property
    def needs(self) -> Needs:
        """The column of the tests; that of the setup code may be missing."""
        return Needs(columns=(self.tests,))

    def _warn_of_opaque_answers(self, sample: Sample, types: set[str]) -> None:
        """Warn once of each type whose values cannot be compared; of a few only, since programs choose the names."""
        new = sorted(types - self._warned_of)[: _TYPES_WARNED_OF - len(self._warned_of)]
        self._warned_of.update(new)
        if new:
            log.warning(
                "reward %r: a program of prompt %d answered with %s, which is no plain data and equals nothing, so its "
                "tests failed. Compared by value are None, numbers (Fraction and Decimal too), texts, bytes, lists, "
                "tuples, sets, dicts and their views, ranges, deques, arrays and iterators",
                *(self.name, sample.prompt.index, ", ".join(map(repr, new))),
            )

    def metrics(self) -> dict[str, float]:
        """Metrics per program since the last call, see :class:`~rlhfkit.rewards.subprocesses.CallMetrics`."""
        return self._metrics.take()

    def close(self) -> None:
        """Stop the processes."""
        self.sandbox.close()
        self.judge.close()

    def _after_failure(self, sample: Sample, outcome: CallResult) -> float | None:
        """Return the reward of a sample whose program could not be run to the end."""
        which = f"prompt {sample.prompt.index}, sample {sample.sample_index}"
        how = f"could not be run to its end: {outcome.status}: {outcome.message}"
        message = f"reward {self.name!r}: the program of {which} {how}"
        reward = reward_after_failure(self.on_failure, message)
        log.warning("%s; its reward is %s", message, reward)
        return reward

    def _tests(self, prompt: Prompt) -> ProgramTests:
        if self.tests not in prompt.metadata:
            columns = ", ".join(sorted(prompt.metadata)) or "none"
            raise ValueError(
                f"reward {self.name!r} reads tests from column {self.tests!r}, which prompt {prompt.index} does not "
                f"have; it has {columns}: CodeExecution(tests=...)"
            )
        try:
            tests = parse_tests(prompt.metadata[self.tests])
        except ValueError as error:
            raise ValueError(
                f"reward {self.name!r}, column {self.tests!r} of prompt {prompt.index}: {error}"
            ) from error
        return tests.first(self.max_tests)
