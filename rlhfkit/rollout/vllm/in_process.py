"""``InProcessLLM``: vLLM 0.32 in this process, for CPUs: it starts twice as fast as ``AsyncLLM`` and its processes.

vLLM is imported when it starts.
"""

import asyncio
import contextlib
import queue
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any


class InProcessLLM:
    """A synchronous ``LLMEngine`` with the methods of vLLM's ``AsyncLLM`` that :class:`VLLMActor` calls.

    One thread owns it and runs the functions posted to it.
    """

    vllm_config: Any
    """vLLM's ``VllmConfig``."""

    def __init__(self) -> None:
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, tuple[asyncio.Future[Any], asyncio.AbstractEventLoop]] = {}
        self._paused = False
        self._failure: BaseException | None = None
        self._engine: Any = None

    @classmethod
    async def start(cls, arguments: dict[str, Any], stat_logger: Callable[..., Any]) -> "InProcessLLM":
        """Build an engine from arguments of ``vllm.EngineArgs``; ``stat_logger`` makes what its steps are told to."""
        engine = cls()
        threading.Thread(target=engine._work, name="vllm", daemon=True).start()
        await engine._post(lambda: engine._build(arguments, stat_logger))
        return engine

    def _build(self, arguments: dict[str, Any], stat_logger: Callable[..., Any]) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        # Unlike AsyncLLM, it asks loggers of its own only if it logs statistics.
        settings = EngineArgs(**arguments | {"disable_log_stats": False})
        self._engine = LLMEngine.from_engine_args(settings, stat_loggers=[stat_logger])
        self.vllm_config = self._engine.vllm_config

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

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, lora_request: Any, priority: int
    ) -> AsyncIterator[Any]:
        """Yield the ``RequestOutput`` of a request when it is finished; ending the iteration aborts it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def add() -> None:
            try:
                self._engine.add_request(request_id, prompt, params, lora_request=lora_request, priority=priority)
            except Exception:
                with contextlib.suppress(Exception):  # a part of vLLM may have accepted it
                    self._engine.abort_request([request_id])
                raise
            self._running[request_id] = (future, loop)

        def abort() -> None:
            if self._running.pop(request_id, None) is not None:
                self._engine.abort_request([request_id])

        try:
            await self._post(add)
            yield await future
        except asyncio.CancelledError:
            self._posts.put(abort)
            raise

    async def abort(self, request_id: str) -> None:
        """End a request, whose output is what was made so far; no effect if it is unknown."""
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

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> Any:
        return await self._post(lambda: self._engine.collective_rpc(method, kwargs=kwargs))

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        def pause() -> None:
            self._paused = True
            self._engine.engine_core.engine_core.pause_scheduler(mode=mode, clear_cache=clear_cache)

        await self._post(pause)

    async def resume_generation(self) -> None:
        def resume() -> None:
            self._engine.engine_core.engine_core.resume_scheduler()
            self._paused = False

        await self._post(resume)

    async def update_weight_version(self, version: str) -> None:
        await self._post(lambda: self._engine.set_weight_version(version))

    async def sleep(self, level: int) -> None:
        """Free memory; running requests are dropped."""

        def sleep() -> None:
            self._paused = True
            self._engine.sleep(level)

        await self._post(sleep)

    async def wake_up(self, tags: list[str] | None) -> bool:
        """Undo :meth:`sleep`, wholly or in part; returns whether everything is awake."""

        def wake() -> bool:
            awake = bool(self._engine.wake_up(tags))
            self._paused = not awake
            return awake

        return bool(await self._post(wake))

    async def is_paused(self) -> bool:
        """Whether it does not compute; the thread answers between two steps."""
        return bool(await self._post(lambda: self._paused))

    @property
    def renderer(self) -> Any:
        """What turns prompts into what the engine computes, in threads of its own."""
        return self._engine.renderer

    @property
    def errored(self) -> bool:
        return self._failure is not None

    async def check_health(self) -> None:
        """Raise RuntimeError if a step has failed."""
        if self._failure is not None:
            raise RuntimeError(f"the engine died earlier: {self._failure!r}")


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
