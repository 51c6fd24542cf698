"""Rule-based rewards: exact answers, formats, lengths."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, ClassVar

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import AnswerReader, Needs, needs, reads_answers
from rlhfkit.validation import check_integer


def required_answer(sample: Sample, reward: str) -> Any:
    """Return the reference answer of a sample's prompt; raises ``ValueError`` for ``reward`` if it has none."""
    if sample.prompt.answer is None:
        raise ValueError(
            f"{reward} compares with the prompt's answer, but prompt {sample.prompt.index} has none: name the column "
            "that holds it, PromptDataModule(answer=...)"
        )
    return sample.prompt.answer


class ExactMatch:
    r"""1 where the completion is the reference answer, else 0.

    Example::

        ExactMatch(pattern=r"The answer is (.+?)\.", ignore_case=True)
    """

    needs: ClassVar[Needs] = Needs(answer=True)

    def __init__(
        self,
        *,
        pattern: str | None = None,
        ignore_case: bool = False,
        ignore_punctuation: bool = False,
        collapse_spaces: bool = False,
    ) -> None:
        """Set how completion and answer are normalised; white space at both ends never counts.

        Args:
            pattern: Regular expression whose last match (the first group, if it has one) is compared; a completion
                without a match is wrong. ``None``: the whole completion.
            ignore_case: Compare case-folded.
            ignore_punctuation: Remove punctuation (Unicode categories P*).
            collapse_spaces: Replace each run of white space by one space.

        Raises:
            ValueError: If the pattern is not a regular expression.
        """
        self.pattern = None if pattern is None else _compiled(pattern)
        self.ignore_case = ignore_case
        self.ignore_punctuation = ignore_punctuation
        self.collapse_spaces = collapse_spaces

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples."""
        return [float(self._matches(sample)) for sample in samples]

    def answer_reader(self) -> AnswerReader:
        """Return what finds the text that is compared, normalised."""
        return self._read

    def _matches(self, sample: Sample) -> bool:
        return self._read(sample) == self._normal(str(required_answer(sample, "exact_match")))

    def _read(self, sample: Sample) -> str | None:
        text: str | None = sample.text
        if self.pattern is not None:
            found = list(self.pattern.finditer(sample.text))
            text = found[-1].group(1 if self.pattern.groups else 0) if found else None
        return None if text is None else self._normal(text)

    def _normal(self, text: str) -> str:
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(char for char in text if not unicodedata.category(char).startswith("P"))
        if self.collapse_spaces:
            text = " ".join(text.split())
        return text.strip()


@needs(answer=True)
@reads_answers(lambda sample: sample.text.strip())
def exact_match(samples: Sequence[Sample]) -> list[float]:
    """1 where the completion, without white space at its ends, is the reference answer, else 0.

    :class:`ExactMatch` takes arguments for other comparisons.

    Raises:
        ValueError: If a prompt has no answer.
    """
    return ExactMatch()(samples)


class FormatReward:
    r"""1 where the completion matches a pattern, else 0.

    Example::

        FormatReward(r"<think>.*?</think>\s*<answer>.*?</answer>")
    """

    def __init__(self, pattern: str, *, whole: bool = True, name: str = "format") -> None:
        """Set the pattern.

        Args:
            pattern: Regular expression; the dot matches newlines too.
            whole: The whole completion must match, without white space at its ends; else a match anywhere is enough.
            name: Name in logs.

        Raises:
            ValueError: If the pattern is not a regular expression.
        """
        self.pattern = _compiled(pattern)
        self.whole = whole
        self.name = name

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples."""
        match = self.pattern.fullmatch if self.whole else self.pattern.search
        return [float(match(sample.text.strip()) is not None) for sample in samples]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error


class LengthPenalty:
    """DAPO's soft overlong punishment (Yu et al., 2025, arXiv:2503.14476, equation 13).

    With ``n`` the tokens of the completion, ``L`` the limit and ``C`` the length of the soft zone before it::

        0                   n <= L - C
        ((L - C) - n) / C   L - C < n <= L
        -1                  n > L

    Example::

        LengthPenalty(max_length=20480, soft_zone=4096)  # the paper's numbers
    """

    def __init__(self, max_length: int, soft_zone: int) -> None:
        """Set the limits.

        Args:
            max_length: ``L`` in tokens; the sampling limit ``max_new_tokens`` or less.
            soft_zone: ``C`` in tokens, between 1 and ``max_length``.

        Raises:
            ValueError: If the soft zone is longer than the limit.
        """
        check_integer("max_length", max_length, minimum=1)
        check_integer("soft_zone", soft_zone, minimum=1, maximum=max_length, why="it ends at max_length")
        self.max_length = max_length
        self.soft_zone = soft_zone

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples by the number of tokens that the policy wrote."""
        start = self.max_length - self.soft_zone
        lengths = [sample.num_action_tokens for sample in samples]
        return [-min(max(length - start, 0) / self.soft_zone, 1.0) for length in lengths]
