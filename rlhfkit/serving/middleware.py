"""``Gate``: what a request must pass before an application sees it: token, free place, size, time."""

import asyncio
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhfkit.serving.access import AccessToken
from rlhfkit.validation import check_integer, check_number

MAX_BODY_BYTES = 64 * 2**20
"""Bytes of a request's body, unless told otherwise."""

MAX_TOTAL_BYTES = 2 * MAX_BODY_BYTES
"""Bytes of the bodies of all requests that are being served, unless told otherwise."""

MAX_CONCURRENT = 256
"""Requests at a time, unless told otherwise."""

BODY_TIMEOUT = 60.0
"""Seconds that a request's body may take to arrive, unless told otherwise."""


class Gate:
    """An ASGI application in front of another one.

    - 401 without the right token (not asked for on ``open_paths``);
    - 503 with ``Retry-After`` while ``max_concurrent`` requests are being served;
    - 413 for a body of more than ``max_body_bytes``, of which no more than that is ever read;
    - 503 with ``Retry-After`` for a body with which those being served would be more than ``max_total_bytes``;
    - 408 for a body that does not arrive within ``body_timeout``;
    - 400 without a token if the request names another host than this machine, which is how a web page in somebody's
      browser reaches a server on their loopback address (DNS rebinding).

    Memory for bodies is thereby at most ``max_total_bytes``, until their requests are answered; what an application
    makes of them comes on top and is its own to bound. WebSockets are closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: AccessToken | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_total_bytes: int | None = None,
        max_concurrent: int = MAX_CONCURRENT,
        body_timeout: float = BODY_TIMEOUT,
        open_paths: Sequence[str] = ("/health",),
    ) -> None:
        """Say what may pass.

        Args:
            app: The application behind.
            token: What requests must bring; ``None``: nothing, for servers on the loopback address.
            max_body_bytes: Bytes of a body.
            max_total_bytes: Bytes of the bodies of all requests being served; ``None``: those of two of the largest,
                or 128 MiB if that is more.
            max_concurrent: Requests at a time.
            body_timeout: Seconds for a body to arrive.
            open_paths: Paths that need neither token nor place, such as a health check; they must reveal nothing.

        Raises:
            ValueError: If a limit is not positive.
        """
        check_integer("max_body_bytes", max_body_bytes, minimum=1)
        check_integer("max_total_bytes", max_total_bytes, minimum=max_body_bytes, optional=True)
        check_integer("max_concurrent", max_concurrent, minimum=1)
        check_number("body_timeout", body_timeout, above=0, why="it is in seconds")
        self.max_total_bytes = max_total_bytes or max(MAX_TOTAL_BYTES, 2 * max_body_bytes)
        self.token = token
        self.max_concurrent = max_concurrent
        self.body_timeout = body_timeout
        self.open_paths = frozenset(open_paths)
        self.active = 0
        """Requests being served."""
        self.total_bytes = 0
        """Bytes of their bodies so far."""
        limited: ASGIApp = RequestBodyLimitMiddleware(app, max_body_bytes)
        if token is None:
            limited = TrustedHostMiddleware(limited, ["localhost", "127.0.0.1", "[::1]"], www_redirect=False)
        self._app = limited

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
            return
        if scope["type"] != "http" or scope["path"] in self.open_paths:
            await self._app(scope, receive, send)
            return
        if self.token is not None and not self.token.matches(Headers(scope=scope).get("authorization")):
            answer = _refusal(401, "a token is needed: Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"})
            await answer(scope, receive, send)
            return
        if self.active >= self.max_concurrent:
            message = f"{self.max_concurrent} requests are being served, which is the limit"
            await _refusal(503, message, {"Retry-After": "1"})(scope, receive, send)
            return
        self.active += 1
        body = _Body()
        try:
            await self._app(scope, self._bounded(receive, body), send)
        finally:
            self.active -= 1
            self.total_bytes -= body.bytes

    def _bounded(self, receive: Receive, body: "_Body") -> Receive:
        """The same messages, of which the body's must come in time and find room."""
        deadline = asyncio.get_running_loop().time() + self.body_timeout
        whole = False

        async def receive_in_time() -> Message:
            nonlocal whole
            if whole:  # what is still to come says that the client has gone
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {self.body_timeout:g} s") from None
            whole = not message.get("more_body", False)
            body.bytes += len(message.get("body", b""))
            self.total_bytes += len(message.get("body", b""))
            if self.total_bytes > self.max_total_bytes:
                detail = f"the requests being served have more than {self.max_total_bytes} bytes, which is the limit"
                raise HTTPException(503, detail, {"Retry-After": "1", "Connection": "close"})
            return message

        return receive_in_time


class _Body:
    """How much of a request's body has arrived."""

    bytes: int = 0


def _refusal(status: int, message: str, headers: dict[str, str]) -> JSONResponse:
    """An error in the form that OpenAI's clients read, and everybody else's can."""
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers | {"Connection": "close"})
