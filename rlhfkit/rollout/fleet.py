"""``Fleet``: the Ray actors of a pool: where they are placed, how they are called, what it means when one fails.

Every call has a time limit, and every error names the engine, what it was doing and what can be done.
"""

import contextlib
import importlib.util
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlhfkit.rollout.vllm_actor import VLLMActor

CURE = (
    "Free what is left with close(), then start() again, or resume the run from its last checkpoint. The engines' "
    "output is in the logs of Ray's session folder."
)


class EngineError(RuntimeError):
    """An engine died, failed, or did not answer in time."""


def require_ray() -> Any:
    """The ``ray`` module, if it and vLLM are installed.

    Raises:
        ImportError: Naming what is missing and how to install it.
    """
    missing = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"VLLMPool needs {' and '.join(missing)}, not installed here: pip install 'rlhfkit[rollout]' on a machine "
            "with GPUs, 'rlhfkit[cpu]' on one without; or use LocalEngine(), which needs neither"
        )
    import ray

    return ray


def join_or_start_ray(*, num_cpus: int, num_gpus: int) -> None:
    """Use the Ray that this process is connected to, else the cluster in ``RAY_ADDRESS``, else start one here.

    A Ray started here lives as long as this process.

    Args:
        num_cpus: Cores that the engines will claim; a machine with fewer is overcommitted, not refused.
        num_gpus: GPUs that they will claim. They get the last ones of this machine, as training takes the first.
    """
    ray = require_ray()
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
        return
    with _last_gpus_visible(num_gpus):
        ray.init(
            address="local",
            num_cpus=max(num_cpus, os.cpu_count() or 1),
            include_dashboard=False,
            # Only token ids travel through it. Ray's default is 30 % of the machine's memory.
            object_store_memory=256 * 2**20,
            log_to_driver=False,
        )


@contextlib.contextmanager
def _last_gpus_visible(count: int) -> Iterator[None]:
    """Let Ray see only the last GPUs, so that it cannot give engines those the training ranks use."""
    import torch

    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = before.split(",") if before else [str(index) for index in range(torch.cuda.device_count())]
    if not count or count > len(visible):
        yield
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[-count:])
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


class RemoteCall:
    """One method called on several engines, under way.

    Args:
        waiting: What will hold the result, and the engine it comes from.
        doing: What the engines do, for messages: "loading weights".
        timeout: Seconds from now.
        fetch: :meth:`Fleet.fetch`.
    """

    def __init__(
        self, waiting: dict[Any, int], doing: str, timeout: float, fetch: Callable[[Any, int, str], Any]
    ) -> None:
        self._waiting = waiting
        self._results: dict[int, Any] = {}
        self._doing, self._timeout, self._fetch = doing, timeout, fetch
        self._deadline = time.monotonic() + timeout

    def poll(self) -> None:
        """Raise if an engine has failed already."""
        self._collect(0.0)

    def result(self) -> list[Any]:
        """Results in the order of the engines.

        Raises:
            EngineError: If an engine failed, or the time is up.
        """
        while self._waiting:
            left = self._deadline - time.monotonic()
            if left <= 0 or not self._collect(left):
                late = sorted(self._waiting.values())
                raise EngineError(
                    f"vLLM engine(s) {late} did not finish {self._doing} within {self._timeout:g} s: stopped, "
                    f"overloaded, or the limit is too low (VLLMPool(..._timeout=...)). {CURE}"
                )
        return [self._results[engine] for engine in sorted(self._results)]

    def _collect(self, timeout: float) -> bool:
        """Take what is ready, waiting for at least one; false if nothing came."""
        import ray

        if not self._waiting:
            return True
        ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=timeout)
        for ref in ready:
            engine = self._waiting.pop(ref)
            self._results[engine] = self._fetch(ref, engine, self._doing)
        return bool(ready)


