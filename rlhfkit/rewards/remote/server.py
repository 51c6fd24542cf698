"""The web application of ``rlhfkit serve-reward``: JSON samples in, JSON rewards out."""

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, Self

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rewards.base import TIMEOUT, Reward, evaluate, reward_name
from rlhfkit.serving.middleware import JSONBodyReader, JSONTooLarge, parse_model
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

Scores = list[float | None]

MAX_SAMPLES = 1024
"""Default maximum of samples per request."""

MAX_TOKENS = 2**20
"""Default maximum of tokens per request, all prompts and completions together: 32 samples of 32,768."""

MEMORY_PER_BODY_BYTE = 32
"""Maximum memory per byte of a request's body, in bytes, measured over the worst bodies known."""

_OBJECTS_PER_SAMPLE = 128  # in a request of MAX_SAMPLES; with 32 samples it is 4096 each

_CHARACTERS_PER_TOKEN = 8  # of texts without token ids

_Count = Annotated[int, Field(ge=0)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]


def _finite(value: Any) -> Any:
    """Return plain values; raises ``ValueError`` for NaN and infinity, which pydantic reads though JSON has none."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, float) and not math.isfinite(one):
            raise ValueError(f"numbers in JSON are finite, got {one}")
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return value


class _Body(BaseModel):
    """Refuses unknown fields, and values of other types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PromptBody(_Body):
    """A :class:`Prompt` in JSON; only the text or the token ids are needed, whichever the reward reads."""

    index: _Count = 0
    token_ids: list[_Token] = []
    text: str = ""
    answer: Annotated[Any, AfterValidator(_finite)] = None
    metadata: Annotated[dict[str, Any], AfterValidator(_finite)] = {}


class SampleBody(_Body):
    """A :class:`Sample` in JSON, without log-probs (NaN in the sample) and policy versions (0)."""

    prompt: PromptBody
    sample_index: _Count = 0
    token_ids: list[_Token] = []
    action_mask: list[bool] | None = None
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    text: str = ""

    @model_validator(mode="after")
    def _one_mask_entry_per_token(self) -> Self:
        if self.action_mask is not None and len(self.action_mask) != len(self.token_ids):
            raise ValueError(
                f"the per-token lists differ in length: {len(self.token_ids)} token_ids, {len(self.action_mask)} in "
                "action_mask"
            )
        return self

    def sample(self) -> Sample:
        """Convert to a sample."""
        count = len(self.token_ids)
        return Sample(
            logprobs=[math.nan] * count,
            versions=[0] * count,
            **(dict(self) | {"prompt": Prompt(**dict(self.prompt))}),
        )


class ScoreBody(_Body):
    """The body of ``POST /score``."""

    samples: list[SampleBody]


class QueryBody(_Body):
    """The body that OpenRLHF sends to ``POST /get_reward``: whole texts, and their prompts."""

    model_config = ConfigDict(extra="ignore")

    query: list[str]
    prompts: list[str] | None = None
    labels: Annotated[list[Any] | None, AfterValidator(_finite)] = None

    @model_validator(mode="after")
    def _equal_lengths(self) -> Self:
        counts = [len(column) for column in (self.query, self.prompts, self.labels) if column]
        if len(set(counts)) > 1:
            raise ValueError(f"query, prompts and labels must have the same length, got {counts}")
        return self


class RequestParser:
    """Parses request bodies into samples, within limits."""

    def __init__(self, *, max_samples: int, max_tokens: int) -> None:
        """Set the limits per request; raises ``ValueError`` if one is not positive.

        Eight characters of a text count as one token where it has fewer token ids.
        """
        check_integer("max_samples", max_samples, minimum=1)
        check_integer("max_tokens", max_tokens, minimum=1)
        self.max_samples = max_samples
        self.max_tokens = max_tokens
        self.max_numbers = 2 * max_tokens + _OBJECTS_PER_SAMPLE * max_samples
        """Limit of commas in the JSON: a token has an id and perhaps a mask entry; other values have commas too."""
        self.max_objects = _OBJECTS_PER_SAMPLE * max_samples
        """Limit of texts, lists and objects: the fields of the samples, and the content of their metadata."""

    def parse_score(self, body: bytes) -> list[Sample]:
        """Return the samples of a :class:`ScoreBody`.

        Raises :class:`JSONTooLarge` above a limit, ``ValueError`` with the name of the field for another form.
        """
        listed = parse_model(ScoreBody, body).samples
        prompts = (_tokens(one.prompt.token_ids, one.prompt.text) for one in listed)
        self._check(len(listed), sum(prompts) + sum(_tokens(one.token_ids, one.text) for one in listed))
        return [one.sample() for one in listed]

    def parse_query(self, body: bytes) -> list[Sample]:
        """Return the samples of a :class:`QueryBody`, without token ids.

        Raises :class:`JSONTooLarge` above a limit, ``ValueError`` for another form or lists that differ in length.
        """
        asked = parse_model(QueryBody, body)
        self._check(len(asked.query), sum(_tokens([], text) for text in [*asked.query, *(asked.prompts or [])]))
        prompts = asked.prompts or [""] * len(asked.query)
        labels = asked.labels or [None] * len(asked.query)
        return [
            Sample(Prompt(index, [], prompt, label), 0, [], [], [], "stop", text=query.removeprefix(prompt))
            for index, (query, prompt, label) in enumerate(zip(asked.query, prompts, labels, strict=True))
        ]

    def _check(self, count: int, tokens: int) -> None:
        way_out = "send fewer samples at a time (RemoteReward(batch_size=...)) or serve with a larger"
        if count > self.max_samples:
            raise JSONTooLarge(
                f"the request has {count} samples, the limit is {self.max_samples}: {way_out} --max_samples"
            )
        if tokens > self.max_tokens:
            raise JSONTooLarge(f"the request has more than {self.max_tokens} tokens: {way_out} --max_tokens")


