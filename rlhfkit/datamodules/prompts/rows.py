"""Rows of a data set as prompts: columns, chat template and length limit."""

import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.tokenization.chat import PromptFormatter, SpecialTokenError
from rlhfkit.datamodules.tokenization.sources import IMAGES, PlacedRow, Source, check_columns, describe

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class PromptColumns:
    """The columns that are read, and what is done with their values."""

    formatter: PromptFormatter
    """Renders and tokenises prompts."""
    prompt: str = "prompt"
    """Column of the prompts."""
    answer: str | None = None
    """Column of the reference answers; ``None``: there are none."""
    answer_extractor: Callable[[Any], Any] = lambda answer: answer
    """Applied to each value of the column ``answer``."""

    def text(self, row: Mapping[str, Any], where: str) -> str:
        """The text that the policy continues; ValueError, which names the place ``where``, for other values."""
        content, place, where = row[self.prompt], where, f"column {self.prompt!r} of {where}"
        self.formatter.check(content, where)
        try:
            return self.formatter.for_row(row, place).prompt(content)
        except SpecialTokenError as error:
            raise ValueError(f"{where} {error}") from None

    def read(self, rows: Sequence[PlacedRow]) -> list[tuple[str, list[int]]]:
        """:meth:`text` and token ids of the prompts of rows, of which some may be texts and others chat messages.

        Raises ValueError for values of other types and for a prompt without a token.
        """
        texts = [self.text(row, where) for where, row in rows]
        templated = [self.formatter.templated(row[self.prompt]) for _, row in rows]
        tokenized = self.formatter.tokenize(list(zip(texts, templated, strict=True)))
        for (where, row), token_ids in zip(rows, tokenized, strict=True):
            if not token_ids:
                raise ValueError(
                    f"column {self.prompt!r} of {where} is a prompt without a token ({row[self.prompt]!r}); a policy "
                    "needs at least one to begin with: remove such rows"
                )
        return list(zip(texts, tokenized, strict=True))

    def check_token(self, token: int, vocabulary: int | None, where: str) -> None:
        """Raise ValueError if the model has no embedding of a token."""
        if vocabulary is not None and token >= vocabulary:
            text = self.formatter.tokenizer.convert_ids_to_tokens(token)
            raise ValueError(
                f"{where} has the token {token} ({text!r}), and the model knows the tokens "
                f"0 to {vocabulary - 1}: use the model's own tokenizer, or resize its embeddings before training "
                "(model.resize_token_embeddings(len(tokenizer)), save_pretrained)"
            )

    def make(self, row: Mapping[str, Any], index: int, rendered: str, token_ids: list[int], where: str) -> Prompt:
        """Make the prompt of a row; ``rendered`` is its :meth:`text`, ``where`` its place for messages."""
        others = dict(row)
        content = others.pop(self.prompt)
        answer = None if self.answer is None else self.answer_extractor(others.pop(self.answer))
        text = content if isinstance(content, str) else rendered
        images: tuple[Any, ...] = ()
        if self.formatter.sees_images:
            formatter = self.formatter.for_row(row, where)
            images = formatter.images_of(content)
            text = formatter.collapse(text, images)
            others = {name: value for name, value in others.items() if name not in IMAGES}
        return Prompt(index=index, token_ids=token_ids, text=text, answer=answer, metadata=others, attachments=images)


log = logging.getLogger(__name__)

_CHUNK = 1000
"""Rows that are tokenised together when all prompts are checked."""


