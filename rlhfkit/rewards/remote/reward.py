"""``RemoteReward``: samples are scored by servers over HTTP, such as ``rlhfkit serve-reward``."""

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import Needs, OnFailure, check_on_failure, reward_after_failure
from rlhfkit.rewards.remote.wire import SampleFormat, WireFormat, decode_rewards, encode_request
from rlhfkit.serving.access import AccessToken, is_loopback
from rlhfkit.serving.endpoints import (
    CLIENT_PACKAGES,
    Endpoint,
    InvalidResponse,
    ServerUnavailable,
    least_outstanding,
    make_client,
    post,
)
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    import httpx
    from tenacity import AsyncRetrying

log = logging.getLogger(__name__)

_MAX_BACKOFF = 30.0  # seconds


class RemoteReward:
    """Scores samples on one or several reward servers.

    Samples are sent in batches, several at a time, each to the server with the fewest outstanding requests. Temporary
    failures (no connection, no response in time, status 5xx, 408 or 429) are retried, on another server if there is
    one; any other status or an invalid response is not. Responses are JSON, checked to hold one finite number or null
    per sample.

    TLS certificates are verified; redirects are not followed; proxies in the environment are not used.

    Example::

        RemoteReward(["http://10.0.0.5:8000", "http://10.0.0.6:8000"], token_variable="REWARD_TOKEN", on_failure="mask")
        WeightedSum(helpful=RemoteReward("http://127.0.0.1:8000"), correct=math_match)
    """

    needs: ClassVar[Needs] = Needs(packages=CLIENT_PACKAGES)

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        token_variable: str | None = None,
        wire_format: WireFormat | None = None,
        batch_size: int = 32,
        concurrency: int = 8,
        timeout: float = 120.0,
        retries: int = 5,
        backoff: float = 1.0,
        total_timeout: float = 500.0,
        on_failure: OnFailure = "stop",
        ssl_ca_certs: str | None = None,
        max_response_bytes: int = 16 * 2**20,
        name: str = "remote_reward",
    ) -> None:
        """Set the servers.

        Args:
            urls: ``http://`` or ``https://`` addresses, without user and password.
            token: Secret that the servers require. Prefer ``token_variable``: this one is in every pickle of the
                reward.
            token_variable: Environment variable that holds the secret.
            wire_format: Format of requests and responses; ``None``: :class:`SampleFormat`. :class:`OpenRLHFFormat` is
                for OpenRLHF's servers.
            batch_size: Samples per request.
            concurrency: Concurrent requests, over all servers.
            timeout: Time limit of one request in seconds.
            retries: Maximum number of retries of a batch.
            backoff: Seconds before the first retry once every server has failed; doubled each time up to 30, plus a
                random part of up to ``backoff``. A server's ``Retry-After`` is respected.
            total_timeout: Time limit of one call in seconds, after which the remaining samples have failed; keep it
                below the 600 s of ``score_samples``.
            on_failure: What happens to samples that could not be scored: ``"stop"``: an error; ``"mask"``: not trained
                on; a number: their reward. A warning says how many there were and why.
            ssl_ca_certs: File of certificate authorities (PEM) to verify the servers with; ``None``: the system's.
            max_response_bytes: Maximum size of one response.
            name: Name in logs.

        Raises:
            ValueError: If an argument is out of range.
        """
        self.urls = _checked_urls([urls] if isinstance(urls, str) else urls)
        check_integer("batch_size", batch_size, minimum=1)
        check_integer("concurrency", concurrency, minimum=1)
        check_integer("max_response_bytes", max_response_bytes, minimum=1)
        check_integer("retries", retries, minimum=0)
        check_number("backoff", backoff, minimum=0, why="it is in seconds")
        check_number("timeout", timeout, above=0, why="it is in seconds")
        check_number("total_timeout", total_timeout, above=0, why="it is in seconds")
        self.token = AccessToken.optional(token, variable=token_variable)
        self.wire_format: WireFormat = SampleFormat() if wire_format is None else wire_format
        self.batch_size = batch_size
        self.concurrency = concurrency
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.total_timeout = total_timeout
        self.on_failure = check_on_failure(on_failure)
        self.ssl_ca_certs = ssl_ca_certs
        self.max_response_bytes = max_response_bytes
        self.name = name
        self._counters = _Counters()
        open_urls = [
            url for url in self.urls if url.startswith("http:") and not is_loopback(urlsplit(url).hostname or "")
        ]
        if self.token is not None and open_urls:
            log.warning("the token for %s is sent unencrypted; use https unless the network is trusted", open_urls[0])

    def __repr__(self) -> str:
        """Show the servers, and where the token comes from."""
        return f"RemoteReward({self.urls!r}, token={self.token!r}, on_failure={self.on_failure!r})"

    async def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return the reward of each sample; ``None`` where the server returned null, or the sample is masked.

        Raises:
            RewardError: If a sample could not be scored and ``on_failure`` is ``"stop"``.
            ValueError: If a sample cannot be written as JSON.
        """
        batches = [list(samples[start : start + self.batch_size]) for start in range(0, len(samples), self.batch_size)]
        async with self._client() as client:
            call = _Call(self, client, [Endpoint(url + self.wire_format.path) for url in self.urls])
            tasks = [asyncio.create_task(call.scored(batch)) for batch in batches]
            try:
                scored = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._counters.add(
                    _Counters(len(samples), len(call.failures), call.requests, call.retries, call.seconds)
                )
        if call.failures:
            became = "are not trained on" if self.on_failure == "mask" else f"got the reward {self.on_failure}"
            counts = f"{len(call.failures)} of {len(samples)} samples"
            log.warning("reward %r: %s could not be scored and %s. %s", self.name, counts, became, call.failures[0])
        return [value for batch in scored for value in batch]

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call: fraction of failed samples, number of retries, mean seconds of a request.

        Empty if nothing was scored, so that a mean over ranks leaves out ranks that do not score.
        """
        tally, self._counters = self._counters, _Counters()
        if not tally.samples:
            return {}
        return {
            f"{self.name}/failed_fraction": tally.failed / tally.samples,
            f"{self.name}/retries": float(tally.retries),
            f"{self.name}/request_seconds": tally.seconds / max(tally.requests, 1),
        }

    def _client(self) -> "httpx.AsyncClient":
        return make_client(
            "RemoteReward",
            token=self.token,
            ssl_ca_certs=self.ssl_ca_certs,
            timeout=self.timeout,
            concurrency=self.concurrency,
        )


