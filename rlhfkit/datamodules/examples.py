"""Supervised examples: what is tokenised, which tokens are learned, and how many fit into memory.

What is learned is found by **common token prefixes**: a span that begins behind the text ``a`` and ends behind the text
``b`` covers the tokens of the whole text between the longest common prefixes with the tokens of ``a`` and of ``b``. A
token that straddles the beginning is learned. This needs nothing of the tokenizer, and no text is glued from pieces.
"""

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rlhfkit.data.collate import TokenExample
from rlhfkit.datamodules.chat import PromptFormat, is_chat

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_CHUNK = 512
"""Rows whose texts are tokenised together."""

_GENERATION = re.compile(r"\{%-?\s*generation\b")


class TokenExamples:
    """Examples in two flat tensors: 5 bytes per token, where lists of Python numbers would take 40."""

    def __init__(self, examples: Iterable[TokenExample]) -> None:
        """Pack examples, one after the other.

        Args:
            examples: Read once.
        """
        self.lengths: list[int] = []
        """Tokens of each example."""
        self.targets: list[int] = []
        """Learned tokens of each example."""
        self.rows: list[int] = []
        """Row of the data that each example was made from; some rows make none. Filled by :class:`ExampleBuilder`."""
        tokens, masks = [torch.empty(0, dtype=torch.int32)], [torch.empty(0, dtype=torch.bool)]
        for example in examples:
            self.lengths.append(len(example.input_ids))
            self.targets.append(example.targets)
            tokens.append(torch.tensor(example.input_ids, dtype=torch.int32))
            masks.append(torch.tensor(example.loss_mask, dtype=torch.bool))
        self._ends = list(itertools.accumulate(self.lengths))
        self._tokens, self._mask = torch.cat(tokens), torch.cat(masks)

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenExample:
        """One example."""
        part = slice(self._ends[index] - self.lengths[index], self._ends[index])
        return TokenExample(self._tokens[part].tolist(), self._mask[part].tolist())


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the longest common prefix of two sequences (of tokens, characters, messages)."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))


class Recipe(NamedTuple):
    """How one row becomes an example, once its texts are tokenised."""

    texts: list[str]
    """To be tokenised."""
    templated: bool
    """Whether they went through the chat template."""
    finish: Callable[[list[list[int]]], TokenExample]
    """From the token ids of each text to the example."""