def _tokens(token_ids: Sequence[int], text: str) -> int:
    return max(len(token_ids), len(text) // _CHARACTERS_PER_TOKEN)


def reward_app(
    reward: Reward,
    *,
    timeout: float = TIMEOUT,
    max_samples: int = MAX_SAMPLES,
    max_tokens: int = MAX_TOKENS,
) -> FastAPI:
    """Create an application that scores samples with a reward, to be served behind ``AccessControlMiddleware``.

    - ``POST /score``: ``{"samples": [...]}`` to ``{"rewards": [...]}``, see :mod:`rlhfkit.rewards.remote.wire`.
    - ``POST /get_reward``: the same for clients of OpenRLHF, whose samples have no token ids.
    - ``GET /health``: 200, or 503 when a request takes longer than ``timeout``.

    Statuses: 422 with the reason for samples that cannot be scored, 413 above a limit, 504 after a timeout, 500 for
    other errors of the reward. A request whose client disconnects before its turn is not scored.

    Bodies are parsed in a thread, one at a time, so that ``/health`` answers meanwhile. Memory is at most
    :data:`MEMORY_PER_BODY_BYTE` times the bytes of admitted bodies (``max_total_bytes``), and about 2 KiB per sample.

    Args:
        reward: Called in one thread, with the samples of a request. It must score each sample by itself: one that
            compares the samples of a prompt (``WeightedSum(normalize=...)``) must run in the trainer.
        timeout: Time limit of a request in seconds, the wait for its turn included.
        max_samples: Samples per request.
        max_tokens: Tokens per request, all prompts and completions together.

    Raises:
        ValueError: If a number is out of range.
    """
    check_number("timeout", timeout, above=0, why="it is in seconds")
    name = reward_name(reward)
    reader = RequestParser(max_samples=max_samples, max_tokens=max_tokens)
    bodies = JSONBodyReader(max_objects=reader.max_objects, max_numbers=reader.max_numbers)

    def score(samples: Sequence[Sample]) -> Scores:
        return evaluate({name: reward}, samples, timeout=timeout)[name] if samples else []

    scoring = ScoringThread(score)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scoring.start()
        yield
        await asyncio.to_thread(scoring.close)

    async def rewards(samples: list[Sample], request: Request) -> dict[str, Scores]:
        try:
            async with asyncio.timeout(timeout):
                return {"rewards": await _unless_disconnected(asyncio.wrap_future(scoring.submit(samples)), request)}
        except HTTPException:
            raise
        except TimeoutError:
            raise HTTPException(504, f"reward {name!r} gave no answer within {timeout:g} s") from None
        except (ValueError, TypeError) as error:
            raise HTTPException(422, str(error)) from error
        except Exception as error:
            log.exception("reward %r failed", name)
            raise HTTPException(500, f"reward {name!r} failed: {type(error).__name__}: {error}") from error

    app = FastAPI(title="rlhfkit reward", openapi_url=None, lifespan=lifespan)

    @app.get("/health")
    async def health() -> JSONResponse:
        stuck = scoring.scoring_seconds > timeout
        return JSONResponse({"status": "stuck" if stuck else "ok"}, 503 if stuck else 200)

    @app.post("/score")
    async def score_samples(request: Request) -> dict[str, Scores]:
        return await rewards(await bodies.read(request, reader.parse_score), request)

    @app.post("/get_reward")
    async def score_queries(request: Request) -> dict[str, Scores]:
        return await rewards(await bodies.read(request, reader.parse_query), request)

    return app


async def _unless_disconnected(scores: asyncio.Future[Scores], request: Request) -> Scores:
    """Await the scores; cancel when the client disconnects, since it will retry."""
    disconnect = asyncio.create_task(_wait_for_disconnect(request))
    disconnect.add_done_callback(lambda _: scores.cancel())
    try:
        return await scores
    except asyncio.CancelledError:
        if disconnect.done():
            raise HTTPException(499, "the client has gone") from None
        raise
    finally:
        disconnect.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ScoringThread:
    """Scores requests one after another in one thread, so a model needs no locks."""

    def __init__(self, score: Callable[[Sequence[Sample]], Scores]) -> None:
        self.score = score
        self._requests: queue.SimpleQueue[tuple[Sequence[Sample], Future[Scores]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._scoring_since: float | None = None

    @property
    def scoring_seconds(self) -> float:
        """Seconds since the current request started; 0 when none is being scored."""
        since = self._scoring_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        """Start the thread."""
        # A daemon: a reward that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="rlhfkit-reward", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Score the waiting requests, then end the thread; wait for it up to ``timeout`` seconds."""
        if self._thread is None:
            return
        self._requests.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("a request is still being scored after %g s; it is left behind", timeout)
        self._thread = None

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]":
        """Add a request and return a future of its scores; if cancelled before its turn, it is not scored."""
        scores: Future[Scores] = Future()
        self._requests.put((samples, scores))
        return scores

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            samples, scores = request
            if not scores.set_running_or_notify_cancel():
                continue
            self._scoring_since = time.monotonic()
            try:
                scores.set_result(self.score(samples))
            except Exception as error:
                scores.set_exception(error)
            except BaseException as error:  # such as SystemExit, which would end this thread, or the event loop
                scores.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            self._scoring_since = None
