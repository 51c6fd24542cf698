"""Rule-based rewards: exact answers, formats and tags, lengths, repetitions."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import AnswerReader, Needs, extracts_answer, needs
from rlhfkit.validation import check_integer, check_number

OPEN_R1_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
"""The tags of Open R1's prompts (https://github.com/huggingface/open-r1)."""


def required_answer(sample: Sample, reward: str) -> str:
    """The reference answer of a sample's prompt as text; raises ``ValueError`` for ``reward`` if it is none."""
    if sample.prompt.answer is None:
        raise ValueError(
            f"{reward} compares with the prompt's answer, but prompt {sample.prompt.index} has none: name the column "
            "that holds it, PromptDataModule(answer=...)"
        )
    if isinstance(sample.prompt.answer, Mapping | list | tuple):  # no completion would be that
        raise ValueError(
            f"{reward} compares with a text or a number, but the answer of prompt {sample.prompt.index} is "
            f"{sample.prompt.answer!r:.200}: make a column of the part that is meant"
        )
    return str(sample.prompt.answer)


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
    ) -> None:
        """Set how completion and answer are normalised; white space at both ends never counts.

        Args:
            pattern: Regular expression whose last match (the first group, if it has one) is compared; a completion
                without a match is wrong. ``None``: the whole completion.
            ignore_case: Compare case-folded.
            ignore_punctuation: Remove punctuation (Unicode categories P*).

        Raises:
            ValueError: If the pattern is not a regular expression.
        """
        self.pattern = None if pattern is None else _compiled(pattern)
        self.ignore_case = ignore_case
        self.ignore_punctuation = ignore_punctuation

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples."""
        return [float(self._matches(sample)) for sample in samples]

    def answer_reader(self) -> AnswerReader:
        """Return what finds the text that is compared, normalised."""
        return self._read

    def _matches(self, sample: Sample) -> bool:
        return self._read(sample) == self._normal(required_answer(sample, "exact_match"))

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
        return text.strip()


@needs(answer=True)
@extracts_answer(lambda sample: sample.text.strip())
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


class ReasoningFormat:
    """1 where a completion is reasoning between two tags and then an answer, else 0.

    Each tag must be there once, the first at the beginning, and the answer must not be empty. TRL's
    ``think_format_reward`` asks for no answer and allows more closing tags; with ``answer``, as DeepSeek-R1's (2025,
    arXiv:2501.12948). Texts have no special tokens: tags that are special tokens of a tokenizer are not in them.

    Example::

        ReasoningFormat(answer=("<answer>", "</answer>"))
    """

    def __init__(
        self,
        begin: str = "<think>",
        end: str = "</think>",
        *,
        answer: tuple[str, str] | None = None,
        opened: bool = False,
    ) -> None:
        """Set the tags.

        Args:
            begin: Before the reasoning.
            end: After it.
            answer: Tags around the answer, with nothing after them; ``None``: the answer is what follows ``end``.
            opened: The prompt ends with ``begin`` already (as DeepSeek-R1's template writes it), so it must not be in
                the completion.

        Raises:
            ValueError: If a tag is empty.
        """
        tags = (begin, end, *(answer or ()))
        if not all(isinstance(tag, str) and tag for tag in tags) or len(tags) not in (2, 4):
            raise ValueError(f"tags must be texts that are not empty, two of the answer, got {tags!r}")
        self.begin = begin
        self.end = end
        self.answer = None if answer is None else (answer[0], answer[1])
        self.opened = opened

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples."""
        return [float(self._fits(sample.text.strip())) for sample in samples]

    def _fits(self, text: str) -> bool:
        if text.count(self.begin) != (not self.opened) or text.count(self.end) != 1:
            return False
        if not self.opened and not text.startswith(self.begin):
            return False
        rest = text.partition(self.end)[2].strip()
        if self.answer is not None:
            first, last = self.answer
            if rest.count(first) != 1 or rest.count(last) != 1 or not rest.startswith(first) or not rest.endswith(last):
                return False
            rest = rest.removeprefix(first).removesuffix(last).strip()
        return bool(rest)


class TagCount:
    """The share of tags that a completion has exactly once: a smoother reward than the whole format.

    Open R1's ``tag_count_reward``, with its tags by default.

    Example::

        TagCount(("<think>", "</think>", "<answer>", "</answer>"))
    """

    def __init__(self, tags: Sequence[str] = OPEN_R1_TAGS) -> None:
        """Set the tags; ValueError if there is none, or one is empty."""
        if isinstance(tags, str) or not tags or not all(isinstance(tag, str) and tag for tag in tags):
            raise ValueError(f"tags must be a list of texts that are not empty, got {tags!r}")
        self.tags = tuple(tags)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples."""
        return [sum(sample.text.count(tag) == 1 for tag in self.tags) / len(self.tags) for sample in samples]


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
        return [sample.token_ids.tolist()]
    runs = groupby(zip(sample.token_ids.tolist(), sample.action_mask, strict=True), key=itemgetter(1))
    return [[token for token, _ in run] for chosen, run in runs if chosen]


def _policy_words(sample: Sample) -> list[list[str]]:
    text = sample.text
    if sample.num_action_tokens < sample.num_tokens and text != sample.info.get("last_text"):
        raise ValueError(
            f"RepetitionPenalty(words=True) would count what the environment wrote into the text of prompt "
            f"{sample.prompt.index}: count tokens (words=False), of which it takes the policy's only, or use "
            "LastTurnReward(RepetitionPenalty(words=True))"
        )
    return [text.lower().split()]