class ExampleBuilder:
    """Turns rows into examples."""

    def __init__(self, style: PromptFormat, max_length: int, overlong: str, source: str) -> None:
        """Set the rules.

        Args:
            style: How prompts and chats are written.
            max_length: Tokens per example.
            overlong: ``"truncate"``, ``"drop"`` or ``"error"``.
            source: Where the rows come from, for messages.
        """
        self.style = style
        self.tokenizer = style.tokenizer
        self.max_length = max_length
        self.overlong = overlong
        self.source = source

    def build(
        self,
        rows: "Dataset",
        *,
        prompt: str | None = None,
        completion: str | None = None,
        messages: str | None = None,
        text: str | None = None,
    ) -> TokenExamples:
        """Tokenise rows; what has nothing to learn is left out, with a logged count.

        Args:
            rows: The data.
            prompt: Column of the prompts, together with ``completion``.
            completion: Column of the completions.
            messages: Column of conversations.
            text: Column of plain text.

        Returns:
            At least one example.

        Raises:
            ValueError: If a value has the wrong type, a sequence is too long under ``overlong="error"``, or no example
                is left.
        """
        self._overlong = self._empty = 0
        made_from: list[int] = []
        recipes = (
            self._recipe(row, f"{self.source}, row {index},", prompt, completion, messages, text)
            for index, row in enumerate(rows)
        )
        kept = TokenExamples(self._fitting(self._cooked(recipes), made_from))
        kept.rows = made_from
        if not len(kept):
            raise ValueError(
                f"{self.source}: none of its {len(rows)} rows has a token to learn within max_length {self.max_length} "
                f"({self._overlong} are longer): raise max_length or check the columns"
            )
        if self._overlong:
            done = "dropped" if self.overlong == "drop" else "truncated"
            limit = f"at max_length {self.max_length}"
            log.warning("%s: %d of %d rows were %s %s", self.source, self._overlong, len(rows), done, limit)
        if self._empty:
            log.warning(
                "%s: %d of %d rows have no token to learn and are left out", self.source, self._empty, len(rows)
            )
        return kept

    def _recipe(
        self,
        row: Mapping[str, Any],
        where: str,
        prompt: str | None,
        completion: str | None,
        messages: str | None,
        text: str | None,
    ) -> "Recipe":
        if messages is not None:
            place = f"column {messages!r} of {where}"
            self._check_chat(row[messages], place)
            return self.conversation(self.style.messages(row[messages]), place)
        if text is not None:
            return self.plain(self._text(row[text], text, where))
        assert prompt is not None
        assert completion is not None
        self.style.check(row[prompt], f"column {prompt!r} of {where}")
        answer = row[completion]
        return self.completion(row[prompt], answer if is_chat(answer) else self._text(answer, completion, where), where)

    def _cooked(self, recipes: Iterable["Recipe"]) -> Iterator[TokenExample]:
        """Tokenise many texts at a time: a fast tokenizer does them on all cores."""
        recipes = iter(recipes)
        while chunk := list(itertools.islice(recipes, _CHUNK)):
            tokenised: dict[bool, Iterator[list[int]]] = {}
            for templated in (False, True):
                texts = [text for recipe in chunk if recipe.templated is templated for text in recipe.texts]
                tokenised[templated] = iter(self.style.tokenize(texts, templated=templated) if texts else [])
            for recipe in chunk:
                parts = tokenised[recipe.templated]
                yield recipe.finish([next(parts) for _ in recipe.texts])

    def _fitting(self, examples: Iterable[TokenExample], made_from: list[int]) -> Iterator[TokenExample]:
        """Those that can be learned from, cut to the limit; their rows go to ``made_from``."""
        for index, example in enumerate(examples):
            if len(example.input_ids) > self.max_length:
                self._overlong += 1
                if self.overlong == "error":
                    raise ValueError(
                        f"{self.source}, row {index}, has {len(example.input_ids)} tokens, more than max_length "
                        f"{self.max_length}: raise it, or let overlong='truncate' or 'drop' deal with such rows"
                    )
                if self.overlong == "drop":
                    continue
                example = TokenExample(example.input_ids[: self.max_length], example.loss_mask[: self.max_length])
            if example.targets:
                made_from.append(index)
                yield example
            else:
                self._empty += 1

    @staticmethod
    def _text(value: Any, column: str, where: str) -> str:
        if not isinstance(value, str):
            raise ValueError(f"column {column!r} of {where} must hold text, it holds {type(value).__name__}: {value!r}")
        return value

    def plain(self, text: str) -> "Recipe":
        """All of a text, and the end-of-sequence token behind it.

        Args:
            text: Any text.
        """

        def finish(parts: list[list[int]]) -> TokenExample:
            token_ids = self._ended(parts[0])
            return TokenExample(token_ids, [True] * len(token_ids))

        return Recipe([text], False, finish)

    def completion(self, prompt: Any, completion: Any, where: str = "the row") -> "Recipe":
        """A prompt and what is to be answered; only the answer is learned.

        Args:
            prompt: Text or chat messages.
            completion: Text or chat messages.
            where: Source and row, for messages.
        """
        if isinstance(completion, list) or self.style.templated(prompt):
            answer = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
            question = self.style.messages(prompt)
            return self.conversation([*question, *answer], where, first=len(question))

        def finish(parts: list[list[int]]) -> TokenExample:
            before, token_ids = parts
            start = common_prefix(before, token_ids)
            token_ids = self._ended(token_ids)
            return TokenExample(token_ids, [False] * start + [True] * (len(token_ids) - start))

        return Recipe([prompt, prompt + completion], False, finish)

    def conversation(self, messages: Any, where: str = "the conversation", *, first: int = 0) -> "Recipe":
        """Chat messages; only what the assistant says (with its end-of-turn tokens) is learned.

        Behind a last word of the assistant an end-of-sequence token is learned, unless the template wrote one.

        Args:
            messages: Roles and contents.
            where: Column, source and row, for messages.
            first: Messages in front of this one are not learned, whoever says them.

        Raises:
            ValueError: If these are no chat messages, or the template writes earlier turns differently once later ones
                follow, so that what the assistant said cannot be found.
        """
        self._check_chat(messages, where)
        if _GENERATION.search(self.tokenizer.chat_template):
            return self._marked(messages, first)
        return self._spans(messages, first, where)

    def _check_chat(self, messages: Any, where: str) -> None:
        if not is_chat(messages):
            raise ValueError(f"{where} must hold chat messages (role and content), it holds {str(messages)[:80]!r}")
        self.style.check(messages, where)

    def _marked(self, messages: list[Any], first: int) -> "Recipe":
        """By the template's own ``{% generation %}`` marks, which only it can tokenise."""
        encoded = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **self.style.arguments
        )
        token_ids, mask = list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]

        def finish(parts: list[list[int]]) -> TokenExample:
            for before in parts:
                start = common_prefix(before, token_ids)
                mask[:start] = [False] * start
            return self._ended_answer(token_ids, mask, messages)

        return Recipe([self.style.render(messages[:first], generation=True)] if first else [], True, finish)

    def _spans(self, messages: list[Any], first: int, where: str) -> "Recipe":
        """By what the template writes before and after each word of the assistant."""
        whole = self.style.render(messages, generation=False)
        borders: list[str] = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant" and turn >= first:
                borders.append(self.style.render(messages[:turn], generation=True))
                borders.append(self.style.render(messages[: turn + 1], generation=False))
        if not all(whole.startswith(text) for text in borders):
            raise ValueError(
                f"{where} cannot be split into turns: the chat template writes a turn differently once others follow. "
                "Use a template that marks the assistant's words with {% generation %}, or one row per assistant turn "
                "as prompt and completion"
            )

        def finish(parts: list[list[int]]) -> TokenExample:
            token_ids = parts[0]
            ends = [common_prefix(part, token_ids) for part in parts[1:]]
            mask = [False] * len(token_ids)
            for start, end in zip(ends[::2], ends[1::2], strict=True):
                mask[start:end] = [True] * (end - start)
            return self._ended_answer(token_ids, mask, messages)

        return Recipe([whole, *borders], True, finish)

    def _ended_answer(self, token_ids: list[int], mask: list[bool], messages: list[Any]) -> TokenExample:
        """With a learned end-of-sequence token behind a last word of the assistant, unless the template wrote one."""
        end = self.tokenizer.eos_token_id
        if messages[-1]["role"] == "assistant" and end is not None and True in mask:
            last = len(mask) - mask[::-1].index(True)  # behind the last learned token
            start = last - mask[:last][::-1].index(False) if False in mask[:last] else 0
            if end not in token_ids[start:]:
                return TokenExample([*token_ids, end], [*mask, True])
        return TokenExample(token_ids, mask)

    def _ended(self, token_ids: list[int]) -> list[int]:
        """With the end-of-sequence token behind it, once."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ValueError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token")
        return token_ids if token_ids and token_ids[-1] == end else [*token_ids, end]
