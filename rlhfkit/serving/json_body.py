"""``JSONBodyReader``: parse request bodies in a thread, after checking how much they hold.

A parser creates all objects before they can be counted, and holds the interpreter's lock meanwhile. So a regular
expression first counts on the bytes; it lets other threads run, and stops at the first excess.
"""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from rlhfkit.validation import check_integer

T = TypeVar("T")

MAX_DEPTH = 64
"""Default maximum nesting of lists and objects."""

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


class JSONBodyReader:
    """Reads the bodies of one application's requests, one at a time, outside of the event loop.

    Answers 413 to a body above the limits, and 422 to one that is invalid, of the wrong form, or not declared as JSON
    (a web page may post other types to any server).
    """

    def __init__(self, *, max_objects: int, max_numbers: int, max_depth: int = MAX_DEPTH) -> None:
        """Set the limits of :func:`check_json_size`; raises ``ValueError`` if one is not positive."""
        self.limits = {"max_objects": max_objects, "max_numbers": max_numbers, "max_depth": max_depth}
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
        return await self.run(self._parsed, body, parse)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run another slow function in the parser's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _parsed(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        try:
            check_json_size(body, **self.limits)
            return parse(body)
        except JSONTooLarge as error:
            raise HTTPException(413, str(error)) from None
        except (ValueError, RecursionError) as error:
            raise HTTPException(422, str(error)) from None
