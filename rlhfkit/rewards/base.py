"""What a reward is, how samples are scored with one, and the weighted sum of several.

A reward is any callable that takes samples and returns one number for each, in order, or ``None`` where it cannot tell
(such a sample is not trained on). It may be a plain function, a class with ``__call__``, or ``async``.

An async reward is bounded by a time limit here; a synchronous one runs in the caller's thread and must bound itself.
"""

import asyncio
import functools
import inspect
import math
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

from rlhfkit.data.experience import Sample

TIMEOUT = 600.0
"""Seconds that an async reward may take for one batch of samples, unless told otherwise."""


class Reward(Protocol):
    """Anything that scores samples.

    Example::

        def shorter_is_better(samples):
            return [-len(sample.token_ids) / 100 for sample in samples]
    """

    def __call__(self, samples: Sequence[Sample], /) -> Any:
        """One finite number or ``None`` for each sample, in order; or an awaitable of these."""
        ...


def reward_name(reward: Any) -> str:
    """How a reward is called in logs: its attribute ``name``, or the name of its function or class in snake case."""
    if isinstance(getattr(reward, "name", None), str):
        return reward.name
    if isinstance(reward, functools.partial):
        return reward_name(reward.func)
    name = getattr(reward, "__name__", None)
    return name if isinstance(name, str) else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(reward).__name__).lower()


def score_samples(reward: Reward, samples: Sequence[Sample], *, timeout: float = TIMEOUT) -> None:
    """Score samples in place: sets ``reward`` and ``reward_parts`` of each.

    A reward that is not made of parts is its own only part. A part that could not be scored is NaN in
    ``reward_parts``, so that all samples have parts of the same names.

    Args:
        reward: What to score with.
        samples: What to score; may be empty.
        timeout: Seconds an async reward may take.

    Raises:
        ValueError: If the reward returns another count than there are samples, or not finite numbers and ``None``.
        TimeoutError: If an async reward takes longer than ``timeout``.
    """
    if not samples:
        return
    for sample in samples:
        sample.reward, sample.reward_parts = None, {}
    values = evaluate({reward_name(reward): reward}, samples, timeout=timeout)
    for name, column in values.items():
        for sample, value in zip(samples, column, strict=True):
            sample.reward = value
            if not isinstance(reward, WeightedSum):
                sample.reward_parts[name] = math.nan if value is None else value


def evaluate(
    rewards: Mapping[str, Reward], samples: Sequence[Sample], *, timeout: float = TIMEOUT
) -> dict[str, list[float | None]]:
    """Call several rewards on the same samples, the async ones at the same time, and check what they return.

    Args:
        rewards: By name.
        samples: What to score.
        timeout: Seconds that each async reward may take.

    Returns:
        Checked values by name.

    Raises:
        ValueError: See :func:`score_samples`.
        TimeoutError: See :func:`score_samples`.
    """
    results = {name: reward(samples) for name, reward in rewards.items()}
    waiting = {name: result for name, result in results.items() if inspect.isawaitable(result)}
    if waiting:
        results |= _wait(waiting, timeout)
    return {name: _checked(name, result, samples) for name, result in results.items()}


def _wait(waiting: Mapping[str, Awaitable[Any]], timeout: float) -> dict[str, Any]:
    """Results of awaitables, from an event loop in a thread of its own: a notebook's loop is running already."""

    async def one(name: str, awaitable: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(awaitable, timeout)
        except TimeoutError:
            raise TimeoutError(f"reward {name!r} did not answer within {timeout:g} s") from None

    async def every() -> list[Any]:
        return await asyncio.gather(*(one(name, awaitable) for name, awaitable in waiting.items()))

    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(every()))
        except BaseException as error:  # carried over to the calling thread
            outcome.append(error)

    thread = threading.Thread(target=run, name="rlhfkit-reward", daemon=True)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return dict(zip(waiting, outcome[0], strict=True))


def _checked(name: str, values: Any, samples: Sequence[Sample]) -> list[float | None]:
    """The values as floats and ``None``, or an error that says which one is wrong."""
    rule = "a reward returns one finite number or None for each sample, in order"
    try:
        listed = None if isinstance(values, str | Mapping) else list(values)
    except TypeError:
        listed = None
    if listed is None:
        raise ValueError(f"reward {name!r} returned {type(values).__name__} for {len(samples)} samples; {rule}")
    if len(listed) != len(samples):
        raise ValueError(f"reward {name!r} returned {len(listed)} values for {len(samples)} samples; {rule}")
    checked: list[float | None] = []
    for position, (value, sample) in enumerate(zip(listed, samples, strict=True)):
        if value is None:
            checked.append(None)
            continue
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"reward {name!r} returned {value!r} for sample {position} (prompt {sample.prompt.index}: "
                f"{sample.prompt.text[-80:]!r}, completion: {sample.text[:80]!r}); {rule}"
            )
        checked.append(number)
    return checked


class WeightedSum:
    """The weighted sum of named rewards; each part is logged by its name, before weighting.

    Example::

        WeightedSum({"correct": (exact_match, 1.0), "format": (FormatReward(r"<answer>.*</answer>"), 0.2)})
        WeightedSum(correct=exact_match, format=(FormatReward(r"<answer>.*</answer>"), 0.2))  # weight 1 when left out
    """

    def __init__(
        self,
        parts: Mapping[str, Reward | tuple[Reward, float]] | None = None,
        *,
        missing: Literal["none", "skip"] = "none",
        timeout: float = TIMEOUT,
        **more: Any,
    ) -> None:
        """Name the parts.

        Args:
            parts: Name to ``(reward, weight)``, or to a reward, whose weight is then 1.
            missing: What a ``None`` in a part does: ``"none"`` makes the sample's total ``None`` too, ``"skip"`` leaves
                the part out of the sum (a sample without any part is ``None`` either way).
            timeout: Seconds that each async part may take.
            **more: Further parts.

        Raises:
            ValueError: If there is no part, or a weight is not finite.
            TypeError: If a part cannot be called.
        """
        self.rewards: dict[str, Reward] = {}
        self.weights: dict[str, float] = {}
        for name, part in {**(parts or {}), **more}.items():
            reward, weight = part if isinstance(part, tuple | list) else (part, 1.0)
            if not callable(reward):
                raise TypeError(f"part {name!r} must be a callable or (callable, weight), got {part!r}")
            if not math.isfinite(weight):
                raise ValueError(f"the weight of part {name!r} must be finite, got {weight}")
            self.rewards[name], self.weights[name] = cast(Reward, reward), float(weight)
        if not self.rewards:
            raise ValueError("WeightedSum needs at least one part")
        if missing not in ("none", "skip"):
            raise ValueError(f"missing must be 'none' or 'skip', got {missing!r}")
        self.missing = missing
        self.timeout = timeout

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """The totals; the parts are left in each sample's ``reward_parts``."""
        values = evaluate(self.rewards, samples, timeout=self.timeout)
        for name, column in values.items():
            for sample, value in zip(samples, column, strict=True):
                sample.reward_parts[name] = math.nan if value is None else value
        return [self._total([values[name][row] for name in values]) for row in range(len(samples))]

    def _total(self, parts: Sequence[float | None]) -> float | None:
        terms = [weight * part for weight, part in zip(self.weights.values(), parts, strict=True) if part is not None]
        if not terms or (len(terms) < len(parts) and self.missing == "none"):
            return None
        return math.fsum(terms)


RewardFunction = Callable[[Sequence[Sample]], Any]
"""The same as :class:`Reward`, as a plain type."""
