"""One sandbox from our side: started when it is needed, asked one thing at a time, killed when it does not answer."""

import contextlib
import dataclasses
import json
import os
import pickle
import secrets
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from rlhfkit.rewards.sandbox.channel import HEAD, Answer, WrongAnswer, receive, trainer_end
from rlhfkit.rewards.sandbox.isolation import Backend, WeakSandbox, chosen_backend, require, view
from rlhfkit.validation import check_integer, check_number

Status = Literal["ok", "timeout", "died", "error"]

_KEPT_OUTPUT = 4096  # bytes of what a worker prints that are kept for messages
_KEPT_REPORT = 4096  # bytes of what a guard says
_LAST_OUTPUT = 1 << 20  # bytes that are read from a worker that is being ended
_END_TIMEOUT = 5.0  # seconds for the guard to kill everything
_INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a sandbox may use; :mod:`rlhfkit.rewards.sandbox.confinement` says what each machine can hold it to.

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
        check_number("memory_gib", self.memory_gib, above=0)
        for name in ("cpu_seconds", "processes", "open_files", "file_mib"):
            check_integer(name, getattr(self, name), minimum=1)


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
    trusted: bool = True
    """Whether it may read whatever the trainer can. If not, it reads the interpreter, the packages, and ``files``."""
    files: tuple[Path, ...] = ()
    """What it reads beside that."""
    required: tuple[str, ...] = ()
    """Walls that it must not run without, see :data:`rlhfkit.rewards.sandbox.isolation.WALLS`."""
    packages: bool = True
    """Whether it imports what we can import, or the standard library only (which starts faster)."""
    largest_answer: int = 1 << 20
    """Bytes that an answer may have as JSON; the trainer never holds more of one."""
    environment: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)
    """Environment variables. Of ours it gets those for paths and languages only, no keys and tokens."""


