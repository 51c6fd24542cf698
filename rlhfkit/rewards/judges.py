"""``PairwiseReward``, the share of comparisons that an answer wins, and ``ChatJudge``, a model that compares."""

import asyncio
import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any, ClassVar, Literal, Protocol

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import Needs, RewardError, RewardWrapper, reward_name
from rlhfkit.serving.access import AccessToken
from rlhfkit.serving.client import CLIENT_PACKAGES, ClientOptions, HTTPClient, InvalidResponse, ServerUnavailable
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

Pair = tuple[Sample, Sample]
"""Two answers to one prompt."""

Judgements = Sequence[float | None]
"""For each pair the probability in [0, 1] that the first answer is better, 1/2 for a tie; ``None``: not judged."""


class PairwiseJudge(Protocol):
    """A callable that compares answers: a rule, a model, or a server.

    Example::

        def shorter(pairs):
            return [0.5 + 0.5 * ((a.num_tokens < b.num_tokens) - (a.num_tokens > b.num_tokens)) for a, b in pairs]
    """

    def __call__(self, pairs: Sequence[Pair], /) -> Any:
        """Return :data:`Judgements` of the pairs, in order, or an awaitable of them."""
        ...


class PairwiseReward(RewardWrapper):
    """Rewards each sample by how often a judge prefers it to the others of its prompt.

    ``r_i = mean over j of (P(i ≻ j) + 1 - P(j ≻ i)) / 2``, where ``P(a ≻ b)`` is the judgement with a shown first. Both
    orders are asked, because judges that are language models prefer a position (Zheng et al., 2023, arXiv:2306.05685,
    section 3.4). For two samples of a prompt the better one has the larger reward, as online DPO needs it (Guo et al.,
    2024, arXiv:2402.04792); for more it is the win rate, which any module can learn from.

    Example::

        RolloutCallback(reward=PairwiseReward(shorter), sampling=SamplingSpec(group_size=2))
        PairwiseReward(ChatJudge("http://127.0.0.1:8000/v1", model="judge"), against="answer")

    Args:
        judge: Compares pairs of samples; plain or async, see :class:`PairwiseJudge`.
        against: What a sample is compared with: ``group``: all other samples of its prompt (a single one, as in greedy
            validation, has no reward); ``answer``: the prompt's answer, whose text is that of the column
            ``PromptDataModule(answer=...)``.
        both_orders: Ask each comparison in both orders; with false a pair costs one judgement.

    Raises:
        TypeError: If the judge cannot be called.
        ValueError: If ``against`` is unknown.
    """

    def __init__(
        self,
        judge: PairwiseJudge | Callable[[Sequence[Pair]], Any],
        *,
        against: Literal["group", "answer"] = "group",
        both_orders: bool = True,
    ) -> None:
        if not callable(judge):
            raise TypeError(f"judge must be callable on a list of pairs of samples, got {type(judge).__name__}")
        if against not in ("group", "answer"):
            raise ValueError(f"against must be 'group' or 'answer', got {against!r}")
        self.judge = judge
        self.against = against
        self.both_orders = both_orders
        self.name = f"{reward_name(judge)}_win_rate"
        self._agreements: list[float] = []

    async def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return the win rate of each sample; ``None`` where no comparison of it could be judged.

        Raises:
            ValueError: If the judge does not return one number in [0, 1] or ``None`` per pair.
        """
        opponents = self._comparisons(samples)
        pairs = [pair for _, _, pair in opponents]
        asked = [*pairs, *((second, first) for first, second in pairs)] if self.both_orders else pairs
        judgements = _checked(await _awaited(self.judge(asked)), len(asked), reward_name(self.judge)) if asked else []
        wins: list[list[float]] = [[] for _ in samples]
        for place, (row, other, _) in enumerate(opponents):
            first = judgements[place]
            if self.both_orders:
                second = judgements[place + len(pairs)]
                if first is not None and second is not None:
                    self._agreements.append(float((first - 0.5) * (0.5 - second) > 0 or first == 1 - second))
                first = None if first is None or second is None else (first + 1 - second) / 2
            if first is None:
                continue
            wins[row].append(first)
            if other is not None:
                wins[other].append(1 - first)
        return [fmean(each) if each else None for each in wins]

    def _comparisons(self, samples: Sequence[Sample]) -> list[tuple[int, int | None, Pair]]:
        """Row of each first answer, of the second (``None``: it is no sample), and both."""
        if self.against == "answer":
            return [(row, None, (sample, _answer(sample))) for row, sample in enumerate(samples)]
        groups: dict[int, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.prompt.index, []).append(row)
        return [
            (row, other, (samples[row], samples[other]))
            for rows in groups.values()
            for row, other in combinations(rows, 2)
        ]

    @property
    def needs(self) -> Needs:
        """The prompts' answers with ``against="answer"``, else nothing."""
        return Needs(answer=self.against == "answer")

    def inner_rewards(self) -> list[Any]:
        """Return the judge, which may have needs too."""
        return [self.judge]

    def metrics(self) -> dict[str, float]:
        """Share of comparisons that came out alike in both orders since the last call, and the judge's metrics."""
        agreements, self._agreements = self._agreements, []
        agreement = {f"{self.name}/order_agreement": fmean(agreements)} if agreements else {}
        return agreement | super().metrics()


