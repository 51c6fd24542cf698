"""The web application of ``rlhfkit serve-reward``: JSON samples in, JSON rewards out."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from rlhfkit.data.experience import Prompt, Sample
from rlhfkit.rewards.base import TIMEOUT, Reward, evaluate, reward_name
from rlhfkit.rewards.batching import Batcher, Scores

log = logging.getLogger(__name__)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PromptBody(_Body):
    """A :class:`Prompt` in JSON; only the text or the token ids are needed, whichever the reward reads."""

    index: int = 0
    token_ids: list[int] = []
    text: str = ""
    answer: Any = None
    metadata: dict[str, Any] = {}


class SampleBody(_Body):
    """A :class:`Sample` in JSON, as far as rewards read it: log-probs are NaN there, policy versions 0."""

    prompt: PromptBody
    sample_index: int = 0
    token_ids: list[int] = []
    action_mask: list[bool] | None = None
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    text: str = ""

    def sample(self) -> Sample:
        """The record.

        Raises:
            ValueError: If the mask is not as long as the tokens.
        """
        count = len(self.token_ids)
        return Sample(
            prompt=Prompt(**dict(self.prompt)),
            sample_index=self.sample_index,
            token_ids=self.token_ids,
            logprobs=[math.nan] * count,
            versions=[0] * count,
            finish_reason=self.finish_reason,
            action_mask=self.action_mask,
            text=self.text,
        )


class ScoreBody(_Body):
    """What is posted to ``/score``."""

    samples: list[SampleBody]


class QueryBody(BaseModel):
    """What OpenRLHF posts to ``/get_reward``: whole texts, and where they began."""

    query: list[str]
    prompts: list[str] | None = None
    labels: list[Any] | None = None

    def samples(self) -> list[Sample]:
        """Records without token ids.

        Raises:
            ValueError: If the lists are of several lengths.
        """
        prompts = self.prompts or [""] * len(self.query)
        labels = self.labels or [None] * len(self.query)
        rows = zip(self.query, prompts, labels, strict=True)
        return [
            Sample(Prompt(index, [], prompt, label), 0, [], [], [], "stop", text=query.removeprefix(prompt))
            for index, (query, prompt, label) in enumerate(rows)
        ]


def reward_app(reward: Reward, *, max_batch: int = 256, max_wait: float = 0.005, timeout: float = TIMEOUT) -> FastAPI:
    """An application that scores samples with a reward. It goes behind a :class:`~rlhfkit.serving.gate.Gate`.

    - ``POST /score``: ``{"samples": [...]}`` to ``{"rewards": [...]}``, see :mod:`rlhfkit.rewards.wire`.
    - ``POST /get_reward``: the same for clients of OpenRLHF, whose samples have no token ids.
    - ``GET /health``: 200, or 503 when a batch takes longer than ``timeout``.

    What cannot be scored is answered with 422 and the reason, a reward that fails otherwise with 500, one that takes
    too long with 504. What waits for its batch when its client leaves is not scored.

    Args:
        reward: What scores. It is called in one thread, with samples of one or several requests, and so must look at
            each sample by itself: what compares the samples of a prompt (``WeightedSum(normalize=...)``) belongs to
            the trainer's side, which has all of them.
        max_batch: Samples at which a batch of requests is closed.
        max_wait: Seconds that a request waits for others.
        timeout: Seconds that a request may take, the wait for its batch included.
    """
    name = reward_name(reward)

    def score(samples: Sequence[Sample]) -> Scores:
        return evaluate({name: reward}, samples, timeout=timeout)[name] if samples else []

    batcher = Batcher(score, max_batch=max_batch, max_wait=max_wait)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await asyncio.to_thread(batcher.close)

    async def rewards(samples: list[Sample], request: Request) -> dict[str, Scores]:
        try:
            async with asyncio.timeout(timeout):
                return {"rewards": await _while_wanted(asyncio.wrap_future(batcher.submit(samples)), request)}
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
    app.add_exception_handler(RequestValidationError, _first_fault)

    @app.get("/health")
    async def health() -> JSONResponse:
        stuck = batcher.scoring_for > timeout
        return JSONResponse({"status": "stuck" if stuck else "ok"}, 503 if stuck else 200)

    @app.post("/score")
    async def score_samples(body: ScoreBody, request: Request) -> dict[str, Scores]:
        return await rewards(_read(body.samples), request)

    @app.post("/get_reward")
    async def score_queries(body: QueryBody, request: Request) -> dict[str, Scores]:
        try:
            samples = body.samples()
        except ValueError as error:
            raise HTTPException(422, f"query, prompts and labels must be equally many: {error}") from error
        return await rewards(samples, request)

    return app


async def _while_wanted(scores: asyncio.Future[Scores], request: Request) -> Scores:
    """The scores, given up when the client has gone: it asks again, and two for one would soon be too many."""
    departure = asyncio.create_task(_departure(request))
    departure.add_done_callback(lambda _: scores.cancel())
    try:
        return await scores
    except asyncio.CancelledError:
        if departure.done():
            raise HTTPException(499, "the client has gone") from None
        raise
    finally:
        departure.cancel()


async def _departure(request: Request) -> None:
    """Return when the client has closed its connection; behind the body nothing else is received."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _read(bodies: Sequence[SampleBody]) -> list[Sample]:
    try:
        return [body.sample() for body in bodies]
    except ValueError as error:
        raise HTTPException(422, str(error)) from error


async def _first_fault(_: Request, error: Exception) -> JSONResponse:
    """Where the body is wrong, without a copy of it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return JSONResponse({"detail": f"{where}: {first['msg']}" if where else first["msg"]}, 422)