class SandboxProcess:
    """One worker behind walls, and its guard; see :mod:`rlhfkit.rewards.sandbox.child`.

    Args:
        work: What it runs.
        limits: What it may use.
        start_timeout: Seconds until it must be ready.
        backend: Who puts up the walls.
        allow_weak: Whether it may run without walls that the work requires.
    """

    def __init__(
        self,
        work: Work,
        limits: Limits,
        start_timeout: float,
        *,
        backend: Backend = "auto",
        allow_weak: bool = False,
    ) -> None:
        self.work = work
        self.limits = limits
        self.start_timeout = start_timeout
        self.backend: Backend = backend
        self.allow_weak = allow_weak
        self.walls: list[str] | None = None
        """What could be put up, see ``sandbox.isolation.WALLS``; ``None`` before the first start."""
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._end: socket.socket | None = None
        self._worker: int | None = None  # the process whose answers count, where the kernel says who wrote them
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
        request, started = pickle.dumps(job), time.monotonic()
        try:
            return self._ask(request, timeout)
        except WrongAnswer:  # an earlier call may have left behind what wrote it; a new process has no earlier call
            pass
        try:
            return self._ask(request, timeout)
        except WrongAnswer as error:
            return self._failed("error", started, str(error))

    def _ask(self, request: bytes, timeout: float) -> Outcome:
        if self._guard is not None and (self._guard.poll() is not None or self._unasked()):
            self.end()  # it ended between two calls, or wrote without being asked
        if self._guard is None:
            self._start()
        return self._exchange(request, timeout)

    def _unasked(self) -> bool:
        """Whether there is something to read though nothing was asked: bytes too many, or the end."""
        assert self._end is not None
        return bool(select.select([self._end], [], [], 0)[0])

    def end(self, *, patience: float = 0.0) -> str:
        """Kill whatever runs inside, and clean up.

        Args:
            patience: Seconds that the guard has to end by itself first, with a reason of its own.

        Returns:
            Why the guard ended, in its words.
        """
        guard, self._guard = self._guard, None
        if guard is None or self._end is None:
            return ""
        self._end.close()
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(patience)
        killed = (guard.poll() or 0) < 0
        if killed:  # by somebody inside, who is in its group
            _kill_group(guard.pid)
        report = self._last_words(guard, 0.5 if killed else _END_TIMEOUT)
        if guard.poll() is None:
            _kill_group(guard.pid)
            guard.wait(_END_TIMEOUT)
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            return str(json.loads(report))
        except ValueError:
            return f"and its guard ended with exit code {guard.returncode}"

    def _last_words(self, guard: subprocess.Popen[bytes], seconds: float) -> bytes:
        """Tell the guard to end, and read what it and the worker still say, of either no more than can be kept.

        Who has left the guard's group may hold the worker's pipe open, and write into it for ever.
        """
        assert guard.stdin is not None
        assert guard.stdout is not None
        assert guard.stderr is not None
        guard.stdin.close()
        report, left, end = b"", _LAST_OUTPUT, time.monotonic() + seconds
        with guard.stdout, guard.stderr, selectors.DefaultSelector() as selector:
            selector.register(guard.stdout, selectors.EVENT_READ)
            selector.register(guard.stderr, selectors.EVENT_READ)
            while selector.get_map() and (wait := end - time.monotonic()) > 0:
                for key, _ in selector.select(wait):
                    read = os.read(key.fd, 1 << 16)
                    if key.fileobj is guard.stdout:
                        report = (report + read)[:_KEPT_REPORT]
                        if not read:  # the guard has ended, so what the worker has printed is in the pipe by now
                            end = min(end, time.monotonic() + 0.05)
                    else:
                        self._keep(read)
                        left -= len(read)
                    if not read or left <= 0:
                        selector.unregister(key.fileobj)
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(max(end - time.monotonic(), 0.05))
        return report

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rlhfkit-sandbox-")
        self._output = b""
        self._end, worker = socket.socketpair()
        trainer_end(self._end)
        self._worker = None
        settings = {
            "limits": dataclasses.asdict(self.limits),
            "folder": self._folder,
            "channel": worker.fileno(),
            "largest_answer": self.work.largest_answer,
            "backend": chosen_backend(self.backend),
            "view": None if self.work.trusted else view([self.work.program, *self.work.files]),
        }
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment |= {
            "HOME": self._folder,
            "TMPDIR": self._folder,
            "OMP_NUM_THREADS": "1",
            **dict(self.work.environment),
        }
        program = Path(__file__).with_name("child.py")
        flags = ["-I", "-B", "-u", *([] if self.work.packages else ["-S"])]
        try:
            self._guard = subprocess.Popen(
                [sys.executable, *flags, str(program), "guard", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd="/",
                pass_fds=(worker.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            self._end.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            worker.close()
        self._set_up(time.monotonic() + self.start_timeout)

    def _set_up(self, deadline: float) -> None:
        """Have the walls put up, and then the function loaded.

        Raises:
            RuntimeError: If one of them fails.
            WeakSandbox: If a wall is missing that it must not do without.
        """
        setup = {
            "path": [os.path.abspath(entry) for entry in sys.path] if self.work.packages else [],
            "program": str(self.work.program),
            "factory": self.work.factory,
            "arguments": pickle.dumps(self.work.arguments),
        }
        try:
            walled = self._exchange(pickle.dumps(setup), deadline - time.monotonic())
            if walled.status == "ok":
                self.walls = list(walled.value)
                self._check_walls()
            ready = walled if walled.status != "ok" else self._exchange(b"load", max(deadline - time.monotonic(), 0.01))
        except WrongAnswer as error:
            raise RuntimeError(f"no process could be started to run {self.work.name}: {error}") from None
        if ready.status != "ok":
            self.end()
            raise RuntimeError(f"no process could be started to run {self.work.name}: {ready.message}")

    def _check_walls(self) -> None:
        """Go no further without the walls that the work must not do without.

        Raises:
            WeakSandbox: If one is missing and that was not allowed.
        """
        required = [wall for wall in self.work.required if wall != "network" or not self.limits.network]
        missing = require(self.work.name, required, self.walls or ())
        if missing and not self.allow_weak:
            self.end()
            raise WeakSandbox(missing)

    def _exchange(self, request: bytes, timeout: float) -> Outcome:
        """Send a message and wait for the answer; a process that does not give one is killed."""
        try:
            return self._answer_to(request, timeout)
        except BaseException:  # a wrong answer, or an interrupt, after which the answer would come unasked
            self.end()
            raise

    def _answer_to(self, request: bytes, timeout: float) -> Outcome:
        started = time.monotonic()
        number = secrets.token_bytes(16)
        sending = memoryview(HEAD.pack(number, len(request)) + request)
        answer = Answer(number, self.work.largest_answer)
        flood = 0
        assert self._end is not None
        assert self._guard is not None
        assert self._guard.stdout is not None
        assert self._guard.stderr is not None
        channel, report, output = self._end.fileno(), self._guard.stdout.fileno(), self._guard.stderr.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ | selectors.EVENT_WRITE)
            selector.register(output, selectors.EVENT_READ)
            selector.register(report, selectors.EVENT_READ)  # the guard speaks once, when it ends
            while (left := started + timeout - time.monotonic()) > 0:
                ready = {key.fd: events for key, events in selector.select(left)}
                if ready.get(channel, 0) & selectors.EVENT_WRITE:
                    sending = self._send(sending)
                    if not sending:
                        selector.modify(channel, selectors.EVENT_READ)
                if output in ready:
                    printed = os.read(output, 1 << 16)
                    self._keep(printed)
                    flood += len(printed)
                    if flood > _LAST_OUTPUT:  # whoever prints without end waits for us, not we for them
                        time.sleep(0.001)
                    if not printed:
                        selector.unregister(output)
                data = self._receive() if ready.get(channel, 0) & selectors.EVENT_READ else b""
                try:
                    message = answer.add(data)
                except OverflowError as error:
                    self.end()
                    return self._failed("error", started, str(error))
                if message is not None:
                    return self._outcome(message, started)
                if not data and (report in ready or ready.get(channel, 0) & selectors.EVENT_READ):
                    # it has ended, and all it had answered is read
                    return self._failed("died", started, f"the process {self.end(patience=1.0)}")
        self.end()
        return self._failed("timeout", started, f"did not answer within {timeout:g} s and was killed")

    def _receive(self) -> bytes:
        """What has arrived, from the process that this sandbox was set up by."""
        assert self._end is not None
        try:
            data, writer = receive(self._end)
        except ConnectionResetError:  # it ended with a request unread
            return b""
        if data and self._worker is None:  # the first answer comes before anybody else's code is loaded
            self._worker = writer
        if data and writer != self._worker:
            raise WrongAnswer("another process than the worker wrote an answer, and was killed")
        return data

    def _send(self, sending: memoryview) -> memoryview:
        """What is left of it; nothing if nobody reads, which then shows as the end of the answers."""
        assert self._end is not None
        try:
            return sending[self._end.send(sending) :]
        except BlockingIOError:
            return sending
        except (BrokenPipeError, ConnectionResetError):
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
