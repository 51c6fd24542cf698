"""Rows of a data set as prompts: which column, chat template or plain text, how long they may be."""

import logging
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.tokenization.chat import PromptFormat, SpecialTokenError
from rlhfkit.datamodules.tokenization.sources import check_columns, describe

if TYPE_CHECKING:
    from rlhfkit.datamodules.prompts.datamodule import PromptDataModule

log = logging.getLogger(__name__)


class PromptRows:
    """Rows of a data set as prompts, tokenised when they are asked for."""

    def __init__(self, options: "PromptDataModule", rows: Any, source: Any, tokenizer: Any) -> None:
        """Check the columns and every row: an empty prompt found in the middle of a run would end it.

        Args:
            options: Whose arguments say how.
            rows: The ``Dataset``.
            source: Where it came from, for messages.
            tokenizer: To tokenise with.
        """
        check_columns(rows, source, prompt=options.prompt, answer=options.answer)
        self.options = options
        self.rows = rows
        self.source = source
        self.format = PromptFormat(
            tokenizer,
            apply_chat_template=options.apply_chat_template,
            system=options.system,
            chat_template_arguments=options.chat_template_arguments,
            special_tokens_in_text=options.special_tokens_in_text,
        )
        self.kept: Sequence[int] = range(len(rows))
        self._fingerprint = ""
        first = rows[0][options.prompt]
        self.format.check(first, f"column {options.prompt!r} of {describe(source)}, row 0,")
        self._templated = self.format.templated(first)
        self.lengths = array("l")
        """Tokens of each row's prompt, those that are not used included."""
        self._largest = (0, 0)  # token id, and the row that has it
        self._read_all()
        if options.max_prompt_length is not None:
            self.limit_lengths(options.max_prompt_length, f"max_prompt_length {options.max_prompt_length}")

    def __len__(self) -> int:
        """Prompts that are used."""
        return len(self.kept)

    def __getitem__(self, position: int) -> Prompt:
        """The prompt at a position among those that are used; its index is the row in the file."""
        index = self.kept[position]
        row = self.rows[index]
        options, style = self.options, self.format.for_row(row)
        content = row.pop(options.prompt)
        answer = None
        if options.answer is not None:
            answer = options.answer_extractor(row.pop(options.answer))
        rendered = style.prompt(content)
        text = content if isinstance(content, str) else rendered
        token_ids = self.format.tokenize([rendered], templated=self._templated)[0]
        return Prompt(index=index, token_ids=token_ids, text=text, answer=answer, metadata=row)

    def column(self, name: str) -> list[Any]:
        """The values of a column, by position.

        Raises:
            ValueError: If there is no such column, or values are missing.
        """
        check_columns(self.rows, self.source, order=name)
        values = self.rows[name]
        return [values[index] for index in self.kept]

    def _read_all(self) -> None:
        """Tokenise every prompt once."""
        column, name = self.options.prompt, describe(self.source)
        for start in range(0, len(self.rows), 1000):
            chunk = self.rows.select(range(start, min(start + 1000, len(self.rows))))
            texts = [
                self._rendered(row, f"column {column!r} of {name}, row {start + i},") for i, row in enumerate(chunk)
            ]
            for row, token_ids in enumerate(self.format.tokenize(texts, templated=self._templated), start):
                if not token_ids:
                    raise ValueError(
                        f"column {column!r} of {name}, row {row}, is a prompt without a token "
                        f"({self.rows[row][column]!r}); a policy needs at least one to begin with: remove such rows"
                    )
                self.lengths.append(len(token_ids))
                self._largest = max(self._largest, (max(token_ids), row))

    def _rendered(self, row: dict[str, Any], where: str) -> str:
        content = row[self.options.prompt]
        self.format.check(content, where)
        try:
            return self.format.for_row(row).prompt(content)
        except SpecialTokenError as error:
            raise ValueError(f"{where} {error}") from None

    def check_vocabulary(self, vocabulary: int | None) -> None:
        """Raise if a prompt has a token that the model does not know.

        Args:
            vocabulary: Tokens of the model; ``None``: not known.

        Raises:
            ValueError: Naming the token and the row.
        """
        token, row = self._largest
        if vocabulary is not None and token >= vocabulary:
            text = self.format.tokenizer.convert_ids_to_tokens(token)
            raise ValueError(
                f"{describe(self.source)}, row {row}, has the token {token} ({text!r}), and the model knows the tokens "
                f"0 to {vocabulary - 1}: use the model's own tokenizer, or resize its embeddings before training "
                "(model.resize_token_embeddings(len(tokenizer)), save_pretrained)"
            )

    def limit_lengths(self, limit: int, reason: str) -> None:
        """Refuse or drop the prompts that are too long.

        Args:
            limit: Tokens that a prompt may have.
            reason: Where that comes from, for messages.

        Raises:
            ValueError: If there are some and ``overlong_prompts`` is ``"error"``, or no prompt is left.
        """
        kept = [index for index in self.kept if self.lengths[index] <= limit]
        if len(kept) == len(self.kept):
            return
        worst = max(self.kept, key=lambda index: self.lengths[index])
        message = (
            f"{len(self.kept) - len(kept)} of {len(self.kept)} prompts of {describe(self.source)} have more than "
            f"{limit} tokens ({reason}), the longest {self.lengths[worst]} (row {worst})"
        )
        if self.options.overlong_prompts == "error":
            raise ValueError(f"{message}: raise the limit, shorten them, or drop them with overlong_prompts='drop'")
        if not kept:
            raise ValueError(f"{message}, so none would be left: raise the limit")
        log.warning("%s; they are dropped", message)
        self.kept = kept
        self._fingerprint = ""

    def fingerprint(self) -> str:
        """Changes when rows are added, dropped or reordered, or one of about 1,000 sampled prompts changes."""
        if not self._fingerprint:
            digest = blake2b(str(len(self)).encode(), digest_size=16)
            stride = max(1, len(self) // 1000)
            for position in range(0, len(self), stride):
                index = self.kept[position]
                digest.update(f"{index}:{self.rows[index][self.options.prompt]!r}\n".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


class PromptBatches:
    """Batches of validation prompts, dealt to the ranks; every rank yields equally many, the last ones may be empty."""

    def __init__(self, rows: Any, batch_size: int, rank: int, world_size: int) -> None:
        """Batches of ``batch_size`` prompts over all ranks, of which this rank takes every ``world_size``-th prompt."""
        self.rows = rows
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        """Batches, the same on every rank."""
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        """This rank's prompts of each batch."""
        for start in range(0, len(self.rows), self.batch_size):
            stop = min(start + self.batch_size, len(self.rows))
            yield [self.rows[position] for position in range(start + self.rank, stop, self.world_size)]
