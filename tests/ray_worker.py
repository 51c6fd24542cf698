"""Ray's worker processes, forked from one that has imported everything once, as are the ranks of ``rank_forker.py``.

A worker that imports torch, Transformers or vLLM anew costs up to nine seconds of processor time, and the suite has two
hundred. Ray runs this file in place of its own ``setup_worker.py`` (``use`` sees to it). It asks the parent of workers
with the same variables for a process, starting that parent if it is the first, and lives as long as that process, for
which Ray takes it. Lightning and rlhfkit are left for the worker to import: they read a rank from the environment.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

FOLDER = "RLHFKIT_TEST_PARENTS"
"""Variable with the folder of the parents' sockets, and the process that they end with."""
FIRST_JOB = "01000000"
"""Workers of a later driver of a Ray are not forked: they were seen to wait for ever."""
READ_LATER = ("PYTHONPATH", "VLLM_ENABLE_V1_MULTIPROCESSING")
"""Variables that workers of one parent may have of their own."""
# Their threads would not survive a fork. Read when pyarrow and tokenizers are imported.
WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "TOKENIZERS_PARALLELISM": "false"}
RAY = ("ray", "ray._private.node", "ray.actor", "ray._private.async_compat", "ray._private.runtime_env.setup_hook")
ENGINE = ("vllm.v1.engine.llm_engine", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker", "xgrammar")
OTHERS = ("torch", "transformers.models.llama.modeling_llama", "datasets", "peft", "deepspeed", "networkx",
          "deepspeed.runtime.zero.muon.muon_optimizer", "torchmetrics")  # fmt: skip


def share() -> None:
    """Let this process and all that it starts have the same parents of workers and of ranks, which end with it."""
    if FOLDER not in os.environ:
        folder = tempfile.mkdtemp(prefix="workers", dir="/tmp")  # paths of sockets are short
        os.environ[FOLDER] = f"{folder}:{os.getpid()}"
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def use() -> None:
    """Let a Ray that this process starts from now on be without what the tests do not use, and fork its workers.

    Not on a machine with GPUs, where what is imported may have asked for them: a fork could not use them. Nor with
    ``RLHFKIT_FORKED_WORKERS=0``, to see whether a test fails for this reason.
    """
    from ray._private import node, ray_constants

    # It gets no further machines, and nobody wants logs or is told how it is used. Each takes a second to start.
    for name in ("start_monitor", "start_api_server", "start_log_monitor"):
        setattr(node.Node, name, lambda self, **options: None)
    if not os.path.exists("/dev/nvidiactl") and os.environ.get("RLHFKIT_FORKED_WORKERS") != "0":
        share()
        ray_constants.SETUP_WORKER_FILENAME = __file__


# ---------------------------------------------------------------- what Ray starts


def main(arguments: list[str]) -> None:
    """Be the worker that Ray asks for, or its stand-in."""
    context = json.loads(next((one for one in arguments if one.startswith("--serialized")), "={}").partition("=")[2])
    variables = context.get("env_vars") or {}
    command = [one for one in arguments if not one.startswith(("--serialized-runtime-env-context", "--language"))]
    if (
        FOLDER in os.environ
        and os.environ.get("RAY_JOB_ID") == FIRST_JOB
        and "--language=PYTHON" in arguments
        and command[0].endswith("default_worker.py")
        and not context.get("command_prefix")
        and not any("$" in value for value in variables.values())
    ):
        os.environ.update(variables)
        be_worker(command, variables)
    from ray._private.workers import setup_worker

    os.execv(sys.executable, [sys.executable, setup_worker.__file__, *arguments])


def be_worker(command: list[str], variables: dict[str, str]) -> None:
    """Ask for a process, and end as it does; returns if there is none."""
    read_at_import = {name: value for name, value in variables.items() if name not in READ_LATER}
    name = hashlib.sha256(json.dumps(read_at_import, sort_keys=True).encode()).hexdigest()[:16]
    # Workers watch the raylet that Ray knew when their parent imported it, be it of another Ray that has ended since.
    # So they watch the tests; this stand-in ends with its raylet, and its worker with it.
    ended_with = os.environ[FOLDER].rpartition(":")[2]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    parent = connect(name, [__file__, "parent"], {"PYTHONPATH": "", "RAY_RAYLET_PID": ended_with})
    request = {"command": command, "environment": dict(os.environ), "place": os.getcwd()}
    try:
        socket.send_fds(parent, [b"\n"], [0, 1, 2])
        parent.sendall(json.dumps(request).encode() + b"\n")
        answers = parent.makefile()
        pid = int(answers.readline())
    except (OSError, ValueError):
        return  # the parent has not come up
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(pid, number))
    code = int(answers.readline() or -signal.SIGKILL)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def place_of(name: str) -> str:
    """Of the socket of a parent; what it prints is in the file of the same name with ``.log``."""
    return os.path.join(os.environ[FOLDER].rpartition(":")[0], name)


