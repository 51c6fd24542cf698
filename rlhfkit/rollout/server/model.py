"""What a server says of its model: its name and context, and which log-probs it reports."""

import asyncio
import time
from typing import Any

from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.server.connection import ServerConnections
from rlhfkit.rollout.server.wire import COMPLETIONS
from rlhfkit.serving.endpoints import Endpoint


async def find_model(
    connections: ServerConnections, endpoint: Endpoint, wanted: str | None, timeout: float, *, pause: float = 1.0
) -> tuple[str, int]:
    """Return the name and the context of a server's model, which has ``timeout`` seconds to answer.

    Raises:
        EngineError: If it does not answer, refuses, or has not exactly the wanted model.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            answer = await connections.call(endpoint, "GET", "/v1/models", timeout=max(1.0, min(30.0, timeout)))
            break
        except EngineError as error:
            if _refused(error) or time.monotonic() >= deadline:
                raise EngineError(f"no vLLM server answers at {endpoint.url} within {timeout:g} s: {error}") from None
        await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
    models = {model["id"]: model for model in answer.get("data", ()) if not model.get("parent")}
    names = [name for name in models if wanted in (None, name)]
    if len(names) != 1:
        asked = (
            "served_model=None needs exactly one" if wanted is None else f"served_model={wanted!r} is not among them"
        )
        raise EngineError(f"{endpoint.url} serves {sorted(models)}: {asked}")
    context = models[names[0]].get("max_model_len")
    if not isinstance(context, int):
        raise EngineError(f"{endpoint.url} does not say its max_model_len in /v1/models, as vLLM does; is it a vLLM?")
    return names[0], context


def _refused(error: EngineError) -> bool:
    """Whether waiting does not help."""
    return getattr(error, "status", None) is not None


async def reports_raw_logprobs(
    connections: ServerConnections, endpoint: Endpoint, model: str, *, timeout: float
) -> bool:
    """Whether a server's log-probs are those before the temperature: those at 2 are then equal to those at 1."""
    found = []
    for temperature in (1.0, 2.0):
        body: dict[str, Any] = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": temperature}
        body |= {"logprobs": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "return_token_ids": True, "seed": 0}
        answer = await connections.call(endpoint, "POST", COMPLETIONS, body, timeout=timeout)
        found.append(max(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()))
    return bool(abs(found[0] - found[1]) < 1e-6)
