"""The two processes of one sandbox: a guard, and inside the walls a worker. Run as a program by its path.

The guard waits. When its input closes (our side has had enough, or is gone), when the worker ends, or when all its
processes together use too much memory, it kills everything, removes the folder, and writes one line that says why.

The worker loads a function and calls it with what comes down a socket (pickled: it comes from us). It answers with
JSON, which is safe to read whoever wrote it; :mod:`rlhfkit.rewards.sandbox.channel` ties answers to requests. Whatever
it prints goes down a pipe.
"""

import contextlib
import importlib
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

_FIRST_USER = 1_900_000_000  # above what systemd gives to containers and services
CHECK_EVERY = 0.1
"""Seconds between two looks at the memory of the worker's processes."""


def main() -> None:
    """Read the settings from the command line, and start guard and worker; or the worker alone, inside bubblewrap."""
    settings = json.loads(sys.argv[-1])
    channel, confinement, namespaces = (_sibling(name) for name in ("channel", "confinement", "namespaces"))
    if sys.argv[1] == "worker":
        os.environ.pop("PWD", None)  # of bubblewrap
        _work(settings, channel, confinement, separated=True)
    namespaces.adopt_orphans()
    settings["user"] = _FIRST_USER + os.getpid()  # a number that no other running process has
    wrapped = settings["backend"] == "bubblewrap"
    separated = wrapped or namespaces.separate()
    worker = os.fork()
    if worker == 0:
        if wrapped:
            _work_in_bubblewrap(settings)
        _work(settings, channel, confinement, separated)
    os.close(settings["channel"])
    reason = _guard(worker, int(settings["limits"]["memory_gib"] * 2**30), separated)
    shutil.rmtree(settings["folder"], ignore_errors=True)
    print(json.dumps(reason), flush=True)


# ---------------------------------------------------------------------- the guard


def _guard(worker: int, memory: int, separated: bool) -> str:
    """Wait until there is a reason to end everything, end it, and say why."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            poll.register(os.pidfd_open(worker), select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(CHECK_EVERY * 1000)]
        ended, status = os.waitpid(-1, os.WNOHANG)
        while ended and ended != worker:  # an orphan that we have inherited
            ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            reason = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        elif 0 in ready and not os.read(0, 1):
            reason = "was closed"
        elif _memory(worker, shared=True) > memory and _memory(worker, shared=False) > memory:
            reason = f"was killed because its processes used more than {memory / 2**30:g} GiB of memory together"
        else:
            continue
        _kill_all(None if ended else worker, separated)
        return reason


def descendants(root: int) -> Iterator[int]:
    """The children of a process, their children, and so on; nothing where the kernel does not tell."""
    for listing in Path(f"/proc/{root}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listing.read_text().split()):
                yield child
                yield from descendants(child)


def _memory(worker: int, *, shared: bool) -> int:
    """Bytes in memory of the worker and what it started; pages of several processes count once unless ``shared``."""
    return sum(_resident(process) if shared else _share(process) for process in (worker, *descendants(worker)))


def _resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):  # it has just ended
        return 0


def _share(process: int) -> int:
    """What is a process's own, and its share of the pages of several."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):  # it has just ended, or is another user's and we may not look
        return _resident(process)


def _kill_all(worker: int | None, separated: bool) -> None:
    """End every process inside. Process 1 takes its namespace with it; without one the whole tree is hunted down."""
    if worker is not None:
        os.kill(worker, signal.SIGKILL)
    for _ in range(1000):
        left = [] if separated else list(descendants(os.getpid()))
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0 if separated else os.WNOHANG)[0]:
                pass
        if not left:
            return
        time.sleep(0.005)


# ---------------------------------------------------------------------- the worker