def _answer(sample: Sample) -> Sample:
    """The reference answer as a sample."""
    if sample.prompt.answer is None:
        raise ValueError(
            f"PairwiseReward(against='answer') compares with the prompt's answer, but prompt {sample.prompt.index} has "
            "none: name the column that holds it, PromptDataModule(answer=...)"
        )
    return Sample(sample.prompt, -1, [], [], [], "stop", text=str(sample.prompt.answer))


async def _awaited(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def _checked(judgements: Any, count: int, name: str) -> list[float | None]:
    """Return judgements as floats and ``None``; errors name the wrong one."""
    rule = "a judge returns for each pair the probability in [0, 1] that the first answer is better, or None"
    if isinstance(judgements, str | bytes | Mapping) or not hasattr(judgements, "__len__") or len(judgements) != count:
        size = f"{len(judgements)} values" if hasattr(judgements, "__len__") else type(judgements).__name__
        raise ValueError(f"judge {name!r} returned {size} for {count} pairs; {rule}")
    found = [None if value is None else float(value) for value in judgements]
    for place, value in enumerate(found):
        if value is not None and not (math.isfinite(value) and 0 <= value <= 1):
            raise ValueError(f"judge {name!r} returned {value!r} for pair {place}; {rule}")
    return found


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
        missing = {"prompt", "first", "second"} - set(_PLACES.findall(template))
        if missing:
            raise ValueError(f"template must have the places {{prompt}}, {{first}} and {{second}}; {missing} missing")
        if re.compile(verdict).groups != 1:
            raise ValueError(f"verdict must have one group, which is A, B or C, got {verdict!r}")
        if on_failure not in ("mask", "stop"):
            raise ValueError(f"on_failure must be 'mask' or 'stop', got {on_failure!r}")
        check_integer("max_tokens", max_tokens, minimum=1)
        check_number("temperature", temperature, minimum=0)
        self.options = ClientOptions(
            urls=url,
            token=AccessToken.optional(token, variable=token_variable),
            concurrency=concurrency,
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            ssl_ca_certs=ssl_ca_certs,
            max_response_bytes=_MAX_BYTES,
        )
        self.model = model
        self.template = template
        self.verdict = verdict
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.on_failure = on_failure
        self.name = "chat_judge"
        self._asked = self._failed = 0

    async def __call__(self, pairs: Sequence[Pair]) -> list[float | None]:
        """Return 1 where the first answer is better, 0 where the second, 1/2 for a tie, ``None`` after a failure.

        Raises:
            RewardError: If a comparison failed, with ``on_failure="stop"``.
        """
        async with HTTPClient("ChatJudge", self.options) as client:
            found = await asyncio.gather(*(self._judged(client, pair) for pair in pairs))
        failures = [value for value in found if isinstance(value, str)]
        self._asked, self._failed = self._asked + len(found), self._failed + len(failures)
        if failures:
            token = self.options.token
            shown = failures[0] if token is None else token.redact(failures[0])
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
        """The body of a request; override it for a server that wants other fields.

        Images of the prompt stand in front of the text, as the chat API of OpenAI has them.
        """
        first, second = pair
        texts = {"prompt": first.prompt.text, "first": first.text, "second": second.text}
        # In one pass: an answer that contains "{second}" is not filled in.
        content: Any = _PLACES.sub(lambda place: texts[place[1]], self.template)
        if first.prompt.attachments:
            from rlhfkit.data.images import Image

            seen = [Image(image.encoded_rgb()).plain() for image in first.prompt.attachments]
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in seen]
            content = [*parts, {"type": "text", "text": content}]
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }

    async def _judged(self, client: HTTPClient, pair: Pair) -> float | str:
        """The judgement, or a text that says why there is none."""
        try:
            _, body = await client.ask("/chat/completions", json.dumps(self.request(pair)).encode())
            reply = _reply(json.loads(body))
        except (ServerUnavailable, InvalidResponse, ValueError) as error:
            return str(error)
        verdicts = re.findall(self.verdict, reply)
        known = _PROBABILITIES.get(verdicts[-1].upper()) if verdicts else None
        return f"no verdict in the reply {reply[-200:]!r}" if known is None else known


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
