"""``VLLMActor``: one vLLM engine as a Ray actor. Written for vLLM 0.32.

Only plain values, NumPy arrays and plain exceptions leave the actor, so the training process never imports vLLM.
"""

import asyncio
import functools
import itertools
import os
import stat
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rlhfkit.gpus import VARIABLE, ask_driver, weights_do_not_fit
from rlhfkit.rollout.errors import RefusedRequest
from rlhfkit.rollout.supervision.calls import Completion, Request
from rlhfkit.rollout.supervision.engines import ENGINE_NAMESPACE
from rlhfkit.rollout.supervision.table import this_process
from rlhfkit.rollout.vllm.adapter_slot import adapter_request
from rlhfkit.rollout.vllm.in_process import InProcessLLM
from rlhfkit.rollout.vllm.machines import WorkerMachines, node_arguments, run_workers
from rlhfkit.rollout.vllm.placement import ActorPlacement, assigned_gpus

Result = TypeVar("Result")


def plain_errors(
    method: Callable[..., Awaitable[Result]],
) -> Callable[..., Coroutine[Any, Any, Result]]:
    """Turn exceptions of a coroutine method into plain ``RuntimeError``, whose unpickling does not import vLLM.

    ``RefusedRequest`` is left as it is. The error of an engine whose own processes have failed, which vLLM only refers
    to ("see root cause above"), ends with what they have written. A process in which no engine was started refuses
    every other call.
    """

    @functools.wraps(method)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Result:
        if not self.started and method.__name__ not in ("start", "run_workers"):
            raise RuntimeError("the engine's process was started again, and the engine has not been yet")
        try:
            return await method(self, *args, **kwargs)
        except asyncio.CancelledError:
            message = "aborted"
        except RefusedRequest:
            raise
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            if not self.in_process and (method.__name__ == "start" or type(error).__name__ == "EngineDeadError"):
                message += last_lines()  # of processes whose error vLLM does not pass on
        raise RuntimeError(message)

    return wrapper


def last_lines(count: int = 12, most_bytes: int = 8192) -> str:
    """The last lines that this process and its children have written, where both go to files, as in Ray's actors."""
    written = []
    for name, descriptor in (("output", 1), ("errors", 2)):
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            continue
        with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # a position of its own
            file.seek(max(0, found.st_size - most_bytes))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        if lines:
            written.append("\n".join([f"the last lines of its {name}:", *lines[-count:]]))
    return "".join(f"\n{one}" for one in written)


@dataclass(eq=False)
class ActorLauncher:
    """Creates the Ray actors of vLLM engines; an :data:`~rlhfkit.rollout.supervision.engines.ActorFactory`."""

    placements: Sequence[ActorPlacement]
    arguments: dict[str, Any]
    """Those of ``vllm.EngineArgs``."""
    in_process: bool
    environment: dict[str, str]
    """Set in all engines before they import torch."""
    weight_bytes: float = 0.0
    """Of each of an engine's processes; 0: unknown."""

    def __call__(self, number: int, name: str) -> Any:
        """Create the actor of an engine, with this name in Ray."""
        import ray

        placement = self.placements[number]
        actor_class = ray.remote(VLLMActor).options(
            **placement.options,
            name=name,
            namespace=ENGINE_NAMESPACE,
            # How often is for the table of the engines to say: it starts vLLM in the new process, or does not.
            max_restarts=-1,
            # Coroutines wait in vLLM's own queue, not in Ray's: all may run at once.
            max_concurrency=10_000,
            runtime_env={"env_vars": self.environment},
        )
        return actor_class.remote(self.arguments, self.in_process, placement, self.weight_bytes)


