"""The parent of all ranks with one number: it has imported everything once, and forks a rank whenever it is asked to.

Importing torch, Lightning, DeepSpeed and Transformers costs several seconds of processor time, a fork 30 milliseconds.
Each rank number has a parent of its own, a plain single-threaded Python process: what differs between real ranks (the
seed of string hashes, what Lightning read from ``LOCAL_RANK`` when it was imported) differs here too.

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
from pathlib import Path
from typing import Any

# Their threads would not survive a fork. Read when pyarrow and tokenizers are imported.
WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "TOKENIZERS_PARALLELISM": "false"}
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
)


def preload() -> None:
    """Import what ranks need, and keep the garbage collector from ever looking at it again."""
    os.environ.update(WITHOUT_THREADS)
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
    value = getattr(importlib.import_module(module), name)(folder=folder, **request["arguments"])
    (folder / f"result_{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(value))


def main() -> None:
    """Serve until nobody asks any more."""
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries print while they are imported
    preload()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            code = 1
            try:
                become_rank(json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.write(answers, b"%d\n" % pid)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # the root of the tests, not this folder
    main()
