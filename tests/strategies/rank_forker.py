"""The parent of all ranks with one number: it has imported everything once, and forks a rank whenever it is asked to.

Importing torch, Lightning, DeepSpeed and Transformers costs several seconds of processor time, a fork 30 milliseconds.
Ranks 0 and 1 come from processes of their own, plain single-threaded Python: what differs between real ranks (the
seed of string hashes, what Lightning read from ``LOCAL_RANK`` when it was imported) differs here too. All processes of
the tests share the two, which fork a parent of ranks for each of them, that of rank 1 also those of further ranks.

A parent reads from its connection the number of its ranks and then requests, one JSON line each, and answers with the
process id of the rank and, when the rank has ended, its exit code.
"""

import gc
import importlib
import importlib.metadata
import json
import os
import selectors
import signal
import socket
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # the root of the tests, not this folder

import ray_worker  # noqa: E402

PRELOADED = (
    "torch",
    "lightning.pytorch",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # its first engine imports it, and with it all of torch.compile
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "networkx",
    "transformers.models.llama.modeling_llama",
    "peft",
    "datasets",
    "pytest",  # of tests that are a rank's program
)


def preload() -> None:
    """Import what ranks need, and keep the garbage collector from ever looking at it again."""
    importlib.metadata.entry_points = cache(importlib.metadata.entry_points)  # as in conftest.py
    for name in PRELOADED:
        importlib.import_module(name)
    import rlhfkit

    for name in rlhfkit.__all__:
        getattr(rlhfkit, name)
    assert len(os.listdir("/proc/self/task")) == 1, threading.enumerate()
    gc.collect()
    gc.freeze()


def become_rank(request: dict[str, Any]) -> None:
    """In the forked process: what a rank started from nothing would see, then its function."""
    import numpy

    os.setsid()
    with open(request["log"], "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["place"])
    numpy.random.seed()  # Python's generator does so itself; that of torch starts from a constant in each process
    module, name = request["function"].split(":")
    folder = Path(request["folder"])
    function = getattr(importlib.import_module(module), name)
    value = getattr(function, "on_rank", function)(folder=folder, **request["arguments"])  # of a test of itself
    (folder / f"result_{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(value))


def become_parent(connection: socket.socket) -> None:
    """In the forked process: serve ranks with one number until nobody asks any more."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    lines = connection.makefile()
    os.environ["LOCAL_RANK"] = lines.readline().strip()
    rank_zero_only.rank = int(os.environ["LOCAL_RANK"])  # read from the environment at import
    for line in lines:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            lines.close()
            ray_worker.run_to_end(become_rank, request, others=[connection])
        connection.sendall(b"%d\n" % pid)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def fork_parent(ready: selectors.BaseSelector, server: socket.socket) -> None:
    """For a process of the tests."""
    connection = server.accept()[0]
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ray_worker.run_to_end(become_parent, connection, others=[server])
    connection.close()


if __name__ == "__main__":
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents
    ray_worker.serve(socket.socket(fileno=int(sys.argv[1])), fork_parent)
