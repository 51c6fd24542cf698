"""The two processes of a sandbox: a supervisor, and an isolated worker. Run as a program by its path.

The supervisor waits until its standard input closes (the trainer stops it, or has died), the worker ends, or the
processes together use too much memory. Then it kills all, removes the folder, and prints the reason in one line.

The worker calls a function with each request, pickled by the trainer, and answers in JSON, see
:mod:`rlhfkit.rewards.sandbox.channel`. What it prints goes to a pipe.
"""

import contextlib
import ctypes
import importlib.util
import json
import math
import os
import pickle
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_SET_CHILD_SUBREAPER = 36
_FIRST_USER = 1_900_000_000  # above the user ids that systemd gives to containers and services
CHECK_EVERY = 0.1
"""Interval in seconds at which the supervisor measures the memory of the worker's processes."""


def main() -> None:
    """Read the settings from the command line and run supervisor and worker; inside bubblewrap, the worker only."""
    settings = json.loads(sys.argv[-1])
    channel, confinement = _load_sibling("channel"), _load_sibling("confinement")
    if sys.argv[1] == "worker":
        os.environ.pop("PWD", None)  # set by bubblewrap
        _run_worker(settings, channel, confinement)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans among the descendants become children
    settings["user"] = _FIRST_USER + os.getpid()  # a user id that no other running process has
    worker = os.fork()
    if worker == 0:
        if settings["bubblewrap"]:
            _exec_bubblewrap(settings)
        _run_worker(settings, channel, confinement)
    os.close(settings["channel"])
    memory = math.inf if settings["limits"] is None else settings["limits"]["memory_gib"] * 2**30
    reason = _supervise(worker, memory)
    remove_folder(settings["folder"])
    print(json.dumps(reason), flush=True)


# ---------------------------------------------------------------------- the supervisor


def remove_folder(folder: str) -> None:
    """Remove a folder of any depth, if it is there: ``shutil.rmtree`` recurses until Python 3.13, ``rm`` does not."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        quiet = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
        with contextlib.suppress(OSError):  # there is no rm
            os.waitpid(os.posix_spawnp("rm", ["rm", "-rf", "--", folder], os.environ, file_actions=quiet), 0)


def _supervise(worker: int, memory: float) -> str:
    """Wait for a reason to end all processes, kill them, and return the reason; ``memory`` is in bytes."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            poll.register(os.pidfd_open(worker), select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(CHECK_EVERY * 1000)]
        ended, status = os.waitpid(-1, os.WNOHANG)
        while ended and ended != worker:  # an orphan that this process has adopted
            ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            reason = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        elif 0 in ready and not os.read(0, 1):
            reason = "was closed"
        elif (
            memory < math.inf
            and _memory_used(worker, shared=True) > memory
            and _memory_used(worker, shared=False) > memory
        ):
            reason = f"was killed because its processes used more than {memory / 2**30:g} GiB of memory together"
        else:
            continue
        _kill_all(None if ended else worker)
        return reason


def descendants(root: int) -> Iterator[int]:
    """Yield the ids of all descendants of a process; none where the kernel does not list children."""
    for listing in Path(f"/proc/{root}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listing.read_text().split()):
                yield child
                yield from descendants(child)


def _memory_used(worker: int, *, shared: bool) -> int:
    """Memory of the worker and its descendants in bytes; shared pages count once, or in every process if ``shared``."""
    return sum(
        _resident(process) if shared else _proportional_memory(process) for process in (worker, *descendants(worker))
    )


def _resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):  # it has just ended
        return 0


