"""The function that runs in the processes of ``CodeExecution``: it starts programs and calls them.

Each program runs in a new interpreter process. Its output is passed on as text, up to a limit, and parsed outside;
expected outputs and values are not here. Loaded by path; standard library only.
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
_SET_CHILD_SUBREAPER = 36
_POLL = 0.02  # seconds between two checks whether a program has ended


def runner(layers: list[str], packages: str, output_limit: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that executes jobs.

    ``layers`` are the active isolation layers, ``packages`` folders of installed packages, separated as in ``PATH``;
    ``output_limit`` is the maximum size of an output or an answer in bytes.
    """
    all_mine = "trainer" in layers  # every process that can be signalled from here belongs to this sandbox
    if sys.platform == "linux":  # deny the program access to this process: ptrace, /proc/.../mem, pidfd_getfd
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    if all_mine:  # what a program leaves behind becomes a child of this process, which can wait for its end
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    programs: list[_Program] = []

    def do(job: dict[str, Any]) -> dict[str, Any]:
        """Execute a job: ``run`` a program on an input, ``open`` one for calls or tests, or ``ask`` it.

        Returns ``text`` (an output or a line; ``None`` after a failure or if it is too long) and ``timeout``.
        """
        deadline = time.monotonic() + job.get("seconds", 0.0)
        if job["do"] == "run":
            program = _Program(packages, "run", all_mine)
            try:
                return program.run(job["program"], job["input"].encode(errors="replace"), output_limit, deadline)
            finally:
                program.end()
        if job["do"] == "open":
            while programs:
                programs.pop().end()
            programs.append(_Program(packages, job["mode"], all_mine))
            return programs[0].ask(job["program"], output_limit, deadline)
        if job["do"] == "ask" and programs:
            return programs[0].ask(job["line"], output_limit, deadline)
        while programs:
            programs.pop().end()
        return {"text": None, "timeout": False}

    return do


class _Program:
    """An interpreter with a program; ``mode`` is the driver's.

    ``all_mine``: whether all processes that can be signalled from here belong to the sandbox.
    """

    def __init__(self, packages: str, mode: str, all_mine: bool) -> None:
        self.all_mine = all_mine
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
        """Send a program and its input, and return its output, up to ``limit`` bytes."""
        output = self._exchange({self.requests: _line(source), self.input: text}, self.output, limit, deadline)
        if output is None:  # above the limit
            return {"text": None, "timeout": False}
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(deadline - time.monotonic(), 0))
        good = self.process.returncode == 0
        return {"text": output.decode(errors="replace") if good else None, "timeout": self.process.returncode is None}

    def ask(self, request: Any, limit: int, deadline: float) -> dict[str, Any]:
        """Write a request as one line of JSON, and read one line of up to ``limit`` bytes."""
        line = self._exchange({self.requests: _line(request)}, self.answers, limit, deadline, line=True)
        whole = line is not None and line.endswith(b"\n") and line.count(b"\n") == 1
        text = line[:-1].decode(errors="replace") if line is not None and whole else None
        return {"text": text, "timeout": text is None and time.monotonic() >= deadline}

    def end(self) -> None:
        """Kill the interpreter and the processes it has started, and wait until they have ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.all_mine:
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
        """Write texts, and read up to the end of a line or of the output; ``None`` if that is too long.

        Without ``line``, each descriptor is closed once its text is written.
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
                    pending[descriptor] = _write_available(descriptor, pending[descriptor])
                    if not pending[descriptor]:
                        selector.unregister(descriptor)
                        del pending[descriptor]
                        if not line:
                            self._close(descriptor)
                piece = _read_available(reading) if reading in ready else b""
                read += piece
                if len(read) > limit:
                    return None
                # All writers have closed the pipe, or the program has ended and only others keep it open.
                if (line and b"\n" in piece) or (not piece and (ended or reading in ready)):
                    break
        return bytes(read)


def _line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _write_available(descriptor: int, text: memoryview) -> memoryview:
    try:
        return text[os.write(descriptor, text) :]
    except BlockingIOError:
        return text
    except OSError:  # the reader has closed its end
        return text[:0]


def _read_available(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