@dataclass
class _Counters:
    """Counts behind the metrics."""

    samples: int = 0
    failed: int = 0
    requests: int = 0
    retries: int = 0
    seconds: float = 0.0

    def add(self, call: "_Counters") -> None:
        """Add the counts of one call."""
        for counted in fields(self):
            setattr(self, counted.name, getattr(self, counted.name) + getattr(call, counted.name))


class _Call:
    """One call of a reward: its connections and endpoints."""

    def __init__(self, reward: RemoteReward, client: "httpx.AsyncClient", endpoints: list[Endpoint]) -> None:
        self.reward = reward
        self.client = client
        self.endpoints = endpoints
        self.requests, self.retries, self.seconds = 0, 0, 0.0
        self.failures: list[str] = []
        self.last_error = ""
        self.slots = asyncio.Semaphore(reward.concurrency)
        self.deadline = asyncio.get_running_loop().time() + reward.total_timeout

    async def scored(self, batch: list[Sample]) -> list[float | None]:
        """Return the rewards of a batch; ``on_failure`` decides those of failed samples."""
        rewards: list[float | None] = []
        for sample, value in zip(batch, await self._values(batch), strict=True):
            if isinstance(value, str):
                shown = value if self.reward.token is None else self.reward.token.redact(value)
                which = f"prompt {sample.prompt.index}, sample {sample.sample_index}, completion {sample.text[:80]!r}"
                self.failures.append(f"{shown} (for {which})")
                value = reward_after_failure(
                    self.reward.on_failure, f"reward {self.reward.name!r}: {self.failures[-1]}"
                )
            rewards.append(value)
        return rewards

    async def _values(self, batch: list[Sample]) -> list[float | str | None]:
        """Return for each sample a server's value, or a text that says why there is none."""
        content = self._encoded(batch)
        try:
            async with asyncio.timeout_at(self.deadline), self.slots:
                url, body = await self._answered(content)
        except TimeoutError:
            return [f"total_timeout of {self.reward.total_timeout:g} s is over{self.last_error}"] * len(batch)
        except (ServerUnavailable, InvalidResponse) as error:
            return [str(error)] * len(batch)
        try:
            found = decode_rewards(self.reward.wire_format, body, len(batch))
        except ValueError as error:
            return [f"{url} answered with {error}"] * len(batch)
        return [f"{url} answered with {value}" if isinstance(value, str) else value for value in found]

    def _encoded(self, batch: list[Sample]) -> bytes:
        try:
            return encode_request(self.reward.wire_format, batch)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"reward {self.reward.name!r} cannot write samples as JSON (the first is of prompt "
                f"{batch[0].prompt.index}): {error}. Choose the columns that are sent: "
                "wire_format=SampleFormat(columns=[...])"
            ) from error

    async def _answered(self, content: bytes) -> tuple[str, bytes]:
        """Return the URL that answered and the body of its response."""
        asked: set[Endpoint] = set()
        async for attempt in self._attempts(asked):
            with attempt:
                endpoint = least_outstanding(self.endpoints, asked)
                asked.add(endpoint)
                self.retries += attempt.retry_state.attempt_number > 1
                with endpoint.in_use():
                    return endpoint.url, await self._post(endpoint.url, content)
        raise AssertionError("tenacity gives the last error")

    async def _post(self, url: str, content: bytes) -> bytes:
        started = time.monotonic()
        try:
            return await post(
                self.client, url, content, timeout=self.reward.timeout, max_bytes=self.reward.max_response_bytes
            )
        finally:
            self.requests += 1
            self.seconds += time.monotonic() - started

    def _attempts(self, asked: set[Endpoint]) -> "AsyncRetrying":
        """Attempts for one batch: each server without delay, then all again with increasing delays."""
        from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

        rounds = itertools.count()  # over all servers; tenacity's own waits count attempts

        def wait(state: RetryCallState) -> float:
            if len(asked) < len(self.endpoints):
                return 0.0
            asked.clear()
            error = state.outcome.exception() if state.outcome is not None else None
            self.last_error = f"; before, {error}"
            later: float = min(self.reward.backoff * 2 ** min(next(rounds), 60), _MAX_BACKOFF)
            later += random.uniform(0.0, self.reward.backoff)
            return max(later, error.retry_after if isinstance(error, ServerUnavailable) else 0.0)

        return AsyncRetrying(
            retry=retry_if_exception_type(ServerUnavailable),
            stop=stop_after_attempt(1 + self.reward.retries),
            wait=wait,
            reraise=True,
        )


def _checked_urls(urls: Sequence[str]) -> list[str]:
    """Return the addresses without trailing slashes."""
    if not urls:
        raise ValueError("urls needs at least one address of a reward server")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"urls must be like 'http://127.0.0.1:8000', got {url!r}")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ValueError(
                f"the address of {parts.hostname} must have no user, password or query, which would be logged; "
                "give the secret as token_variable"
            )
    return [url.rstrip("/") for url in urls]
