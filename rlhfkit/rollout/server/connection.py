"""``ServerConnections``: requests to one or several servers of the same model, from any thread.

Requests run in the event loop of one thread, so that hundreds are in flight at little cost, and one that is cancelled
closes its connection, at which vLLM drops it.
"""

import asyncio
import concurrent.futures
import json
import logging
import random
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from rlhfkit.rollout.errors import EngineError, RequestError
from rlhfkit.serving.access import AccessToken, is_loopback
from rlhfkit.serving.endpoints import (
    Endpoint,
    InvalidResponse,
    ServerUnavailable,
    exchange,
    least_outstanding,
    make_client,
)
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    import httpx
    from tenacity import AsyncRetrying

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_RESPONSE_BYTES = 2**30
"""Largest response: log-probs of the 20 likeliest tokens at each of a long prompt's are some hundred megabytes."""

_MAX_BACKOFF = 30.0  # seconds


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the servers are, and how they are asked; raises ``ValueError`` if a field is out of range."""

    urls: tuple[str, ...]
    """``http://`` or ``https://`` addresses, without user, password and query; all serve the same model."""
    token: AccessToken | None = None
    """Sent as ``Authorization: Bearer``; the server's ``--api-key``."""
    concurrency: int = 256
    """Requests in flight on each server; more wait here. vLLM runs 256 at once by default (``--max-num-seqs``)."""
    timeout: float = 1800.0
    """Seconds in which a server must answer one request, the time in its queue included."""
    retries: int = 5
    """How often a request is repeated, on another server if there is one, that found no connection or no answer in
    time, or status 408, 429 or 5xx. The answer is the same, as each has its own seed."""
    backoff: float = 1.0
    """Seconds before the first repetition; doubled each time up to 30, plus a random part of up to this."""
    ssl_ca_certs: str | None = None
    """File of certificate authorities (PEM) to verify the servers with; ``None``: the system's."""

    def __post_init__(self) -> None:
        """Check every field."""
        object.__setattr__(self, "urls", checked_urls(self.urls))
        check_integer("concurrency", self.concurrency, minimum=1)
        check_number("request_timeout", self.timeout, above=0, why="it is in seconds")
        check_integer("retries", self.retries, minimum=0)
        check_number("backoff", self.backoff, minimum=0, why="it is in seconds")


def checked_urls(urls: str | Sequence[str]) -> tuple[str, ...]:
    """Return addresses without trailing slashes and the ``/v1`` of OpenAI clients; ValueError if one is none."""
    listed = (urls,) if isinstance(urls, str) else tuple(urls)
    if not listed:
        raise ValueError("urls needs the address of at least one running server, like 'http://127.0.0.1:8000'")
    for url in listed:
        parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"urls must be like 'http://127.0.0.1:8000', got {url!r}")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ValueError(
                f"the address of {parts.hostname} must have no user, password or query, which would be logged; give "
                "the secret as token_variable"
            )
    return tuple(url.rstrip("/").removesuffix("/v1") for url in listed)


