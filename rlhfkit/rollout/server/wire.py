"""What ``/v1/completions`` of vLLM 0.32 is sent and answers: token ids in and out, with log-probs."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhfkit.data.types import Prompt
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.vllm.arguments import sample_request

COMPLETIONS = "/v1/completions"

_NOT_SENT = {"detokenize", "priority"}
"""Parameters of ``vllm.SamplingParams`` that the endpoint lacks, or takes of servers started for them only."""


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
