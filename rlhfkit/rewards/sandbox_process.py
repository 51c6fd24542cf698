"""One sandbox from our side: started when it is needed, asked one thing at a time, killed when it does not answer."""

import contextlib
import dataclasses
import json
import os
import pickle
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "timeout", "died", "error"]

_KEPT_OUTPUT = 4096  # bytes of what a worker prints that are kept for messages
_LARGEST_ANSWER = 64 << 20
_END_TIMEOUT = 5.0  # seconds for the guard to kill everything
_INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a sandbox may use; :mod:`rlhfkit.rewards.confinement` says what each machine can hold it to.

    Raises:
        ValueError: If a limit is not positive.
    """

    memory_gib: float = 4.0
    """Address space of each process, and memory of all of them together (Linux). PyTorch's CPU build takes 0.7 GiB of
    the former, its CUDA builds several times that."""
    cpu_seconds: int = 600
    """Seconds of computing of each process in one call. The time limit comes first unless there are several threads;
    this also ends what has escaped it."""
    processes: int = 64
    """Processes and threads."""
    open_files: int = 256
    """Open files of each process."""
    file_mib: int = 256
    """Size of each file, and where namespaces are allowed of all of them together."""
    network: bool = False
    """Whether it may use the network. Without it is promised only where namespaces are allowed."""

    def __post_init__(self) -> None:
        """Check."""
        for name in ("memory_gib", "cpu_seconds", "processes", "open_files", "file_mib"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call."""

    status: Status
    """``ok``; ``timeout``: killed, as it took too long; ``died``: the process ended; ``error``: the call raised, or
    answered nonsense."""
    value: Any = None
    """What was returned, as JSON has it."""
    message: str = ""
    """What went wrong, with the end of what was printed."""
    seconds: float = 0.0
    """How long it took."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a sandbox runs: a factory in a file of Python makes the function that is called.

    The file is loaded by its path, so it imports what it needs and not the package that it lies in.
    """

    name: str
    """For messages."""
    program: Path
    factory: str
    arguments: tuple[Any, ...] = ()
    """Of the factory; pickled."""
    packages: bool = True
    """Whether it imports what we can import, or the standard library only (which starts faster)."""
    environment: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)
    """Environment variables. Of ours it gets those for paths and languages only, no keys and tokens."""


