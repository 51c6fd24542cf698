"""What a reward is, and how samples are scored with one.

A reward is any callable that takes samples and returns one number for each, in order, or ``None`` where it cannot tell
(such a sample is not trained on). It may be a plain function, a class with ``__call__``, or ``async``.

An async reward is bounded by a time limit here. A synchronous one runs in the caller's thread, where nothing can stop
it: a warning names it when it takes long, and :class:`~rlhfkit.rewards.SandboxedReward` runs it where it can
be killed.
"""

import asyncio
import functools
import inspect
import itertools
import math
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from statistics import fmean
from typing import Any, Protocol

import torch

from rlhfkit.data.types import Sample
from rlhfkit.rewards.failures import RewardFailure
from rlhfkit.rewards.slow_calls import WARN_AFTER, warn_if_slow

TIMEOUT = 600.0
"""Seconds that an async reward may take for one batch of samples, unless told otherwise."""

_LARGEST = torch.finfo(torch.float32).max

_GRACE = 5.0  # seconds that a cancelled async reward has to end


class Reward(Protocol):
    """Anything that scores samples.

    A class may say more: ``name``; ``metrics()``, numbers by name that a run logs (see :func:`reward_metrics`);
    ``composed = True`` if it sets ``reward_parts`` of the samples itself; ``bounded = True`` if it bounds its own time.

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


def part_names(reward: Any) -> list[str] | None:
    """Names of the parts that a reward will leave in ``reward_parts``; ``None`` where only its calls can tell.

    Args:
        reward: What scores; ``None``: nothing does.
    """
    if reward is None:
        return []
    if not getattr(reward, "composed", False):
        return [reward_name(reward)]
    parts = getattr(reward, "rewards", None)  # of a WeightedSum
    return list(parts) if isinstance(parts, Mapping) else None


def reward_metrics(reward: Reward) -> dict[str, float]:
    """What a reward tells about itself, such as the fraction of calls that failed, since it was last asked.

    Args:
        reward: With an optional method ``metrics()`` that returns numbers by name; most have none.
    """
    metrics = getattr(reward, "metrics", None)
    return dict(metrics()) if callable(metrics) else {}


def mean_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several ranks as one: the mean over those that have it.

    Args:
        parts: Metrics by name, each rank's. A rank that scored nothing has none.
    """
    names = sorted({name for part in parts for name in part})
    return {name: fmean(part[name] for part in parts if name in part) for name in names}


def score_samples(
    reward: Reward, samples: Sequence[Sample], *, timeout: float = TIMEOUT, warn_after: float = WARN_AFTER
) -> None:
    """Score samples in place: sets ``reward`` and ``reward_parts`` of each.

    A reward that is not made of parts is its own only part. A part that could not be scored is NaN in
    ``reward_parts``, so that all samples have parts of the same names.

    Args:
        reward: What to score with.
        samples: What to score; may be empty.
        timeout: Seconds an async reward may take.
        warn_after: Seconds after which a warning names a synchronous reward that is still running.

    Raises:
        ValueError: If the reward returns another count than there are samples, or not finite numbers and ``None``.
        TimeoutError: If an async reward takes longer than ``timeout``.
    """
    if not samples:
        return
    for sample in samples:
        sample.reward, sample.reward_parts = None, {}
    values = evaluate({reward_name(reward): reward}, samples, timeout=timeout, warn_after=warn_after)
    for name, column in values.items():
        for sample, value in zip(samples, column, strict=True):
            sample.reward = value
            if not getattr(reward, "composed", False):
                sample.reward_parts[name] = math.nan if value is None else value


def evaluate(
    rewards: Mapping[str, Reward],
    samples: Sequence[Sample],
    *,
    timeout: float = TIMEOUT,
    warn_after: float = WARN_AFTER,
) -> dict[str, list[float | None]]:
    """Call several rewards on the same samples, the async ones at the same time, and check what they return.

    Args:
        rewards: By name.
        samples: What to score.
        timeout: Seconds that each async reward may take.
        warn_after: Seconds after which a warning names a synchronous reward that is still running.

    Returns:
        Checked values by name.

    Raises:
        ValueError: See :func:`score_samples`.
        TimeoutError: See :func:`score_samples`.
    """
    before = _fingerprints(samples)
    results = {name: _call(name, reward, samples, warn_after) for name, reward in rewards.items()}
    waiting = {name: result for name, result in results.items() if inspect.isawaitable(result)}
    if waiting:
        results |= _wait(waiting, timeout, len(samples))
    after = _fingerprints(samples)
    if after != before:
        changed = next(place for place, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"reward {' or '.join(map(repr, rewards))} has changed the token ids of sample {changed} (prompt "
            f"{samples[changed].prompt.index}), which would be trained on: work on a copy, list(sample.token_ids)"
        )
    return {name: _checked(name, result, samples) for name, result in results.items()}


