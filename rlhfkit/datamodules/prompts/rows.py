"""Rows of a data set as prompts: the columns, the chat template or plain text, and the length limit."""

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.tokenization.chat import PromptFormatter, SpecialTokenError
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
        formatter: PromptFormatter,
        *,
        prompt: str,
        answer: str | None = None,
        answer_extractor: Callable[[Any], Any] = lambda answer: answer,
        max_length: int | None = None,
        overlong: Literal["error", "drop"] = "error",
    ) -> None:
        """Check the columns and every row.

        ``answer_extractor`` is applied to each value of the column ``answer``. Prompts above ``max_length`` tokens
        (``None``: no limit) are an error or dropped, as ``overlong`` says. ``source`` is for messages.

        Raises ValueError if a column is missing, or a prompt is empty, of the wrong type, or too long.
        """
        check_columns(rows, source, prompt=prompt, answer=answer)
        self.rows = rows
        self.source = source
        self.formatter = formatter
        self.prompt = prompt
        self.answer = answer
        self.answer_extractor = answer_extractor
        self.overlong = overlong
        self.kept: Sequence[int] = range(len(rows))
        """The rows that are used."""
        self._fingerprint = ""
        first = rows[0][prompt]
        formatter.check(first, f"column {prompt!r} of {describe(source)}, row 0,")
        self._templated = formatter.templated(first)
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
        formatter = self.formatter.for_row(row)
        content = row.pop(self.prompt)
        answer = None if self.answer is None else self.answer_extractor(row.pop(self.answer))
        rendered = formatter.prompt(content)
        text = content if isinstance(content, str) else rendered
        token_ids = self.formatter.tokenize([rendered], templated=self._templated)[0]
        return Prompt(index=index, token_ids=token_ids, text=text, answer=answer, metadata=row)

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
            chunk = self.rows.select(range(start, min(start + _CHUNK, len(self.rows))))
            texts = [
                self._render(row, f"column {self.prompt!r} of {name}, row {start + i},") for i, row in enumerate(chunk)
            ]
            for row, token_ids in enumerate(self.formatter.tokenize(texts, templated=self._templated), start):
                if not token_ids:
                    raise ValueError(
                        f"column {self.prompt!r} of {name}, row {row}, is a prompt without a token "
                        f"({self.rows[row][self.prompt]!r}); a policy needs at least one to begin with: remove such "
                        "rows"
                    )
                self.lengths.append(len(token_ids))
                self._largest_token = max(self._largest_token, (max(token_ids), row))

    def _render(self, row: dict[str, Any], where: str) -> str:
        content = row[self.prompt]
        self.formatter.check(content, where)
        try:
            return self.formatter.for_row(row).prompt(content)
        except SpecialTokenError as error:
            raise ValueError(f"{where} {error}") from None

    def check_vocabulary(self, vocabulary: int | None) -> None:
        """Raise ValueError if a prompt has a token that the model has no embedding of."""
        token, row = self._largest_token
        if vocabulary is not None and token >= vocabulary:
            text = self.formatter.tokenizer.convert_ids_to_tokens(token)
            raise ValueError(
                f"{describe(self.source)}, row {row}, has the token {token} ({text!r}), and the model knows the tokens "
                f"0 to {vocabulary - 1}: use the model's own tokenizer, or resize its embeddings before training "
                "(model.resize_token_embeddings(len(tokenizer)), save_pretrained)"
            )

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
                digest.update(f"{index}:{self.rows[index][self.prompt]!r}\n".encode())
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
