"""Which engine makes which samples, and what exactly it is asked."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rlhfkit.data.experience import Prompt
from rlhfkit.rollout.engine import SamplingSpec, sample_seed
from rlhfkit.rollout.fleet import CURE, EngineError, Fleet
from rlhfkit.rollout.vllm_actor import Completion, Request

# Requests given to an engine ahead of time. More than any engine runs at once, so none waits for work; few enough that
# the last ones go to whichever engine is done first.
_REQUESTS_AHEAD = 2048


def split_into_jobs(num_prompts: int, group_size: int, num_engines: int) -> list[tuple[int, range]]:
    """What is routed as one: a prompt's group, as its samples share the cached prompt; cut up when groups are too few.

    Args:
        num_prompts: Prompts.
        group_size: Samples of each.
        num_engines: Engines to keep busy.

    Returns:
        Prompt and positions in its group, for each job.
    """
    parts = min(group_size, max(1, -(-num_engines // max(1, num_prompts))))
    cuts = [group_size * part // parts for part in range(parts + 1)]
    return [(row, range(cuts[part], cuts[part + 1])) for row in range(num_prompts) for part in range(parts)]


def sample_request(prompt: Prompt, index: int, spec: SamplingSpec, iteration: int, stops: tuple[int, ...]) -> Request:
    """One sample as vLLM is asked for it: every parameter that matters is named, none is left to a default.

    Args:
        prompt: The prompt.
        index: Position in its group.
        spec: How to sample.
        iteration: Goes into the seed.
        stops: The model's end-of-sequence tokens.
    """
    return prompt.token_ids, {
        "n": 1,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "min_p": spec.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": sample_seed(spec.seed, iteration, prompt.index, index),
        "max_tokens": spec.max_new_tokens,
        "min_tokens": spec.min_new_tokens,
        "stop": list(spec.stop),
        "stop_token_ids": [*stops, *spec.stop_token_ids],
        "ignore_eos": True,  # the end-of-sequence tokens are among the stop tokens
        "logprobs": 0,  # that of the sampled token alone
        "detokenize": bool(spec.stop),  # stop texts are looked for in text; nothing else needs it
        "skip_special_tokens": True,
    }


def run_jobs(fleet: Fleet, jobs: Sequence[list[Request]], timeout: float) -> list[list[Completion]]:
    """Run jobs on the engines, each on the one with the fewest requests when its turn comes.

    Args:
        fleet: The engines.
        jobs: Requests that stay together.
        timeout: Seconds without any job being finished.

    Returns:
        Completions of each job, in the order of the jobs.

    Raises:
        EngineError: If an engine died or nothing was finished in time. All requests are dropped then.
    """
    import ray

    results: dict[int, list[Completion]] = {}
    waiting: dict[Any, tuple[int, int]] = {}  # result -> (job, engine)
    load = [0] * len(fleet.actors)
    todo = deque(range(len(jobs)))
    progress = time.monotonic()
    try:
        while todo or waiting:
            while todo and min(load) < _REQUESTS_AHEAD:
                job, engine = todo.popleft(), load.index(min(load))
                load[engine] += len(jobs[job])
                waiting[fleet.actors[engine].generate.remote(jobs[job])] = (job, engine)
            left = timeout - (time.monotonic() - progress)
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, left))
            if not ready:
                engines = sorted({engine for _, engine in waiting.values()})
                raise EngineError(
                    f"no request was finished for {timeout:g} s; {len(waiting) + len(todo)} of {len(jobs)} are open, "
                    f"on vLLM engine(s) {engines}: stopped, overloaded, or the limit is too low "
                    f"(VLLMPool(generate_timeout=...)). {CURE}"
                )
            for ref in ready:
                job, engine = waiting.pop(ref)
                results[job] = fleet.fetch(ref, engine, "generating")
                load[engine] -= len(jobs[job])
                progress = time.monotonic()
    except BaseException:
        fleet.abort()
        raise
    return [results[job] for job in range(len(jobs))]
