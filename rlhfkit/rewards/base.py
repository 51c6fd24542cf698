"""What a reward is, and how samples are scored with one.

A reward is a callable, plain or async, that takes samples and returns a number for each, in order, or ``None`` for
those that it cannot score, which are not trained on. Async rewards have a time limit. A synchronous one runs in the
caller's thread and cannot be stopped; a warning names one that runs long, and :class:`~rlhfkit.rewards.SandboxedReward`
runs it in a process that can be killed.
"""

import asyncio
import functools
import importlib.util
import inspect
import itertools
import logging
import math
import re
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

import torch

from rlhfkit.data.types import Sample
from rlhfkit.rank_store import call_in_thread
from rlhfkit.validation import check_number

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

TIMEOUT = 600.0
"""Default time limit of an async reward for one batch of samples, in seconds."""

WARN_AFTER = 120.0
"""Default number of seconds that a synchronous reward may run before a warning names it."""

OnFailure = Literal["mask", "stop"] | float
"""What happens to a sample whose scoring failed: ``"mask"``: it is not trained on; ``"stop"``: an error ends the run; a
number: its reward."""

_LARGEST = torch.finfo(torch.float32).max

_CANCEL_SECONDS = 5.0  # for a cancelled async reward to return


class Reward(Protocol):
    """A callable that scores samples.

    A class, or a function by its attributes, may say more about itself with any of:

    - ``name``: its name in logs, see :func:`reward_name`;
    - ``metrics()``: numbers by name since the last call, which are logged each iteration;
    - ``set_progress(*, step, epoch)``: called in the trainer's process before samples are scored, with the optimizer
      steps (``trainer.global_step``) and iterations (``trainer.current_epoch``) so far, for example for a weight that
      grows;
    - ``answer_reader()``: a function from a sample to the answer that the reward reads in it, see
      :data:`AnswerReader`, for majority votes (``val/maj@k``); :func:`extracts_answer` marks a function;
    - ``needs``: :class:`Needs`, checked before any model is loaded; :func:`needs` marks a function;
    - ``inner_rewards()``: the rewards that it calls, whose needs are checked too, see :class:`RewardWrapper`;
    - ``part_names()``: see :class:`CompositeReward`;
    - ``has_timeout = True``: its calls always return in time, so that no warning is given for one that runs long.

    Example::

        def shorter_is_better(samples):
            return [-sample.num_tokens / 100 for sample in samples]


        class FirstWord:
            needs = Needs(answer=True)

            def __call__(self, samples):
                return [float(self.read(sample) == sample.prompt.answer) for sample in samples]

            def read(self, sample):
                return next(iter(sample.text.split()), None)

            def answer_reader(self):
                return self.read
    """

    def __call__(self, samples: Sequence[Sample], /) -> Any:
        """One finite number or ``None`` for each sample, in order; or an awaitable of these."""
        ...


@runtime_checkable
class CompositeReward(Protocol):
    """A reward made of others: it calls them with :func:`evaluate` and sets ``reward_parts`` of the samples itself."""

    def part_names(self) -> Sequence[str] | None:
        """Names of the parts; ``None`` if they are not known before the first call."""
        ...


AnswerReader = Callable[[Sample], str | None]
"""From a sample to its answer in the form in which answers are counted; ``None``: it has none."""


@dataclass(frozen=True)
class Needs:
    """What a reward needs, which ``RolloutCallback.setup`` checks before any model is loaded."""

    packages: Mapping[str, str] = field(default_factory=dict)
    """Modules that it imports, each with what ``pip install`` is given for it: ``{"math_verify": "rlhfkit[math]"}``."""
    answer: bool = False
    """Whether it reads ``sample.prompt.answer``, so that ``PromptDataModule(answer=...)`` must name a column."""
    columns: tuple[str, ...] = ()
    """Columns of the data that it reads in ``sample.prompt.metadata``."""


class RewardError(RuntimeError):
    """A reward failed in a way that must stop the run."""


def check_on_failure(on_failure: OnFailure) -> OnFailure:
    """Return ``on_failure``, a number as float; raises ``ValueError`` for other words and non-finite numbers."""
    if isinstance(on_failure, int | float) and not isinstance(on_failure, bool) and math.isfinite(on_failure):
        return float(on_failure)
    if on_failure in ("mask", "stop"):
        return on_failure
    raise ValueError(
        "on_failure must be 'mask' (the sample is not trained on), 'stop' (an error ends the run) or a finite number "
        f"(the reward of such samples), got {on_failure!r}"
    )


