"""``AccessControlMiddleware``: checks token, host, size and time of requests before an application sees them."""

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhfkit.serving.access import AccessToken
from rlhfkit.validation import check_integer, check_number

MAX_BODY_BYTES = 64 * 2**20
"""Default maximum size of a request's body."""

MAX_TOTAL_BYTES = 2 * MAX_BODY_BYTES
"""Default maximum size of the bodies of all requests being served."""

MAX_CONCURRENT = 256
"""Default maximum of concurrent requests."""

BODY_TIMEOUT = 60.0
"""Default time limit in seconds for a request's body to arrive."""


class AccessControlMiddleware:
    """An ASGI middleware that refuses requests with

    - 401 without the right token (not needed on ``open_paths``);
    - 503 and ``Retry-After`` while ``max_concurrent`` requests are being served;
    - 413 for a body of more than ``max_body_bytes``; the rest is not read;
    - 503 and ``Retry-After`` if the bodies of all requests being served would exceed ``max_total_bytes``;
    - 408 for a body that does not arrive within ``body_timeout``;
    - 400, if there is no token, for a ``Host`` header other than this machine, with which a web page could reach a
      server on the loopback address (DNS rebinding).

    So bodies take at most ``max_total_bytes`` of memory, besides what the application makes of them. WebSockets are
    closed.
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
        """Set the limits.

        Args:
            app: The application.
            token: Token that requests must bring; ``None``: none, for servers on the loopback address.
            max_body_bytes: Maximum size of a body.
            max_total_bytes: Maximum size of the bodies of all requests being served; ``None``: twice
                ``max_body_bytes``, and at least 128 MiB.
            max_concurrent: Maximum of concurrent requests.
            body_timeout: Time limit in seconds for a body to arrive.
            open_paths: Paths without token and limits, such as a health check; they must reveal nothing.

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
        """Size of their bodies so far."""
        limited: ASGIApp = RequestBodyLimitMiddleware(app, max_body_bytes)
        if token is None:
            limited = TrustedHostMiddleware(limited, ["localhost", "127.0.0.1", "[::1]"], www_redirect=False)
        self._app = limited

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        """Wrap ``receive`` with the limits of size and time."""
        deadline = asyncio.get_running_loop().time() + self.body_timeout
        whole = False

        async def receive_in_time() -> Message:
            nonlocal whole
            if whole:  # only the client's disconnect can still come
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
    """Return an error in the form of OpenAI's API."""
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers | {"Connection": "close"})


# ---------------------------------------------------------------- bodies that are large when they are parsed
#
# A parser creates all objects before they can be counted, and holds the interpreter's lock meanwhile. So a regular
# expression first counts on the bytes; it lets other threads run, and stops at the first excess.

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

MAX_DEPTH = 64
"""Maximum nesting of lists and objects."""

_PARTS = re.compile(rb'"[^"]*+"|([\[{])|([\]}])|(")|[^"\[\]{}]++')


class JSONTooLarge(ValueError):
    """The body exceeds a limit."""


def check_json_size(body: bytes, *, max_objects: int, max_numbers: int, max_depth: int = MAX_DEPTH) -> None:
    """Raise :class:`JSONTooLarge` if a JSON text exceeds a limit, ``ValueError`` if a text in it is not terminated.

    ``max_objects`` counts texts (keys included), lists and objects; ``max_numbers`` counts commas, about as many as
    numbers. The text may still be invalid JSON.
    """
    if b"\\" in body:  # an escaped quote does not end a text; JSON has backslashes in texts only
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    objects = numbers = depth = 0
    for part in _PARTS.finditer(body):
        if part[1]:
            objects += 1
            depth += 1
            if depth > max_depth:
                raise JSONTooLarge(f"the body nests more than {max_depth} lists and objects inside one another")
        elif part[2]:
            depth -= 1
        elif part[3]:
            raise ValueError(
                f"the body is not JSON: the text that begins at byte {part.start()} or before does not end"
            )
        elif body.startswith(b'"', part.start()):
            objects += 1
        else:
            numbers += part[0].count(b",")
        if objects > max_objects or numbers > max_numbers:
            raise JSONTooLarge(
                f"the body holds more than {max_objects} texts, lists and objects or more than {max_numbers} numbers: "
                "send less at a time"
            )


def parse_model(model: type[Model], body: bytes) -> Model:
    """Parse JSON as a model of pydantic's; raises ``ValueError`` with the places that are wrong, eight at most."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        raise ValueError("; ".join(f"{_place(one['loc'])}{one['msg']}" for one in faults[:8])) from None


def _place(path: Sequence[int | str]) -> str:
    """``samples[0].prompt: `` of ``("samples", 0, "prompt")``."""
    written = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return f"{written.lstrip('.')}: " if written else ""


class JSONBodyReader:
    """Reads the bodies of one application's requests, one at a time, outside of the event loop.

    Answers 413 to a body above the limits, and 422 to one that is invalid, of the wrong form, or not declared as JSON
    (a web page may post other types to any server).
    """

    def __init__(self, *, max_objects: int, max_numbers: int) -> None:
        """Set the limits of :func:`check_json_size`; raises ``ValueError`` if one is not positive."""
        self.limits = {"max_objects": max_objects, "max_numbers": max_numbers}
        for name, limit in self.limits.items():
            check_integer(name, limit, minimum=1)
        # One thread: only one body at a time takes memory for parsing. It ends with the last reference.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlhfkit-json")

    async def read(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """Read a request's body and parse it in the thread; ``parse`` raises ``ValueError`` if it is invalid.

        Raises ``HTTPException`` if the body is refused.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise HTTPException(
                422, f"send JSON with the header Content-Type: application/json, got {kind or 'none'!r}"
            )
        body = await request.body()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._parsed, body, parse)

    def _parsed(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        try:
            check_json_size(body, **self.limits)
            return parse(body)
        except JSONTooLarge as error:
            raise HTTPException(413, str(error)) from None
        except (ValueError, RecursionError) as error:
            raise HTTPException(422, str(error)) from None
