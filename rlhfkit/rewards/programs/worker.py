"""What runs inside the processes of :class:`~rlhfkit.rewards.programs.CodeExecution`: a program, test by test.

Loaded by path; imports the standard library only. Each run is a new interpreter. Expected outputs are not here, so that
no program can read them.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def runner(packages: str, timeout: float, output_limit: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that runs a program with tests.

    Args:
        packages: Folders of installed packages, as in ``PATH``.
        timeout: Seconds for one run.
        output_limit: Bytes that one run may write.
    """

    def run(job: dict[str, Any]) -> dict[str, Any]:
        """Of ``program`` with ``assertions`` (list of code) or ``inputs`` (list of text).

        Returns:
            ``passed`` (numbers of assertions) or ``outputs`` (text, or ``None`` for a failed run), and ``timeout``.
        """
        if job["assertions"]:
            return _assertions(packages, job, timeout)
        Path("program.py").write_text(job["program"], encoding="utf-8", errors="replace")
        outputs: list[str | None] = []
        for text in job["inputs"]:
            code = _interpreter(packages, text, timeout)
            output = Path("output").read_bytes() if Path("output").stat().st_size <= output_limit else None
            outputs.append(None if code != 0 or output is None else output.decode(errors="replace"))
            if code is None:  # what hangs once would mostly hang again
                return {"outputs": outputs, "timeout": True}
        return {"outputs": outputs, "timeout": False}

    return run


def _assertions(packages: str, job: dict[str, Any], timeout: float) -> dict[str, Any]:
    word = secrets.token_hex(16)
    text = json.dumps({"program": job["program"], "tests": job["assertions"], "word": word})
    with open("marks", "wb") as marks:
        code = _interpreter(packages, text, timeout, marks.fileno())
    lines = Path("marks").read_text(errors="replace").splitlines()
    passed = [number for number in range(len(job["assertions"])) if f"{word} {number}" in lines]
    return {"passed": passed, "timeout": code is None}


def _interpreter(packages: str, text: str, timeout: float, *descriptors: int) -> int | None:
    """Run Python with some input and kill what it leaves behind; its exit code, or ``None`` if the time was up."""
    Path("input").write_text(text, encoding="utf-8", errors="replace")
    driver = str(Path(__file__).with_name("driver.py"))
    with open("input", "rb") as given, open("output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", driver, packages, *map(str, descriptors)],
            stdin=given,
            stdout=output,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if os.getpid() == 1:  # in a namespace of our own: everything but ourselves
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, 0):
                        pass
