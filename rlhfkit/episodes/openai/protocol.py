"""Requests and responses of OpenAI's chat completions, as far as a policy in training can support them."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhfkit.data.images import Image
from rlhfkit.episodes.environment import Message
from rlhfkit.episodes.tool_calls import ToolCall, check_json, parse_json


class ChatError(Exception):
    """A request that cannot be answered; clients get an error of OpenAI's API with code and HTTP status."""

    def __init__(self, message: str, *, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        """Return the error as JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "code": self.code, "param": None}}


class ChatRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``. Other fields of the API are accepted and ignored."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    n: Literal[1] | None = 1
    stream: bool | None = False
    logprobs: bool | None = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_plain(cls, value: Any) -> Any:
        check_json(value)
        return value

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Tools that are shown to the policy."""
        return None if self.tool_choice == "none" else self.tools or None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def form(self) -> dict[str, Any]:
        """Arguments of ``SamplingSpec`` for ``response_format``; raises :class:`ChatError` for unknown ones."""
        wanted = self.response_format or {"type": "text"}
        kind = wanted.get("type")
        if kind == "text":
            return {}
        if kind == "json_object":
            return {"json_schema": {"type": "object"}}
        described = wanted.get("json_schema")
        if kind == "json_schema" and isinstance(described, Mapping) and isinstance(described.get("schema"), Mapping):
            return {"json_schema": described["schema"]}
        raise ChatError(
            'response_format is {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
            f'{{"name": ..., "schema": {{...}}}}}}, got {str(wanted)[:80]}'
        )

    @property
    def completion_limit(self) -> int | None:
        """Maximum number of tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens


def normalize_message(message: Mapping[str, Any], *, images: bool = False) -> dict[str, Any]:
    """Return a message as chat templates take it: content as text, arguments as objects; raises :class:`ChatError`.

    With ``images``, as a model sees them, content with pictures is a list of parts. They come in ``data:`` URLs; files
    and addresses that a client names are not read.
    """
    if not isinstance(message.get("role"), str):
        raise ChatError(f"a message needs a role: {str(dict(message))[:80]}")
    content = message.get("content")
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
        if any(kind not in (("text", "image_url") if images else ("text",)) for kind in kinds):
            can = "text or pictures; sound" if images else "text; pictures and sound"
            raise ChatError(f"the content of a message must be {can} cannot be read")
        if "image_url" not in kinds:
            content = "".join(str(part.get("text", "")) for part in content)
        else:
            content = [_normalize_part(part) for part in content]
    if content is not None and not isinstance(content, str | list):
        raise ChatError(f"the content of a message must be text, got {type(content).__name__}")
    plain = {"role": message["role"], "content": content or ""}
    if plain["role"] == "developer":  # the name for newer models of OpenAI
        plain["role"] = "system"
    for name in ("name", "tool_call_id"):
        if message.get(name):
            if not isinstance(message[name], str):
                raise ChatError(f"the {name} of a message must be text, got {type(message[name]).__name__}")
            plain[name] = message[name]
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ChatError("tool_calls must be a list")
    if calls:
        plain["tool_calls"] = [_normalize_tool_call(one) for one in calls]
    return plain


def _normalize_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": str(part.get("text", ""))}
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ChatError(f"a picture must come in a data: URL, got {str(url)[:80]!r}")
    try:
        return {"type": "image", "image": Image.of(url, "a picture of a message")}
    except ValueError as error:
        raise ChatError(str(error)) from error


def _normalize_tool_call(wanted: Any) -> dict[str, Any]:
    function = wanted.get("function") if isinstance(wanted, Mapping) else None
    if not isinstance(function, Mapping):
        raise ChatError("a tool call needs a function")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            raise ChatError(f"the arguments of a tool call must be JSON: {error}") from error
    if not isinstance(arguments, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError("the function of a tool call needs a name (text) and arguments (a JSON object)")
    return {
        "type": "function",
        "id": wanted.get("id"),
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def same_message(one: Message, other: Message) -> bool:
    """Whether two normalised messages are equal, apart from white space at the ends and ids of tool calls."""
    return _message_key(one) == _message_key(other)


def _message_key(message: Message) -> tuple[Any, ...]:
    calls = [json.dumps(one["function"], sort_keys=True) for one in message.get("tool_calls", ())]
    content = message["content"]
    if isinstance(content, str):
        return message["role"], content.strip(), calls
    return message["role"], [part["image"] if part["type"] == "image" else part["text"] for part in content], calls


def assistant_message(text: str, calls: Sequence[ToolCall], request_id: str, *, before: str = "") -> dict[str, Any]:
    """Return the policy's turn as a message; ``request_id`` is the prefix of the ids of its tool calls.

    ``before`` is what it says before them.
    """
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": before or None,
        "tool_calls": [
            {
                "id": f"call_{request_id}_{number}",
                "type": "function",
                "function": {"name": one.name, "arguments": json.dumps(dict(one.arguments))},
            }
            for number, one in enumerate(calls)
        ],
    }


def chat_completion(
    message: Mapping[str, Any],
    *,
    request_id: str,
    model: str,
    finish_reason: str,
    prompt_tokens: int,
    completion_tokens: int,
    logprobs: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """Return a response as JSON; ``finish_reason`` is ``stop``, ``length`` or ``tool_calls``.

    ``logprobs`` has one entry per token, if asked for.
    """
    return {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": dict(message),
                "finish_reason": finish_reason,
                "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def stream_events(body: Mapping[str, Any]) -> list[str]:
    """Return a response of :func:`chat_completion` as server-sent events: the whole answer, then the end."""
    (choice,) = body["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": number, **one} for number, one in enumerate(delta["tool_calls"])]
    head = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    said = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks = [{**head, "choices": [said]}, {**head, "choices": [end], "usage": body["usage"]}]
    return [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]