def connect(name: str, program: list[str], variables: dict[str, str]) -> socket.socket:
    """To the parent of this name, which reads what it is asked when it has imported everything.

    The first one starts it: a program that is given the number of a socket that listens, with these variables.
    """
    path = place_of(name)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        client = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            client.connect(path)
            return client
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX) as server, open(f"{path}.log", "ab") as log:
            server.bind(path)
            server.listen(64)
            subprocess.Popen(
                [sys.executable, "-u", *program, str(server.fileno())],
                env=os.environ | WITHOUT_THREADS | variables,
                pass_fds=[server.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        client.connect(path)
        return client


# ---------------------------------------------------------------- the parent of the workers


def preload() -> None:
    """Import what workers with these variables need."""
    for name in (*RAY, *(ENGINE if "VLLM_NO_USAGE_STATS" in os.environ else OTHERS)):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1
    gc.collect()
    gc.freeze()


def serve(server: socket.socket, fork: Callable[[selectors.BaseSelector, socket.socket], None]) -> None:
    """Fork a process for each connection, until the tests have ended."""
    with selectors.DefaultSelector() as ready:
        ready.register(os.pidfd_open(int(os.environ[FOLDER].rpartition(":")[2])), selectors.EVENT_READ, sys.exit)
        ready.register(server, selectors.EVENT_READ, partial(fork, ready, server))
        while True:
            for key, _ in ready.select():
                if key.fd in ready.get_map():  # or an event before this one has been its end
                    key.data()


def fork_worker(ready: selectors.BaseSelector, server: socket.socket) -> None:
    """Fork the worker that a stand-in asks for."""
    client = server.accept()[0]
    files = socket.recv_fds(client, 1, 3)[1]
    request = client.makefile().readline()
    pid = os.fork()
    if pid == 0:
        run_to_end(become_worker, json.loads(request), files, others=[server, client])
    for file in files:
        os.close(file)
    client.sendall(b"%d\n" % pid)
    end = os.pidfd_open(pid)

    def ended() -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):  # Ray has killed the stand-in
            client.sendall(b"%d\n" % code)
        for one in (end, client):
            ready.unregister(one)
        os.close(end)
        client.close()

    def killed() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        ended()

    ready.register(end, selectors.EVENT_READ, ended)
    ready.register(client, selectors.EVENT_READ, killed)


def run_to_end(function: Callable[..., None], *arguments: Any, others: Iterable[socket.socket]) -> NoReturn:
    """In a forked process: do what it is for, without the sockets of others, and end as a process of its own would."""
    code = 1
    try:
        for one in others:
            one.close()
        function(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def become_worker(request: dict[str, Any], files: list[int]) -> None:
    """In the forked process: what a worker that Ray has started would see."""
    import numpy
    from ray._private import utils, worker
    from ray._raylet import AuthenticationTokenLoader, Config

    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    Config.initialize("")  # reads RAY_AUTH_MODE and others anew, as Rays of one parent may have their own
    AuthenticationTokenLoader.instance().reset_cache()
    worker.global_worker.original_visible_accelerator_ids = utils.get_visible_accelerator_ids()  # as at import
    os.chdir(request["place"])
    numpy.random.seed()
    sys.argv = request["command"]
    places = os.environ.get("PYTHONPATH")  # that of each worker may be another
    sys.path[:1] = [os.path.dirname(sys.argv[0]), *(places.split(os.pathsep) if places else [])]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "parent":
        sys.path[0] = os.path.dirname(os.path.abspath(__file__))
        preload()
        serve(socket.socket(fileno=int(sys.argv[2])), fork_worker)
    main(sys.argv[1:])