def _proportional_memory(process: int) -> int:
    """Proportional set size of a process in bytes: its own pages, and its share of shared pages."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):  # it has just ended, or belongs to another user
        return _resident(process)


def _kill_all(worker: int | None) -> None:
    """Kill the worker and all descendants; what a killed process leaves behind becomes a child of this one."""
    if worker is not None:
        os.kill(worker, signal.SIGKILL)
    for _ in range(1000):
        left = list(descendants(os.getpid()))
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return
        time.sleep(0.005)


# ---------------------------------------------------------------------- the worker


def _exec_bubblewrap(settings: dict[str, Any]) -> None:
    """Replace this process by a bubblewrap that starts the worker. Never returns."""
    try:
        os.setsid()
        _redirect_stdio()
        limits, readable_paths = settings["limits"], settings["readable_paths"]
        layers = ["processes", "writes", *(["reads"] if readable_paths is not None else [])]
        settings["existing"] = layers if limits["network"] else [*layers, "network"]
        here = os.path.dirname(os.path.abspath(__file__))
        shown = (
            readable_paths
            if readable_paths is None or here.startswith(tuple(f"{path}/" for path in readable_paths))
            else [*readable_paths, here]
        )
        flags = ["-I", "-B", "-u", *(["-S"] if sys.flags.no_site else [])]
        program = [sys.executable, *flags, os.path.abspath(__file__), "worker", json.dumps(settings)]
        words = _load_sibling("isolation").bubblewrap_command(
            program, settings["folder"], limits, shown, limits["network"]
        )
        os.execvp(words[0], words)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _run_worker(settings: dict[str, Any], channel: ModuleType, confinement: ModuleType) -> None:
    """Isolate this process, load the function, and serve requests. Never returns."""
    code = 1
    try:
        _redirect_stdio()
        trainer = channel.WorkerChannel(settings["channel"], settings["max_answer_bytes"])
        setup = pickle.loads(trainer.read())  # sent by the trainer
        limits = settings["limits"]
        layers = (
            []
            if limits is None
            else confinement.confine(
                limits,
                settings["folder"],
                user=settings["user"],
                existing=settings.get("existing", ()),
                readable=[*setup["path"], os.path.dirname(setup["program"])],
                readable_paths=settings["readable_paths"],
            )
        )
        trainer.write(_encode({"status": "ok", "value": layers}, trainer.largest))  # before user code is loaded
        trainer.read()
        if setup["path"]:
            sys.path[:] = setup["path"]
        try:
            factory = getattr(load_file(setup["program"]), setup["factory"])
            function = factory(layers, *pickle.loads(setup["arguments"]))
        except BaseException as error:
            trainer.write(_encode({"status": "error", "message": _describe(error)}, trainer.largest))
            return
        trainer.write(_encode({"status": "ok"}, trainer.largest))
        signal.signal(signal.SIGXCPU, _raise_cpu_limit)
        while request := trainer.read():
            if limits is not None:
                _extend_cpu_limit(limits["cpu_seconds"])
            trainer.write(_answer(function, request, trainer.largest))
        code = 0
    except (BrokenPipeError, ConnectionResetError):  # the trainer has closed the connection
        code = 0
    except BaseException:
        traceback.print_exc()  # the trainer's message includes the last output
    finally:
        os._exit(code)


def _extend_cpu_limit(seconds: int) -> None:
    """Allow this process ``seconds`` more CPU time; child processes count from 0."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    allowed = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


class CPULimitExceeded(BaseException):
    """Raised inside a call that has used up its CPU time."""


def _raise_cpu_limit(*_: object) -> None:
    raise CPULimitExceeded("the call has used up its CPU time")


def _redirect_stdio() -> None:
    """Close standard input, and redirect standard output to standard error; both pipes are the supervisor's."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)


def _answer(function: Callable[[Any], Any], request: bytes, largest: int) -> bytes:
    """Return the function's result, or its error as text, since an exception object could hold anything."""
    try:
        return _encode({"status": "ok", "value": function(pickle.loads(request))}, largest)
    except BaseException as error:
        return _encode({"status": "error", "message": _describe(error)}, largest)


def _encode(answer: dict[str, Any], largest: int) -> bytes:
    message = json.dumps(answer).encode()
    if len(message) > largest:
        raise ValueError(f"the answer has {len(message)} bytes, the limit is {largest}")
    return message


def _describe(error: BaseException) -> str:
    """Return an exception as text, even one whose ``__str__`` fails."""
    try:
        return "".join(traceback.format_exception(error))[-4000:]
    except BaseException:
        return f"{type(error).__name__} (which cannot be described)"


def _load_sibling(name: str) -> ModuleType:
    """Import a file of this folder under a name that no module of the user has, without importing ``rlhfkit``."""
    return load_file(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py"), f"rlhfkit_sandbox_{name}")


def load_file(path: str, name: str | None = None) -> ModuleType:
    """Import a module by path: importing it by name would import its package, and with it torch."""
    spec = importlib.util.spec_from_file_location(name or Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
