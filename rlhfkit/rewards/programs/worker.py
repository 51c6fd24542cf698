"""What runs inside the processes of :class:`~rlhfkit.rewards.programs.CodeExecution`: it starts a program and asks it.

Loaded by path; imports the standard library only. The program is another process, a new interpreter each time. Whatever
a program writes is passed on as text, up to a limit, and read outside; expected outputs and values are not here.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SET_DUMPABLE = 4
_POLL = 0.02  # seconds between two looks at whether a program has ended


def runner(packages: str, output_limit: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that does what jobs say.

    Args:
        packages: Folders of installed packages, as in ``PATH``.
        output_limit: Bytes that are taken of an output or an answer.
    """
    if sys.platform == "linux":  # nobody of our user may look into this process: no ptrace, /proc/.../mem, pidfd_getfd
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    programs: list[_Program] = []

    def do(job: dict[str, Any]) -> dict[str, Any]:
        """``run`` (a program with an input), ``open`` (one whose functions or tests follow), ``ask`` it, ``close`` it.

        Returns:
            ``text`` (an output, or a line; ``None`` for a failure or too long a text), and ``timeout``.
        """
        deadline = time.monotonic() + job.get("seconds", 0.0)
        if job["do"] == "run":
            program = _Program(packages, "run", job["alone"])
            try:
                return program.run(job["program"], job["input"].encode(errors="replace"), output_limit, deadline)
            finally:
                program.end()
        if job["do"] == "open":
            while programs:
                programs.pop().end()
            programs.append(_Program(packages, job["mode"], job["alone"]))
            return programs[0].ask(job["program"], output_limit, deadline)
        if job["do"] == "ask" and programs:
            return programs[0].ask(job["line"], output_limit, deadline)
        while programs:
            programs.pop().end()
        return {"text": None, "timeout": False}

    return do


class _Program:
    """One interpreter with a program.

    Args:
        packages: See :func:`runner`.
        mode: What the driver does.
        alone: Whether no process but ours can be signalled from here, so that all of them may be.
    """

    def __init__(self, packages: str, mode: str, alone: bool) -> None:
        self.alone = alone
        reading, self.requests = os.pipe()
        self.answers, writing = os.pipe()
        stdin, self.input = os.pipe()
        self.output, stdout = os.pipe()
        self.open = {self.requests, self.answers, self.input, self.output}
        for descriptor in self.open:
            os.set_blocking(descriptor, False)
        driver = str(Path(__file__).with_name("driver.py"))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", driver, packages, mode, str(reading), str(writing)],
                stdin=stdin,
                stdout=stdout if mode == "run" else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(reading, writing),
                start_new_session=True,
            )
        except BaseException:
            self._close(*self.open)
            raise
        finally:
            for descriptor in (reading, writing, stdin, stdout):
                os.close(descriptor)
        if mode != "run":
            self._close(self.input, self.output)

    def run(self, source: str, text: bytes, limit: int, deadline: float) -> dict[str, Any]:
        """Give it a program and an input, and take what it writes until it ends.

        Args:
            source: Of the program.
            text: Its input.
            limit: Bytes that it may write.
            deadline: On the monotonic clock.
        """
        output = self._exchange({self.requests: _line(source), self.input: text}, self.output, limit, deadline)
        if output is None:  # too much of it
            return {"text": None, "timeout": False}
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(deadline - time.monotonic(), 0))
        good = self.process.returncode == 0
        return {"text": output.decode(errors="replace") if good else None, "timeout": self.process.returncode is None}

    def ask(self, request: Any, limit: int, deadline: float) -> dict[str, Any]:
        """Write a line and take one.

        Args:
            request: Becomes JSON.
            limit: Bytes that the line may have.
            deadline: On the monotonic clock.
        """
        line = self._exchange({self.requests: _line(request)}, self.answers, limit, deadline, line=True)
        whole = line is not None and line.endswith(b"\n") and line.count(b"\n") == 1
        text = line[:-1].decode(errors="replace") if line is not None and whole else None
        return {"text": text, "timeout": text is None and time.monotonic() >= deadline}

    def end(self) -> None:
        """Kill it and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.alone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, 0):
                    pass
        self._close(*self.open)

    def _close(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            self.open.discard(descriptor)
            os.close(descriptor)

    def _exchange(
        self, writes: dict[int, bytes], reading: int, limit: int, deadline: float, *, line: bool = False
    ) -> bytes | None:
        """Write texts, and read up to the end of a line, or else of the program; ``None`` if that is too long.

        What was written to is closed afterwards unless lines are exchanged.
        """
        read = bytearray()
        pending = {descriptor: memoryview(text) for descriptor, text in writes.items()}
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            for descriptor in pending:
                selector.register(descriptor, selectors.EVENT_WRITE)
            while (left := deadline - time.monotonic()) > 0:
                ended = self.process.poll() is not None
                ready = {key.fd for key, _ in selector.select(0 if ended else min(left, _POLL))}
                for descriptor in ready & pending.keys():
                    pending[descriptor] = _written(descriptor, pending[descriptor])
                    if not pending[descriptor]:
                        selector.unregister(descriptor)
                        del pending[descriptor]
                        if not line:
                            self._close(descriptor)
                piece = _piece(reading) if reading in ready else b""
                read += piece
                if len(read) > limit:
                    return None
                # Nobody has the other end of the pipe any more, or who has it is not the program, which has ended.
                if (line and b"\n" in piece) or (not piece and (ended or reading in ready)):
                    break
        return bytes(read)


def _line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _written(descriptor: int, text: memoryview) -> memoryview:
    try:
        return text[os.write(descriptor, text) :]
    except BlockingIOError:
        return text
    except OSError:  # nobody reads
        return text[:0]


def _piece(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
