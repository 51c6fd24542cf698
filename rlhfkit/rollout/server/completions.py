"""What ``/v1/completions`` of vLLM 0.32 is sent and answers: token ids in and out, with log-probs."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfkit.data.types import Prompt
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.server.connection import ServerConnections, ServerOptions
from rlhfkit.rollout.vllm.arguments import sample_request
from rlhfkit.serving.client import Endpoint

COMPLETIONS = "/v1/completions"

_NOT_SENT = {"detokenize", "priority"}
"""Parameters of ``vllm.SamplingParams`` that the endpoint lacks, or accepts only from servers started for them."""


def sample_body(
    prompt: Prompt, index: int, sampling: SamplingSpec, iteration: int, stops: tuple[int, ...]
) -> dict[str, Any]:
    """Return the request for sample ``index`` of a group: that of :class:`~rlhfkit.VLLMPool`, with the same seed."""
    token_ids, arguments = sample_request(prompt, index, sampling, iteration, stops)
    sent = {name: value for name, value in arguments.items() if name not in _NOT_SENT}
    return {"prompt": token_ids, "return_token_ids": True, **sent}


def score_body(token_ids: Sequence[int], top: int = 0) -> dict[str, Any]:
    """Return the request for log-probs of a prompt's tokens, and of the ``top`` likeliest at each position."""
    # vLLM computes them when it samples the first token, so one is requested and dropped.
    arguments = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top, "return_token_ids": True}
    return {"prompt": list(token_ids), **arguments}


def parse_completion(answer: Any) -> tuple[list[int], list[float], str]:
    """Return token ids, their log-probs and the finish reason; EngineError if the answer lacks them."""
    choice = _choice(answer)
    token_ids, finish = choice.get("token_ids"), choice.get("finish_reason")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if token_ids is None:
        raise EngineError(
            "the server returns no token ids: it must know return_token_ids of /v1/completions, as vLLM does (0.32)"
        )
    if logprobs is None or len(logprobs) != len(token_ids):
        raise EngineError(f"the server returned {len(token_ids)} tokens without a log-prob of each")
    if finish not in ("stop", "length"):
        raise EngineError(f"the server ended a completion with {finish!r}")
    return token_ids, [float(value) for value in logprobs], finish


def parse_scores(answer: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the log-prob of every token after the first."""
    entries = _prompt_logprobs(answer, len(token_ids))
    return [float(entry[str(token)]["logprob"]) for token, entry in zip(token_ids[1:], entries, strict=True)]


def parse_top(answer: Any, token_ids: Sequence[int], top: int) -> tuple[list[list[float]], list[list[int]]]:
    """Return log-probs and ids of the ``top`` likeliest tokens at every position after the first, likeliest first."""
    values, ids = [], []
    for entry in _prompt_logprobs(answer, len(token_ids)):
        # The prompt's own token is in there too, whatever its rank.
        best = sorted(entry.items(), key=lambda item: int(item[1]["rank"]))[:top]
        if len(best) < top:
            raise EngineError(f"the server returned {len(best)} of the {top} likeliest tokens that it was asked for")
        values.append([float(one["logprob"]) for _, one in best])
        ids.append([int(token) for token, _ in best])
    return values, ids


def _choice(answer: Any) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise EngineError(f"the server answered with something else than one completion: {str(answer)[:200]}")
    return choices[0]


def _prompt_logprobs(answer: Any, length: int) -> list[Mapping[str, Any]]:
    """Return what is known of each token after the first."""
    entries = _choice(answer).get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != length:
        raise EngineError(
            "the server returns no log-probs of prompts: it must know prompt_logprobs of /v1/completions, as vLLM does"
        )
    return entries[1:]


# ---------------------------------------------------------------- the server's model


def connect(options: ServerOptions, served_model: str | None, timeout: float) -> tuple[ServerConnections, str, int]:
    """Connect to servers; returns the name of their model, and the context that all of them have.

    Args:
        options: Where they are.
        served_model: Name by which they know the model; ``None``: the only one they have.
        timeout: Seconds in which each must answer.

    Raises:
        EngineError: If one does not answer, refuses, or has another model than the others.
    """
    connections = ServerConnections(options)
    try:
        found = [
            connections.submit(find_model(connections, endpoint, served_model, timeout)).result()
            for endpoint in connections.endpoints
        ]
        names = {name for name, _ in found}
        if len(names) > 1:
            raise EngineError(f"the servers have different models, {sorted(names)}, and need the same on all")
    except BaseException:
        connections.close()
        raise
    return connections, names.pop(), min(context for _, context in found)


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
            refused = getattr(error, "status", None) is not None  # waiting does not help
            if refused or time.monotonic() >= deadline:
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
