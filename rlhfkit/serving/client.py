"""``HTTPClient``: requests to one or several servers of the same, each repeated while its failure may pass."""

import asyncio
import email.utils
import itertools
import logging
import random
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from rlhfkit.serving.access import AccessToken, is_loopback
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    import httpx
    from tenacity import AsyncRetrying

log = logging.getLogger(__name__)

RETRYABLE_STATUSES = frozenset({408, 429})
"""HTTP statuses below 500 after which a request is retried."""

COOLDOWN = 1.0
"""Seconds that a server is avoided after a failure.

Doubled after each further failure, up to a minute, and at least as long as the server asks for (``Retry-After``).
"""


CLIENT_PACKAGES = {"httpx": "rlhfkit[server]", "tenacity": "rlhfkit[server]"}
"""Modules that :class:`HTTPClient` imports, each with what ``pip install`` is given for it."""

MAX_RETRY_AFTER = 3600.0
"""Maximum number of seconds taken from a server's ``Retry-After``."""

_MAX_COOLDOWN = 60.0  # seconds
_MAX_BACKOFF = 30.0  # seconds
_CONNECT_SECONDS = 30.0


class ServerUnavailable(Exception):
    """The server is down, slow, overloaded or broken; the request may be retried."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        """Create the error; ``retry_after`` is the wait in seconds that the server asked for."""
        super().__init__(message)
        self.retry_after = retry_after


class InvalidResponse(Exception):
    """The server refused the request or its response is invalid; a retry would give the same.

    ``status`` is the HTTP status of a refusal.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def checked_urls(urls: str | Sequence[str]) -> tuple[str, ...]:
    """Return ``http://`` or ``https://`` addresses without trailing slashes; ValueError if one is none."""
    listed = (urls,) if isinstance(urls, str) else tuple(urls)
    if not listed:
        raise ValueError("urls needs at least one address of a running server, like 'http://127.0.0.1:8000'")
    for url in listed:
        parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the address of a server must be like 'http://127.0.0.1:8000', got {url!r}")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ValueError(
                f"the address of {parts.hostname} must have no user, password or query, which would be logged; give "
                "the secret as token_variable"
            )
    return tuple(url.rstrip("/") for url in listed)


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Where servers are, and how they are asked; ``ValueError`` if a field is out of range.

    Warns if a token is sent in the clear to another machine.
    """

    urls: Sequence[str]
    """``http://`` or ``https://`` addresses, or one of them, without user, password and query."""
    token: AccessToken | None = None
    """Sent with every request; ``None``: none."""
    concurrency: int
    """Requests in flight, over all servers; more wait, which does not count as time."""
    timeout: float
    """Seconds in which a server must answer a request."""
    retries: int
    """How often a request is repeated that found no connection or no answer in time, or status 5xx, 408 or 429; on
    another server, if there is one."""
    backoff: float = 1.0
    """Seconds before the first repetition once every server has failed; doubled each time up to 30, plus a random part
    of up to this. A server's ``Retry-After`` is respected."""
    ssl_ca_certs: str | None = None
    """File of certificate authorities (PEM) to verify the servers with; ``None``: the system's."""
    max_response_bytes: int
    """Maximum size of a response."""

    def __post_init__(self) -> None:
        urls = checked_urls(self.urls)
        object.__setattr__(self, "urls", urls)
        check_integer("concurrency", self.concurrency, minimum=1)
        check_number("timeout", self.timeout, above=0, why="it is in seconds")
        check_integer("retries", self.retries, minimum=0)
        check_number("backoff", self.backoff, minimum=0, why="it is in seconds")
        check_integer("max_response_bytes", self.max_response_bytes, minimum=1)
        unencrypted = [url for url in urls if url.startswith("http:") and not is_loopback(urlsplit(url).hostname or "")]
        if self.token is not None and unencrypted:
            log.warning("the token for %s is sent unencrypted; use https unless the network is trusted", unencrypted[0])


@dataclass(eq=False)
class Endpoint:
    """A server as seen by one client."""

    url: str
    outstanding: int = 0
    failures: int = 0
    """Since the last success."""
    cooldown_until: float = 0.0
    """On the clock of ``time.monotonic``."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request, and its failure if the block raises :class:`ServerUnavailable`."""
        self.outstanding += 1
        try:
            yield
        except ServerUnavailable as error:
            rest = min(COOLDOWN * 2 ** min(self.failures, 10), _MAX_COOLDOWN)  # 2**1024 overflows a float
            self.cooldown_until = time.monotonic() + max(rest, error.retry_after)
            self.failures += 1
            raise
        else:
            self.failures, self.cooldown_until = 0, 0.0
        finally:
            self.outstanding -= 1


def least_outstanding(endpoints: Sequence[Endpoint], avoided: set[Endpoint]) -> Endpoint:
    """Return the first endpoint with the fewest requests; those in cooldown come later, those in ``avoided`` last."""
    now = time.monotonic()
    return min(endpoints, key=lambda one: (one in avoided, one.cooldown_until > now, one.outstanding))


