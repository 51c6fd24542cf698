"""Rewards for how long and how repetitive a completion is: a cosine of the length, distinct n-grams."""

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import (
    TIMEOUT,
    AnswerReader,
    Reward,
    answer_reader,
    evaluate,
    reward_metrics,
    reward_name,
    tell_progress,
)
from rlhfkit.validation import check_integer, check_number


class CosineLength:
    """A reward by correctness and length: short right answers and long wrong ones are better (Yeo et al., 2025).

    arXiv:2502.03373, section 4: with ``n`` the tokens of the completion, ``L`` the limit, and ``(a, b)`` the two values
    of right or of wrong answers::

        b + (a - b) (1 + cos(π n / L)) / 2   n < L
        at_limit                             n >= L

    Defaults are the paper's. Open R1's and TRL's cosine reward has ``(1, 0.5)`` for right answers, ``(-1, -0.5)`` for
    wrong ones, and no value of its own at the limit.

    Example::

        CosineLength(math_match, max_length=14336)
    """

    time_bounded = True

    def __init__(
        self,
        correct: Reward,
        max_length: int,
        *,
        correct_short: float = 2.0,
        correct_long: float = 1.0,
        wrong_short: float = -10.0,
        wrong_long: float = 0.0,
        at_limit: float | None = -10.0,
        success_threshold: float = 1.0,
        timeout: float = TIMEOUT,
    ) -> None:
        """Set the values.

        Args:
            correct: The reward that tells whether a completion is right; its metrics are logged too.
            max_length: ``L`` in tokens; the sampling limit ``max_new_tokens`` or less.
            correct_short: Of a right answer of length 0.
            correct_long: Of a right answer of length ``L``.
            wrong_short: Of a wrong answer of length 0.
            wrong_long: Of a wrong answer of length ``L``.
            at_limit: Of a completion of ``L`` tokens or more; ``None``: the values at ``L``.
            success_threshold: A completion with at least this reward is right.
            timeout: Time limit of ``correct`` in seconds, if it is async.

        Raises:
            TypeError: If ``correct`` cannot be called.
            ValueError: If a number is out of range.
        """
        if not callable(correct):
            raise TypeError(f"correct must be a reward, got {correct!r}")
        check_integer("max_length", max_length, minimum=1)
        values = {"correct_short": correct_short, "correct_long": correct_long, "wrong_short": wrong_short}
        for name, value in {**values, "wrong_long": wrong_long, "success_threshold": success_threshold}.items():
            check_number(name, value)
        check_number("at_limit", at_limit, optional=True)
        check_number("timeout", timeout, above=0, why="it is in seconds")
        self.correct = correct
        self.max_length = max_length
        self.correct_values = (correct_short, correct_long)
        self.wrong_values = (wrong_short, wrong_long)
        self.at_limit = at_limit
        self.success_threshold = success_threshold
        self.timeout = timeout

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score samples; ``None`` where ``correct`` gives none."""
        name = reward_name(self.correct)
        found = evaluate({name: self.correct}, samples, timeout=self.timeout)[name]
        return [None if value is None else self._value(value, one) for value, one in zip(found, samples, strict=True)]

    def _value(self, value: float, sample: Sample) -> float:
        length = sample.num_action_tokens
        if length >= self.max_length and self.at_limit is not None:
            return self.at_limit
        short, long = self.correct_values if value >= self.success_threshold else self.wrong_values
        share = min(length / self.max_length, 1.0)
        return long + (short - long) * (1 + math.cos(math.pi * share)) / 2

    def inner_rewards(self) -> list[Reward]:
        """Return ``correct``."""
        return [self.correct]

    def metrics(self) -> dict[str, float]:
        """Metrics of ``correct``."""
        return reward_metrics(self.correct)

    def set_progress(self, *, step: int, epoch: int) -> None:
        """Tell ``correct``, if it wants to know."""
        tell_progress(self.correct, step=step, epoch=epoch)

    def answer_reader(self) -> AnswerReader | None:
        """Return that of ``correct``."""
        return answer_reader(self.correct)


class RepetitionPenalty:
    """0 for a completion without repetitions, down to ``-penalty`` for one that says the same again and again.

    ``-penalty (1 - distinct n-grams / n-grams)``, as in TRL, which counts token ids too, and in Open R1, which counts
    words (``words=True``). In episodes only what the policy wrote counts, turn by turn. Yeo et al. (2025,
    arXiv:2502.03373) penalise repeated n-grams of 40 tokens, token by token.

    Example::

        RepetitionPenalty(ngram=3, penalty=1.0)
    """

    def __init__(self, *, ngram: int = 3, penalty: float = 1.0, words: bool = False) -> None:
        """Set what is counted.

        Args:
            ngram: Tokens (or words) of an n-gram (3: Open R1's and TRL's).
            penalty: The largest penalty.
            words: Count words of the text, split at white space in lower case.

        Raises:
            ValueError: If a number is out of range.
        """
        check_integer("ngram", ngram, minimum=1)
        check_number("penalty", penalty, minimum=0)
        self.ngram = ngram
        self.penalty = penalty
        self.words = words

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples; one shorter than an n-gram gets 0.

        Raises:
            ValueError: If words are to be counted in a text of which the environment wrote a part.
        """
        return [self._score(_policy_words(sample) if self.words else _policy_tokens(sample)) for sample in samples]

    def _score(self, turns: Sequence[Sequence[Any]]) -> float:
        ngrams = [
            tuple(turn[start : start + self.ngram]) for turn in turns for start in range(len(turn) - self.ngram + 1)
        ]
        return -self.penalty * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0


def _policy_tokens(sample: Sample) -> list[list[int]]:
    """The tokens that the policy chose, turn by turn: no n-gram lies across what an environment wrote."""
    if sample.action_mask is None:
        return [sample.token_ids]
    runs = groupby(zip(sample.token_ids, sample.action_mask, strict=True), key=itemgetter(1))
    return [[token for token, _ in run] for chosen, run in runs if chosen]


def _policy_words(sample: Sample) -> list[list[str]]:
    text = sample.text
    if sample.num_action_tokens < sample.num_tokens and text != sample.info.get("last_text"):
        raise ValueError(
            f"RepetitionPenalty(words=True) would count what the environment wrote into the text of prompt "
            f"{sample.prompt.index}: count tokens (words=False), of which it takes the policy's only, or use "
            "OnLastTurn(RepetitionPenalty(words=True))"
        )
    return [text.lower().split()]
