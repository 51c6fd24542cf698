"""``Stopwatch``: processor seconds and seconds of the parts of an iteration, by wrapping the functions that do them.

Each part excludes the parts inside it. Seconds of the clock include waiting for other ranks and, where there are more
ranks than cores, for a core; processor seconds do not, so those are what is compared with predictions. They are those
of the whole process: gloo copies in threads of its own.
"""

import functools
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Part:
    """What one part has taken so far."""

    processor: float = 0.0
    """Processor seconds, less those of parts inside it."""
    clock: float = 0.0
    """Seconds, less those of parts inside it."""
    calls: int = 0
    resident: int = 0
    """Bytes of the process's resident set at the end of the last call."""
    peak: int = 0
    """Its high-water mark then."""


def status_bytes(field: str) -> int:
    """A line of /proc/self/status in bytes: ``VmRSS``, the resident set, ``VmHWM``, its high-water mark. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


class Stopwatch:
    """Measures named parts of the main thread's work, which may be inside one another."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self._inner: list[list[float]] = []  # per open part: processor seconds and seconds of parts inside it

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the code inside the context to a part."""
        self._inner.append([0.0, 0.0])
        processor, clock = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            processor, clock = time.process_time() - processor, time.perf_counter() - clock
            inner = self._inner.pop()
            part = self.parts.setdefault(name, Part())
            part.processor += processor - inner[0]
            part.clock += clock - inner[1]
            part.calls += 1
            if part.calls < 3:  # parts that are called often are small
                part.resident, part.peak = status_bytes("VmRSS"), status_bytes("VmHWM")
            if self._inner:
                self._inner[-1][0] += processor
                self._inner[-1][1] += clock

    def wrap(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, measured."""

        @functools.wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            with self.measure(name):
                return function(*arguments, **named)

        return measured

    def install(self, places: Mapping[str, Sequence[str]]) -> None:
        """Wrap the functions of each part, given as ``"module:function"`` or ``"module:Class.method"``."""
        for name, functions in places.items():
            for place in functions:
                module, path = place.split(":")
                owner: Any = importlib.import_module(module)
                *outer, last = path.split(".")
                for each in outer:
                    owner = getattr(owner, each)
                found = vars(owner)[last]
                if isinstance(found, classmethod):
                    setattr(owner, last, classmethod(self.wrap(found.__func__, name)))
                else:
                    setattr(owner, last, self.wrap(found, name))


class Traffic:
    """Counts what this rank sends: bytes of rows in ``all_to_all_single``, and entries and requests of the store."""

    def __init__(self) -> None:
        self.sent = 0
        """Bytes of rows for other ranks."""
        self.requests = 0
        """Answered requests of the ranks' store."""
        self.entries = 0
        """Entries written to logs."""
        self.entry_bytes = 0
        """Of these, pickled."""

    def clear(self) -> None:
        """Count from 0."""
        self.__init__()  # type: ignore[misc]

    def install(self) -> None:
        """Begin to count."""
        import pickle

        import torch.distributed

        from rlhfkit.rank_store import RankStore

        exchange, append, request = torch.distributed.all_to_all_single, RankStore.append, RankStore._request

        def exchanged(output: Any, given: Any, received: Any = None, sizes: Any = None, **named: Any) -> Any:
            kept = sizes[torch.distributed.get_rank()] if sizes else 0
            self.sent += (given.shape[0] - kept) * given[:1].nbytes
            return exchange(output, given, received, sizes, **named)

        def appended(store: Any, name: str, entry: Any) -> None:
            self.entries += 1
            self.entry_bytes += len(pickle.dumps(entry))
            append(store, name, entry)

        def requested(store: Any, send: Any) -> Any:
            self.requests += 1
            return request(store, send)

        torch.distributed.all_to_all_single = exchanged
        RankStore.append, RankStore._request = appended, requested  # type: ignore[method-assign]