class HTTPClient:
    """Requests from one event loop to one or several servers of the same.

    Certificates are verified; redirects are not followed; the environment's proxies are not used.

    Args:
        owner: Name of the class that asks, for the error.
        options: Where the servers are, and how they are asked.

    Raises:
        ImportError: If httpx or tenacity is missing; names ``owner``.
    """

    def __init__(self, owner: str, options: ClientOptions) -> None:
        try:
            import httpx
            import tenacity  # noqa: F401
        except ImportError as error:
            raise ImportError(f"{owner} needs httpx and tenacity: pip install 'rlhfkit[server]'") from error
        self.endpoints = [Endpoint(url) for url in options.urls]
        self.num_requests = 0
        """Sent by :meth:`ask`, repetitions included."""
        self.num_retries = 0
        self.seconds = 0.0
        """Spent on them."""
        self.last_error = ""
        """Why every server was to be asked again, the last time that happened."""
        self._options = options
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._settings: dict[str, Any] = {
            "headers": headers | ({} if options.token is None else options.token.header()),
            # Not the environment's proxies and .netrc, which would receive or replace the token.
            "verify": ssl.create_default_context(cafile=options.ssl_ca_certs),
            "trust_env": False,
            "timeout": httpx.Timeout(None, connect=_CONNECT_SECONDS),  # _exchange limits all of a request
        }
        # No bound in the pool, which would close connections of one server while requests to another need theirs.
        self._client = httpx.AsyncClient(**self._settings, limits=httpx.Limits(max_connections=None))
        self._slots = asyncio.Semaphore(options.concurrency)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(self, path: str, content: bytes) -> tuple[str, bytes]:
        """Post JSON to the server with the fewest requests, with repetitions; returns the URL and the response's body.

        Raises:
            ServerUnavailable: If none has answered; what :meth:`call` raises of the last attempt.
            InvalidResponse: If one has refused it, or answered with too much.
        """
        asked: set[Endpoint] = set()
        async with self._slots:
            async for attempt in self._attempts(asked):
                with attempt:
                    endpoint = least_outstanding(self.endpoints, asked)
                    asked.add(endpoint)
                    self.num_requests += 1
                    self.num_retries += attempt.retry_state.attempt_number > 1
                    started, url = time.monotonic(), endpoint.url + path
                    try:
                        with endpoint.in_use():
                            return url, await self._exchange(self._client, "POST", url, content, self._options.timeout)
                    finally:
                        self.seconds += time.monotonic() - started
        raise AssertionError("tenacity gives the last error")

    async def call(self, method: str, url: str, content: bytes | None, *, timeout: float) -> bytes:
        """Send one request, once, on a connection of its own, and return the response's body.

        uvicorn closes a connection when its application has raised, after the response, and after 5 idle seconds. A
        request that is sent at that moment fails, and this one is not repeated.

        Raises:
            ServerUnavailable: If there is no connection or no response in ``timeout`` seconds, or the status is 5xx,
                408 or 429.
            InvalidResponse: If the response is too large, or the status any other than 200.
        """
        import httpx

        async with httpx.AsyncClient(**self._settings) as client:
            return await self._exchange(client, method, url, content, timeout)

    async def _exchange(
        self, client: "httpx.AsyncClient", method: str, url: str, content: bytes | None, timeout: float
    ) -> bytes:
        """Send a request and return the response's body; ``timeout`` limits all of it; errors are :meth:`call`'s."""
        import httpx

        most = self._options.max_response_bytes
        try:
            async with asyncio.timeout(timeout), client.stream(method, url, content=content) as response:
                body = bytearray()
                async for chunk in response.aiter_raw():  # not decompressed: a small response could become a huge one
                    body += chunk
                    if len(body) > most:
                        raise InvalidResponse(f"{url} answered with more than {most} bytes")
        except TimeoutError:
            raise ServerUnavailable(f"{url} did not answer within {timeout:g} s") from None
        except httpx.TransportError as error:
            raise ServerUnavailable(
                f"{url} cannot be reached or closed the connection ({type(error).__name__}: {error})"
            ) from error
        if response.status_code == 200:
            return bytes(body)
        message = f"{url} answered with status {response.status_code}: {body[:300].decode(errors='replace')}"
        if response.status_code in RETRYABLE_STATUSES or response.status_code >= 500:
            raise ServerUnavailable(message, parse_retry_after(response.headers.get("retry-after")))
        raise InvalidResponse(message, response.status_code)

    def _attempts(self, asked: set[Endpoint]) -> "AsyncRetrying":
        """Attempts for one request: each server without a pause, then all again with growing ones."""
        from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

        rounds = itertools.count()  # over all servers; tenacity's own waits count attempts

        def wait(state: RetryCallState) -> float:
            if len(asked) < len(self.endpoints):
                return 0.0
            asked.clear()
            error = state.outcome.exception() if state.outcome is not None else None
            self.last_error = str(error)
            later: float = min(self._options.backoff * 2 ** min(next(rounds), 60), _MAX_BACKOFF)
            later += random.uniform(0.0, self._options.backoff)
            return max(later, error.retry_after if isinstance(error, ServerUnavailable) else 0.0)

        return AsyncRetrying(
            retry=retry_if_exception_type(ServerUnavailable),
            stop=stop_after_attempt(1 + self._options.retries),
            wait=wait,
            reraise=True,
        )


def parse_retry_after(header: str | None) -> float:
    """Seconds in a ``Retry-After`` header (RFC 9110, 10.2.3), up to :data:`MAX_RETRY_AFTER`; 0 if there are none."""
    if header is None:
        return 0.0
    try:
        if header.strip().isdecimal():
            seconds = float(header)
        else:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError, OSError):  # the last two for years out of range
        return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER)
