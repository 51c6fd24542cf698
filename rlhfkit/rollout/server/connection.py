"""``ServerConnections``: requests to one or several vLLM servers of the same model, from any thread.

Requests run in the event loop of one thread, so that hundreds are in flight at little cost, and one that is cancelled
closes its connection, at which vLLM drops it.
"""

import asyncio
import concurrent.futures
import json
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from rlhfkit.rollout.errors import EngineError, RequestError
from rlhfkit.rollout.event_loop import EventLoopThread
from rlhfkit.serving.client import (
    ClientOptions,
    Endpoint,
    HTTPClient,
    InvalidResponse,
    ServerUnavailable,
    checked_urls,
)
from rlhfkit.validation import check_integer, check_number

T = TypeVar("T")

MAX_RESPONSE_BYTES = 2**30
"""Largest response: log-probs of the 20 likeliest tokens at each of a long prompt's are some hundred megabytes."""

_REFUSED = (401, 403, 404)
"""Statuses that say something of the server, not of the request."""


def server_options(
    urls: str | Sequence[str], *, concurrency: int, request_timeout: float, **others: Any
) -> ClientOptions:
    """How vLLM servers of one model are asked; raises ``ValueError`` if an argument is out of range.

    Args:
        urls: Addresses, which may end with the ``/v1`` of OpenAI clients.
        concurrency: Requests in flight on each server. vLLM runs 256 at once by default (``--max-num-seqs``).
        request_timeout: Seconds in which a server must answer one request, the time in its queue included. The answer
            to a repetition is the same, as each request has its own seed.
        **others: ``token``, ``retries``, ``backoff`` and ``ssl_ca_certs`` of :class:`ClientOptions`.
    """
    addresses = [url.removesuffix("/v1") for url in checked_urls(urls)]
    check_integer("concurrency", concurrency, minimum=1)
    check_number("request_timeout", request_timeout, above=0, why="it is in seconds")
    return ClientOptions(
        urls=addresses,
        concurrency=concurrency * len(addresses),
        timeout=request_timeout,
        max_response_bytes=MAX_RESPONSE_BYTES,
        **others,
    )


class ServerConnections:
    """Open connections to the servers of some options; :meth:`close` ends them."""

    def __init__(self, options: ClientOptions) -> None:
        """Start the thread; nothing is sent yet. ImportError if httpx or tenacity is missing."""
        self.options = options
        self._client = HTTPClient("a client of vLLM servers", options)
        self._thread = EventLoopThread("rlhfkit-server-requests")

    @property
    def endpoints(self) -> list[Endpoint]:
        return self._client.endpoints

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the thread; cancelling the result cancels it."""
        return self._thread.submit(coroutine)

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Post to the server with the fewest requests, with repetitions, and return what its JSON says.

        Raises:
            RequestError: If the server refuses the request.
            EngineError: If no server answers it.
        """
        try:
            return _parsed(*await self._client.ask(path, json.dumps(body).encode()))
        except ServerUnavailable as error:
            raise EngineError(
                f"{self._shown(error)}; given up after {1 + self.options.retries} attempt(s). Is the server running? A "
                "request may take request_timeout seconds, its time in the queue included"
            ) from None
        except InvalidResponse as error:
            if error.status is not None and 400 <= error.status < 500 and error.status not in _REFUSED:
                raise RequestError(f"the request was refused: {self._shown(error)}") from None
            raise EngineError(self._refusal(error)) from None

    async def call(
        self, endpoint: Endpoint, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float
    ) -> Any:
        """Send one request to one server, once, on a new connection, and return what its JSON says.

        EngineError if that fails.
        """
        content, url = None if body is None else json.dumps(body).encode(), endpoint.url + path
        try:
            return _parsed(url, await self._client.call(method, url, content, timeout=timeout))
        except InvalidResponse as error:
            raise ServerRefusal(self._refusal(error), error.status) from None
        except ServerUnavailable as error:
            raise EngineError(self._shown(error)) from None

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

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._client.close()

        self.submit(end()).result(timeout=30)
        self._thread.close()


class ServerRefusal(EngineError):
    """A server answered with another HTTP ``status`` than 200, or with something unexpected."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def _parsed(url: str, answer: bytes) -> Any:
    try:
        return json.loads(answer or b"null")
    except ValueError as error:
        raise InvalidResponse(f"{url} answered with something else than JSON ({error}): {answer[:200]!r}") from None