class Fleet:
    """N vLLM actors.

    Args:
        num_engines: Actors.
        tensor_parallel_size: GPUs (processes on a CPU) per engine.
        cpus_per_engine: Cores, and OpenMP threads on a CPU, per process of an engine.
        device: ``"cpu"``, ``"cuda"``, or ``None``: GPUs if the cluster has any.
        environment: Environment variables of the engines, over ours.
        sync_timeout: Seconds for each step of a weight transfer.
    """

    def __init__(
        self,
        *,
        num_engines: int,
        tensor_parallel_size: int,
        cpus_per_engine: int,
        device: str | None,
        environment: dict[str, str],
        sync_timeout: float,
    ) -> None:
        self.num_engines = num_engines
        self.tensor_parallel_size = tensor_parallel_size
        self.cpus_per_engine = cpus_per_engine
        self.device = device
        self.environment = environment
        self.sync_timeout = sync_timeout
        self.actors: list[Any] = []
        self.max_model_len = 0
        weakref.finalize(self, kill_actors, self.actors)  # also at the end of the interpreter
        self._pids: list[int] = []

    @property
    def num_workers(self) -> int:
        """Processes that hold weights."""
        return len(self.actors) * self.tensor_parallel_size

    @property
    def address(self) -> str:
        """Where the engines reach this process: loopback when all of them are on this machine."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        nodes = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}
        return "127.0.0.1" if nodes == {here} else str(ray.util.get_node_ip_address())

    def start(self, arguments: dict[str, Any], timeout: float) -> None:
        """Create the actors and wait until all serve.

        Args:
            arguments: Of ``vllm.EngineArgs``.
            timeout: Seconds.

        Raises:
            EngineError: If the cluster is too small, an engine cannot start, or the time is up.
        """
        import ray

        in_process = self.device == "cpu" and self.tensor_parallel_size == 1
        remote = ray.remote(VLLMActor).options(
            **self._resources(),
            # Async methods wait in vLLM's own queue, not in Ray's: all may be inside at once.
            max_concurrency=10_000,
            runtime_env={"env_vars": self._environment()},
        )
        self.actors.extend(remote.remote(arguments, in_process) for _ in range(self.num_engines))
        try:
            infos = self.submit(
                "start", doing="starting (importing vLLM and building the model)", timeout=timeout
            ).result()
        except BaseException:
            self.kill()
            raise
        self._pids = [info["pid"] for info in infos]
        self.max_model_len = min(info["max_model_len"] for info in infos)

    def _resources(self) -> dict[str, Any]:
        """Ray resources of one engine, after checking that the cluster has enough for all."""
        import ray

        processes = self.tensor_parallel_size
        cpus, gpus = self.cpus_per_engine * (processes if self.device == "cpu" else 1), processes
        need = {"CPU": cpus} if self.device == "cpu" else {"CPU": cpus, "GPU": gpus}
        have = ray.cluster_resources()
        for name, each in need.items():
            if have.get(name, 0) < each * self.num_engines:
                raise EngineError(
                    f"{self.num_engines} engine(s) need {each * self.num_engines} {name}(s), but Ray's cluster has "
                    f"{have.get(name, 0):g}: lower VLLMPool(num_engines=..., tensor_parallel_size=...) or add machines"
                )
        return {"num_cpus": cpus, "num_gpus": gpus if self.device == "cuda" else 0}

    def _environment(self) -> dict[str, str]:
        """Environment of an engine; must be set before it imports torch."""
        variables = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.device == "cpu":
            variables |= {
                "OMP_NUM_THREADS": str(self.cpus_per_engine),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # vLLM 0.32 compiles one function of its log-probs even with enforce_eager: 30 s for nothing.
                "TORCHDYNAMO_DISABLE": "1",
            }
            if self.tensor_parallel_size == 1:
                variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return variables | self.environment

    def submit(
        self,
        method: str,
        *args: Any,
        doing: str,
        timeout: float,
        each: Sequence[tuple[Any, ...]] | None = None,
    ) -> RemoteCall:
        """Call a method on every engine.

        Args:
            method: Of :class:`~rlhfkit.rollout.vllm_actor.VLLMActor`.
            *args: Same for all.
            doing: For messages.
            timeout: Seconds.
            each: Arguments per engine instead.
        """
        refs = {}
        for engine, actor in enumerate(self.actors):
            refs[getattr(actor, method).remote(*(args if each is None else each[engine]))] = engine
        return RemoteCall(refs, doing, timeout, self.fetch)

    def fetch(self, ref: Any, engine: int, doing: str) -> Any:
        """The result of a call that has ended.

        Args:
            ref: What :func:`ray.wait` found ready.
            engine: Where it ran.
            doing: For the message.

        Raises:
            EngineError: If it failed.
        """
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            name = f"vLLM engine {engine} of {self.num_engines}"
            if engine < len(self._pids):
                name += f" (process {self._pids[engine]})"
            if isinstance(error, ray.exceptions.RayTaskError):
                message = f"{name} failed while {doing}: {error.cause}."
            else:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                message = f"{name} died while {doing} (is the machine out of memory?): {reason}"
        raise EngineError(f"{message} {CURE}")

    def connect(self, rendezvous: dict[str, Any]) -> RemoteCall:
        """Have every worker join the transfer group; engine i's workers are ranks 1 + i * tensor_parallel_size on."""
        each = [
            ({**rendezvous, "rank_offset": 1 + engine * self.tensor_parallel_size},)
            for engine in range(len(self.actors))
        ]
        return self.submit("connect", doing="joining the weight transfer", timeout=self.sync_timeout, each=each)

    def update(self, update: dict[str, Any]) -> RemoteCall:
        """Have every worker receive."""
        return self.submit("update", update, doing="loading weights", timeout=self.sync_timeout)

    def abort(self) -> None:
        """Have all engines drop their requests; nobody waits for it."""
        for actor in self.actors:
            with contextlib.suppress(Exception):
                actor.abort.remote()

    def kill(self) -> None:
        """End all actors, also when Ray is gone already."""
        kill_actors(self.actors)
        self._pids = []


def kill_actors(actors: list[Any]) -> None:
    """End actors without waiting; empties the list."""
    if not actors:
        return
    import ray

    while actors:
        actor = actors.pop()
        if ray.is_initialized():
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
