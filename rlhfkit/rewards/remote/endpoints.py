"""One request to one of several reward servers, and what its failure means: try again, or do not."""

import asyncio
import email.utils
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

RETRIED = frozenset({408, 429})
"""Statuses below 500 that say: later, perhaps."""

REST = 1.0
"""Seconds that a server is avoided after a failure; twice as long after each further one, a minute at most, and as long
as it asks for (``Retry-After``)."""


LONGEST_RETRY_AFTER = 3600.0
"""Seconds that a server can ask for (``Retry-After``)."""

_LONGEST_REST = 60.0  # seconds


class Unavailable(Exception):
    """The server did not do its work this time: it is down, slow, overloaded or broken. Another may."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        """Say what happened.

        Args:
            message: With the server's URL.
            retry_after: Seconds that the server asked to be left alone.
        """
        super().__init__(message)
        self.retry_after = retry_after


class WrongAnswer(Exception):
    """The server refused the request or its answer makes no sense. Asking again would give the same."""


@dataclass(eq=False)
class Endpoint:
    """A server as one client sees it."""

    url: str
    outstanding: int = 0
    failures: int = 0
    """Since the last success."""
    rests_until: float = 0.0
    """On the clock of ``time.monotonic``."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request, and whether the server failed it."""
        self.outstanding += 1
        try:
            yield
        except Unavailable as error:
            rest = min(REST * 2 ** min(self.failures, 10), _LONGEST_REST)  # 2**1024 is no float any more
            self.rests_until = time.monotonic() + max(rest, error.retry_after)
            self.failures += 1
            raise
        else:
            self.failures, self.rests_until = 0, 0.0
        finally:
            self.outstanding -= 1


def least_outstanding(endpoints: Sequence[Endpoint], avoided: set[Endpoint]) -> Endpoint:
    """The server to ask next: one that works, with the fewest requests of ours.

    Args:
        endpoints: At least one; of equals the first is taken.
        avoided: Asked only if there is no other.
    """
    now = time.monotonic()
    return min(endpoints, key=lambda one: (one in avoided, one.rests_until > now, one.outstanding))


async def post(client: "httpx.AsyncClient", url: str, content: bytes, *, timeout: float, max_bytes: int) -> bytes:
    """Post JSON and read the answer, of which no more than ``max_bytes`` are read.

    Args:
        client: With the headers.
        url: Where to.
        content: JSON.
        timeout: Seconds for all of it: a server that sends a byte a second is slow, too.
        max_bytes: Bytes of the answer.

    Raises:
        Unavailable: If there is no connection or no answer in time, or the status is 5xx, 408 or 429.
        WrongAnswer: If the answer is too large, or the status any other than 200.
    """
    import httpx

    try:
        async with asyncio.timeout(timeout), client.stream("POST", url, content=content) as response:
            body = bytearray()
            async for chunk in response.aiter_raw():  # not decompressed: a small answer could become a huge one
                body += chunk
                if len(body) > max_bytes:
                    raise WrongAnswer(f"{url} answered with more than {max_bytes} bytes")
    except TimeoutError:
        raise Unavailable(f"{url} did not answer within {timeout:g} s") from None
    except httpx.TransportError as error:
        raise Unavailable(f"{url} cannot be reached or broke off ({type(error).__name__}: {error})") from error
    if response.status_code == 200:
        return bytes(body)
    message = f"{url} answered with status {response.status_code}: {body[:300].decode(errors='replace')}"
    if response.status_code in RETRIED or response.status_code >= 500:
        raise Unavailable(message, retry_after_seconds(response.headers.get("retry-after")))
    raise WrongAnswer(message)


def retry_after_seconds(header: str | None) -> float:
    """Seconds that a ``Retry-After`` header asks for (RFC 9110, section 10.2.3: a number of them, or a date); else 0.

    A malformed header asks for nothing, and none for longer than :data:`LONGEST_RETRY_AFTER`.

    Args:
        header: Its value; ``None``: there was none.
    """
    if header is None:
        return 0.0
    try:
        if header.strip().isdecimal():
            seconds = float(header)
        else:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError, OSError):  # the last two for years that no clock has
        return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)
