"""Engines over several machines: vLLM's multi-process executor with ``nnodes``, one actor on each machine.

The actor of the first machine is the engine; it starts one on each other machine, which runs workers only (vLLM's
"headless" launch) and ends with it. When one of them ends, the engine ends: it is restarted as a whole.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rlhfkit.ray_session import unassigned_port


def node_arguments(nodes: int) -> dict[str, Any]:
    """Return the arguments of ``vllm.EngineArgs`` of an engine over ``nodes`` machines, of which this is the first."""
    import ray

    address = str(ray.util.get_node_ip_address())
    port = unassigned_port(address)  # vLLM's first worker listens there later
    return {"nnodes": nodes, "node_rank": 0, "master_addr": address, "master_port": port}


def run_workers(arguments: Mapping[str, Any]) -> None:
    """Run the workers of one machine but the first; returns when one of them has ended."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = AsyncEngineArgs(**arguments).create_engine_config(headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)


def end_with_parent() -> None:
    """Have this process, if Python's ``multiprocessing`` started it, end when its parent does, even if that was killed.

    vLLM 0.32 asks its workers to leave their loop then. Those of an engine over several machines, which may be waiting
    for one another, have been seen to stay, with the memory of their GPUs.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, name="parent watch", daemon=True).start()


class WorkerMachines:
    """The actors of an engine's other machines; ``calls`` are Ray's references to their endless calls.

    When one ends, all processes of this one's are killed, so that vLLM fails what runs and what comes.
    """

    def __init__(self, actors: list[Any], calls: list[Any], end: Callable[[], None] | None = None) -> None:
        self._actors = actors  # they live as long as they are referred to
        self._end = end or _kill_children
        self.problem: str | None = None
        """Why the engine cannot be used any more; ``None`` while all machines run."""
        for number, call in enumerate(calls, 1):
            threading.Thread(target=self._watch, args=(number, call), name=f"machine {number}", daemon=True).start()

    def _watch(self, number: int, call: Any) -> None:
        import ray

        try:
            ray.get(call)
            reason = "a worker has ended"
        except Exception as error:
            reason = str(getattr(error, "cause", None) or error)
        if self.problem is None:
            self.problem = f"machine {number} of the engine is lost: {reason}"
        self._end()

    def check(self) -> None:
        """Raise RuntimeError if a machine is lost."""
        if self.problem is not None:
            raise RuntimeError(self.problem)


def _kill_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
