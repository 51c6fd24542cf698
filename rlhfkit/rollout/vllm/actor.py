"""``VLLMActor``: one vLLM engine behind one asyncio interface, to be hosted by a Ray actor.

Only plain Python values and plain exceptions leave the actor, so the training process never imports vLLM.
Written for vLLM 0.32.
"""

import asyncio
import functools
import itertools
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rlhfkit.rollout.errors import RefusedRequest
from rlhfkit.rollout.remote.gpu_holder import assigned_gpus
from rlhfkit.rollout.remote.placement import RankLocation
from rlhfkit.rollout.vllm.backends import AsyncBackend, Backend, InProcessBackend

Result = TypeVar("Result")
Request = tuple[list[int], dict[str, Any]]
"""Prompt token ids and the arguments of ``vllm.SamplingParams``."""
Completion = tuple[list[int], list[float], str, list[tuple[str, int, int]]]
"""Token ids, log-probs, finish reason, and spans (weight version, first token, end)."""


def plain_errors(
    method: Callable[..., Awaitable[Result]],
) -> Callable[..., Coroutine[Any, Any, Result]]:
    """Turn any exception of a coroutine method into a ``RuntimeError`` (or ``RefusedRequest``) with its text.

    An exception object of vLLM's would make whoever receives it import vLLM.
    """

    @functools.wraps(method)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Result:
        try:
            return await method(self, *args, **kwargs)
        except asyncio.CancelledError:
            message = "aborted"
        except RefusedRequest:
            raise
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        raise RuntimeError(message)

    return wrapper


