"""Manage the ranks on Ray from the driver: start and number their processes, wait for them, report failures, stop."""

import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from rlhfkit.rank_store import RankError
from rlhfkit.ray_calls import ActorCalls, first_lines_of
from rlhfkit.ray_placement import ReservedResources, actor_options
from rlhfkit.ray_session import port_candidates
from rlhfkit.strategies.ray import actor as ray_actor

# Time for the other ranks to end after one has failed; most wait for it in a collective.
_GRACE_SECONDS = 5.0
# Time for the hooks for errors if all ranks have failed: OnExceptionCheckpoint saves a checkpoint in one.
_ON_EXCEPTION_SECONDS = 600.0
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.1
# Environment variables of the driver that are not passed to ranks.
_DRIVER_VARIABLES = ("RAY_", "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_")


class Ranks:
    """The actors of all ranks, by rank, and their mailbox."""

    def __init__(self, resources: ReservedResources) -> None:
        self._resources = resources
        self.actors: list[Any] = []
        self._locations: list[dict[str, Any]] = []  # location of each
        self._mailbox: Any = None
        self._bar = ""  # last state of the line that rank 0 redraws

    def start(self, count: int, device: str, timeout: float) -> None:
        """Create the actors and number them, machine by machine."""
        import ray

        self._mailbox = ray.remote(ray_actor.Mailbox).options(num_cpus=0).remote()
        for index in range(count):
            actor = ray.remote(ray_actor.RankActor).options(**actor_options(self._resources, index))
            self.actors.append(actor.remote())
        ports = port_candidates()
        calls = [actor.location.remote(ports) for actor in self.actors]
        locations = _results(calls, "starting its process", timeout)
        machines = list(dict.fromkeys(one["node"] for one in locations))
        order = sorted(range(count), key=lambda index: machines.index(locations[index]["node"]))
        self.actors = [self.actors[index] for index in order]
        self._locations = [locations[index] for index in order]
        environments = rank_environments(self._locations, device)
        prepared = [
            actor.prepare.remote(rank, environment, sys.path, os.getcwd(), self._mailbox)
            for rank, (actor, environment) in enumerate(zip(self.actors, environments, strict=True))
        ]
        _results(prepared, "getting ready", timeout)

    def wait(self, runs: list[Any]) -> Any:
        """Print the ranks' output until all have ended; return rank 0's result, or raise the first cause of failure."""
        import ray

        waiting = {ref: rank for rank, ref in enumerate(runs)}
        failures: dict[int, dict[str, Any]] = {}
        result, failed_at = None, float("inf")
        while waiting and time.monotonic() < failed_at + self._time_limit(waiting, failures):
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_POLL_SECONDS)
            for ref in ready:
                rank = waiting.pop(ref)
                kind, value = self._outcome(ref, rank)
                if kind == "failed":
                    failures[rank] = value
                elif rank == 0:
                    result = value
            # Ranks that end by themselves have waited until their last event was in the mailbox.
            self._show(ray.get(self._mailbox.collect.remote()), failures)
            if failures and failed_at == float("inf"):
                failed_at = time.monotonic()
        if failures:
            self._raise(failures)
        return result

    def _time_limit(self, waiting: dict[Any, int], failures: dict[int, dict[str, Any]]) -> float:
        """Return the seconds after the first failure until the other ranks are stopped."""
        all_in_hooks = all(rank in failures for rank in waiting.values())
        nobody_died = all(failure["type"] is not None for failure in failures.values())
        return _ON_EXCEPTION_SECONDS if all_in_hooks and nobody_died else _GRACE_SECONDS

    def _show(self, events: list[ray_actor.Event], failures: dict[int, dict[str, Any]]) -> None:
        for kind, *values in events:
            if kind == "line":
                self._print_line(*values)
            elif kind == "bar":
                self._draw_bar(*values)
            elif kind == "failed":
                failures.setdefault(values[0]["rank"], values[0])

    def _print_line(self, rank: int, stream: str, text: str) -> None:
        """Print a line of a rank above the progress bar; an empty one of rank 0 ends the bar."""
        bar = self._bar
        if rank == 0 and not text:
            self._bar = ""
            print(file=getattr(sys, stream), flush=True)
            return
        if bar:
            self._draw_bar(stream, "")
        print(text if rank == 0 else f"[rank {rank}] {text}", file=getattr(sys, stream), flush=True)
        if bar:
            self._draw_bar(stream, bar)

    def _draw_bar(self, stream: str, bar: str) -> None:
        """Draw what rank 0 has last drawn on its line that has no end."""
        print(f"\r{' ' * len(self._bar)}\r{bar}", end="", file=getattr(sys, stream), flush=True)
        self._bar = bar

    def _outcome(self, ref: Any, rank: int) -> tuple[str, Any]:
        """Return the value of ``RankActor.run``, or a failure if its process died."""
        import ray

        try:
            outcome: tuple[str, Any] = ray.get(ref)
            return outcome
        except ray.exceptions.RayError as error:
            return "failed", {"rank": rank, "error": None, "type": None, "traceback": first_lines_of(error)}

    def _raise(self, failures: dict[int, dict[str, Any]]) -> None:
        """Raise the failure that caused the others.

        The death of a process comes before errors, and RuntimeErrors last: collectives raise them on the other ranks.
        """
        import ray.cloudpickle

        priority = {None: 0, "RuntimeError": 2, "DistBackendError": 2}
        first = min(failures.values(), key=lambda failure: priority.get(failure["type"], 1))
        where = self._locations[first["rank"]]
        name = f"rank {first['rank']} of {len(self.actors)} (process {where['pid']} on {where['host']})"
        if first["type"] is None:
            raise RankError(
                f"{name} died: {first['traceback']} Its own last output, if any, is in the logs of Ray's session. The"
                " other ranks were stopped; resume from the last checkpoint."
            )
        cause = RankError(f"{name} failed:\n{first['traceback']}")
        try:
            error = ray.cloudpickle.loads(first["error"])
        except Exception:  # it could not be pickled or unpickled
            raise cause from None
        raise error from cause

    def stop(self) -> None:
        """Kill all processes and wait until those on this machine have ended."""
        import ray

        if not ray.is_initialized():
            return
        for actor in [*self.actors, *([self._mailbox] if self._mailbox is not None else [])]:
            ray.kill(actor, no_restart=True)
        here = [Path(f"/proc/{one['pid']}") for one in self._locations if one["host"] == socket.gethostname()]
        deadline = time.monotonic() + _KILL_SECONDS
        while any(process.exists() for process in here):
            if time.monotonic() > deadline:
                left = [int(process.name) for process in here if process.exists()]
                rank_zero_warn(
                    f"Processes {left} of ranks still run {_KILL_SECONDS:g} s after Ray was told to end them."
                )
                return
            time.sleep(0.02)


