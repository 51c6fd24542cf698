"""Ray actors: one ``RankActor`` per rank, and the ``Mailbox`` through which ranks send events to the driver.

:mod:`rlhfkit.strategies.ray.launcher` has these classes pickled by value: importing them by name would import torch and
Lightning before a rank has its environment. For the same reason this file imports only the standard library at the top.
"""

import contextlib
import io
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

Event = tuple[Any, ...]
"""``("line", rank, stream, text)``, ``("bar", stream, text)`` or ``("failed", failure)``."""


class Mailbox:
    """Events of all ranks for the driver; those of a rank in its order, in which Ray makes the calls of one caller."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def post(self, *event: Any) -> None:
        """Add an event."""
        self._events.append(event)

    def collect(self) -> list[Event]:
        """Return all events since the last call."""
        events, self._events = self._events, []
        return events


class RankOutput(io.TextIOBase):
    """Replaces ``sys.stdout`` or ``sys.stderr`` of a rank: posts complete lines, and of rank 0 also a bar's redraws."""

    encoding = "utf-8"

    def __init__(self, post: Callable[..., Any], rank: int, stream: str) -> None:
        self._post, self._rank, self._stream = post, rank, stream
        self._rest, self._lock = "", threading.Lock()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Post complete lines, of each its last state, and the state of an incomplete one that is redrawn."""
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._post("line", self._rank, self._stream, line.rstrip("\r").rsplit("\r", 1)[-1])
            if "\r" in self._rest and self._rank == 0:
                self._post("bar", self._stream, self._rest.rsplit("\r", 1)[-1])
                self._rest = ""
        return len(text)

    def finish(self) -> None:
        """Post an incomplete last line."""
        if self._rest:
            self.write("\n")


class RankActor:
    """One rank, in a process of its own that Ray has placed."""

    rank: int
    _mailbox: Any
    _reported: dict[str, Any] | None

    def location(self, ports: list[int]) -> dict[str, Any]:
        """Return where Ray has placed this process: machine, the first of ``ports`` that is free, GPUs, process id."""
        import ray

        port = 0
        for port in ports:
            with contextlib.suppress(OSError), socket.create_server(("", port)):
                break
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "port": port,
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
            "pid": os.getpid(),
        }

    def prepare(self, rank: int, environment: dict[str, str], path: list[str], folder: str, mailbox: Any) -> None:
        """Set up the process as a rank; to be called before anything imports torch."""
        os.environ.update(environment)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        if os.path.isdir(folder):
            os.chdir(folder)
        self.rank, self._mailbox, self._reported = rank, mailbox, None
        sys.stdout = RankOutput(mailbox.post.remote, rank, "stdout")
        sys.stderr = RankOutput(mailbox.post.remote, rank, "stderr")

    def run(self, work: bytes) -> tuple[str, Any]:
        """Call what ``pickle_run`` pickled; return ``("done", result)`` or ``("failed", failure)``."""
        import ray.cloudpickle

        try:
            return "done", ray.cloudpickle.loads(work)(self)
        except BaseException as error:  # SystemExit too: the driver is told why this rank has ended
            return "failed", self._reported or self.report(error)
        finally:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, RankOutput):
                    stream.finish()
            ray.get(self._mailbox.__ray_ready__.remote())  # after all that this rank has posted

    def report(self, error: BaseException) -> dict[str, Any]:
        """Send an error to the driver, and return it as a ``failure``."""
        import ray.cloudpickle

        text = "".join(traceback.format_exception(error))
        try:
            pickled = ray.cloudpickle.dumps(error)
        except Exception:
            pickled = None
        self._reported = {"rank": self.rank, "error": pickled, "type": type(error).__name__, "traceback": text}
        self._mailbox.post.remote("failed", self._reported)
        return self._reported
