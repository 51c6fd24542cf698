"""``SandboxProcess``: one sandbox as seen by the trainer, which starts it, calls it, and kills it on timeout."""

import contextlib
import dataclasses
import json
import os
import pickle
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from rlhfkit.rewards.sandbox.channel import HEADER, ProtocolError, Response, configure_trainer_socket, receive
from rlhfkit.rewards.sandbox.child import remove_folder
from rlhfkit.rewards.sandbox.isolation import (
    InsufficientIsolationError,
    bubblewrap_works,
    missing_isolation,
    readable_paths,
)
from rlhfkit.validation import check_integer, check_number

Status = Literal["ok", "timeout", "died", "error"]

_KEPT_OUTPUT = 4096  # bytes of a worker's output kept for messages
_KEPT_REPORT = 4096  # bytes kept of a supervisor's report
_LAST_OUTPUT = 1 << 20  # bytes read from a worker that is being stopped
_STOP_TIMEOUT = 5.0  # seconds for the supervisor to kill everything
_INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """Resource limits of a sandbox; :mod:`rlhfkit.rewards.sandbox.confinement` says which machine can enforce which.

    Raises:
        ValueError: If a limit is not positive.
    """

    memory_gib: float = 4.0
    """Address space of each process, and memory of all of them together (Linux). PyTorch's CPU build takes 0.7 GiB of
    address space, its CUDA builds several times that.
    """
    cpu_seconds: int = 600
    """CPU time of each process in one call. The time limit comes first unless there are several threads; this one also
    ends processes that have escaped from the time limit.
    """
    processes: int = 64
    """Number of processes and threads."""
    open_files: int = 256
    """Open files of each process."""
    file_mib: int = 256
    """Size of each file, and under bubblewrap of all files together."""
    network: bool = False
    """Whether the network may be used."""

    def __post_init__(self) -> None:
        """Check the limits."""
        check_number("memory_gib", self.memory_gib, above=0)
        for name in ("cpu_seconds", "processes", "open_files", "file_mib"):
            check_integer(name, getattr(self, name), minimum=1)


@dataclasses.dataclass(frozen=True, slots=True)
class CallResult:
    """The result of one call."""

    status: Status
    """``ok``; ``timeout``: killed because it took too long; ``died``: the process ended; ``error``: the call raised, or
    its answer was invalid.
    """
    value: Any = None
    """The return value, as JSON."""
    message: str = ""
    """What went wrong, with the end of what was printed."""
    seconds: float = 0.0
    """Duration of the call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a sandbox runs: a factory in a Python file that returns the function to call.

    The file is loaded by path, without its package. The factory gets the list of active isolation layers, and then
    ``arguments``.
    """

    name: str
    """Name in messages."""
    program: Path
    factory: str
    arguments: tuple[Any, ...] = ()
    """Further arguments of the factory; pickled."""
    confined: bool = True
    """Whether it has limits and isolation layers, and a small environment; if not, it is a process like the trainer."""
    trusted: bool = True
    """Whether it may read whatever the trainer can. If not, it reads the interpreter, the packages, and ``files``."""
    files: tuple[Path, ...] = ()
    """Further files that untrusted code may read."""
    required: tuple[str, ...] = ()
    """Layers that it must not run without, see :data:`rlhfkit.rewards.sandbox.isolation.ISOLATION_LAYERS`."""
    packages: bool = True
    """Whether it can import installed packages, or the standard library only (which starts faster)."""
    max_answer_bytes: int = 1 << 20
    """Maximum size of an answer as JSON in bytes; the trainer never buffers more."""
    environment: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)
    """Environment variables. Of the trainer's, only those for paths and languages are passed on, no keys or tokens."""