class VLLMActor:
    """One vLLM engine in a process of its own, as it changes global state of torch.

    ``arguments`` are those of ``vllm.EngineArgs``; the environment of ``placement`` overrides variables set by Ray;
    ``weight_bytes``, if known, each of its GPUs must hold.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        in_process: bool,
        placement: ActorPlacement | None = None,
        weight_bytes: float = 0.0,
    ) -> None:
        self._placement = placement or ActorPlacement({})
        os.environ.update(self._placement.environment)
        self._weight_bytes = weight_bytes
        self._arguments = arguments
        self._machines: WorkerMachines | None = None
        self.in_process = in_process
        self._engine: Any = None  # vLLM's AsyncLLM, or an InProcessLLM
        self._adapter: Any = None  # of every request
        self._numbers = itertools.count()
        self.started = False
        self._has_weights = False  # those that it was started with, or was sent
        self._running: dict[str, dict[str, asyncio.Task[Any]]] = {}  # by key, and by name of the request
        self._paused = False
        self._load = EngineLoad()
        self._last_step = time.monotonic()  # when it was seen
        self._question: asyncio.Task[Any] | None = None  # to the engine's process, which answers between two steps
        # Steps of a transfer run one after another, in the order of the calls, also if several have arrived while the
        # process was suspended.
        self._transfer = asyncio.Lock()

    async def identify(self) -> dict[str, Any]:
        """Return what names this process."""
        return this_process()

    @plain_errors
    async def start(self, has_weights: bool) -> dict[str, Any]:
        """Build the engine, which takes tens of seconds.

        ``has_weights``: it may serve the weights that it loads; else it refuses requests until it was sent some.
        """
        import psutil

        gpus = self._check_gpus()
        self._start_other_machines()
        try:
            self._engine = await self._build()
        except Exception:
            self._check_machines()  # the cause, if there is one
            raise
        config, self._adapter = self._engine.vllm_config, adapter_request(self._arguments)
        if config.parallel_config.pipeline_parallel_size > 1:
            await self._rpc("allocate_pipeline_buffers")
        await self._engine.update_weight_version("0")
        if self._adapter is not None:
            await self._rpc("check_adapter", targets=self._arguments["lora_target_modules"])
        self.started, self._has_weights, self._last_step = True, has_weights, time.monotonic()
        this = psutil.Process()
        return {
            "max_model_len": int(config.model_config.max_model_len),
            "vocabulary": int(config.model_config.get_vocab_size()),
            "gpus": gpus,
            "machines": 1 + len(self._placement.others),
            "processes": [(one.pid, one.create_time()) for one in (this, *this.children(recursive=True))],
        }

    async def _build(self) -> Any:
        """Build the engine; one of several processes is an ``AsyncLLM``."""
        if self.in_process:
            return await InProcessLLM.start(self._arguments, self._load.factory)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments), stat_loggers=[self._load.factory])

    async def _rpc(self, method: str, **arguments: Any) -> None:
        """Call a method of every worker."""
        await self._engine.collective_rpc(method, kwargs=arguments)

    def _start_other_machines(self) -> None:
        """Start the workers of the engine's other machines, which wait for those of this one."""
        import ray

        if not self._placement.others:
            return
        self._arguments |= node_arguments(1 + len(self._placement.others))
        kind = ray.remote(VLLMActor)
        there = ActorPlacement({}, excluded=self._placement.excluded)
        actors = [
            kind.options(**options).remote(self._arguments | {"node_rank": number}, False, there, self._weight_bytes)
            for number, options in enumerate(self._placement.others, 1)
        ]
        self._machines = WorkerMachines(actors, [actor.run_workers.remote() for actor in actors])

    def _check_machines(self) -> None:
        if self._machines is not None:
            self._machines.check()

    @plain_errors
    async def run_workers(self) -> None:
        """Run the workers of another machine than the first; returns when one of them has ended."""
        self._check_gpus()
        await asyncio.to_thread(run_workers, self._arguments)

    def _check_gpus(self) -> list[str]:
        """Return the kinds of this engine's GPUs, as far as the driver reports them.

        Raises RuntimeError if one is a training rank's, as Ray takes those of ranks that it has not started for free;
        or, of an engine that shares those of ranks, another one; or if the weights do not fit.
        """
        assigned = assigned_gpus()
        for mine in assigned:
            for rank, location in enumerate(self._placement.excluded):
                if mine.has_same_gpu(location):
                    raise RuntimeError(
                        f"Ray gave this engine {mine}, which training rank {rank} of those on GPUs uses: start Ray on "
                        "the ranks' machines with the GPUs that they leave free (CUDA_VISIBLE_DEVICES=... ray start), "
                        "let Ray start the ranks (launcher='ray'), or share GPUs with VLLMPool(colocate=True)"
                    )
        shared = ask_driver().gpus if self._placement.shared else ()
        seen = [gpu.uuid for gpu in shared]
        wanted = [rank.uuid for rank in self._placement.shared]
        if seen and all(wanted) and set(seen) != set(wanted):
            raise RuntimeError(
                f"this engine shares {', '.join(map(str, self._placement.shared))} with training ranks (UUIDs "
                f"{wanted}), but with CUDA_VISIBLE_DEVICES={os.environ.get(VARIABLE)} it sees {seen}: Ray on that "
                "machine must be started where all of its GPUs are visible, in the same container as the ranks"
            )
        gpus = [(gpu.kind, gpu.memory) for gpu in assigned] + [(gpu.name, gpu.memory) for gpu in shared]
        self._check_memory([(name, memory) for name, memory in gpus if memory])
        return [name for name, _ in gpus if name]

    def _check_memory(self, gpus: Sequence[tuple[str, int]]) -> None:
        """Raise RuntimeError if a process's weights exceed what vLLM may use of a GPU, before vLLM loads them."""
        share = float(self._arguments.get("gpu_memory_utilization", 1.0))
        for name, memory in gpus:
            problem = weights_do_not_fit(
                {"weights of each process of an engine": self._weight_bytes},
                f"{share:.0%} of {name}",
                int(share * memory),
                "raise VLLMPool(tensor_parallel_size=...) or gpu_memory_utilization",
            )
            if problem is not None:
                raise RuntimeError(problem)

    @plain_errors
    async def health(self) -> dict[str, Any]:
        """Return the health; RuntimeError if vLLM reports that it has failed."""
        self._check_machines()
        await self._engine.check_health()
        answered = self._question is not None and self._question.done()
        if self._question is None or answered:
            question, self._question = self._question, asyncio.ensure_future(self._engine.is_paused())
            if question is not None:
                question.result()
        now = time.monotonic()
        if answered or self._paused or not self._running:
            self._last_step = now
        return {"seconds_since_step": now - self._last_step, "paused": self._paused}

    async def take_load(self) -> dict[str, float]:
        """Return how busy the engine was since the last call."""
        return self._load.take()

    @plain_errors
    async def generate(self, key: str, requests: Sequence[Request]) -> list[Completion]:
        """Sample one completion per request, concurrently; none if they are aborted."""
        try:
            return [_completion(output) for output in await self._run(key, requests)]
        except asyncio.CancelledError:
            return []

    @plain_errors
    async def score(self, sequences: Sequence[list[int]], images: Sequence[Any] = ()) -> list[list[float]]:
        """Return the log-probs of every token after the first, at temperature 1.

        ``images``: the :class:`~rlhfkit.rollout.vllm.images.SentImages` of each sequence; empty: none has any.
        """
        # vLLM computes prompt log-probs when it samples the first token, so one is requested and dropped.
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        key = f"score-{next(self._numbers)}"
        seen = [{"images": each} for each in images] or [{}] * len(sequences)
        asked = [(list(sequence), params | more) for sequence, more in zip(sequences, seen, strict=True)]
        outputs = await self._run(key, asked)
        return [
            [
                entry[token].logprob
                for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for output in outputs
        ]

    async def _run(self, key: str, requests: Sequence[Request]) -> list[Any]:
        """Run requests concurrently; RefusedRequest, which leaves the engine unaffected, if one cannot be run."""
        if not self._has_weights:  # asked for the process before this one
            raise RuntimeError("the engine was started again and has no weights yet")
        checked = [
            (list(token_ids), _sampling_params(arguments), arguments.get("priority", 0), arguments.get("images"))
            for token_ids, arguments in requests
        ]
        names = [f"request-{next(self._numbers)}" for _ in checked]
        read = None
        if any(images is not None for *_, images in checked):
            from rlhfkit.rollout.vllm.images import ReadPrompts

            read = ReadPrompts(self._engine.renderer).read
        running = [self._generate(name, *request, read) for name, request in zip(names, checked, strict=True)]
        tasks = [asyncio.ensure_future(one) for one in running]
        self._running[key] = dict(zip(names, tasks, strict=True))
        try:
            return await asyncio.gather(*tasks)
        finally:
            del self._running[key]
            for task in tasks:  # if one has failed, the others are not needed
                task.cancel()

    async def _generate(
        self, name: str, token_ids: list[int], params: Any, priority: int, images: Any, read: Any
    ) -> Any:
        """Run one request and return its ``RequestOutput``; RefusedRequest if it cannot be run."""
        last: Any = None
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
        try:
            if images is not None:
                prompt = await read(token_ids, images)
            outputs = self._engine.generate(prompt, params, name, lora_request=self._adapter, priority=priority)
            async for output in outputs:
                last = output
        except RefusedRequest:
            raise
        except Exception as error:
            if self._engine.errored:
                raise
            cause = error.__cause__ or error  # vLLM wraps unexpected exceptions
            raise RefusedRequest(f"{type(cause).__name__}: {cause}") from None
        return last

    @plain_errors
    async def abort(self, keys: Sequence[str]) -> None:
        """Drop the requests of :meth:`generate` calls; unknown keys have ended already."""
        for key in keys:
            for task in self._running.get(key, {}).values():
                task.cancel()

    @plain_errors
    async def cut(self, keys: Sequence[str]) -> None:
        """End :meth:`generate` calls, which return what was made so far; unknown keys have ended already."""
        tasks = {name: task for key in keys for name, task in self._running.get(key, {}).items()}
        while tasks := {name: task for name, task in tasks.items() if not task.done()}:
            for name in tasks:
                await self._engine.abort(name)
            await asyncio.sleep(0.01)  # vLLM may not know a request yet that has just arrived

    @plain_errors
    async def connect(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's group for weight transfers."""
        async with self._transfer:
            await self._rpc("init_weight_transfer_engine", init_info=init_info)

    @plain_errors
    async def pause(self) -> None:
        """Stop computing and keep the requests. An update while they run would crash vLLM."""
        async with self._transfer:
            self._paused = True
            await self._engine.pause_generation(mode="keep", clear_cache=True)

    @plain_errors
    async def begin_update(self) -> None:
        """Prepare to receive weights; :meth:`pause` comes first."""
        async with self._transfer:
            await self._rpc("start_weight_update")

    @plain_errors
    async def update(self, update_info: dict[str, Any]) -> None:
        """Receive weights; returns when all are loaded."""
        async with self._transfer:
            await self._rpc("update_weights", update_info=update_info)

    @plain_errors
    async def finish_update(self, version: int) -> None:
        """Label the new weights with their version. The engine stays paused until :meth:`resume`."""
        async with self._transfer:
            await self._rpc("finish_weight_update")
            if self._adapter is not None:
                await self._rpc("install_adapter")
            await self._engine.update_weight_version(str(version))
        self._has_weights = True

    @plain_errors
    async def resume(self) -> None:
        """Continue; requests that were kept are computed with the current weights."""
        async with self._transfer:
            await self._engine.resume_generation()
            self._paused = False

    @plain_errors
    async def abandon_update(self) -> None:
        """End an update that broke off, if there is one. The weights are unusable until the next update."""
        async with self._transfer:
            try:
                await self._rpc("finish_weight_update")
            except Exception as error:
                if "without a matching start" not in str(error):
                    raise

    @plain_errors
    async def sleep(self, level: int) -> None:
        """Free the memory of cached keys and values, and move the weights to main memory (1) or drop them (2)."""
        async with self._transfer:
            self._paused = True
            await self._engine.sleep(level)

    @plain_errors
    async def wake(self, what: list[str] | None = None) -> None:
        """Allocate memory again; the engine computes once it has all of it."""
        async with self._transfer:
            self._paused = not await self._engine.wake_up(what)


def _sampling_params(arguments: dict[str, Any]) -> Any:
    """Build ``vllm.SamplingParams``; any exception becomes RefusedRequest."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    try:
        named = {name: value for name, value in arguments.items() if name not in ("priority", "images")}
        if "structured_outputs" in named:
            named["structured_outputs"] = StructuredOutputsParams(**named["structured_outputs"])
        return SamplingParams(**named, output_kind=RequestOutputKind.FINAL_ONLY)
    except Exception as error:
        raise RefusedRequest(f"{type(error).__name__}: {error}") from None


def _completion(output: Any) -> Completion:
    """Extract plain values from a finished vLLM request."""
    (made,) = output.outputs
    token_ids = np.array(made.token_ids, dtype=np.int32)
    logprobs = (entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs, strict=True))
    runs = [(int(span.version), span.end - span.start) for span in made.weight_versions or ()]
    return Completion(token_ids, np.fromiter(logprobs, np.float32, len(token_ids)), str(made.finish_reason), runs)


class EngineLoad:
    """How busy an engine is, from what its scheduler reports after each step.

    A stat logger of vLLM 0.32 and 0.33 (``vllm.v1.metrics.loggers.StatLoggerBase``), without its base class.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._steps, self._running, self._waiting, self._cache = 0, 0, 0, 0.0

    def factory(self, config: Any, number: int = 0) -> "EngineLoad":
        """Return this object, for each replica of the engine that vLLM makes a logger for."""
        return self

    def record(self, scheduler_stats: Any, *more: Any, **others: Any) -> None:
        """Add a step; ``scheduler_stats`` are vLLM's ``SchedulerStats``, or ``None``."""
        if scheduler_stats is None:
            return
        self._steps += 1
        self._running += scheduler_stats.num_running_reqs
        self._waiting += scheduler_stats.num_waiting_reqs
        self._cache = max(self._cache, scheduler_stats.kv_cache_usage)

    def take(self) -> dict[str, float]:
        """Return the load since the last call: means of requests over steps, and the most of the cache; 0 to 1."""
        steps = max(self._steps, 1)
        found = {"running": self._running / steps, "waiting": self._waiting / steps, "kv_cache": self._cache}
        steps = self._steps
        self._forget()
        return found if steps else {}

    def log_engine_initialized(self) -> None:
        """Nothing is written."""

    def log(self) -> None:
        """Nothing is written."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Sleep is not counted."""
