"""Rows of a data set as prompts: the columns, the chat template or plain text, and the length limit."""

import logging
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.prompts.columns import PromptColumns
from rlhfkit.datamodules.tokenization.sources import Source, check_columns, describe

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_CHUNK = 1000
"""Rows that are tokenised together when all prompts are checked."""


class PromptSequence(Protocol):
    """Prompts by position."""

    def __len__(self) -> int:
        """Number of prompts."""
        ...

    def __getitem__(self, position: int) -> Prompt:
        """One prompt."""
        ...


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
        rendered = self.columns.formatter.for_row(row).prompt(row[self.columns.prompt])
        token_ids = self.columns.tokenize([row], [rendered])[0]
        return self.columns.make(row, index, rendered, token_ids)

    def column_by_index(self, name: str) -> dict[int, Any]:
        """Return the values of a column by the ``index`` of the prompts in use; errors as in :meth:`column`."""
        return dict(zip(self.kept, self.column(name), strict=True))

    def column(self, name: str) -> list[Any]:
        """Return the values of a column, by position; ValueError if it does not exist or has missing values."""
        check_columns(self.rows, self.source, curriculum=name)
        values = self.rows[name]
        return [values[index] for index in self.kept]

    def _tokenize_all(self) -> None:
        """Tokenise every prompt once, to check it and to record its length."""
        name = describe(self.source)
        for start in range(0, len(self.rows), _CHUNK):
            chunk = list(self.rows.select(range(start, min(start + _CHUNK, len(self.rows)))))
            places = [f"{name}, row {row}," for row in range(start, start + len(chunk))]
            texts = list(map(self.columns.text, chunk, places))
            for row, token_ids in enumerate(self.columns.tokenize(chunk, texts), start):
                self.columns.check_tokens(chunk[row - start], places[row - start], token_ids)
                self.lengths.append(len(token_ids))
                self._largest_token = max(self._largest_token, (max(token_ids), row))

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


class PromptBatches:
    """Validation prompts in batches over all ranks; each rank takes every ``world_size``-th, so shares may be empty."""

    def __init__(self, prompts: PromptSequence, batch_size: int, rank: int, world_size: int) -> None:
        self.prompts = prompts
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return -(-len(self.prompts) // self.batch_size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        """Yield this rank's share of each batch."""
        for start in range(0, len(self.prompts), self.batch_size):
            stop = min(start + self.batch_size, len(self.prompts))
            yield [self.prompts[position] for position in range(start + self.rank, stop, self.world_size)]