class SandboxProcess:
    """One isolated worker and its supervisor, see ``child.py``; arguments as in :class:`SandboxPool`."""

    def __init__(
        self,
        spec: WorkerSpec,
        limits: ResourceLimits,
        start_timeout: float,
        *,
        allow_partial_isolation: bool = False,
    ) -> None:
        self.spec = spec
        self.limits = limits
        self.start_timeout = start_timeout
        self.allow_partial_isolation = allow_partial_isolation
        self.isolation: list[str] | None = None
        """Active layers, see ``sandbox.isolation.ISOLATION_LAYERS``; ``None`` before the first start."""
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._socket: socket.socket | None = None
        # The only process whose answers are accepted; None where the kernel does not report who wrote them.
        self._worker_pid: int | None = None
        self._output = b""

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, if it runs."""
        return None if self._supervisor is None else self._supervisor.pid

    def call(self, job: Any, timeout: float) -> CallResult:
        """Call the function with a picklable job, starting the process if necessary; kill it after ``timeout`` seconds.

        Raises ``RuntimeError`` if no process can be started.
        """
        request, started = pickle.dumps(job), time.monotonic()
        try:
            return self._call(request, timeout)
        except ProtocolError:  # perhaps written by what an earlier call left behind: try once more in a new process
            pass
        try:
            return self._call(request, timeout)
        except ProtocolError as error:
            return self._failed("error", started, str(error))

    def _call(self, request: bytes, timeout: float) -> CallResult:
        if self._supervisor is not None and (self._supervisor.poll() is not None or self._has_unexpected_data()):
            self.stop()  # it ended between two calls, or wrote before it was asked
        if self._supervisor is None:
            self._start()
        return self._exchange(request, timeout)

    def _has_unexpected_data(self) -> bool:
        """Whether there are bytes to read, or the end of the stream, before a request was sent."""
        assert self._socket is not None
        return bool(select.select([self._socket], [], [], 0)[0])

    def stop(self, *, grace: float = 0.0) -> str:
        """Kill all processes of the sandbox, clean up, and return the reason that the supervisor reports.

        The supervisor first gets ``grace`` seconds to end by itself.
        """
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None or self._socket is None:
            return ""
        self._socket.close()
        if grace:
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(grace)
        killed = (supervisor.poll() or 0) < 0
        if killed:  # by a process inside, which is in the same group
            _kill_group(supervisor.pid)
        report = self._drain_output(supervisor, 0.5 if killed else _STOP_TIMEOUT)
        if supervisor.poll() is None:
            _kill_group(supervisor.pid)
            supervisor.wait(_STOP_TIMEOUT)
        remove_folder(self._folder)
        try:
            return str(json.loads(report))
        except ValueError:
            return f"and its supervisor ended with exit code {supervisor.returncode}"

    def _drain_output(self, supervisor: subprocess.Popen[bytes], seconds: float) -> bytes:
        """Tell the supervisor to end, and read what it and the worker print meanwhile, up to a limit.

        The limit is for processes that have left the supervisor's group and keep writing to the worker's pipe.
        """
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        assert supervisor.stderr is not None
        supervisor.stdin.close()
        report, left, end = b"", _LAST_OUTPUT, time.monotonic() + seconds
        with supervisor.stdout, supervisor.stderr, selectors.DefaultSelector() as selector:
            selector.register(supervisor.stdout, selectors.EVENT_READ)
            selector.register(supervisor.stderr, selectors.EVENT_READ)
            while selector.get_map() and (wait := end - time.monotonic()) > 0:
                for key, _ in selector.select(wait):
                    read = os.read(key.fd, 1 << 16)
                    if key.fileobj is supervisor.stdout:
                        report = (report + read)[:_KEPT_REPORT]
                        if not read:  # the supervisor has ended, so the worker's output is in the pipe by now
                            end = min(end, time.monotonic() + 0.05)
                    else:
                        self._keep_output(read)
                        left -= len(read)
                    if not read or left <= 0:
                        selector.unregister(key.fileobj)
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(max(end - time.monotonic(), 0.05))
        return report

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rlhfkit-sandbox-")
        self._output = b""
        self._socket, worker = socket.socketpair()
        configure_trainer_socket(self._socket)
        self._worker_pid = None
        settings = {
            "limits": dataclasses.asdict(self.limits) if self.spec.confined else None,
            "folder": self._folder,
            "channel": worker.fileno(),
            "max_answer_bytes": self.spec.max_answer_bytes,
            "bubblewrap": self.spec.confined and bubblewrap_works(),
            "readable_paths": None if self.spec.trusted else readable_paths([self.spec.program, *self.spec.files]),
        }
        environment = dict(os.environ)
        if self.spec.confined:
            own = {"HOME": self._folder, "TMPDIR": self._folder, "OMP_NUM_THREADS": "1"}
            environment = {name: os.environ[name] for name in _INHERITED if name in os.environ} | own
        environment |= dict(self.spec.environment)
        program = Path(__file__).with_name("child.py")
        flags = ["-I", "-B", "-u", *([] if self.spec.packages else ["-S"])]
        try:
            self._supervisor = subprocess.Popen(
                [sys.executable, *flags, str(program), "supervisor", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd="/" if self.spec.confined else None,
                pass_fds=(worker.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            remove_folder(self._folder)
            raise
        finally:
            worker.close()
        self._initialize(time.monotonic() + self.start_timeout)

    def _initialize(self, deadline: float) -> None:
        """Have the worker set up its isolation, then load the function."""
        setup = {
            "path": [os.path.abspath(entry) for entry in sys.path] if self.spec.packages else [],
            "program": str(self.spec.program),
            "factory": self.spec.factory,
            "arguments": pickle.dumps(self.spec.arguments),
        }
        try:
            ready = self._exchange(pickle.dumps(setup), deadline - time.monotonic())
            if ready.status == "ok":
                self.isolation = list(ready.value)
                self._check_isolation()
                ready = self._exchange(b"load", max(deadline - time.monotonic(), 0.01))
        except ProtocolError as error:
            raise RuntimeError(f"no process could be started to run {self.spec.name}: {error}") from None
        if ready.status != "ok":
            self.stop()
            raise RuntimeError(f"no process could be started to run {self.spec.name}: {ready.message}")

    def _check_isolation(self) -> None:
        """Stop the sandbox and raise if a required layer is missing and ``allow_partial_isolation`` is off."""
        required = [layer for layer in self.spec.required if layer != "network" or not self.limits.network]
        missing = missing_isolation(self.spec.name, required, self.isolation or ())
        if missing and not self.allow_partial_isolation:
            self.stop()
            raise InsufficientIsolationError(missing)

    def _exchange(self, request: bytes, timeout: float) -> CallResult:
        """Send a message and wait for the answer; kill a process that gives none."""
        try:
            return self._send_and_receive(request, timeout)
        except BaseException:  # a wrong answer; or an interrupt, after which the answer would reach the next call
            self.stop()
            raise

    def _send_and_receive(self, request: bytes, timeout: float) -> CallResult:
        started = time.monotonic()
        number = secrets.token_bytes(16)
        sending = memoryview(HEADER.pack(number, len(request)) + request)
        answer = Response(number, self.spec.max_answer_bytes)
        flood = 0
        assert self._socket is not None
        assert self._supervisor is not None
        assert self._supervisor.stdout is not None
        assert self._supervisor.stderr is not None
        channel, report, output = (
            self._socket.fileno(),
            self._supervisor.stdout.fileno(),
            self._supervisor.stderr.fileno(),
        )
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ | selectors.EVENT_WRITE)
            selector.register(output, selectors.EVENT_READ)
            selector.register(report, selectors.EVENT_READ)  # the supervisor prints once, when it ends
            while (left := started + timeout - time.monotonic()) > 0:
                ready = {key.fd: events for key, events in selector.select(left)}
                if ready.get(channel, 0) & selectors.EVENT_WRITE:
                    sending = self._send(sending)
                    if not sending:
                        selector.modify(channel, selectors.EVENT_READ)
                if output in ready:
                    printed = os.read(output, 1 << 16)
                    self._keep_output(printed)
                    flood += len(printed)
                    if flood > _LAST_OUTPUT:  # slow down a worker that prints without end
                        time.sleep(0.001)
                    if not printed:
                        selector.unregister(output)
                data = self._receive() if ready.get(channel, 0) & selectors.EVENT_READ else b""
                try:
                    message = answer.add(data)
                except OverflowError as error:
                    self.stop()
                    return self._failed("error", started, str(error))
                if message is not None:
                    return self._outcome(message, started)
                if not data and (report in ready or ready.get(channel, 0) & selectors.EVENT_READ):
                    # the worker has ended, and everything it wrote has been read
                    return self._failed("died", started, f"the process {self.stop(grace=1.0)}")
        self.stop()
        return self._failed("timeout", started, f"did not answer within {timeout:g} s and was killed")

    def _receive(self) -> bytes:
        """Return the bytes that have arrived; checks that the worker wrote them."""
        assert self._socket is not None
        try:
            data, writer = receive(self._socket)
        except ConnectionResetError:  # it ended before it read the request
            return b""
        if data and self._worker_pid is None:  # the first answer comes before user code is loaded
            self._worker_pid = writer
        if data and writer != self._worker_pid:
            raise ProtocolError("another process than the worker wrote an answer, and was killed")
        return data

    def _send(self, sending: memoryview) -> memoryview:
        """Send what can be sent and return the rest; empty if the worker has closed its end."""
        assert self._socket is not None
        try:
            return sending[self._socket.send(sending) :]
        except BlockingIOError:
            return sending
        except (BrokenPipeError, ConnectionResetError):
            return sending[:0]

    def _outcome(self, answer: bytes, started: float) -> CallResult:
        try:
            content = json.loads(answer)
            status, value, message = content["status"], content.get("value"), str(content.get("message", ""))
            if status not in ("ok", "error"):
                raise ValueError(status)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.stop()
            return self._failed("error", started, "answered with invalid JSON and was killed")
        if status == "error":
            return self._failed("error", started, message)
        return CallResult("ok", value, seconds=time.monotonic() - started)

    def _failed(self, status: Status, started: float, message: str) -> CallResult:
        printed = self._output.decode(errors="replace").strip()
        message = f"{message.strip()}; it printed at last:\n{printed}" if printed else message.strip()
        return CallResult(status, message=message, seconds=time.monotonic() - started)

    def _keep_output(self, output: bytes) -> None:
        self._output = (self._output + output)[-_KEPT_OUTPUT:]


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
