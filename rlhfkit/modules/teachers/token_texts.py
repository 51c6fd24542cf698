"""``TokenTexts``: what the tokens of a tokenizer write, and ``aligned_spans``: where two divisions of a text agree."""

from collections.abc import Sequence
from typing import Any, NamedTuple

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers write for bytes that are no whole character."""
_CONTEXT = 6
"""Tokens before a piece that is decoded again with them; spaces at the start of a text are dropped by some decoders."""


class Span(NamedTuple):
    """A piece of text in the tokens of both."""

    first: range
    second: range


def aligned_spans(first: Sequence[str], second: Sequence[str]) -> list[Span]:
    """Divide a text at all places where both divisions of it have an end.

    Args:
        first: The text, token by token; a token may write nothing.
        second: The same text in other tokens.

    Returns:
        The spans, in order. Tokens at the end that write nothing are in none, and none follows a place from which on
        the texts differ.
    """
    spans: list[Span] = []
    ends, starts, texts = [0, 0], (0, 0), ["", ""]
    sides = (first, second)
    while True:
        behind = 0 if len(texts[0]) <= len(texts[1]) else 1
        if ends[behind] == len(sides[behind]):
            return spans
        texts[behind] += sides[behind][ends[behind]]
        ends[behind] += 1
        if texts[0] == texts[1] and texts[0]:
            spans.append(Span(range(starts[0], ends[0]), range(starts[1], ends[1])))
            starts, texts = (ends[0], ends[1]), ["", ""]
        elif not (texts[0].startswith(texts[1]) or texts[1].startswith(texts[0])):
            return spans


class TokenTexts:
    """What each token of a tokenizer writes.

    Args:
        tokenizer: A tokenizer of Transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        self.controls = {*tokenizer.all_special_ids, *(token for token, content in added if content.special)}
        """Ids of tokens that write nothing; a family's end of a turn need not be among its named ones."""
        self._anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._written = self.text(self._anchor)
        self._known: dict[int, str] = {}

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a sequence; control tokens write nothing."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def continuation(self, token_ids: Sequence[int]) -> str:
        """The text of a sequence that follows another: some decoders leave out a space at the start of a text."""
        return self.text([*self._anchor, *token_ids])[len(self._written) :]

    def pieces(self, token_ids: Sequence[int]) -> tuple[list[int], list[str]]:
        """Divide a sequence that follows another into the shortest pieces that write whole characters.

        Returns:
            The number of tokens of each piece, one unless a character is written by several, and its text.
        """
        whole = self.continuation(token_ids)
        alone = [self.text_of(token) for token in token_ids]
        sizes, texts, start = list[int](), list[str](), 0
        while start < len(alone):
            end = start + 1
            if UNFINISHED in alone[start]:
                end = next((place for place in range(end, len(alone)) if UNFINISHED not in alone[place]), len(alone))
                parts = self._divided(token_ids, start, end)
            else:
                parts = [1], [alone[start]]
            sizes += parts[0]
            texts += parts[1]
            start = end
        if "".join(texts) == whole:
            return sizes, texts
        return self._divided(token_ids, 0, len(token_ids))  # of a decoder that looks at neighbours

    def _divided(self, token_ids: Sequence[int], start: int, stop: int) -> tuple[list[int], list[str]]:
        """:meth:`pieces` of the tokens from ``start`` to ``stop``, token by token with those before it."""
        sizes, texts = list[int](), list[str]()
        for end in range(start + 1, stop + 1):
            context = [*self._anchor, *token_ids[max(start - _CONTEXT, 0) : start]]
            before, after = self.text(context), self.text([*context, *token_ids[start:end]])
            finished = after.startswith(before) and not after.endswith(UNFINISHED)
            if finished or end == stop:
                sizes.append(end - start)
                texts.append(after[len(before) :])
                start = end
        return sizes, texts

    def text_of(self, token: int) -> str:
        """What a token writes that follows others."""
        if token not in self._known:
            self._known[token] = self.continuation([token])
        return self._known[token]
