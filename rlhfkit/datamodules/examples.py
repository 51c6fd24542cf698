"""Supervised examples: what is tokenised, which tokens are learned, and how many fit into memory.

What is learned is found by **common token prefixes**: a span that begins behind the text ``a`` and ends behind the text
``b`` covers the tokens of the whole text between the longest common prefixes with the tokens of ``a`` and of ``b``. A
token that straddles the beginning is learned. This needs nothing of the tokenizer, and no text is glued from pieces.
"""

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlhfkit.data.collate import TokenExample
from rlhfkit.datamodules.chat import PromptFormat, is_chat

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_GENERATION = re.compile(r"\{%-?\s*generation\b")


class TokenExamples:
    """Examples in two flat tensors: 5 bytes per token, where lists of Python numbers would take 40."""

    def __init__(self, examples: Sequence[TokenExample]) -> None:
        """Pack examples.

        Args:
            examples: At least one.
        """
        self.lengths = [len(example.input_ids) for example in examples]
        """Tokens of each example."""
        self.targets = [example.targets for example in examples]
        """Learned tokens of each example."""
        self._ends = torch.tensor(self.lengths).cumsum(0).tolist()
        self._tokens = torch.cat([torch.tensor(example.input_ids, dtype=torch.int32) for example in examples])
        self._mask = torch.cat([torch.tensor(example.loss_mask, dtype=torch.bool) for example in examples])

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenExample:
        """One example."""
        part = slice(self._ends[index] - self.lengths[index], self._ends[index])
        return TokenExample(self._tokens[part].tolist(), self._mask[part].tolist())


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix of two token sequences."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))


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
        kept: list[TokenExample] = []
        overlong = empty = 0
        for index, row in enumerate(rows):
            where = f"{self.source}, row {index},"
            if messages is not None:
                place = f"column {messages!r} of {where}"
                self._check_chat(row[messages], place)
                example = self.conversation(self.style.messages(row[messages]), place)
            elif text is not None:
                example = self.plain(self._text(row[text], text, where))
            else:
                assert prompt is not None
                assert completion is not None
                self.style.check(row[prompt], f"column {prompt!r} of {where}")
                answer = row[completion]
                if not is_chat(answer):
                    answer = self._text(answer, completion, where)
                example = self.completion(row[prompt], answer, where)
            if len(example.input_ids) > self.max_length:
                overlong += 1
                if self.overlong == "error":
                    raise ValueError(
                        f"{where} has {len(example.input_ids)} tokens, more than max_length {self.max_length}: raise "
                        "it, or let overlong='truncate' or 'drop' deal with such rows"
                    )
                if self.overlong == "drop":
                    continue
                example = TokenExample(example.input_ids[: self.max_length], example.loss_mask[: self.max_length])
            if not example.targets:
                empty += 1
                continue
            kept.append(example)
        if not kept:
            raise ValueError(
                f"{self.source}: none of its {len(rows)} rows has a token to learn within max_length {self.max_length} "
                f"({overlong} are longer): raise max_length or check the columns"
            )
        if overlong:
            done = "dropped" if self.overlong == "drop" else "truncated"
            log.warning(
                "%s: %d of %d rows were %s at max_length %d", self.source, overlong, len(rows), done, self.max_length
            )
        if empty:
            log.warning("%s: %d of %d rows have no token to learn and are left out", self.source, empty, len(rows))
        return TokenExamples(kept)

    @staticmethod
    def _text(value: Any, column: str, where: str) -> str:
        if not isinstance(value, str):
            raise ValueError(f"column {column!r} of {where} must hold text, it holds {type(value).__name__}: {value!r}")
        return value

    def plain(self, text: str) -> TokenExample:
        """All of a text, and the end-of-sequence token behind it.

        Args:
            text: Any text.
        """
        token_ids = self._ended(self.style.tokenize([text], templated=False)[0])
        return TokenExample(token_ids, [True] * len(token_ids))

    def completion(self, prompt: Any, completion: Any, where: str = "the row") -> TokenExample:
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
        before, token_ids = self.style.tokenize([prompt, prompt + completion], templated=False)
        start = common_prefix(before, token_ids)
        token_ids = self._ended(token_ids)
        return TokenExample(token_ids, [position >= start for position in range(len(token_ids))])

    def conversation(self, messages: Any, where: str = "the conversation", *, first: int = 0) -> TokenExample:
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
        find = self._marked if _GENERATION.search(self.tokenizer.chat_template) else self._spans
        token_ids, mask = find(messages, first, where)
        end = self.tokenizer.eos_token_id
        if messages[-1]["role"] == "assistant" and end is not None:
            answer = len(mask) - mask[::-1].index(False) if False in mask else 0
            if end not in token_ids[answer:]:
                token_ids, mask = [*token_ids, end], [*mask, True]
        return TokenExample(token_ids, mask)

    def _check_chat(self, messages: Any, where: str) -> None:
        if not is_chat(messages):
            raise ValueError(f"{where} must hold chat messages (role and content), it holds {str(messages)[:80]!r}")
        self.style.check(messages, where)

    def _marked(self, messages: list[Any], first: int, where: str) -> tuple[list[int], list[bool]]:
        """Tokens and mask by the template's own ``{% generation %}`` marks."""
        encoded = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **self.style.arguments
        )
        token_ids, mask = list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
        if first:
            before = self.style.render(messages[:first], generation=True)
            start = common_prefix(self.style.tokenize([before], templated=True)[0], token_ids)
            mask[:start] = [False] * start
        return token_ids, mask

    def _spans(self, messages: list[Any], first: int, where: str) -> tuple[list[int], list[bool]]:
        """Tokens and mask by what the template writes before and after each word of the assistant."""
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
        token_ids, *parts = self.style.tokenize([whole, *borders], templated=True)
        ends = [common_prefix(part, token_ids) for part in parts]
        mask = [False] * len(token_ids)
        for start, end in zip(ends[::2], ends[1::2], strict=True):
            mask[start:end] = [True] * (end - start)
        return token_ids, mask

    def _ended(self, token_ids: list[int]) -> list[int]:
        """With the end-of-sequence token behind it, once."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ValueError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token")
        return token_ids if token_ids and token_ids[-1] == end else [*token_ids, end]