def reward_after_failure(on_failure: OnFailure, message: str) -> float | None:
    """Return the reward after a failure, ``None`` for ``"mask"``; raises :class:`RewardError` for ``"stop"``."""
    if on_failure == "stop":
        raise RewardError(message)
    return None if on_failure == "mask" else float(on_failure)


def check_is_reward(what: str, reward: Any) -> None:
    """Raise TypeError unless this can be called with samples; ``what`` names it in the message."""
    if not callable(reward):
        several = ": WeightedSum(right=..., style=...) adds several" if isinstance(reward, list | tuple | dict) else ""
        raise TypeError(f"{what} must be callable on a list of samples, got {type(reward).__name__}{several}")
    try:
        signature = inspect.signature(reward)
    except ValueError:  # of a function written in C
        return
    try:
        signature.bind([])
    except TypeError:
        raise TypeError(
            f"{what} is called with one argument, a list of samples with sample.prompt.text, sample.text, "
            f"sample.prompt.answer and sample.prompt.metadata (other columns); {reward_name(reward)}{signature} takes "
            "others: docs/coming_from.md has the wrapper"
        ) from None


def reward_name(reward: Any) -> str:
    """Return a reward's name in logs: its attribute ``name``, its function's name, or its class's in snake case."""
    if isinstance(reward, functools.partial) and not isinstance(getattr(reward, "name", None), str):
        return reward_name(reward.func)
    names = (getattr(reward, attribute, None) for attribute in ("name", "__name__"))
    own = next((name for name in names if isinstance(name, str)), None)
    return own or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(reward).__name__).lower()


def part_names(reward: Any) -> list[str] | None:
    """Return a reward's keys in ``reward_parts``: none for ``None``; ``None`` if only a call can tell."""
    if reward is None:
        return []
    if not isinstance(reward, CompositeReward):
        return [reward_name(reward)]
    names = reward.part_names()
    return None if names is None else list(names)


def reward_metrics(reward: Any) -> dict[str, float]:
    """Return a reward's metrics since the last call; empty if it has no method ``metrics()``."""
    metrics = getattr(reward, "metrics", None)
    return dict(metrics()) if callable(metrics) else {}


def tell_progress(reward: Any, *, step: int, epoch: int) -> None:
    """Tell a reward how far training is, if it has a method ``set_progress()``."""
    if hasattr(reward, "set_progress"):
        reward.set_progress(step=step, epoch=epoch)


def answer_reader(reward: Any) -> AnswerReader | None:
    """Return the function that reads the answer of a sample as a reward does; ``None``: the reward has none."""
    if isinstance(reward, functools.partial):
        return answer_reader(reward.func)
    reader: AnswerReader | None = reward.answer_reader() if hasattr(reward, "answer_reader") else None
    return reader


def extracts_answer(read: AnswerReader) -> Callable[[F], F]:
    """Give a function an ``answer_reader()``: ``@extracts_answer(lambda sample: sample.text.strip())``."""

    def mark(function: F) -> F:
        function.answer_reader = lambda: read  # type: ignore[attr-defined]  # functions take attributes
        return function

    return mark


def needs(
    *, packages: Mapping[str, str] | None = None, answer: bool = False, columns: Sequence[str] = ()
) -> Callable[[F], F]:
    """Mark a reward function with its :class:`Needs`: ``@needs(packages={"sympy": "sympy"}, columns=["unit"])``."""
    stated = Needs(dict(packages or {}), answer, tuple(columns))

    def mark(function: F) -> F:
        function.needs = stated  # type: ignore[attr-defined]  # functions take attributes
        return function

    return mark


def reward_needs(reward: Any) -> list[tuple[str, Needs]]:
    """Return the needs of a reward and of those that it calls, each with the name of its reward."""
    if isinstance(reward, functools.partial):
        return reward_needs(reward.func)
    stated = getattr(reward, "needs", None)
    own = [(reward_name(reward), stated)] if isinstance(stated, Needs) else []
    inner = reward.inner_rewards() if hasattr(reward, "inner_rewards") else ()
    return own + [need for one in inner for need in reward_needs(one)]


