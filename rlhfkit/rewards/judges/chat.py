"""``ChatJudge``: a language model behind an OpenAI-compatible server compares two answers."""

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rlhfkit.rewards.base import Needs, RewardError
from rlhfkit.rewards.judges.pairwise import Pair
from rlhfkit.serving.access import AccessToken
from rlhfkit.serving.endpoints import CLIENT_PACKAGES, InvalidResponse, ServerUnavailable, make_client, post
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

TEMPLATE = """\
Compare two answers to the same request. Judge how helpful, correct and complete they are. Neither their order nor \
their length may influence you. Explain your decision briefly, then end with exactly one of these lines:
[[A]] if answer A is better, [[B]] if answer B is better, [[C]] if they are equally good.

<request>
{prompt}
</request>
<answer_a>
{first}
</answer_a>
<answer_b>
{second}
</answer_b>
"""
"""What the judge is asked; its verdicts are those of MT-bench (Zheng et al., 2023, arXiv:2306.05685, appendix A)."""

_PLACES = re.compile(r"\{(prompt|first|second)\}")
_PROBABILITIES = {"A": 1.0, "B": 0.0, "C": 0.5}
_MAX_BYTES = 4 * 2**20


class ChatJudge:
    """Asks a chat model which of two answers is better.

    Temporary failures are retried with increasing delays. TLS certificates are verified, redirects are not followed,
    proxies in the environment are not used. An answer can contain text that is meant to influence the judge: a policy
    that finds such text is rewarded for it, so read some judgements.

    Example::

        PairwiseReward(ChatJudge("http://10.0.0.5:8000/v1", model="Qwen/Qwen3-32B", token_variable="JUDGE_TOKEN"))

    Args:
        url: Address of the API, to which ``/chat/completions`` is added.
        model: Name of the model there.
        template: The request, with the places ``{prompt}``, ``{first}`` and ``{second}``.
        verdict: Regular expression whose last match in the reply has the verdict, ``A``, ``B`` or ``C``, as its group.
        max_tokens: Tokens of a reply.
        temperature: Sampling temperature of the judge.
        token: Secret that the server requires; prefer ``token_variable``, as this one is in every pickle.
        token_variable: Environment variable that holds the secret.
        concurrency: Concurrent requests.
        timeout: Time limit of one request in seconds.
        retries: Maximum number of retries of a request.
        backoff: Seconds before the first retry, doubled each time up to 30, plus a random part of up to as much.
        on_failure: A comparison that failed or has no verdict: ``mask``: is not judged; ``stop``: ends the run.
        ssl_ca_certs: File of certificate authorities (PEM) to verify the server with; ``None``: the system's.

    Raises:
        ValueError: If an argument is out of range.
    """

    needs: ClassVar[Needs] = Needs(packages=CLIENT_PACKAGES)

    def __init__(
        self,
        url: str,
        *,
        model: str,
        template: str = TEMPLATE,
        verdict: str = r"\[\[([ABC])\]\]",
        max_tokens: int = 1024,
        temperature: float = 0.0,
        token: str | None = None,
        token_variable: str | None = None,
        concurrency: int = 16,
        timeout: float = 120.0,
        retries: int = 4,
        backoff: float = 1.0,
        on_failure: str = "mask",
        ssl_ca_certs: str | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must be like 'http://127.0.0.1:8000/v1', got {url!r}")
        missing = {"prompt", "first", "second"} - set(_PLACES.findall(template))
        if missing:
            raise ValueError(f"template must have the places {{prompt}}, {{first}} and {{second}}; {missing} missing")
        if re.compile(verdict).groups != 1:
            raise ValueError(f"verdict must have one group, which is A, B or C, got {verdict!r}")
        if on_failure not in ("mask", "stop"):
            raise ValueError(f"on_failure must be 'mask' or 'stop', got {on_failure!r}")
        check_integer("max_tokens", max_tokens, minimum=1)
        check_number("temperature", temperature, minimum=0)
        check_integer("concurrency", concurrency, minimum=1)
        check_number("timeout", timeout, above=0, why="it is in seconds")
        check_integer("retries", retries, minimum=0)
        check_number("backoff", backoff, minimum=0, why="it is in seconds")
        self.url = url.rstrip("/") + "/chat/completions"
        self.model = model
        self.template = template
        self.verdict = verdict
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.token = AccessToken.optional(token, variable=token_variable)
        self.concurrency = concurrency
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.on_failure = on_failure
        self.ssl_ca_certs = ssl_ca_certs
        self.name = "chat_judge"
        self._asked = self._failed = 0

    async def __call__(self, pairs: Sequence[Pair]) -> list[float | None]:
        """Return 1 where the first answer is better, 0 where the second, 1/2 for a tie, ``None`` after a failure.

        Raises:
            RewardError: If a comparison failed, with ``on_failure="stop"``.
        """
        slots = asyncio.Semaphore(self.concurrency)
        async with self._client() as client:

            async def judged(pair: Pair) -> float | str:
                async with slots:
                    return await self._judged(client, pair)

            found = await asyncio.gather(*map(judged, pairs))
        failures = [value for value in found if isinstance(value, str)]
        self._asked, self._failed = self._asked + len(found), self._failed + len(failures)
        if failures:
            shown = failures[0] if self.token is None else self.token.redact(failures[0])
            message = f"judge {self.model}: {len(failures)} of {len(found)} comparisons failed; the first: {shown}"
            if self.on_failure == "stop":
                raise RewardError(message)
            log.warning("%s. They are not used", message)
        return [None if isinstance(value, str) else value for value in found]

    def metrics(self) -> dict[str, float]:
        """Share of comparisons without a verdict since the last call; empty if there were none."""
        asked, failed, self._asked, self._failed = self._asked, self._failed, 0, 0
        return {f"{self.name}/failed_fraction": failed / asked} if asked else {}

    def request(self, pair: Pair) -> dict[str, Any]:
        """The body of a request; override it for a server that wants other fields."""
        first, second = pair
        texts = {"prompt": first.prompt.text, "first": first.text, "second": second.text}
        # In one pass: an answer that contains "{second}" is not filled in.
        content = _PLACES.sub(lambda place: texts[place[1]], self.template)
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }

    async def _judged(self, client: "httpx.AsyncClient", pair: Pair) -> float | str:
        """The judgement, or a text that says why there is none."""
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential, wait_random

        attempts = AsyncRetrying(
            retry=retry_if_exception_type(ServerUnavailable),
            stop=stop_after_attempt(1 + self.retries),
            wait=wait_exponential(self.backoff, max=30.0) + wait_random(0.0, self.backoff),
            reraise=True,
        )
        content = json.dumps(self.request(pair)).encode()
        try:
            body: bytes = await attempts(post, client, self.url, content, timeout=self.timeout, max_bytes=_MAX_BYTES)
            reply = _reply(json.loads(body))
        except (ServerUnavailable, InvalidResponse, ValueError) as error:
            return str(error)
        verdicts = re.findall(self.verdict, reply)
        known = _PROBABILITIES.get(verdicts[-1].upper()) if verdicts else None
        return f"no verdict in the reply {reply[-200:]!r}" if known is None else known

    def _client(self) -> "httpx.AsyncClient":
        return make_client(
            "ChatJudge",
            token=self.token,
            ssl_ca_certs=self.ssl_ca_certs,
            timeout=self.timeout,
            concurrency=self.concurrency,
        )


def _reply(answer: Any) -> str:
    """The text of the first choice of a chat completion; ValueError if there is none."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        shown = sorted(answer) if isinstance(answer, Mapping) else type(answer).__name__
        raise ValueError(f"the server's answer has no choices[0].message.content; it has {shown}")
    return text
