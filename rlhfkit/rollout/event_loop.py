"""An asyncio event loop in a thread, for concurrent calls of slow user code from a synchronous caller.

A call that hangs costs only its own time limit: threads of plain functions are abandoned, coroutines cancelled without
waiting, and a coroutine that blocks the loop is detected and named.
"""

import asyncio
import concurrent.futures
import contextvars
import inspect
import math
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_HEARTBEAT = 0.25  # seconds


class BlockedLoopError(RuntimeError):
    """A coroutine blocks the event loop."""


class EventLoopThread:
    """An event loop in a daemon thread named ``name``, started at first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._beat = 0.0

    def __reduce__(self) -> Any:
        """Pickle without the loop and its thread."""
        return type(self), (self._name,)

    def submit(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._running())

    def submit_together(self, works: Sequence[Callable[[], Awaitable[T]]]) -> "list[concurrent.futures.Future[T]]":
        """Call async functions in one step of the loop, so that none is ahead of another by the caller's thread."""
        loop, gate = self._running(), asyncio.Event()

        async def behind_gate(work: Callable[[], Awaitable[T]]) -> T:
            await gate.wait()
            return await work()

        futures = [asyncio.run_coroutine_threadsafe(behind_gate(work), loop) for work in works]
        loop.call_soon_threadsafe(gate.set)
        return futures

    def wait(
        self,
        futures: Sequence["concurrent.futures.Future[Any]"],
        *,
        blocked_after: float,
        timeout: float | None = None,
    ) -> None:
        """Wait until one of the futures is done, up to ``timeout`` seconds (``None``: no limit).

        Raises :class:`BlockedLoopError`, which shows where, and abandons the thread, if one step of a coroutine blocks
        the loop for more than ``blocked_after`` seconds.
        """
        first = concurrent.futures.FIRST_COMPLETED
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            if concurrent.futures.wait(futures, timeout=min(left, 1.0), return_when=first).done:
                return
            silent = time.monotonic() - self._beat
            if silent > blocked_after:
                raise BlockedLoopError(self._blocked(silent))
            if left <= 0:
                return

    def close(self) -> None:
        """Stop the thread; a second call does nothing."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None and thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(5.0)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
                self._beat = time.monotonic()
                self._thread.start()
            return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        def beat() -> None:
            self._beat = time.monotonic()
            loop.call_later(_HEARTBEAT, beat)

        asyncio.set_event_loop(loop)
        loop.call_soon(beat)
        try:
            loop.run_forever()
            _cancel_everything(loop)
        finally:
            loop.close()

    def _blocked(self, seconds: float) -> str:
        """Return the error message, and forget the thread, so that the next call starts a new one."""
        with self._lock:
            thread, self._loop, self._thread = self._thread, None, None
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else "(the thread has ended)\n"
        return (
            f"an async function has blocked the event loop of all groups for {seconds:.0f} s: await something that "
            f"does not block there, or make it a plain function, which gets a thread of its own. It is at\n{where}"
        )


async def call_with_timeout(function: Callable[..., Any], *arguments: Any, timeout: float, description: str) -> Any:
    """Call a function, async or plain (then in a new thread), and return its result within ``timeout`` seconds.

    Raises ``TimeoutError`` if it takes longer (a coroutine is cancelled, a thread abandoned), or what the function
    raised.
    """
    task = asyncio.ensure_future(
        function(*arguments) if inspect.iscoroutinefunction(function) else run_in_thread(function, *arguments)
    )
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if not done:
        _abandon(task)
        raise TimeoutError(f"{description} took longer than {timeout:g} s")
    return task.result()


async def run_in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new daemon thread, which may hang; an awaitable that it returns is awaited in the loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(*arguments)
        except StopIteration as stop:  # a future cannot hold it
            error = RuntimeError(f"{stop!r} was raised")
            error.__cause__ = stop
        except BaseException as raised:  # raised again by the awaiting caller
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name="rlhfkit-call", daemon=True).start()
    result = await future
    return await result if inspect.isawaitable(result) else result


def _abandon(task: "asyncio.Future[Any]") -> None:
    """Cancel without waiting, and ignore what the task raises."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


def _cancel_everything(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the running tasks and give them a second to clean up."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