class SandboxProcess:
    """One worker behind walls, and its guard; see :mod:`rlhfkit.rewards.sandbox_child`.

    Args:
        work: What it runs.
        limits: What it may use.
        start_timeout: Seconds until it must be ready.
    """

    def __init__(self, work: Work, limits: Limits, start_timeout: float) -> None:
        self.work = work
        self.limits = limits
        self.start_timeout = start_timeout
        self.walls: list[str] | None = None
        """What :func:`rlhfkit.rewards.confinement.confine` could put up; ``None`` before the first start."""
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._requests = self._answers = -1
        self._output = b""

    @property
    def pid(self) -> int | None:
        """The guard's process, if it runs."""
        return None if self._guard is None else self._guard.pid

    def ask(self, job: Any, timeout: float) -> Outcome:
        """Call the function, in a process that is started if there is none.

        Args:
            job: Its argument; picklable.
            timeout: Seconds; a process that takes longer is killed.

        Raises:
            RuntimeError: If no process can be started.
        """
        if self._guard is not None and self._guard.poll() is not None:
            self.end()  # it ended between two calls; this closes its pipes
        if self._guard is None:
            self._start()
        return self._exchange(pickle.dumps(job), timeout)

    def end(self, *, patience: float = 0.0) -> str:
        """Kill whatever runs inside, and clean up.

        Args:
            patience: Seconds that the guard has to end by itself first, with a reason of its own.

        Returns:
            Why the guard ended, in its words.
        """
        guard, self._guard = self._guard, None
        if guard is None:
            return ""
        os.close(self._requests)
        os.close(self._answers)
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(patience)
        killed = (guard.poll() or 0) < 0
        if killed:  # by somebody inside, who is in its group
            _kill_group(guard.pid)
        try:  # closes its input, which tells it to end; who has left its group may hold the other pipes open
            report, output = guard.communicate(timeout=0.5 if killed else _END_TIMEOUT)
        except subprocess.TimeoutExpired:
            _kill_group(guard.pid)
            report, output = b"", b""
            for stream in (guard.stdin, guard.stdout, guard.stderr):
                if stream is not None:
                    stream.close()
            guard.wait(_END_TIMEOUT)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._keep(output)
        try:
            return str(json.loads(report))
        except ValueError:
            return f"and its guard ended with exit code {guard.returncode}"

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rlhfkit-sandbox-")
        self._output = b""
        request, self._requests = os.pipe()
        self._answers, answer = os.pipe()
        settings = {
            "limits": dataclasses.asdict(self.limits),
            "folder": self._folder,
            "requests": request,
            "answers": answer,
        }
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment |= {
            "HOME": self._folder,
            "TMPDIR": self._folder,
            "OMP_NUM_THREADS": "1",
            **dict(self.work.environment),
        }
        program = Path(__file__).with_name("sandbox_child.py")
        flags = ["-I", "-B", "-u", *([] if self.work.packages else ["-S"])]
        try:
            self._guard = subprocess.Popen(
                [sys.executable, *flags, str(program), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd="/",
                pass_fds=(request, answer),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._requests)
            os.close(self._answers)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(request)
            os.close(answer)
        setup = {
            "path": [os.path.abspath(entry) for entry in sys.path] if self.work.packages else [],
            "program": str(self.work.program),
            "factory": self.work.factory,
            "arguments": pickle.dumps(self.work.arguments),
        }
        ready = self._exchange(pickle.dumps(setup), self.start_timeout)
        if ready.status != "ok":
            self.end()
            raise RuntimeError(f"no process could be started to run {self.work.name}: {ready.message}")
        self.walls = list(ready.value)

    def _exchange(self, request: bytes, timeout: float) -> Outcome:
        """Send a message and wait for the answer; a process that does not give one is killed."""
        try:
            return self._answer_to(request, timeout)
        except BaseException:  # an interrupt, say; the answer would be taken for that to the next message
            self.end()
            raise

    def _answer_to(self, request: bytes, timeout: float) -> Outcome:
        started = time.monotonic()
        sending = memoryview(struct.pack(">Q", len(request)) + request)
        answer = bytearray()
        assert self._guard is not None
        assert self._guard.stdout is not None
        assert self._guard.stderr is not None
        report, output = self._guard.stdout.fileno(), self._guard.stderr.fileno()
        os.set_blocking(self._requests, False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_WRITE)
            selector.register(self._answers, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            selector.register(report, selectors.EVENT_READ)  # the guard speaks once, when it ends
            while (left := started + timeout - time.monotonic()) > 0:
                ready = {key.fd for key, _ in selector.select(left)}
                if self._requests in ready:
                    sending = self._send(sending)
                    if not sending:
                        selector.unregister(self._requests)
                if output in ready:
                    printed = os.read(output, 1 << 16)
                    self._keep(printed)
                    if not printed:
                        selector.unregister(output)
                data = os.read(self._answers, 1 << 16) if self._answers in ready else b""
                answer += data
                size = struct.unpack(">Q", answer[:8])[0] if len(answer) >= 8 else 0
                if size > _LARGEST_ANSWER:
                    break
                if size and len(answer) >= 8 + size:
                    return self._outcome(bytes(answer[8:]), started)
                if not data and ready & {self._answers, report}:  # it has ended, and all it had answered is read
                    return self._failed("died", started, f"the process {self.end(patience=1.0)}")
            else:
                self.end()
                return self._failed("timeout", started, f"did not answer within {timeout:g} s and was killed")
        self.end()
        return self._failed("error", started, f"answered with more than {_LARGEST_ANSWER >> 20} MiB and was killed")

    def _send(self, sending: memoryview) -> memoryview:
        """What is left of it; nothing if nobody reads, which then shows as the end of the answers."""
        try:
            return sending[os.write(self._requests, sending) :]
        except BlockingIOError:
            return sending
        except BrokenPipeError:
            return sending[:0]

    def _outcome(self, answer: bytes, started: float) -> Outcome:
        try:
            content = json.loads(answer)
            status, value, message = content["status"], content.get("value"), str(content.get("message", ""))
            if status not in ("ok", "error"):
                raise ValueError(status)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.end()
            return self._failed("error", started, "answered with something that is no JSON of ours and was killed")
        if status == "error":
            return self._failed("error", started, message)
        return Outcome("ok", value, seconds=time.monotonic() - started)

    def _failed(self, status: Status, started: float, message: str) -> Outcome:
        printed = self._output.decode(errors="replace").strip()
        message = f"{message.strip()}; it printed at last:\n{printed}" if printed else message.strip()
        return Outcome(status, message=message, seconds=time.monotonic() - started)

    def _keep(self, output: bytes) -> None:
        self._output = (self._output + output)[-_KEPT_OUTPUT:]


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
