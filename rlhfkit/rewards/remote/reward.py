"""``RemoteReward``: samples are scored by servers over HTTP, such as ``rlhfkit serve-reward``."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import Needs, OnFailure, check_on_failure, reward_after_failure
from rlhfkit.rewards.remote.wire import SampleFormat, WireFormat, decode_rewards, encode_request
from rlhfkit.serving.access import AccessToken
from rlhfkit.serving.client import (
    CLIENT_PACKAGES,
    ClientOptions,
    HTTPClient,
    InvalidResponse,
    ServerUnavailable,
)
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)


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
        check_integer("batch_size", batch_size, minimum=1)
        check_number("total_timeout", total_timeout, above=0, why="it is in seconds")
        self.options = ClientOptions(
            urls=urls,
            token=AccessToken.optional(token, variable=token_variable),
            concurrency=concurrency,
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            ssl_ca_certs=ssl_ca_certs,
            max_response_bytes=max_response_bytes,
        )
        self.wire_format: WireFormat = SampleFormat() if wire_format is None else wire_format
        self.batch_size = batch_size
        self.total_timeout = total_timeout
        self.on_failure = check_on_failure(on_failure)
        self.name = name
        self._counted: Counter[str] = Counter()

    def __repr__(self) -> str:
        """Show the servers, and where the token comes from."""
        return f"RemoteReward({[*self.options.urls]}, token={self.options.token!r}, on_failure={self.on_failure!r})"

    async def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return the reward of each sample; ``None`` where the server returned null, or the sample is masked.

        Raises:
            RewardError: If a sample could not be scored and ``on_failure`` is ``"stop"``.
            ValueError: If a sample cannot be written as JSON.
        """
        batches = [list(samples[start : start + self.batch_size]) for start in range(0, len(samples), self.batch_size)]
        deadline = asyncio.get_running_loop().time() + self.total_timeout
        failures: list[str] = []
        async with HTTPClient("RemoteReward", self.options) as client:
            tasks = [asyncio.create_task(self._scored(batch, client, deadline, failures)) for batch in batches]
            try:
                scored = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._counted.update(samples=len(samples), failed=len(failures), retries=client.num_retries)
                self._counted.update(requests=client.num_requests, seconds=client.seconds)  # type: ignore[call-overload]
        if failures:
            became = "are not trained on" if self.on_failure == "mask" else f"got the reward {self.on_failure}"
            counts = f"{len(failures)} of {len(samples)} samples"
            log.warning("reward %r: %s could not be scored and %s. %s", self.name, counts, became, failures[0])
        return [value for batch in scored for value in batch]

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call: fraction of failed samples, number of retries, mean seconds of a request.

        Empty if nothing was scored, so that a mean over ranks leaves out ranks that do not score.
        """
        counted, self._counted = self._counted, Counter()
        if not counted["samples"]:
            return {}
        return {
            f"{self.name}/failed_fraction": counted["failed"] / counted["samples"],
            f"{self.name}/retries": float(counted["retries"]),
            f"{self.name}/request_seconds": counted["seconds"] / max(counted["requests"], 1),
        }

    async def _scored(
        self, batch: list[Sample], client: HTTPClient, deadline: float, failures: list[str]
    ) -> list[float | None]:
        """Return the rewards of a batch, those of failed samples by ``on_failure``; adds to ``failures`` why."""
        rewards: list[float | None] = []
        for sample, value in zip(batch, await self._values(batch, client, deadline), strict=True):
            if isinstance(value, str):
                shown = value if self.options.token is None else self.options.token.redact(value)
                which = f"prompt {sample.prompt.index}, sample {sample.sample_index}, completion {sample.text[:80]!r}"
                failures.append(f"{shown} (for {which})")
                value = reward_after_failure(self.on_failure, f"reward {self.name!r}: {failures[-1]}")
            rewards.append(value)
        return rewards

    async def _values(self, batch: list[Sample], client: HTTPClient, deadline: float) -> list[float | str | None]:
        """Return for each sample a server's value, or a text that says why there is none."""
        try:
            content = encode_request(self.wire_format, batch)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"reward {self.name!r} cannot write samples as JSON (the first is of prompt {batch[0].prompt.index}):"
                f" {error}. Choose the columns that are sent: wire_format=SampleFormat(columns=[...])"
            ) from error
        try:
            async with asyncio.timeout_at(deadline):
                url, body = await client.ask(self.wire_format.path, content)
        except TimeoutError:
            before = f"; before, {client.last_error}" if client.last_error else ""
            return [f"total_timeout of {self.total_timeout:g} s is over{before}"] * len(batch)
        except (ServerUnavailable, InvalidResponse) as error:
            return [str(error)] * len(batch)
        try:
            found = decode_rewards(self.wire_format, body, len(batch))
        except ValueError as error:
            return [f"{url} answered with {error}"] * len(batch)
        return [f"{url} answered with {value}" if isinstance(value, str) else value for value in found]
