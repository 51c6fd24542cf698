"""Rewards for the format of a completion that reasons before it answers: whole, and tag by tag."""

from collections.abc import Sequence

from rlhfkit.data.types import Sample

OPEN_R1_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
"""The tags of Open R1's prompts (https://github.com/huggingface/open-r1)."""


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