def check_packages(reward: Any) -> None:
    """Raise ImportError, with the command to install them, if packages that a reward needs are missing."""
    missing = [
        (name, module, install)
        for name, stated in reward_needs(reward)
        for module, install in stated.packages.items()
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        what = " and ".join(f"{name} needs {module}" for name, module, _ in missing)
        command = " ".join(f"'{install}'" for install in dict.fromkeys(install for *_, install in missing))
        raise ImportError(f"{what}, not installed here: pip install {command}")


class RewardWrapper:
    """A reward that calls others with :func:`evaluate`, and has their metrics, their progress and their answers."""

    has_timeout: ClassVar[bool] = True
    """No warning for this class: :func:`evaluate` warns about the inner rewards by their names."""

    def inner_rewards(self) -> Sequence[Any]:
        """Return the rewards that it calls; abstract."""
        raise NotImplementedError(f"{type(self).__name__} must define inner_rewards()")

    def metrics(self) -> dict[str, float]:
        """Metrics of the inner rewards, see :func:`reward_metrics`."""
        return {name: value for reward in self.inner_rewards() for name, value in reward_metrics(reward).items()}

    def set_progress(self, *, step: int, epoch: int) -> None:
        """Tell the inner rewards that want to know."""
        for reward in self.inner_rewards():
            tell_progress(reward, step=step, epoch=epoch)

    def answer_reader(self) -> AnswerReader | None:
        """Return that of the first inner reward that has one."""
        readers = map(answer_reader, self.inner_rewards())
        return next((reader for reader in readers if reader is not None), None)


def mean_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over the ranks that have it; a rank that scored nothing has none."""
    names = sorted({name for part in parts for name in part})
    return {name: fmean(part[name] for part in parts if name in part) for name in names}


def score_samples(
    reward: Reward, samples: Sequence[Sample], *, timeout: float = TIMEOUT, warn_after: float = WARN_AFTER
) -> None:
    """Score samples in place: set ``reward`` and ``reward_parts`` of each.

    A reward that is not composite is its own only part. A part that could not be scored is NaN, so that all samples
    have the same parts.

    Args:
        reward: What to score with.
        samples: What to score; may be empty.
        timeout: Time limit of an async reward in seconds.
        warn_after: Seconds after which a warning names a synchronous reward that is still running.

    Raises:
        ValueError: If the reward does not return one finite number or ``None`` per sample.
        TimeoutError: If an async reward takes longer than ``timeout``.
        RewardError: If the reward raises ``SystemExit`` or ``KeyError``.
    """
    if not samples:
        return
    for sample in samples:
        sample.reward, sample.reward_parts = None, {}
    values = evaluate({reward_name(reward): reward}, samples, timeout=timeout, warn_after=warn_after)
    for name, column in values.items():
        for sample, value in zip(samples, column, strict=True):
            sample.reward = value
            if not isinstance(reward, CompositeReward):
                sample.reward_parts[name] = math.nan if value is None else value


def evaluate(
    rewards: Mapping[str, Reward],
    samples: Sequence[Sample],
    *,
    timeout: float = TIMEOUT,
    warn_after: float = WARN_AFTER,
) -> dict[str, list[float | None]]:
    """Call several rewards on the same samples, the async ones concurrently, and return the checked values by name.

    Arguments and errors are those of :func:`score_samples`; ``timeout`` applies to each async reward.
    """
    before = [_token_ids(sample) for sample in samples]
    results = {name: _call(name, reward, samples, warn_after) for name, reward in rewards.items()}
    waiting = {name: result for name, result in results.items() if inspect.isawaitable(result)}
    if waiting:
        results |= _wait(waiting, timeout, len(samples))
    for place, (sample, had) in enumerate(zip(samples, before, strict=True)):
        if any(one is not other for one, other in zip(_token_ids(sample), had, strict=True)):
            raise ValueError(
                f"reward {' or '.join(map(repr, rewards))} has changed the token ids of sample {place} (prompt "
                f"{sample.prompt.index}), which would be trained on: work on a copy of the sample (dataclasses.replace)"
            )
    return {name: _checked(name, result, samples) for name, result in results.items()}


def _token_ids(sample: Sample) -> tuple[Any, Any]:
    """The arrays of prompt and completion, which are read-only, to notice a reward that sets others."""
    return sample.prompt.token_ids, sample.token_ids


def _call(name: str, reward: Reward, samples: Sequence[Sample], warn_after: float) -> Any:
    """Call a reward; warn if it runs long, unless it bounds its own time."""
    given = list(samples)  # a copy: the reward may sort it or remove from it
    if getattr(reward, "has_timeout", False) or isinstance(reward, CompositeReward):
        return _call_with_context(name, reward, given)
    prompts = sorted({sample.prompt.index for sample in samples})
    shown = ", ".join(map(str, prompts[:8])) + (" ..." if len(prompts) > 8 else "")
    what = f"reward {name!r}, called with {len(samples)} samples of prompts {shown},"
    advice = "It runs in the trainer's own process and cannot be stopped there; SandboxedReward runs it in another one."
    with warn_if_slow(what, advice, after=warn_after):
        return _call_with_context(name, reward, given)


def _call_with_context(name: str, reward: Reward, samples: list[Sample]) -> Any:
    """Call a reward; add its name to errors, and replace ``SystemExit`` and ``KeyError`` by :class:`RewardError`."""
    try:
        return _materialize(reward(samples), len(samples))
    except SystemExit as error:
        raise RewardError(
            f"reward {name!r} has called sys.exit({error.code!r}), which would end the run: let it return None for "
            "samples that it cannot score, or raise an error"
        ) from error
    except KeyError as error:
        columns = ", ".join(sorted({column for sample in samples for column in sample.prompt.metadata}))
        raise RewardError(
            f"reward {name!r} failed with KeyError: {error}. The prompts' metadata has {columns or 'nothing'}; the "
            "column given as PromptDataModule(answer=...) is sample.prompt.answer"
        ) from error
    except Exception as error:
        error.add_note(f"raised by reward {name!r}, scoring {len(samples)} samples")
        if isinstance(error, TypeError | AttributeError) and all(one.prompt.answer is None for one in samples):
            error.add_note("no prompt has an answer: PromptDataModule(answer=...) names the column that holds it")
        raise


def _materialize(values: Any, count: int) -> Any:
    """Turn a generator into a list of at most ``count + 1`` values, since it may be endless; its code runs here."""
    if inspect.isawaitable(values) or isinstance(values, Sized) or not isinstance(values, Iterable):
        return values
    return list(itertools.islice(values, count + 1))


def _wait(waiting: Mapping[str, Awaitable[Any]], timeout: float, count: int) -> dict[str, Any]:
    """Await results in an event loop in a new thread: the caller's loop (a notebook's) is already running."""

    async def one(name: str, awaitable: Awaitable[Any]) -> Any:
        try:
            return _materialize(await asyncio.wait_for(awaitable, timeout), count)
        except TimeoutError:
            raise TimeoutError(f"reward {name!r} did not answer within {timeout:g} s") from None

    async def every() -> list[Any]:
        return await asyncio.gather(*(one(name, awaitable) for name, awaitable in waiting.items()))

    called = call_in_thread(lambda: asyncio.run(every()), "rlhfkit-reward")
    if not wait([called], timeout + _CANCEL_SECONDS).done:
        raise TimeoutError(
            f"async reward {' or '.join(map(repr, waiting))} did not answer within {timeout:g} s and could not be "
            "cancelled: it blocks its event loop (await asyncio.to_thread(...) what takes time), or a thread that it "
            "waits for hangs"
        )
    return dict(zip(waiting, called.result(), strict=True))


def _checked(name: str, values: Any, samples: Sequence[Sample]) -> list[float | None]:
    """Return the values as floats and ``None``; errors name the wrong value."""
    rule = "a reward returns one finite number or None for each sample, in order"
    try:
        ordered = isinstance(values, Sized) and not isinstance(values, str | bytes | Mapping | Set)
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


@contextmanager
def warn_if_slow(what: str, advice: str, *, after: float = WARN_AFTER) -> Iterator[None]:
    """While the block runs, warn from another thread after ``after`` seconds, and each time that has doubled.

    ``what`` names the call and ``advice`` a remedy, for the message, which also shows the line that is running. Raises
    ``ValueError`` if ``after`` is not positive.
    """
    check_number("after", after, above=0, why="it is in seconds")
    caller = threading.get_ident()
    finished = threading.Event()
    started = time.monotonic()

    def watch() -> None:
        interval = after
        while not finished.wait(interval):
            interval = time.monotonic() - started  # warn again after the same time
            frame = sys._current_frames().get(caller)
            lines = "".join(traceback.format_stack(frame)[-2:]) if frame is not None else ""
            log.warning("%s has been running for %.3g s. %s\nIt is at:\n%s", what, interval, advice, lines)

    thread = threading.Thread(target=watch, name="rlhfkit-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