class ServerConnections:
    """Open connections to the servers of some options; :meth:`close` ends them."""

    def __init__(self, options: ServerOptions) -> None:
        """Start the thread; nothing is sent yet. ImportError if httpx or tenacity is missing."""
        self.options = options
        self.endpoints = [Endpoint(url) for url in options.urls]
        if options.token is not None:
            insecure = [url for url in options.urls if url.startswith("http:") and not self._local(url)]
            if insecure:
                log.warning("the token for %s is sent unencrypted; use https unless the network is trusted", *insecure)
        client = partial(
            make_client,
            "a client of vLLM servers",
            token=options.token,
            ssl_ca_certs=options.ssl_ca_certs,
            timeout=options.timeout,
            concurrency=None,
        )
        # uvicorn closes a connection when its application has raised, after the response, and after 5 idle seconds. A
        # request that is sent at that moment fails. Requests that are repeated share connections all the same; the
        # steps of a weight sync, which are sent once, have one each. Slots bound the shared ones: a bound in the pool
        # would close those of one server while requests to another need theirs.
        self._client = client(keepalive=None)
        self._single_use_client = client(keepalive=0)
        self._slots = asyncio.Semaphore(options.concurrency * len(self.endpoints))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlhfkit-server-requests", daemon=True)
        self._thread.start()

    @staticmethod
    def _local(url: str) -> bool:
        return is_loopback(urlsplit(url).hostname or "")

    # ---------------------------------------------------------------- requests

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the thread; cancelling the result cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Post to the server with the fewest requests, with repetitions, and return what its JSON says.

        Raises:
            RequestError: If the server refuses the request.
            EngineError: If no server answers it.
        """
        content, asked = json.dumps(body).encode(), set[Endpoint]()
        try:
            async with self._slots:
                async for attempt in self._attempts(asked):
                    with attempt:
                        if len(asked) == len(self.endpoints):
                            asked.clear()
                        endpoint = least_outstanding(self.endpoints, asked)
                        asked.add(endpoint)
                        with endpoint.in_use():
                            return await self._exchange(
                                self._client, "POST", endpoint.url + path, content, self.options.timeout
                            )
        except ServerUnavailable as error:
            raise EngineError(
                f"{self._shown(error)}; given up after {1 + self.options.retries} attempt(s). Is the server running? A "
                "request may take request_timeout seconds, its time in the queue included"
            ) from None
        except InvalidResponse as error:
            if error.status is not None and 400 <= error.status < 500 and error.status not in (401, 403, 404):
                raise RequestError(f"the request was refused: {self._shown(error)}") from None
            raise EngineError(self._refusal(error)) from None
        raise AssertionError("tenacity gives the last error")

    async def call(
        self, endpoint: Endpoint, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float
    ) -> Any:
        """Send one request to one server, once, on a new connection, and return what its JSON says.

        EngineError if that fails.
        """
        content = None if body is None else json.dumps(body).encode()
        try:
            return await self._exchange(self._single_use_client, method, endpoint.url + path, content, timeout)
        except InvalidResponse as error:
            raise ServerRefusal(self._refusal(error), error.status) from None
        except ServerUnavailable as error:
            raise EngineError(self._shown(error)) from None

    async def _exchange(
        self, client: "httpx.AsyncClient", method: str, url: str, content: bytes | None, timeout: float
    ) -> Any:
        answer = await exchange(client, method, url, content, timeout=timeout, max_bytes=MAX_RESPONSE_BYTES)
        try:
            return json.loads(answer or b"null")
        except ValueError as error:
            raise InvalidResponse(f"{url} answered with something else than JSON ({error}): {answer[:200]!r}") from None

    def _attempts(self, asked: set[Endpoint]) -> "AsyncRetrying":
        """Attempts for one request: each server without a pause, then all again with growing ones."""
        from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

        def wait(state: RetryCallState) -> float:
            if len(asked) < len(self.endpoints):
                return 0.0
            error = state.outcome.exception() if state.outcome is not None else None
            exponent = min((state.attempt_number - 1) // len(self.endpoints), 10)
            later: float = min(self.options.backoff * 2**exponent, _MAX_BACKOFF)
            later += random.uniform(0.0, self.options.backoff)
            return max(later, error.retry_after if isinstance(error, ServerUnavailable) else 0.0)

        return AsyncRetrying(
            retry=retry_if_exception_type(ServerUnavailable),
            stop=stop_after_attempt(1 + self.options.retries),
            wait=wait,
            reraise=True,
        )

    def _refusal(self, error: InvalidResponse) -> str:
        shown = self._shown(error)
        if error.status in (401, 403):
            have = "the token that was sent is not the server's" if self.options.token else "no token was sent"
            return f"{shown}: {have} (--api-key; VLLMServer(token_variable=...) names the variable that holds it)"
        return shown

    def _shown(self, error: Exception) -> str:
        return str(error) if self.options.token is None else self.options.token.redact(str(error))

    def close(self) -> None:
        """End the connections and the thread; what is in flight is cancelled."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._client.aclose()
            await self._single_use_client.aclose()

        self.submit(end()).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()


class ServerRefusal(EngineError):
    """A server answered with another HTTP ``status`` than 200, or with something unexpected."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