def _work_in_bubblewrap(settings: dict[str, Any]) -> None:
    """Become a bubblewrap that starts the worker, and never return."""
    try:
        os.setsid()
        _to_nowhere()
        limits, view = settings["limits"], settings["view"]
        walls = ["processes", "files", *(["data"] if view is not None else [])]
        settings["standing"] = walls if limits["network"] else [*walls, "network"]
        here = os.path.dirname(os.path.abspath(__file__))
        shown = view if view is None or here.startswith(tuple(f"{path}/" for path in view)) else [*view, here]
        flags = ["-I", "-B", "-u", *(["-S"] if sys.flags.no_site else [])]
        program = [sys.executable, *flags, os.path.abspath(__file__), "worker", json.dumps(settings)]
        words = _sibling("bubblewrap").command(program, settings["folder"], limits, shown, limits["network"])
        os.execvp(words[0], words)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _work(settings: dict[str, Any], channel: ModuleType, confinement: ModuleType, separated: bool) -> None:
    """Serve, and never return."""
    code = 1
    try:
        if separated and "standing" not in settings:
            os.setsid()  # a signal to its group would reach the guard, which it cannot name otherwise
        _to_nowhere()
        trainer = channel.WorkerEnd(settings["channel"], settings["largest_answer"])
        setup = pickle.loads(trainer.read())
        walls = confinement.confine(
            settings["limits"],
            settings["folder"],
            user=settings["user"],
            separated=separated,
            standing=settings.get("standing", ()),
            readable=[*setup["path"], os.path.dirname(setup["program"])],
            view=settings["view"],
        )
        trainer.write(_encoded({"status": "ok", "value": walls}, trainer.largest))  # before anybody's code is loaded
        trainer.read()
        if setup["path"]:
            sys.path[:] = setup["path"]
        try:
            function = getattr(load_file(setup["program"]), setup["factory"])(*pickle.loads(setup["arguments"]))
        except BaseException as error:
            trainer.write(_encoded({"status": "error", "message": _described(error)}, trainer.largest))
            return
        trainer.write(_encoded({"status": "ok"}, trainer.largest))
        signal.signal(signal.SIGXCPU, _computed_enough)  # the first process of a namespace has to ask for signals
        while request := trainer.read():
            _allow_computing(settings["limits"]["cpu_seconds"])
            trainer.write(_answer(function, request, trainer.largest))
        code = 0
    except (BrokenPipeError, ConnectionResetError):  # nobody listens any more
        code = 0
    except BaseException:
        traceback.print_exc()  # our side shows what was printed last
    finally:
        os._exit(code)


def _allow_computing(seconds: int) -> None:
    """So many seconds more than were used up to now; processes that are started count from 0."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    allowed = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


class ComputedEnough(BaseException):
    """Raised where a call is when it has used up its seconds of computing."""


def _computed_enough(*_: object) -> None:
    raise ComputedEnough("the call has used up its seconds of computing")


def _to_nowhere() -> None:
    """No input, and output where our side keeps its end; the pipes that the guard uses are not for the worker."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)


def _answer(function: Callable[[Any], Any], request: bytes, largest: int) -> bytes:
    """What the function returned, or its error as text: an exception object may be anything and stays here."""
    try:
        return _encoded({"status": "ok", "value": function(pickle.loads(request))}, largest)
    except BaseException as error:
        return _encoded({"status": "error", "message": _described(error)}, largest)


def _encoded(answer: dict[str, Any], largest: int) -> bytes:
    message = json.dumps(answer).encode()
    if len(message) > largest:
        raise ValueError(f"the answer has {len(message)} bytes, more than the {largest} that an answer may have")
    return message


def _described(error: BaseException) -> str:
    """An exception as text, even one that cannot describe itself."""
    try:
        return "".join(traceback.format_exception(error))[-4000:]
    except BaseException:
        return f"{type(error).__name__} (which cannot be described)"


def _sibling(name: str) -> ModuleType:
    """A file beside this one, as part of a package that brings nothing else."""
    if "rlhfkit_sandbox" not in sys.modules:
        package = sys.modules["rlhfkit_sandbox"] = ModuleType("rlhfkit_sandbox")
        package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    return importlib.import_module(f"rlhfkit_sandbox.{name}")


def load_file(path: str) -> ModuleType:
    """A module from its file. By name it would bring its package, and that torch.

    Args:
        path: Of a Python file.
    """
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