class PromptRows:
    """Rows of a data set as prompts, tokenised on access; all are checked at construction, before training."""

    def __init__(
        self,
        rows: "Dataset",
        source: Source,
        columns: PromptColumns,
        *,
        max_length: int | None = None,
        overlong: Literal["error", "drop"] = "error",
    ) -> None:
        """Check the columns and every row.

        ``columns`` makes rows into prompts. Prompts above ``max_length`` tokens
        (``None``: no limit) are an error or dropped, as ``overlong`` says. ``source`` is for messages.

        Raises ValueError if a column is missing, or a prompt is empty, of the wrong type, or too long.
        """
        check_columns(rows, source, prompt=columns.prompt, answer=columns.answer)
        self.rows = rows
        self.source = source
        self.columns = columns
        self.overlong = overlong
        self.kept: Sequence[int] = range(len(rows))
        """The rows that are used."""
        self._fingerprint = ""
        self.lengths = array("l")
        """Tokens of each row's prompt, dropped rows included."""
        self._largest_token = (0, 0)  # token id, and the row that has it
        self._tokenize_all()
        if max_length is not None:
            self.limit_lengths(max_length, f"max_prompt_length {max_length}")

    def __len__(self) -> int:
        """Number of prompts that are used."""
        return len(self.kept)

    def __getitem__(self, position: int) -> Prompt:
        """Return the prompt at a position among those in use; its ``index`` is the row in the file."""
        index = self.kept[position]
        row = self.rows[index]
        where = f"{describe(self.source)}, row {index},"
        text, token_ids = self.columns.read([(where, row)])[0]
        return self.columns.make(row, index, text, token_ids, where)

    def column(self, name: str) -> list[Any]:
        """Return the values of a column, by position; ValueError if it does not exist or has missing values."""
        check_columns(self.rows, self.source, curriculum=name)
        values = self.rows[name][:]  # a column by index reads row by row
        return [values[index] for index in self.kept]

    def _tokenize_all(self) -> None:
        """Tokenise every prompt once, to check it and to record its length."""
        name = describe(self.source)
        for start in range(0, len(self.rows), _CHUNK):
            chunk = self.rows.select(range(start, min(start + _CHUNK, len(self.rows))))
            placed = [(f"{name}, row {number},", row) for number, row in enumerate(chunk, start)]
            for number, (_, token_ids) in enumerate(self.columns.read(placed), start):
                self.lengths.append(len(token_ids))
                self._largest_token = max(self._largest_token, (max(token_ids), number))

    def check_vocabulary(self, vocabulary: int | None) -> None:
        """Raise ValueError if a prompt has a token that the model has no embedding of."""
        token, row = self._largest_token
        self.columns.check_token(token, vocabulary, f"{describe(self.source)}, row {row},")

    def limit_lengths(self, limit: int, reason: str) -> None:
        """Drop the prompts above ``limit`` tokens; ValueError if ``overlong`` is ``"error"`` or none is left."""
        kept = [index for index in self.kept if self.lengths[index] <= limit]
        if len(kept) == len(self.kept):
            return
        worst = max(self.kept, key=lambda index: self.lengths[index])
        message = (
            f"{len(self.kept) - len(kept)} of {len(self.kept)} prompts of {describe(self.source)} have more than "
            f"{limit} tokens ({reason}), the longest {self.lengths[worst]} (row {worst})"
        )
        if self.overlong == "error":
            raise ValueError(f"{message}: raise the limit, shorten them, or drop them with overlong_prompts='drop'")
        if not kept:
            raise ValueError(f"{message}, so none would be left: raise the limit")
        log.warning("%s; they are dropped", message)
        self.kept = kept
        self._fingerprint = ""

    def fingerprint(self) -> str:
        """Return a digest of the length, the rows in use, and the text of about 1,000 sampled prompts."""
        if not self._fingerprint:
            digest = blake2b(str(len(self)).encode(), digest_size=16)
            stride = max(1, len(self) // 1000)
            for position in range(0, len(self), stride):
                index = self.kept[position]
                digest.update(f"{index}:{self.rows[index][self.columns.prompt]!r}\n".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def source_names(sources: Sequence[Any]) -> list[str]:
    """Return the names of sources for metrics: file names without folder and suffix if these are unique."""
    paths = [isinstance(source, str | os.PathLike) for source in sources]
    whole = [os.fspath(one) if path else f"rows{i}" for i, (one, path) in enumerate(zip(sources, paths, strict=True))]
    short = [Path(name).name.split(".")[0] for name in whole]
    return short if len(set(short)) == len(short) else whole
