"""One request to one of several servers, and whether its failure may be retried."""

import asyncio
import email.utils
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

    from rlhfkit.serving.access import AccessToken

RETRYABLE_STATUSES = frozenset({408, 429})
"""HTTP statuses below 500 after which a request is retried."""

COOLDOWN = 1.0
"""Seconds that a server is avoided after a failure.

Doubled after each further failure, up to a minute, and at least as long as the server asks for (``Retry-After``).
"""


CLIENT_PACKAGES = {"httpx": "rlhfkit[server]", "tenacity": "rlhfkit[server]"}
"""Modules that classes with :func:`make_client` import, each with what ``pip install`` is given for it."""

MAX_RETRY_AFTER = 3600.0
"""Maximum number of seconds taken from a server's ``Retry-After``."""

_MAX_COOLDOWN = 60.0  # seconds
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


def make_client(
    owner: str,
    *,
    token: "AccessToken | None",
    ssl_ca_certs: str | None,
    timeout: float,
    concurrency: int | None,
    keepalive: int | None = None,
) -> "httpx.AsyncClient":
    """Make the HTTP client of one of our classes, named ``owner``; ImportError that names it if httpx is missing.

    Args:
        owner: Name of the class, for the error.
        token: Sent with every request; ``None``: none.
        ssl_ca_certs: File of certificates to trust; ``None``: the system's.
        timeout: Seconds of a request; waiting for one of the ``concurrency`` connections does not count.
        concurrency: Connections at most; ``None``: no limit.
        keepalive: Idle connections that are kept for later requests; ``None``: all.
    """
    try:
        import httpx
        import tenacity  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{owner} needs httpx and tenacity: pip install 'rlhfkit[server]'") from error
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if token is not None:
        headers |= token.header()
    return httpx.AsyncClient(
        headers=headers,
        # Not the environment's proxies and .netrc, which would receive or replace the token.
        verify=ssl.create_default_context(cafile=ssl_ca_certs),
        trust_env=False,
        timeout=httpx.Timeout(timeout, connect=min(_CONNECT_SECONDS, timeout), pool=None),
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=keepalive),
    )


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


async def exchange(
    client: "httpx.AsyncClient", method: str, url: str, content: bytes | None, *, timeout: float, max_bytes: int
) -> bytes:
    """Send a request and return the response's body, of at most ``max_bytes``; ``timeout`` limits the whole exchange.

    Raises:
        ServerUnavailable: If there is no connection or no response in ``timeout`` seconds, or the status is 5xx, 408 or
            429.
        InvalidResponse: If the response is too large, or the status any other than 200.
    """
    import httpx

    try:
        async with asyncio.timeout(timeout), client.stream(method, url, content=content) as response:
            body = bytearray()
            async for chunk in response.aiter_raw():  # not decompressed: a small response could become a huge one
                body += chunk
                if len(body) > max_bytes:
                    raise InvalidResponse(f"{url} answered with more than {max_bytes} bytes")
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


async def post(client: "httpx.AsyncClient", url: str, content: bytes, *, timeout: float, max_bytes: int) -> bytes:
    """Post JSON; see :func:`exchange`."""
    return await exchange(client, "POST", url, content, timeout=timeout, max_bytes=max_bytes)


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