def _fingerprints(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Of the tokens that will be trained on."""
    prompts = {id(sample.prompt): hash(tuple(sample.prompt.token_ids)) for sample in samples}
    return [(prompts[id(sample.prompt)], hash(tuple(sample.token_ids))) for sample in samples]


def _call(name: str, reward: Reward, samples: Sequence[Sample], warn_after: float) -> Any:
    """What a reward returns, watched unless it says that it needs no watching."""
    given = list(samples)  # its own, so that sorting it or taking out of it moves nobody's reward
    if getattr(reward, "bounded", False) or getattr(reward, "composed", False):
        return _passed_on(name, reward, given)
    prompts = sorted({sample.prompt.index for sample in samples})
    shown = ", ".join(map(str, prompts[:8])) + (" ..." if len(prompts) > 8 else "")
    what = f"reward {name!r}, called with {len(samples)} samples of prompts {shown},"
    advice = "It runs in the trainer's own process and cannot be stopped there; SandboxedReward runs it in another one."
    with warn_if_slow(what, advice, after=warn_after):
        return _passed_on(name, reward, given)


def _passed_on(name: str, reward: Reward, samples: list[Sample]) -> Any:
    """What a reward returns; what it raises says whose error it is.

    Raises:
        RewardFailure: In place of errors that say too little, or would end the process.
    """
    try:
        return _taken(reward(samples), len(samples))
    except SystemExit as error:
        raise RewardFailure(
            f"reward {name!r} has called sys.exit({error.code!r}), which would end the run: let it return None for "
            "samples that it cannot score, or raise an error"
        ) from error
    except KeyError as error:
        columns = ", ".join(sorted({column for sample in samples for column in sample.prompt.metadata}))
        raise RewardFailure(
            f"reward {name!r} failed with KeyError: {error}. The prompts' metadata has {columns or 'nothing'}; the "
            "column given as PromptDataModule(answer=...) is sample.prompt.answer"
        ) from error
    except Exception as error:
        error.add_note(f"raised by reward {name!r}, scoring {len(samples)} samples")
        raise


def _taken(values: Any, count: int) -> Any:
    """The values of a generator or another iterable without a length, one more than there may be at most.

    It runs the reward's code while it is iterated over, so that belongs to the call, and it may have no end.
    """
    if inspect.isawaitable(values) or hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        return values
    return list(itertools.islice(values, count + 1))


def _wait(waiting: Mapping[str, Awaitable[Any]], timeout: float, count: int) -> dict[str, Any]:
    """Results of awaitables, from an event loop in a thread of its own: a notebook's loop is running already."""

    async def one(name: str, awaitable: Awaitable[Any]) -> Any:
        try:
            return _taken(await asyncio.wait_for(awaitable, timeout), count)
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
    thread.join(timeout + _GRACE)
    if not outcome:
        raise TimeoutError(
            f"async reward {' or '.join(map(repr, waiting))} did not answer within {timeout:g} s and could not be "
            "cancelled: it blocks its event loop (await asyncio.to_thread(...) what takes time), or a thread that it "
            "waits for hangs"
        )
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return dict(zip(waiting, outcome[0], strict=True))


def _checked(name: str, values: Any, samples: Sequence[Sample]) -> list[float | None]:
    """The values as floats and ``None``, or an error that says which one is wrong."""
    rule = "a reward returns one finite number or None for each sample, in order"
    try:
        ordered = hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping | Set)
        listed = list(values) if ordered else None
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
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number) and abs(number) > _LARGEST:
            raise ValueError(
                f"reward {name!r} returned {value!r} for sample {position} (prompt {sample.prompt.index}), and rewards "
                f"are numbers of float32, {_LARGEST:.3g} at most: scale it, or clip it"
            )
        if not math.isfinite(number):
            raise ValueError(
                f"reward {name!r} returned {value!r} for sample {position} (prompt {sample.prompt.index}: "
                f"{sample.prompt.text[-80:]!r}, completion: {sample.text[:80]!r}); {rule}"
            )
        checked.append(number)
    return checked


RewardFunction = Callable[[Sequence[Sample]], Any]
"""The same as :class:`Reward`, as a plain type."""
