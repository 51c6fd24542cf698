"""Two ways of running vLLM 0.32 behind one asynchronous interface; vLLM is imported when a backend starts.

:class:`InProcessBackend` steps a synchronous ``LLMEngine`` in a thread, for CPUs: it starts three times as fast as
vLLM's own three processes. :class:`AsyncBackend` is vLLM's ``AsyncLLM``, for GPUs and tensor parallelism.
"""

import asyncio
import contextlib
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from rlhfkit.rollout.errors import RefusedRequest
from rlhfkit.rollout.vllm.adapter_slot import adapter_request


class Backend(Protocol):
    """One vLLM engine."""

    async def start(self, arguments: dict[str, Any]) -> Any:
        """Build the engine; returns vLLM's ``VllmConfig``."""
        ...

    async def generate(self, request_id: str, token_ids: list[int], params: Any, priority: int) -> Any:
        """Run one request and return its ``RequestOutput``; cancelling the coroutine aborts it.

        Of waiting requests the one with the lowest ``priority`` is next.

        Raises RefusedRequest if the engine does not accept it; other requests are unaffected.
        """
        ...

    async def cut(self, request_id: str) -> None:
        """End a request, so that :meth:`generate` returns what was made so far; no effect if it is unknown."""
        ...

    async def rpc(self, method: str, **kwargs: Any) -> Any:
        """Call a method of every worker."""
        ...

    async def pause(self) -> None:
        """Stop computing, keep the requests, and clear the cache of keys and values."""
        ...

    async def resume(self) -> None:
        """Continue; the cache of kept requests is computed again."""
        ...

    async def set_version(self, version: str) -> None:
        """Set the version that labels the tokens from now on."""
        ...

    async def sleep(self, level: int) -> None:
        """Free GPU memory; running requests are dropped."""
        ...

    async def wake(self, what: list[str] | None) -> bool:
        """Undo :meth:`sleep`, wholly or in part; returns whether everything is awake."""
        ...

    async def step_count(self) -> int:
        """Return a number that grows while the engine's process computes; raises if it has failed."""
        ...


