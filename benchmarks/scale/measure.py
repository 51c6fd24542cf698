"""Measurements of the real code on this machine, as plain dictionaries for ``measured.json``."""

import multiprocessing
import pickle
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.scale.rank import RunSize, run

STORE_COUNTS = ("requests", "entries", "entry_bytes")
"""What a rank asks of the store in an iteration."""


def summarize(size: RunSize, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and largest processor seconds of each part over the ranks of a run, and the largest memory."""
    names = sorted({name for each in results for name in each["parts"]})

    def over_ranks(name: str) -> dict[str, float]:
        seconds = [each["parts"].get(name, {"processor": 0.0})["processor"] for each in results]
        return {"mean": statistics.mean(seconds), "most": max(seconds)}

    return {
        "ranks": len(results),
        "size": vars(size),
        "answer_tokens": sum(each["tokens"] for each in results) / size.sequences,
        "longest": size.prompt_tokens + max(each["longest"] for each in results),
        "parts": {name: over_ranks(name) for name in names},
        "processor": statistics.mean(each["processor"] for each in results),
        "clock": max(each["clock"] for each in results),
        "peak": max(each["peak"] for each in results),
        "resident": max(each["resident"] for each in results),
        "sent": max(each["traffic"]["sent"] for each in results),
        "store": {name: statistics.mean(each["traffic"][name] for each in results) for name in STORE_COUNTS},
    }


def measure_runs(sizes: Iterable[tuple[RunSize, int]], say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Measure each run of these sizes and numbers of ranks."""
    found = []
    for size, ranks in sizes:
        found.append(summarize(size, run(size, ranks)))
        say(f"{ranks} ranks, {size}: {found[-1]['processor']:.2f} s, {found[-1]['peak'] / 1e6:.0f} MB")
    return found


# ------------------------------------------------------------------ the store that ranks wait on


def _serve(port: int, pipe: Any) -> None:
    """Serve a store, and answer with the processor seconds so far whenever asked."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv():
        pipe.send(time.process_time())


def measure_store(entry_bytes: int = 200) -> dict[str, float]:
    """Processor seconds of the process that holds the ranks' store, per request, per key and per byte that it answers.

    Its one thread answers all ranks; with a client that does nothing else, it is what limits them.
    """
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("forkserver")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(port, theirs), daemon=True)
    server.start()
    store = TCPStore("127.0.0.1", ours.recv(), is_master=False, wait_for_workers=False)

    def served(work: Callable[[], None]) -> float:
        ours.send(True)
        before = ours.recv()
        work()
        ours.send(True)
        return float(ours.recv() - before)

    def add(count: int) -> None:
        for _ in range(count):
            store.add("count", 1)

    def append(count: int, value: bytes) -> None:
        for number in range(count):
            store.set(f"entry/{number}", value)

    def read(times: int, keys: list[str]) -> None:
        for _ in range(times):
            store.multi_get(keys)

    requests, keys = 5000, [f"entry/{number}" for number in range(1000)]
    add(100)
    request = served(lambda: add(requests)) / requests
    write = served(lambda: append(1000, pickle.dumps(b"x" * entry_bytes))) / 1000
    small = served(lambda: read(100, keys)) / (100 * len(keys))
    append(1000, b"x" * 10_000)
    large = served(lambda: read(20, keys)) / (20 * len(keys))
    ours.send(False)
    server.join()
    byte = max(0.0, (large - small) / (10_000 - entry_bytes))
    return {"request": request, "write": write, "key": max(0.0, small - byte * entry_bytes), "byte": byte}


def measure_log(runs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What runs on several ranks asked of the store, as arguments of :meth:`StoreUse.iteration_seconds`."""
    several = [run for run in runs if run["ranks"] > 1]
    return {
        "entries_per_rank": max(run["store"]["entries"] for run in several),
        "bytes_per_group": max(run["store"]["entry_bytes"] * run["ranks"] / run["size"]["prompts"] for run in several),
        "requests_per_rank": max(run["store"]["requests"] for run in several),
    }
