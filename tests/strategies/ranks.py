"""Start a function of the tests on several ranks, each a real process over gloo, and collect what it returns."""

import contextlib
import functools
import json
import os
import random
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray_worker

FOLDER = Path(__file__).parent
_NAMES: list[socket.socket] = []
"""Of the ports that this process has."""


def free_port() -> int:
    """A TCP port that is free, that no process gets by asking for any port (those are from 32768 on), nor another test.

    Whoever binds its name, which Linux keeps outside of the file system, has a port until its process ends.
    """
    while True:
        port, name = random.SystemRandom().randrange(20_000, 32_768), socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, contextlib.suppress(OSError):
            name.bind(f"\0port {port} of a test")
            probe.bind(("127.0.0.1", port))
            _NAMES.append(name)
            return port
        name.close()


def rank_environment(rank: int, ranks: int, port: int, folder: Path) -> dict[str, str]:
    """What a launcher sets for one rank; extensions would be built in ``folder``, one thread per rank."""
    return os.environ | {
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


class RankForker:
    """The process that forks all ranks with one number (``rank_forker.py``)."""

    def __init__(self, rank: int) -> None:
        ray_worker.share()
        self.name = f"rank_{min(rank, 1)}"
        variables = {"LOCAL_RANK": str(min(rank, 1)), "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
        self.connection = ray_worker.connect(self.name, [str(FOLDER / "rank_forker.py")], variables)
        self.answers = self.connection.makefile("rb", 0)
        self.connection.sendall(b"%d\n" % rank)

    def ask(self, request: dict[str, Any]) -> None:
        """For a rank."""
        self.connection.sendall(json.dumps(request).encode() + b"\n")

    def answer(self, timeout: float) -> int | None:
        """The next number, or None if there is none within ``timeout`` seconds."""
        if not select.select([self.connection], [], [], timeout)[0]:
            return None
        line = self.answers.readline()
        if not line:
            log = Path(ray_worker.place_of(self.name) + ".log").read_text()
            raise AssertionError(f"the parent of the ranks died\n{log[-5000:]}")
        return int(line)


@functools.cache
def forker_of(rank: int) -> RankForker:
    """Of ranks with this number; started when first used, kept until the tests end."""
    return RankForker(rank)


class Rank:
    """A rank that has been asked for."""

    def __init__(self, parent: RankForker) -> None:
        self.parent = parent
        pid = parent.answer(timeout=600)
        assert pid is not None, "no rank within 600 s: its parent is still importing"
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.code is None:
            self.code = self.parent.answer(timeout=0)
        return self.code

    def kill(self) -> None:
        """End it and the processes that it has started."""
        if self.poll() is not None:
            return
        for send in (os.killpg, os.kill):  # it may have ended this moment, or have no group of its own yet
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, signal.SIGKILL)
        self.code = self.parent.answer(timeout=120)
        # An exit code that nobody has read would be taken for the process id of the next rank.
        assert self.code is not None, f"rank {self.pid} did not end within 120 s of being killed"


Function = str | Callable[..., Any]
"""What ranks run: a function of a module of the tests, or ``"module:function"`` as imported from ``tests``."""


def start(function: Function, ranks: int, folder: Path, **arguments: Any) -> list[Rank]:
    """Start a function on all ranks; each writes a result and a log."""
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__name__}"
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    forkers = [forker_of(rank) for rank in range(ranks)]
    for rank, forker in enumerate(forkers):
        (folder / f"result_{rank}.json").unlink(missing_ok=True)
        log = folder / f"rank_{rank}.log"
        log.write_bytes(b"")
        forker.ask(
            {
                "function": name,
                "arguments": arguments,
                "folder": str(folder),
                "log": str(log),
                "environment": rank_environment(rank, ranks, port, folder),
                "place": os.getcwd(),
            }
        )
    return [Rank(forker) for forker in forkers]


def stop(processes: list[Rank]) -> None:
    """Kill what still runs, children included."""
    for process in processes:
        process.kill()


def run(function: Function, ranks: int, folder: Path, timeout: float = 600, **arguments: Any) -> list[Any]:
    """Run a function on all ranks and return their results in order; fails with the logs."""
    results = _finish(start(function, ranks, folder, **arguments), folder, timeout, until_one_fails=True)
    if len(results) < ranks:
        logs = "\n".join(f"--- rank {r}\n{(folder / f'rank_{r}.log').read_text()[-5000:]}" for r in range(ranks))
        name = getattr(function, "__name__", function)
        raise AssertionError(f"{name} on {ranks} rank(s) failed or took longer than {timeout} s\n{logs}")
    return list(results.values())


def on_two_ranks(function: Callable[..., None]) -> Callable[..., None]:
    """Make a test of what a function asserts on each of two ranks, which have a folder and a model."""

    def test(tmp_path: Path, model_folder: str) -> None:
        run(function, 2, tmp_path, model=model_folder)

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    test.on_rank = function  # type: ignore[attr-defined]
    return pytest.mark.distributed(test)


def run_until_dead(
    function: Function, ranks: int, folder: Path, timeout: float = 600, **arguments: Any
) -> dict[int, Any]:
    """Run a function on ranks of which some die, and return the results of those that wrote one, by rank."""
    return _finish(start(function, ranks, folder, **arguments), folder, timeout, until_one_fails=False)


def _finish(processes: list[Rank], folder: Path, timeout: float, *, until_one_fails: bool) -> dict[int, Any]:
    """Wait for ranks, end those that are left, and return the results that were written, by rank."""
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if until_one_fails and any(process.poll() not in (None, 0) for process in processes):
                time.sleep(1.0)  # in which the others may say what they have noticed
                break
            time.sleep(0.05)
    finally:
        stop(processes)
    results = {rank: folder / f"result_{rank}.json" for rank in range(len(processes))}
    return {rank: json.loads(result.read_text()) for rank, result in results.items() if result.exists()}
