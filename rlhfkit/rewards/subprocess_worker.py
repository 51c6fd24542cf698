"""The function that runs in the processes of :mod:`rlhfkit.rewards.subprocesses`.

Loaded by path; imports the standard library only, and then the reward.
"""

import asyncio
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

Progress = dict[str, int] | None
Scored = dict[str, Any]
"""``values`` of samples, their ``parts`` by name, and ``metrics``."""


def scorer(
    _layers: list[str], reward: str | Callable[..., Any], timeout: float, whole: bool
) -> Callable[[tuple[list[dict[str, Any]], Progress]], Scored]:
    """Return a function that scores samples with a reward, a callable or its dotted name.

    ``timeout`` is the limit of an async reward in seconds. Samples are those of rlhfkit if the reward imports it, or
    ``whole`` asks for them.
    """
    function = pkgutil.resolve_name(reward) if isinstance(reward, str) else reward
    if whole or "rlhfkit.data.types" in sys.modules:  # what rlhfkit's own rewards need
        return lambda job: _score_whole(function, *job, timeout)
    return lambda job: _score_plain(function, *job)


def _score_whole(function: Any, rows: list[dict[str, Any]], progress: Progress, timeout: float) -> Scored:
    from rlhfkit.data.types import Prompt, Sample
    from rlhfkit.rewards.base import evaluate, reward_metrics, reward_name, tell_progress

    samples = [Sample(**{**row, "prompt": Prompt(**row["prompt"]), "reward_parts": {}}) for row in rows]
    if progress is not None:
        tell_progress(function, **progress)
    name = reward_name(function)
    values = evaluate({name: function}, samples, timeout=timeout)[name]
    return _scored(values, samples, reward_metrics(function))


def _score_plain(function: Any, rows: list[dict[str, Any]], progress: Progress) -> Scored:
    """Score samples that are plain objects, as importing their class would import torch."""
    samples = [
        SimpleNamespace(**{**row, "prompt": SimpleNamespace(**row["prompt"]), "reward_parts": {}}) for row in rows
    ]
    if progress is not None and callable(getattr(function, "set_progress", None)):
        function.set_progress(**progress)
    values = function(samples)
    if inspect.isawaitable(values):
        values = asyncio.run(_await(values))
    if isinstance(values, str | Mapping):
        raise TypeError(f"returned {type(values).__name__}, not one number or None for each sample")
    metrics = function.metrics() if callable(getattr(function, "metrics", None)) else {}
    return _scored(values, samples, metrics)


def _scored(values: Any, samples: list[Any], metrics: Mapping[str, Any]) -> Scored:
    return {
        "values": [None if value is None else float(value) for value in values],
        "parts": [sample.reward_parts for sample in samples],
        "metrics": {name: float(value) for name, value in metrics.items()},
    }


async def _await(values: Any) -> Any:
    return await values
