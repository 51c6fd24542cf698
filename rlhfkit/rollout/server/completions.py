"""What vLLM 0.32 is sent over HTTP and answers: token ids in and out, with log-probs.

Texts go to ``/v1/completions``, which every server has. It takes no images: token ids with images go to
``/inference/v1/generate``, which a server has that was started with ``--enable-scale-out``.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhfkit.data.images import Image
from rlhfkit.rollout.errors import EngineError, RefusedRequest, RequestError
from rlhfkit.rollout.server.connection import ServerConnections, ServerRefusal
from rlhfkit.rollout.supervision.calls import Request
from rlhfkit.serving.client import ClientOptions, Endpoint

if TYPE_CHECKING:
    from rlhfkit.rollout.vllm.images import SentImages

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"

_NOT_SENT = {"detokenize", "priority"}
"""Parameters of ``vllm.SamplingParams`` that the endpoint lacks, or accepts only from servers started for them."""


def sample_body(request: Request) -> dict[str, Any]:
    """Return the body for one sample of a text."""
    token_ids, arguments = request
    sent = {name: value for name, value in arguments.items() if name not in _NOT_SENT}
    return {"prompt": token_ids, "return_token_ids": True, **sent}


def score_body(token_ids: Sequence[int], top: int = 0) -> dict[str, Any]:
    """Return the request for log-probs of a prompt's tokens, and of the ``top`` likeliest at each position."""
    return {"prompt": list(token_ids), "return_token_ids": True, **_score_arguments(top)}


def _score_arguments(top: int = 0) -> dict[str, Any]:
    # vLLM computes them when it samples the first token, so one is requested and dropped.
    return {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}


async def ask_with_images(
    connections: ServerConnections, model: str, token_ids: Sequence[int], images: "SentImages", arguments: Any = None
) -> Any:
    """Ask for a sample of a prompt with images, or without ``arguments`` for the log-probs of its tokens.

    ``arguments`` are those of ``vllm.SamplingParams``. The answer is like one of ``/v1/completions``.

    Raises:
        RequestError: If the server refuses the request, or has read other tokens than these.
        EngineError: If no server answers.
    """
    from rlhfkit.rollout.vllm.images import check_read

    given = _score_arguments() if arguments is None else arguments
    body = {
        "model": model,
        "token_ids": images.token_ids,
        "content_parts": [{"type": "image_url", "url": Image(file).plain()} for file in images.encoded],
        "sampling_params": {name: value for name, value in given.items() if name != "priority"},
        "return_token_ids": True,
    }
    answer = await connections.ask(GENERATE, body)
    choice = _choice(answer)
    try:
        check_read(token_ids, answer.get("prompt_token_ids") or ())
    except RefusedRequest as error:
        raise RequestError(str(error)) from None
    logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
    found = {"logprobs": {"token_logprobs": logprobs}, "prompt_logprobs": answer.get("prompt_logprobs")}
    return {"choices": [{**choice, **found}]}


async def takes_images(connections: ServerConnections, endpoint: Endpoint, model: str, *, timeout: float) -> bool:
    """Whether a server takes token ids with images; EngineError if it does not answer."""
    body = {"model": model, "token_ids": [0], "sampling_params": {"max_tokens": 1}}
    try:
        await connections.call(endpoint, "POST", GENERATE, body, timeout=timeout)
    except ServerRefusal as error:
        if error.status not in (403, 404):
            raise
        return False
    return True


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


def connect(options: ClientOptions, served_model: str | None, timeout: float) -> tuple[ServerConnections, str, int]:
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