class InProcessBackend(Backend):
    """A synchronous ``LLMEngine``, owned by one thread that runs the functions posted to it."""

    def __init__(self) -> None:
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, tuple[asyncio.Future[Any], asyncio.AbstractEventLoop]] = {}
        self._paused = False
        self._steps = 0
        self._failure: BaseException | None = None
        self._engine: Any = None
        self._adapter: Any = None  # of every request

    async def start(self, arguments: dict[str, Any]) -> Any:
        threading.Thread(target=self._work, name="vllm", daemon=True).start()
        return await self._post(lambda: self._build(arguments))

    def _build(self, arguments: dict[str, Any]) -> Any:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._adapter = adapter_request(arguments)
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        return self._engine.vllm_config

    def _work(self) -> None:
        """Run the thread: posted functions first, then steps of the engine."""
        while True:
            idle = self._engine is None or self._paused or not self._engine.has_unfinished_requests()
            try:
                post = self._posts.get() if idle else self._posts.get_nowait()
            except queue.Empty:
                self._step()
            else:
                post()

    def _step(self) -> None:
        self._steps += 1
        try:
            outputs = self._engine.step()
        except BaseException as error:  # the engine's state is undefined now
            self._failure, self._paused = error, True
            where = traceback.extract_tb(error.__traceback__)[-1]
            broken = RuntimeError(f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
            for future, loop in self._running.values():
                loop.call_soon_threadsafe(_fail, future, broken)
            self._running.clear()
            return
        for output in outputs:
            if output.finished and output.request_id in self._running:
                future, loop = self._running.pop(output.request_id)
                loop.call_soon_threadsafe(_resolve, future, output)

    async def _post(self, function: Callable[[], Any]) -> Any:
        """Run a function in the thread and return its result."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def post() -> None:
            try:
                if self._failure is not None:
                    raise RuntimeError(f"the engine died earlier: {self._failure!r}")
                result = function()
            except BaseException as error:
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_resolve, future, result)

        self._posts.put(post)
        return await future

    async def generate(self, request_id: str, token_ids: list[int], params: Any, priority: int) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def add() -> None:
            try:
                self._engine.add_request(
                    request_id,
                    {"prompt_token_ids": token_ids},
                    params,
                    lora_request=self._adapter,
                    priority=priority,
                )
            except Exception as error:
                with contextlib.suppress(Exception):  # a part of vLLM may have accepted it
                    self._engine.abort_request([request_id])
                raise RefusedRequest(f"{type(error).__name__}: {error}") from None
            self._running[request_id] = (future, loop)

        def abort() -> None:
            if self._running.pop(request_id, None) is not None:
                self._engine.abort_request([request_id])

        try:
            await self._post(add)
            return await future
        except asyncio.CancelledError:
            self._posts.put(abort)
            raise

    async def cut(self, request_id: str) -> None:
        from vllm.v1.engine import FinishReason

        def cut() -> None:
            future, loop = self._running.pop(request_id, (None, None))
            if future is None or loop is None:
                return
            # What AsyncLLM returns for an aborted request; LLMEngine only forgets it.
            processor = self._engine.output_processor
            (name,) = processor.external_req_ids[request_id]
            made = processor.request_states[name].make_request_output([], None, FinishReason.ABORT, None)
            self._engine.abort_request([request_id])
            loop.call_soon_threadsafe(_resolve, future, made)

        await self._post(cut)

    async def rpc(self, method: str, **kwargs: Any) -> Any:
        return await self._post(lambda: self._engine.collective_rpc(method, kwargs=kwargs))

    async def pause(self) -> None:
        def pause() -> None:
            self._paused = True
            self._engine.engine_core.engine_core.pause_scheduler(mode="keep", clear_cache=True)

        await self._post(pause)

    async def resume(self) -> None:
        def resume() -> None:
            self._engine.engine_core.engine_core.resume_scheduler()
            self._paused = False

        await self._post(resume)

    async def set_version(self, version: str) -> None:
        await self._post(lambda: self._engine.set_weight_version(version))

    async def sleep(self, level: int) -> None:
        def sleep() -> None:
            self._paused = True
            self._engine.sleep(level)

        await self._post(sleep)

    async def wake(self, what: list[str] | None) -> bool:
        def wake() -> bool:
            awake = bool(self._engine.wake_up(what))
            self._paused = not awake
            return awake

        return bool(await self._post(wake))

    async def step_count(self) -> int:
        if self._failure is not None:
            raise RuntimeError(f"the engine died earlier: {self._failure!r}")
        return self._steps


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class AsyncBackend(Backend):
    """vLLM's ``AsyncLLM``, whose engine lives in child processes."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._adapter: Any = None  # of every request
        self._num_answers = 0
        self._open_question: asyncio.Task[Any] | None = None

    async def start(self, arguments: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._adapter = adapter_request(arguments)
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        return self._engine.vllm_config

    async def generate(self, request_id: str, token_ids: list[int], params: Any, priority: int) -> Any:
        last = None
        try:
            prompt: Any = {"prompt_token_ids": token_ids}
            outputs = self._engine.generate(prompt, params, request_id, lora_request=self._adapter, priority=priority)
            async for output in outputs:
                last = output
        except Exception as error:
            if self._engine.errored:
                raise
            cause = error.__cause__ or error  # vLLM wraps unexpected exceptions
            raise RefusedRequest(f"{type(cause).__name__}: {cause}") from None
        return last

    async def cut(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def rpc(self, method: str, **kwargs: Any) -> Any:
        return await self._engine.collective_rpc(method, kwargs=kwargs)

    async def pause(self) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=True)

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def set_version(self, version: str) -> None:
        await self._engine.update_weight_version(version)

    async def sleep(self, level: int) -> None:
        await self._engine.sleep(level)

    async def wake(self, what: list[str] | None) -> bool:
        return bool(await self._engine.wake_up(what))

    async def step_count(self) -> int:
        await self._engine.check_health()
        # The engine's process answers between two steps, so answers are counted instead of steps.
        if self._open_question is None or self._open_question.done():
            if self._open_question is not None:
                self._open_question.result()
                self._num_answers += 1
            self._open_question = asyncio.ensure_future(self._engine.is_paused())
        return self._num_answers
