"""``OpenAIEndpoint``: an HTTP server with OpenAI's chat API, answered by the policy.

``/sessions/<name>/v1`` is the base URL of a session, recorded as one episode; requests to ``/v1`` are not recorded. All
paths need the token, which is the API key.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Mapping
from functools import partial
from math import isnan
from types import TracebackType
from typing import Any, Self

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from rlhfkit.data.types import Prompt
from rlhfkit.episodes.observations import ObservationTokenizer
from rlhfkit.episodes.openai.protocol import (
    ChatError,
    ChatRequest,
    chat_completion,
    stream_events,
)
from rlhfkit.episodes.openai.session import ChatSession, ChatTurn
from rlhfkit.episodes.tool_calls import ToolCallParser, template_parser
from rlhfkit.episodes.tool_calls import tool_call_parser as find_parser
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec
from rlhfkit.rollout.request_batcher import EngineFailedError, RequestBatcher
from rlhfkit.serving.access import AccessToken, ServerOptions, is_loopback
from rlhfkit.serving.middleware import JSONBodyReader, parse_model
from rlhfkit.serving.server import Server
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

MODEL = "policy"
"""Name of the policy in the API; requests may name any."""

_NOT_USED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed")


class OpenAIEndpoint:
    """Serves ``POST .../v1/chat/completions`` and ``GET .../v1/models`` in a thread of this process.

    Sampling parameters are set here, not by clients, since log-probs must be those of the distribution that is trained.
    Requests may lower ``max_tokens`` and add ``stop``; ``temperature`` and the like are ignored, with one warning.

    The default is the loopback address with a random token; other addresses need a token of your own. Size, number and
    duration of requests are limited (:class:`~rlhfkit.serving.middleware.AccessControlMiddleware`).

    Example::

        with OpenAIEndpoint(engine, tokenizer, max_context_tokens=4096) as endpoint:
            client = openai.OpenAI(base_url=endpoint.base_url(), api_key=endpoint.api_key)

    Args:
        engine: Samples, with its current weights.
        tokenizer: The model's tokenizer; needs a chat template.
        max_context_tokens: Maximum number of tokens of a conversation, the answer included.
        sampling: Sampling parameters of requests outside of sessions.
        server: Address, API key and TLS files.
        tool_call_parser: Finds tool calls in answers to requests with ``tools``, by name or a function; ``None``: the
            format of the tokenizer's chat template.
        request_timeout: Time limit of an answer in seconds.
        max_body_bytes: Maximum size of a request.
        max_body_values: Maximum number of values in a request's JSON: texts, numbers, lists and objects.
        max_concurrent: Maximum of concurrent requests; others are refused with 503, which clients retry.
        parallel_calls: Concurrent calls of the engine; ``None``: see
            :class:`~rlhfkit.rollout.request_batcher.RequestBatcher`.
        chat_template_kwargs: Passed to the chat template.

    Raises:
        ValueError: If the host can be reached from outside and there is no token, or a limit is out of range.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        *,
        max_context_tokens: int,
        sampling: SamplingSpec | None = None,
        server: ServerOptions = ServerOptions(),  # noqa: B008  # frozen
        tool_call_parser: str | ToolCallParser | None = None,
        request_timeout: float = 600.0,
        max_body_bytes: int = 4 * 2**20,
        max_body_values: int = 100_000,
        max_concurrent: int = 1024,
        parallel_calls: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_number("request_timeout", request_timeout, above=0, why="it is in seconds")
        check_integer(
            "max_context_tokens", max_context_tokens, minimum=2, why="a prompt and an answer have a token each at least"
        )
        check_integer("parallel_calls", parallel_calls, minimum=1, optional=True)
        check_integer("max_body_values", max_body_values, minimum=1)
        self.engine = engine
        self.max_context_tokens = max_context_tokens
        self.sampling = sampling or SamplingSpec()
        self.tool_call_parser = find_parser(tool_call_parser or template_parser(tokenizer))
        self.request_timeout = request_timeout
        self.parallel_calls = parallel_calls
        self.observations = ObservationTokenizer(tokenizer, chat_template_kwargs)
        self._public_url = None if server.public_url is None else server.public_url.rstrip("/")
        self._token = server.token or (AccessToken(secrets.token_urlsafe(32)) if is_loopback(server.host) else None)
        self._sessions: dict[str, ChatSession] = {}
        self._numbers = itertools.count()
        self._warned: set[str] = set()
        self._bodies = JSONBodyReader(max_objects=max_body_values, max_numbers=max_body_values)
        self._sampler = RequestBatcher(engine, parallel_calls=parallel_calls)
        self._server = Server(
            self._application(),
            host=server.host,
            port=server.port,
            token=self._token,
            ssl_certfile=server.ssl_certfile,
            ssl_keyfile=server.ssl_keyfile,
            max_body_bytes=max_body_bytes,
            max_concurrent=max_concurrent,
            open_paths=(),
        )

    @property
    def api_key(self) -> str:
        """The token, as clients send it."""
        assert self._token is not None  # checked in the constructor
        return self._token.header()["Authorization"].removeprefix("Bearer ")

    def base_url(self, session: str | None = None) -> str:
        """Return the ``base_url`` for clients of a session; ``None``: outside of sessions."""
        here = self._server.url.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")
        path = "/v1" if session is None else f"/sessions/{session}/v1"
        return f"{self._public_url or here}{path}"

    def open_session(
        self, prompt: Prompt, sample_index: int, sampling: SamplingSpec, *, iteration: int, max_turns: int
    ) -> tuple[str, ChatSession]:
        """Start a session of at most ``max_turns`` answers, for the given index in a prompt's group.

        Returns:
            Its name, which cannot be guessed, and the session, which records the requests.
        """
        name = secrets.token_urlsafe(16)
        self._sessions[name] = self._new_session(prompt, sample_index, sampling, iteration, max_turns)
        return name, self._sessions[name]

    def _new_session(
        self, prompt: Prompt, sample_index: int, sampling: SamplingSpec, iteration: int, max_turns: int
    ) -> ChatSession:
        return ChatSession(
            prompt,
            sample_index,
            sampling=sampling,
            iteration=iteration,
            observations=self.observations,
            tool_call_parser=self.tool_call_parser,
            max_context_tokens=self.max_context_tokens,
            max_turns=max_turns,
        )

    def close_session(self, name: str) -> None:
        """End a session: further requests are refused."""
        self._sessions.pop(name, None)

    def start(self) -> Self:
        """Start to listen; see :meth:`rlhfkit.serving.server.Server.start`."""
        self._server.start()
        return self

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        self._server.close()
        self._sessions.clear()

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # ------------------------------------------------------------------ HTTP

    def _application(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

        @app.exception_handler(ChatError)
        async def refuse(request: Request, error: ChatError) -> JSONResponse:
            return JSONResponse(error.body(), error.status)

        @app.exception_handler(HTTPException)
        async def misunderstand(request: Request, error: HTTPException) -> JSONResponse:
            status = 400 if error.status_code == 422 else error.status_code  # as OpenAI's servers do
            return JSONResponse(ChatError(str(error.detail), status=status).body(), status, error.headers)

        @app.get("/v1/models")
        @app.get("/sessions/{name}/v1/models")
        async def models(name: str | None = None) -> dict[str, Any]:
            entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlhfkit"}
            return {"object": "list", "data": [entry]}

        @app.post("/v1/chat/completions", response_model=None)
        @app.post("/sessions/{name}/v1/chat/completions", response_model=None)
        async def complete(request: Request, name: str | None = None) -> JSONResponse | StreamingResponse:
            asked = await self._bodies.read(request, partial(parse_model, ChatRequest))
            body = await self._complete(self._session(name), asked)
            if asked.stream:
                return StreamingResponse(iter(stream_events(body)), media_type="text/event-stream")
            return JSONResponse(body)

        return app

    def _session(self, name: str | None) -> ChatSession:
        self.observations.use_images(self.engine.image_processor)
        if name is None:
            return self._new_session(Prompt(next(self._numbers), []), 0, self.sampling, iteration=0, max_turns=1)
        if name not in self._sessions:
            raise ChatError("there is no such session, or it has ended", code="session_not_found", status=404)
        return self._sessions[name]

    async def _complete(self, session: ChatSession, request: ChatRequest) -> dict[str, Any]:
        self._warn_of_unused(request)
        self._sampler.requesters.count = len(self._sessions)
        try:
            async with asyncio.timeout(self.request_timeout):
                turn = await session.answer(request, self._sampler)
        except TimeoutError:
            message = f"no answer within {self.request_timeout:g} s"
            raise ChatError(message, code="timeout", status=504) from None
        except EngineFailedError as error:
            raise ChatError(f"the engine failed: {error}", code="engine_failed", status=500) from error
        return self._body(turn, request)

    def _body(self, turn: ChatTurn, request: ChatRequest) -> dict[str, Any]:
        sampled = turn.trajectory.last_action
        assert sampled is not None  # a turn has an answer
        tokenizer, logprobs = self.observations.tokenizer, None
        if request.logprobs:
            texts = [tokenizer.decode([token]) for token in sampled.token_ids.tolist()]
            logprobs = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                # OpenAI's API uses -9999 for unknown log-probs; NaN is not valid JSON.
                for text, logprob in zip(
                    texts, (-9999.0 if isnan(p) else p for p in sampled.logprobs.tolist()), strict=True
                )
            ]
        return chat_completion(
            turn.reply,
            request_id=turn.request_id,
            model=request.model or MODEL,
            finish_reason="tool_calls" if turn.reply.get("tool_calls") else sampled.finish_reason,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=len(sampled.token_ids),
            logprobs=logprobs,
        )

    def _warn_of_unused(self, request: ChatRequest) -> None:
        extra = request.model_extra or {}
        unused = {name for name in _NOT_USED if extra.get(name) is not None} - self._warned
        if unused:
            self._warned |= unused
            log.warning(
                "requests set %s, which is ignored: SamplingSpec determines the sampling",
                ", ".join(sorted(unused)),
            )