class VLLMActor:
    """What the pool calls. All methods are coroutines, so a busy engine still answers :meth:`health`.

    One engine a process, and never in the training process: a vLLM engine changes global state of torch.

    Args:
        arguments: Of ``vllm.EngineArgs``.
        in_process: Which backend.
        environment: Variables set in this process, over what Ray has set.
        not_on: Training ranks whose GPUs this engine must not have.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        in_process: bool,
        environment: dict[str, str] | None = None,
        not_on: Sequence[RankLocation] = (),
    ) -> None:
        os.environ.update(environment or {})
        self._not_on = tuple(not_on)
        self._arguments = arguments
        self._backend: Backend = InProcessBackend() if in_process else AsyncBackend()
        self._numbers = itertools.count()
        self._tasks: dict[str, list[asyncio.Task[Any]]] = {}
        self._paused = False
        self._step = (-1, time.monotonic())  # the last that was seen, and when
        # Steps of a transfer run one after another, in the order of the calls, also when an engine that was stopped for
        # a while finds several waiting.
        self._transfer = asyncio.Lock()

    @plain_errors
    async def start(self) -> dict[str, Any]:
        """Build the engine (tens of seconds).

        Returns:
            ``max_model_len`` and ``vocabulary``, in tokens; ``pid``, ``node`` and ``processes`` (number and time of
            creation of each), by which the manager names and kills them.
        """
        import psutil
        import ray

        self._check_gpus()
        config = await self._backend.start(self._arguments)
        await self._backend.set_version("0")
        this = psutil.Process()
        return {
            "max_model_len": int(config.model_config.max_model_len),
            "vocabulary": int(config.model_config.get_vocab_size()),
            "pid": this.pid,
            "node": ray.get_runtime_context().get_node_id(),
            "processes": [(one.pid, one.create_time()) for one in (this, *this.children(recursive=True))],
        }

    def _check_gpus(self) -> None:
        """The last wall between an engine and the training ranks; Ray should not have given it their GPUs.

        Raises:
            RuntimeError: If it has one of theirs.
        """
        for gpu in assigned_gpus() if self._not_on else ():
            mine = RankLocation(gpu["host"], gpu["gpu"], on_ray=True, uuid=gpu["uuid"])
            for rank, seat in enumerate(self._not_on):
                if mine.is_gpu_of(seat):
                    raise RuntimeError(
                        f"Ray gave this engine {mine}, which training rank {rank} of those on GPUs uses: start Ray on "
                        "the ranks' machines with the GPUs that they leave free (CUDA_VISIBLE_DEVICES=... ray start), "
                        "let Ray start the ranks (launcher='ray'), or share GPUs with VLLMPool(colocate=True)"
                    )

    @plain_errors
    async def health(self) -> dict[str, Any]:
        """Whether the engine lives.

        Returns:
            ``silent``: seconds, since an earlier call, that it has had requests to compute and made no step;
            ``paused``: whether it has been told to make none.

        Raises:
            RuntimeError: If vLLM says that it has failed.
        """
        step, now = await self._backend.step_count(), time.monotonic()
        if step != self._step[0] or self._paused or not self._tasks:
            self._step = (step, now)
        return {"silent": now - self._step[1], "paused": self._paused}

    @plain_errors
    async def generate(self, key: str, requests: Sequence[Request]) -> list[Completion]:
        """Sample one completion per request, side by side.

        Args:
            key: By which :meth:`abort` finds them; nobody waits for the result then.
            requests: What to sample.
        """
        try:
            return [_completion(output) for output in await self._run(key, requests)]
        except asyncio.CancelledError:
            return []

    @plain_errors
    async def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-probs of every token after the first, temperature 1."""
        # vLLM computes prompt log-probs on the way to a first new token, so one is asked for and thrown away.
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        key = f"score-{next(self._numbers)}"
        outputs = await self._run(key, [(list(sequence), params) for sequence in sequences])
        return [
            [
                entry[token].logprob
                for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for output in outputs
        ]

    async def _run(self, key: str, requests: Sequence[Request]) -> list[Any]:
        """Run requests side by side.

        Raises:
            RefusedRequest: If one cannot be run; the engine is as it was.
        """
        checked = [(list(token_ids), _sampling_params(arguments)) for token_ids, arguments in requests]
        running = [self._backend.generate(f"request-{next(self._numbers)}", *request) for request in checked]
        tasks = [asyncio.ensure_future(one) for one in running]
        self._tasks[key] = tasks
        try:
            return await asyncio.gather(*tasks)
        finally:
            del self._tasks[key]
            for task in tasks:  # when one fails, nobody waits for the others
                task.cancel()

    @plain_errors
    async def abort(self, keys: Sequence[str]) -> None:
        """Drop requests.

        Args:
            keys: Those given to :meth:`generate`; unknown ones are ended already.
        """
        for key in keys:
            for task in self._tasks.get(key, ()):
                task.cancel()

    @plain_errors
    async def connect(self, rendezvous: dict[str, Any]) -> None:
        """Join the trainer's group."""
        async with self._transfer:
            await self._backend.rpc("init_weight_transfer_engine", init_info=rendezvous)

    @plain_errors
    async def pause(self) -> None:
        """Stop computing; requests are kept. An update while they run would crash vLLM."""
        async with self._transfer:
            self._paused = True
            await self._backend.pause()

    @plain_errors
    async def begin_update(self) -> None:
        """Get ready to receive; :meth:`pause` comes first."""
        async with self._transfer:
            await self._backend.rpc("start_weight_update")

    @plain_errors
    async def update(self, update: dict[str, Any]) -> None:
        """Receive; returns when all has been loaded."""
        async with self._transfer:
            await self._backend.rpc("update_weights", update_info=update)

    @plain_errors
    async def finish_update(self, version: int) -> None:
        """Serve the new weights under their version. The engine stays paused until :meth:`resume`."""
        async with self._transfer:
            await self._backend.rpc("finish_weight_update")
            await self._backend.set_version(str(version))

    @plain_errors
    async def resume(self) -> None:
        """Compute again; what was kept is computed with the weights that are there now."""
        async with self._transfer:
            await self._backend.resume()
            self._paused = False

    @plain_errors
    async def abandon_update(self) -> None:
        """Close an update that broke off, if there is one. The weights are garbage until the next update."""
        async with self._transfer:
            try:
                await self._backend.rpc("finish_weight_update")
            except Exception as error:
                if "without a matching start" not in str(error):
                    raise

    @plain_errors
    async def sleep(self, level: int) -> None:
        """Free GPU memory: of the cached keys and values, and (1) move or (2) drop the weights."""
        async with self._transfer:
            self._paused = True
            await self._backend.sleep(level)

    @plain_errors
    async def wake(self, what: list[str] | None = None) -> None:
        """Take memory again.

        Args:
            what: ``["weights"]``, ``["kv_cache"]``, or ``None`` for all; the engine computes when it has all.
        """
        async with self._transfer:
            self._paused = not await self._backend.wake(what)


def _sampling_params(arguments: dict[str, Any]) -> Any:
    """What vLLM makes of the arguments of a request.

    Raises:
        RefusedRequest: If it does not take them, whatever it says so with.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    try:
        return SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
    except Exception as error:
        raise RefusedRequest(f"{type(error).__name__}: {error}") from None


def _completion(output: Any) -> Completion:
    """The plain values of a finished vLLM request."""
    (made,) = output.outputs
    token_ids = list(made.token_ids)
    spans = [(span.version, span.start, span.end) for span in made.weight_versions or ()]
    return token_ids, _chosen(token_ids, made.logprobs), str(made.finish_reason), spans


def _chosen(token_ids: Sequence[int], logprobs: Sequence[Any]) -> list[float]:
    """Log-probs of the given tokens out of vLLM's mappings from token to log-prob, one per position."""
    return [entry[token].logprob for token, entry in zip(token_ids, logprobs, strict=True)]
