"""Ray actors: one ``RankActor`` per rank, and the ``Mailbox`` through which ranks send events to the driver.

:mod:`rlhfkit.strategies.ray.launcher` has these classes pickled by value: importing them by name would import torch and
Lightning before a rank has its environment. For the same reason this file imports only the standard library at the top.
"""

import asyncio
import contextlib
import io
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

Event = tuple[Any, ...]
"""``("line", rank, stream, text)``, ``("hook", ...)`` of the bar, or ``("failed", failure)``."""


class Mailbox:
    """Events of all ranks for the driver; those of one rank in sending order.

    Ray may run the calls of an asynchronous actor in any order (``allow_out_of_order_execution`` in Ray 2.60), so each
    rank numbers its events.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._changed = asyncio.Condition()
        self._closed = False
        self._delivered: dict[int, int] = {}  # number of events by rank
        self._early: dict[tuple[int, int], Event] = {}  # events that arrived before an earlier one, by rank and number

    async def post(self, rank: int, number: int, *event: Any) -> None:
        """Add an event."""
        self._early[rank, number] = event
        async with self._changed:
            while (rank, following := self._delivered.get(rank, 0)) in self._early:
                self._events.append(self._early.pop((rank, following)))
                self._delivered[rank] = following + 1
            self._changed.notify_all()

    async def delivered(self, rank: int, count: int) -> None:
        """Wait until the first ``count`` events of a rank have been delivered."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._delivered.get(rank, 0) >= count)

    async def collect(self) -> list[Event]:
        """Return all events since the last call; wait for one, unless the mailbox is closed."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._events) or self._closed)
            events, self._events = self._events, []
        return events

    async def close(self) -> None:
        """Make ``collect`` return without waiting."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()


class LineStream(io.TextIOBase):
    """Replaces ``sys.stdout``: sends complete lines; of a line that a progress bar redraws, the last state."""

    encoding = "utf-8"

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send, self._rest, self._lock = send, "", threading.Lock()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Send complete lines, keep the rest."""
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._send(line.rstrip("\r").rsplit("\r", 1)[-1])
        return len(text)

    def finish(self) -> None:
        """Send an incomplete last line."""
        if self._rest:
            self.write("\n")


class RankActor:
    """One rank, in a process of its own that Ray has placed."""

    rank: int
    _mailbox: Any
    _reported: dict[str, Any] | None
    _sent: int
    _sending: threading.Lock

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
        self._sent, self._sending = 0, threading.Lock()
        sys.stdout = LineStream(partial(self.post, "line", rank, "stdout"))
        sys.stderr = LineStream(partial(self.post, "line", rank, "stderr"))

    def post(self, *event: Any) -> None:
        """Send an event to the driver without waiting for it."""
        with self._sending:
            self._mailbox.post.remote(self.rank, self._sent, *event)
            self._sent += 1

    def run(self, work: bytes) -> tuple[str, Any]:
        """Call what ``pickle_run`` pickled; return ``("done", result)`` or ``("failed", failure)``."""
        import ray.cloudpickle

        try:
            return "done", ray.cloudpickle.loads(work)(self)
        except BaseException as error:  # SystemExit too: the driver is told why this rank has ended
            return "failed", self._reported or self.report(error)
        finally:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, LineStream):
                    stream.finish()
            ray.get(self._mailbox.delivered.remote(self.rank, self._sent))

    def report(self, error: BaseException) -> dict[str, Any]:
        """Send an error to the driver, and return it as a ``failure``."""
        import ray.cloudpickle

        text = "".join(traceback.format_exception(error))
        try:
            pickled = ray.cloudpickle.dumps(error)
        except Exception:
            pickled = None
        self._reported = {"rank": self.rank, "error": pickled, "type": type(error).__name__, "traceback": text}
        self.post("failed", self._reported)
        return self._reported
