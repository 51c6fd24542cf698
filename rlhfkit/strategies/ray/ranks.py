"""The driver's side of ranks on Ray: start, number, follow and end their processes; what it means when one fails."""

import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rlhfkit.strategies.ray import actor as ray_actor
from rlhfkit.strategies.ray.progress import Display

# How long ranks that are well may go on after another has failed. Mostly they wait for it in a collective.
_LAST_WORDS_SECONDS = 5.0
# How long their hooks for errors may take when all have failed: OnExceptionCheckpoint saves a checkpoint there.
_ON_EXCEPTION_SECONDS = 600.0
_KILL_SECONDS = 10.0
# The driver's environment variables that say something about its process only.
_OWN_VARIABLES = ("RAY_", "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_")


class RankError(RuntimeError):
    """A rank died or failed. Also the cause, with the remote traceback, of an error that could be raised again here."""


class Ranks:
    """Actors in the order of their ranks, and their mailbox."""

    def __init__(self, group: Any, resources: dict[str, float]) -> None:
        self._group, self._resources = group, dict(resources)
        self.actors: list[Any] = []
        self._found: list[dict[str, Any]] = []  # whereabouts, in the same order
        self._mailbox: Any = None

    def start(self, count: int, device: str, timeout: float) -> None:
        """Create the actors and number them, those of one machine side by side."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._mailbox = ray.remote(ray_actor.Mailbox).options(num_cpus=0).remote()
        others = dict(self._resources)
        options: dict[str, Any] = {"num_cpus": others.pop("CPU", 0), "num_gpus": others.pop("GPU", 0)}
        options |= {"memory": others.pop("memory")} if "memory" in others else {}
        for index in range(count):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            actor = ray.remote(ray_actor.RankActor).options(**options, resources=others, scheduling_strategy=place)
            self.actors.append(actor.remote())
        deadline = time.monotonic() + timeout
        found = self._get([actor.whereabouts.remote() for actor in self.actors], deadline, "start a process")
        machines = list(dict.fromkeys(one["node"] for one in found))
        order = sorted(range(count), key=lambda index: machines.index(found[index]["node"]))
        self.actors, self._found = [self.actors[index] for index in order], [found[index] for index in order]
        environments = rank_environments(self._found, device)
        prepared = [
            actor.prepare.remote(rank, environment, sys.path, os.getcwd(), self._mailbox)
            for rank, (actor, environment) in enumerate(zip(self.actors, environments, strict=True))
        ]
        self._get(prepared, deadline, "get ready")

    def _get(self, refs: list[Any], deadline: float, doing: str) -> list[Any]:
        import ray

        _, late = ray.wait(refs, num_returns=len(refs), timeout=max(deadline - time.monotonic(), 0))
        if late:
            numbers = ", ".join(str(refs.index(ref)) for ref in late)
            raise RankError(f"Rank(s) {numbers} of {len(refs)} took too long to {doing}; raise init_timeout if busy.")
        return ray.get(refs)

    def follow(self, runs: list[Any], display: Display) -> Any:
        """Show what the ranks send until all have ended; rank 0's result.

        Raises:
            BaseException: Of the rank that failed first of all.
        """
        import ray

        waiting = {ref: rank for rank, ref in enumerate(runs)}
        failures: dict[int, dict[str, Any]] = {}
        result, failed_at = None, float("inf")
        news = self._mailbox.collect.remote()
        while waiting and time.monotonic() < failed_at + self._patience(waiting, failures):
            ready, _ = ray.wait([*waiting, news], num_returns=1, timeout=1.0)
            for ref in ready:
                if ref == news:
                    self._show(ray.get(news), display, failures)
                    news = self._mailbox.collect.remote()
                    continue
                rank = waiting.pop(ref)
                kind, value = self._outcome(ref, rank)
                if kind == "failed":
                    failures[rank] = value
                elif rank == 0:
                    result = value
            if failures and failed_at == float("inf"):
                failed_at = time.monotonic()
        # Ranks that ended by themselves waited until their events were delivered. The collection under way may have
        # been answered before the last of them, so there is one more.
        self._mailbox.close.remote()
        for collection in (news, None):
            self._show(ray.get(collection or self._mailbox.collect.remote()), display, failures)
        if failures:
            self._raise(failures)
        return result

    def _patience(self, waiting: dict[Any, int], failures: dict[int, dict[str, Any]]) -> float:
        """Seconds after the first failure that the others get."""
        all_in_hooks = all(rank in failures for rank in waiting.values())
        nobody_died = all(failure["type"] is not None for failure in failures.values())
        return _ON_EXCEPTION_SECONDS if all_in_hooks and nobody_died else _LAST_WORDS_SECONDS

    def _show(self, events: list[ray_actor.Event], display: Display, failures: dict[int, dict[str, Any]]) -> None:
        for kind, *values in events:
            if kind == "line":
                display.line(*values)
            elif kind == "hook":
                display.hook(*values)
            elif kind == "failed":
                failures.setdefault(values[0]["rank"], values[0])

    def _outcome(self, ref: Any, rank: int) -> tuple[str, Any]:
        """What ``run`` returned, or how its process died."""
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()
            return "failed", {"rank": rank, "error": None, "type": None, "traceback": " ".join(reason[:6])}

    def _raise(self, failures: dict[int, dict[str, Any]]) -> None:
        """Raise the failure that caused the others.

        A death comes before errors, and a RuntimeError last: it is what torch's collectives and our own code raise on
        ranks that only notice that another has failed.
        """
        import ray.cloudpickle

        weight = {None: 0, "RuntimeError": 2, "DistBackendError": 2}
        first = min(failures.values(), key=lambda failure: weight.get(failure["type"], 1))
        where = self._found[first["rank"]]
        name = f"rank {first['rank']} of {len(self.actors)} (process {where['pid']} on {where['host']})"
        if first["type"] is None:
            raise RankError(
                f"{name} died: {first['traceback']} Its own last output, if any, is in the logs of Ray's session. The"
                " other ranks were stopped; resume from the last checkpoint."
            )
        cause = RankError(f"{name} failed:\n{first['traceback']}")
        try:
            error = ray.cloudpickle.loads(first["error"])
        except Exception:  # it could not be pickled, or not be made again from its arguments
            raise cause from None
        raise error from cause

    def end(self) -> None:
        """Kill all processes and wait until those on this machine are gone."""
        import ray

        if not ray.is_initialized():
            return
        for actor in [*self.actors, *([self._mailbox] if self._mailbox is not None else [])]:
            ray.kill(actor, no_restart=True)
        here = [Path(f"/proc/{one['pid']}") for one in self._found if one["host"] == socket.gethostname()]
        deadline = time.monotonic() + _KILL_SECONDS
        while any(process.exists() for process in here):
            if time.monotonic() > deadline:
                left = [int(process.name) for process in here if process.exists()]
                rank_zero_warn(
                    f"Processes {left} of ranks still run {_KILL_SECONDS:g} s after Ray was told to end them."
                )
                return
            time.sleep(0.02)


def rank_environments(found: list[dict[str, Any]], device: str) -> list[dict[str, str]]:
    """Environment variables of each rank.

    On the driver's machine ranks get the driver's variables, as a script's would; elsewhere only Lightning's, such as
    the seed. All ranks of a machine see the same GPUs, in their order, so that those can reach each other directly.

    Args:
        found: ``whereabouts`` of the ranks, in order.
        device: ``"cpu"`` or ``"cuda"``.
    """
    machines = list(dict.fromkeys(one["node"] for one in found))
    size = shutil.get_terminal_size()
    common = {
        "WORLD_SIZE": str(len(found)),
        "MASTER_ADDR": "127.0.0.1" if len(machines) == 1 else found[0]["address"],
        "MASTER_PORT": str(found[0]["port"]),
        "DS_ACCELERATOR": device,
        "COLUMNS": str(size.columns),
        "LINES": str(size.lines),
    }
    environments = []
    for rank, one in enumerate(found):
        neighbours = [other for other in found if other["node"] == one["node"]]
        here = one["host"] == socket.gethostname()
        environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PL_") or (here and not name.startswith(_OWN_VARIABLES))
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
