"""The function that runs in the processes of :class:`~rlhfkit.rewards.sandbox.reward.SandboxedReward`.

Loaded by path; imports the standard library only, and then the reward.
"""

import asyncio
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any


def scorer(
    _layers: list[str], reward: str | Callable[..., Any]
) -> Callable[[list[dict[str, Any]]], list[float | None]]:
    """Return a function that scores samples with a reward, a callable or its dotted name."""
    function = pkgutil.resolve_name(reward) if isinstance(reward, str) else reward

    def score(rows: list[dict[str, Any]]) -> list[float | None]:
        samples = [SimpleNamespace(**{**row, "prompt": SimpleNamespace(**row["prompt"])}) for row in rows]
        values = function(samples)
        if inspect.isawaitable(values):
            values = asyncio.run(_await(values))
        if isinstance(values, str | Mapping):
            raise TypeError(f"returned {type(values).__name__}, not one number or None for each sample")
        return [None if value is None else float(value) for value in values]

    return score


async def _await(values: Any) -> Any:
    return await values