def _results(calls: list[Any], doing: str, timeout: float) -> list[Any]:
    """Wait for a call of each rank; RankError if one fails, or takes longer than ``timeout`` seconds."""
    ranks = {call: f"rank {number} of {len(calls)}" for number, call in enumerate(calls)}
    return ActorCalls(ranks, f"{doing} (time limit: init_timeout)", timeout, RankError).result()


def rank_environments(locations: list[dict[str, Any]], device: str) -> list[dict[str, str]]:
    """Return the environment variables of each rank, from the ranks' ``RankActor.location``.

    Ranks on the driver's machine get the variables of the driver, other ranks only those of Lightning, such as the
    seed. All ranks of a machine see the same GPUs in the same order, so that GPUs can reach each other directly.
    """
    machines = list(dict.fromkeys(one["node"] for one in locations))
    size = shutil.get_terminal_size()
    common = {
        "WORLD_SIZE": str(len(locations)),
        "MASTER_ADDR": "127.0.0.1" if len(machines) == 1 else locations[0]["address"],
        "MASTER_PORT": str(locations[0]["port"]),
        "DS_ACCELERATOR": device,
        "COLUMNS": str(size.columns),
        "LINES": str(size.lines),
    }
    environments = []
    for rank, one in enumerate(locations):
        neighbours = [other for other in locations if other["node"] == one["node"]]
        here = one["host"] == socket.gethostname()
        environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PL_") or (here and not name.startswith(_DRIVER_VARIABLES))
        }
        environment |= common | {
            "RANK": str(rank),
            "LOCAL_RANK": str(neighbours.index(one)),
            "NODE_RANK": str(machines.index(one["node"])),
            "LOCAL_WORLD_SIZE": str(len(neighbours)),
        }
        if device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(other["gpus"][0] for other in neighbours)
        environments.append(environment)
    return environments
