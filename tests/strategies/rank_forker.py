"""The parent of all ranks with one number: it has imported everything once, and forks a rank whenever it is asked to.

Importing torch, Lightning, DeepSpeed and Transformers costs several seconds of processor time, a fork 30 milliseconds.
Ranks 0 and 1 have parents of their own, plain single-threaded Python processes: what differs between real ranks (the
seed of string hashes, what Lightning read from ``LOCAL_RANK`` when it was imported) differs here too. The parents of
further ranks are forked from that of rank 1, which spares their imports.

Reads requests from its standard input, one JSON line each, and answers with the process id of the rank and, when the
rank has ended, its exit code. It ends with the process that has started it.
"""

import gc
import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    import ray_worker

    os.environ.update(ray_worker.WITHOUT_THREADS)
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


def become_parent(rank: int, requests: str, answers: str) -> None:
    """In the forked process: serve the ranks with another number, through named pipes."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    os.environ["LOCAL_RANK"] = str(rank)
    rank_zero_only.rank = rank  # read from the environment at import
    numbers = os.open(answers, os.O_WRONLY)
    with open(requests) as lines:
        os.dup2(lines.fileno(), 0)  # of the process that this one was forked from
        serve(lines, numbers)


def main() -> None:
    """Serve until nobody asks any more."""
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries print while they are imported
    preload()
    serve(sys.stdin, answers)


def serve(lines: Iterable[str], answers: int) -> None:
    """Fork a rank, or the parent of ranks with another number, for every request."""
    for line in lines:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            code = 1
            try:
                if "parent" in request:
                    become_parent(*request["parent"])
                else:
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    become_rank(request)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        if "parent" in request:
            continue
        os.write(answers, b"%d\n" % pid)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # the root of the tests, not this folder
    main()
