"""Supervised examples: rows become token ids with a mask of the learned tokens, truncated to a maximum length.

Texts are tokenised as a whole. A completion begins at the first token that differs from the tokens of the prompt alone,
so a token that spans both is learned. Rows may be token ids already, and examples may be split instead of cut.
"""

import copy
import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rlhfkit.data.batch import TokenExample
from rlhfkit.datamodules.tokenization.assistant_mask import common_prefix, span_mask, write_conversation
from rlhfkit.datamodules.tokenization.cache import CHUNK, TokenCache, TokenExamples, tokenize_in_chunks
from rlhfkit.datamodules.tokenization.chat import PromptFormatter, SpecialTokenError, is_chat
from rlhfkit.datamodules.tokenization.columns import ATTENTION_MASK

if TYPE_CHECKING:
    from datasets import Dataset


IGNORED = -100
"""The label of a token that is not learned, in Transformers' data sets."""


def tokenized_row(
    row: Mapping[str, Any], where: str, columns: Mapping[str, str | None], *, vocabulary: int
) -> TokenExample:
    """Make an example of a row of token ids; nothing is added, no end-of-sequence token either.

    Args:
        row: The row; tokens at which a column ``attention_mask`` is 0 are padding and left out.
        where: Its place, for messages.
        columns: Column of ``input_ids``, and of ``labels`` (the same ids, -100 where a token is not learned) or of
            ``loss_mask`` (true or 1 where it is learned); with neither, all are learned.
        vocabulary: Number of tokens of the tokenizer.

    Raises:
        ValueError: If a value is no list of integers, lists have different lengths, a token is unknown, or labels are
            other tokens than ``input_ids``, for example shifted ones.
    """
    token_ids = _numbers(row, str(columns["input_ids"]), where)
    mask = [True] * len(token_ids)
    labels, learned = columns.get("labels"), columns.get("loss_mask")
    if labels is not None:
        values = _numbers(row, labels, where, len(token_ids))
        wrong = [
            i for i, (label, token) in enumerate(zip(values, token_ids, strict=True)) if label not in (IGNORED, token)
        ]
        if wrong:
            raise ValueError(
                f"column {labels!r} of {where} has the label {values[wrong[0]]} at position {wrong[0]}, where the token"
                f" is {token_ids[wrong[0]]}: labels are the tokens themselves, not shifted, or {IGNORED}"
            )
        mask = [label != IGNORED for label in values]
    elif learned is not None:
        values = _numbers(row, learned, where, len(token_ids))
        if not {*values} <= {0, 1}:
            raise ValueError(f"column {learned!r} of {where} must hold 0 and 1, or false and true, got {values!r:.80}")
        mask = [bool(value) for value in values]
    if row.get(ATTENTION_MASK) is not None:
        real = _numbers(row, ATTENTION_MASK, where, len(token_ids))
        token_ids = [token for token, keep in zip(token_ids, real, strict=True) if keep]
        mask = [mark for mark, keep in zip(mask, real, strict=True) if keep]
    unknown = [token for token in token_ids if not 0 <= token < vocabulary]
    if unknown or not token_ids:
        what = f"the token {unknown[0]}, and the tokenizer has 0 to {vocabulary - 1}" if unknown else "no token"
        raise ValueError(f"column {columns['input_ids']!r} of {where} has {what}")
    return TokenExample(token_ids, mask)


def split_example(example: TokenExample, length: int) -> list[TokenExample]:
    """Split an example into parts of ``length`` tokens, of which each begins with the last token of the part before.

    So every token but the first is predicted, and learned, once.
    """
    starts = range(0, max(len(example.input_ids) - 1, 1), length - 1)
    return [
        TokenExample(example.input_ids[start : start + length], example.loss_mask[start : start + length])
        for start in starts
    ]


def _numbers(row: Mapping[str, Any], column: str, where: str, count: int | None = None) -> list[int]:
    values = row[column]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"column {column!r} of {where} must hold a list of integers, it holds {values!r:.80}")
    if count is not None and len(values) != count:
        raise ValueError(f"column {column!r} of {where} has {len(values)} values for {count} tokens")
    return values


log = logging.getLogger(__name__)


class PendingExample(NamedTuple):
    """How to make one example: texts, which are tokenised in batches, and a function of their token ids."""

    texts: list[str]
    """Texts to tokenise."""
    templated: bool
    """Whether the texts went through the chat template."""
    finish: Callable[[list[list[int]]], TokenExample]
    """Makes the example from the token ids of the texts."""
    attachments: tuple[Any, ...] = ()
    """The images of the example, in the order of their tokens."""


PendingOf = Callable[["ExampleBuilder", Mapping[str, Any], str], Iterable[PendingExample]]
"""Makes the examples of a row, given the builder for that row, the row, and its place for messages."""


class ExampleBuilder:
    """Tokenises rows as examples of supervised fine-tuning; subclasses read other columns.

    Args:
        formatter: Renders prompts and chats.
        max_length: Tokens per example.
        overlong: ``"truncate"``, ``"split"``, ``"drop"`` or ``"error"`` for longer ones.
        source: Where the rows come from, for messages.
        context: The model's context length; longer examples are an error; ``None``: unlimited.
        cache: Stores the examples for later runs; ``None``: they are not stored.
        reports: Log how many rows were truncated or dropped.
    """

    def __init__(
        self,
        formatter: PromptFormatter,
        max_length: int,
        overlong: str,
        source: str,
        *,
        context: int | None = None,
        cache: TokenCache | None = None,
        reports: bool = True,
    ) -> None:
        self.formatter = formatter
        self.tokenizer = formatter.tokenizer
        self.max_length = max_length
        self.overlong = overlong
        self.source = source
        self.context = context
        self.cache = cache
        self.reports = reports

    def for_row(self, row: Mapping[str, Any], where: str) -> Self:
        """Return the builder for one row, with the template arguments and images of the row if it has any."""
        formatter = self.formatter.for_row(row, where)
        if formatter is self.formatter:
            return self
        changed = copy.copy(self)
        changed.formatter = formatter
        return changed

    def build(
        self,
        rows: "Dataset",
        *,
        prompt: str | None = None,
        completion: str | None = None,
        messages: str | None = None,
        text: str | None = None,
        input_ids: str | None = None,
        labels: str | None = None,
        loss_mask: str | None = None,
    ) -> TokenExamples:
        """Tokenise rows, from columns ``prompt`` and ``completion``, ``messages``, or ``text``.

        Rows with ``input_ids`` are tokens already; ``labels`` or ``loss_mask`` say which are learned, else all are.

        Rows without a token to learn are dropped, with a logged count. Raises ValueError if a value has the wrong type,
        a sequence is too long under ``overlong="error"`` or for the model's context, or no example is left.
        """
        columns = {"prompt": prompt, "completion": completion, "messages": messages, "text": text}
        columns |= {"input_ids": input_ids, "labels": labels, "loss_mask": loss_mask}
        self.check_first(rows[0], columns)
        examples = self.cached_examples(rows, columns, lambda: self._make_examples(rows, columns))
        if self.reports:
            log_counts(self.source, len(rows), examples.counts, self.max_length)
        return examples

    def cached_examples(
        self, rows: "Dataset", columns: Mapping[str, Any], make: Callable[[], TokenExamples]
    ) -> TokenExamples:
        """Load examples from the cache, or make and store them.

        ``columns`` holds what they depend on besides rows and builder. Raises ValueError if an example is longer than
        the model's context; the cache keeps it, for other models.
        """
        if self.cache is None:
            examples = make()
        else:
            formatter = self.formatter
            arguments = {
                "builder": type(self).__name__,
                "columns": dict(columns),
                "max_length": self.max_length,
                "overlong": self.overlong,
                "style": [
                    formatter.wraps_text,
                    formatter.system,
                    formatter.arguments,
                    formatter.special_tokens_in_text,
                ],
            }
            examples = self.cache.examples(rows, self.tokenizer, arguments, make)
        if self.formatter.sees_images:
            examples.attachments = self._image_reader(rows, columns, examples.rows)
        longest = max(range(len(examples)), key=lambda index: examples.lengths[index])
        self.check_context(examples.lengths[longest], f"{self.source}, row {examples.rows[longest]},")
        return examples

    def _image_reader(
        self, rows: "Dataset", columns: Mapping[str, Any], made_from: Sequence[int]
    ) -> Callable[[int], tuple[Any, ...]]:
        """Reads the images of an example again from its row; those of all rows would be much to keep."""

        def read(index: int) -> tuple[Any, ...]:
            row = made_from[index]
            place, where = index - bisect_left(made_from, row), f"{self.source}, row {row},"
            made = list(self.pending_of(columns)(self.for_row(rows[row], where), rows[row], where))
            return made[place].attachments

        return read

    def check_context(self, length: int, where: str) -> None:
        """Raise ValueError if an example is longer than the model's context."""
        if self.context is not None and length > self.context:
            raise ValueError(
                f"{where} has {length} tokens within max_length {self.max_length}, more than the model's context of "
                f"{self.context}: lower it, max_length={self.context}, or use a model with a longer context"
            )

    def _make_examples(self, rows: "Dataset", columns: Mapping[str, str | None]) -> TokenExamples:
        counts: dict[str, int] = {"truncated": 0, "dropped": 0, "empty": 0}
        made_from: list[int] = []
        tokenized = self.tokenize_dataset(rows, self.pending_of(columns))
        made = TokenExamples(self._limit_examples(tokenized, made_from, counts))
        made.rows, made.counts = made_from, counts
        if not len(made):
            raise ValueError(
                f"{self.source}: none of its {len(rows)} rows has a token to learn within max_length {self.max_length} "
                f"({counts['truncated'] + counts['dropped']} are longer): raise max_length or check the columns"
            )
        return made

    def tokenize_dataset(self, rows: "Dataset", pending_of: PendingOf) -> Iterator[TokenExample]:
        """Yield the examples of all rows with a progress bar, before truncating or dropping.

        ``pending_of`` is called with the row's builder, the row, and its place for messages; it returns the examples
        of the row.
        """

        def tokenize(chunk: list[dict[str, Any]], first: int) -> list[TokenExample]:
            places = ((f"{self.source}, row {index},", row) for index, row in enumerate(chunk, first))
            return list(self.tokenize_rows(places, pending_of))

        num_proc = 1 if self.cache is None else self.cache.num_proc
        return tokenize_in_chunks(rows, tokenize, num_proc=num_proc, title=f"Tokenising {self.source}")

    def tokenize_rows(
        self,
        rows: Iterable[tuple[str, Mapping[str, Any]]],
        pending_of: PendingOf,
    ) -> Iterator[TokenExample]:
        """Yield the examples of (place, row) pairs, before truncating or dropping; see :meth:`tokenize_dataset`."""
        pending = (each for where, row in rows for each in self._pending_of(row, where, pending_of))
        # A fast tokenizer uses all cores for many texts at once.
        while chunk := list(itertools.islice(pending, CHUNK)):
            tokenized: dict[bool, Iterator[list[int]]] = {}
            for templated in (False, True):
                texts = [text for each in chunk if each.templated is templated for text in each.texts]
                tokenized[templated] = iter(self.formatter.tokenize(texts, templated=templated) if texts else [])
            for each in chunk:
                parts = tokenized[each.templated]
                example = each.finish([next(parts) for _ in each.texts])
                example.attachments = each.attachments
                yield example

    def _pending_of(
        self,
        row: Mapping[str, Any],
        where: str,
        pending_of: PendingOf,
    ) -> Iterator[PendingExample]:
        try:
            yield from pending_of(self.for_row(row, where), row, where)
        except SpecialTokenError as error:
            raise ValueError(f"{where} {error}") from None

    def examples_of_rows(
        self, rows: Sequence[tuple[str, Mapping[str, Any]]], columns: Mapping[str, str | None]
    ) -> Iterator[list[TokenExample]]:
        """Yield the examples of each of some (place, row) pairs of a stream, cut to ``max_length``; log counts.

        Raises ValueError as :meth:`build` does.
        """
        counts = {"truncated": 0, "dropped": 0, "empty": 0}
        tokenized = self.tokenize_rows(rows, self.pending_of(columns))
        for (where, _), example in zip(rows, tokenized, strict=True):
            fitting = self.limit_lengths(example, where, counts)
            for each in fitting:
                self.check_context(len(each.input_ids), where)
            yield fitting
        log_counts(self.source, len(rows), counts, self.max_length)

    def check_first(self, row: Mapping[str, Any], columns: Mapping[str, str | None]) -> None:
        """Warn if the template's generation marks leave out the end-of-turn token, so that it would not be learned."""
        column = columns.get("messages")
        if column is None:
            return
        where = f"column {column!r} of {self.source}, row 0,"
        builder = self.for_row(row, f"{self.source}, row 0,")
        builder._check_chat(row[column], where)
        try:
            written = write_conversation(builder.formatter, builder.formatter.messages(row[column]))
        except SpecialTokenError as error:
            raise ValueError(f"{where} {error}") from None
        if written.stop == "left out" and self.reports:
            log.warning(
                "%s: the chat template's {%% generation %%} marks leave out the end-of-turn token, so the model does "
                "not learn to stop: put the token in front of {%% endgeneration %%}",
                self.source,
            )

    def pending(self, row: Mapping[str, Any], where: str, columns: Mapping[str, str | None]) -> PendingExample:
        """The example of one row; override for other columns."""
        messages, text = columns.get("messages"), columns.get("text")
        if columns.get("input_ids") is not None:
            made = tokenized_row(row, where, columns, vocabulary=len(self.tokenizer))
            return PendingExample([], True, lambda _: made)
        if messages is not None:
            place = f"column {messages!r} of {where}"
            self._check_chat(row[messages], place)
            return self.conversation(self.formatter.messages(row[messages]), place)
        if text is not None:
            return self.plain(self._text(row[text], text, where))
        prompt, completion = str(columns["prompt"]), str(columns["completion"])
        self.formatter.check(row[prompt], f"column {prompt!r} of {where}")
        answer = row[completion]
        return self.completion(row[prompt], answer if is_chat(answer) else self._text(answer, completion, where), where)

    def pending_of(self, columns: Mapping[str, Any]) -> PendingOf:
        """What makes the examples of a row, given the builder for the row, the row and its place; override it."""
        return lambda builder, row, where: [builder.pending(row, where, columns)]

    def _limit_examples(
        self, examples: Iterable[TokenExample], made_from: list[int], counts: dict[str, int]
    ) -> Iterator[TokenExample]:
        """Yield the examples with a token to learn, cut to ``max_length``; append their rows to ``made_from``."""
        for index, example in enumerate(examples):
            for fitting in self.limit_lengths(example, f"{self.source}, row {index},", counts):
                made_from.append(index)
                yield fitting

    def limit_lengths(self, example: TokenExample, where: str, counts: dict[str, int]) -> list[TokenExample]:
        """Apply ``max_length``; several examples of one under ``overlong="split"``. See :meth:`limit_length`."""
        if self.overlong == "split" and len(example.input_ids) > self.max_length and not example.attachments:
            counts["split"] = counts.get("split", 0) + 1
            pieces = [piece for piece in split_example(example, self.max_length) if piece.targets]
            counts["empty"] += not pieces
            return pieces
        fitting = self.limit_length(example, where, counts)
        return [] if fitting is None else [fitting]

    def limit_length(self, example: TokenExample, where: str, counts: dict[str, int]) -> TokenExample | None:
        """Apply ``max_length``, counting in ``counts``; ``None`` if the example is dropped or has no token to learn.

        Raises ValueError if it is too long under ``overlong="error"``.
        """
        length = len(example.input_ids)
        if length > self.max_length:
            self.check_overlong(length, where)
            drops = self.drops(example)
            counts["dropped" if drops else "truncated"] += 1
            if drops:
                return None
            example = TokenExample(example.input_ids[: self.max_length], example.loss_mask[: self.max_length])
        if example.targets:
            return example
        counts["empty"] += 1
        return None

    def drops(self, example: TokenExample) -> bool:
        """Whether an example above ``max_length`` is left out; one with images always is, as they cannot be cut."""
        return self.overlong == "drop" or bool(example.attachments)

    def check_overlong(self, length: int, where: str) -> None:
        """Raise ValueError for an example above ``max_length`` if ``overlong`` is ``"error"``."""
        if self.overlong == "error":
            raise ValueError(
                f"{where} has {length} tokens, more than max_length {self.max_length}: raise it, or let "
                "overlong='truncate' or 'drop' deal with such rows"
            )

    @staticmethod
    def _text(value: Any, column: str, where: str) -> str:
        if not isinstance(value, str):
            raise ValueError(f"column {column!r} of {where} must hold text, it holds {type(value).__name__}: {value!r}")
        return value

    def plain(self, text: str) -> PendingExample:
        """The example of a text followed by an end-of-sequence token; all tokens are learned."""

        def finish(parts: list[list[int]]) -> TokenExample:
            token_ids = self._with_eos(parts[0])
            return TokenExample(token_ids, [True] * len(token_ids))

        text = self.formatter.handle_special_tokens(text, templated=False)
        return PendingExample([text], False, finish, self.formatter.images)

    def completion(self, prompt: Any, completion: Any, where: str = "the row") -> PendingExample:
        """The example of a prompt and completion, each text or chat messages; only the latter is learned."""
        if isinstance(completion, list) or self.formatter.templated(prompt):
            answer = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
            question = self.formatter.messages(prompt)
            return self.conversation([*question, *answer], where, first=len(question))

        def finish(parts: list[list[int]]) -> TokenExample:
            before, token_ids = parts
            start = common_prefix(before, token_ids)
            token_ids = self._with_eos(token_ids)
            return TokenExample(token_ids, [False] * start + [True] * (len(token_ids) - start))

        texts = (prompt, prompt + completion)
        prompt, both = (self.formatter.handle_special_tokens(text, templated=False) for text in texts)
        return PendingExample([prompt, both], False, finish, self.formatter.images)

    def conversation(self, messages: Any, where: str = "the conversation", *, first: int = 0) -> PendingExample:
        """The example of a conversation; only the assistant's turns with their end-of-turn tokens are learned.

        If the template writes no end-of-turn token after a last turn of the assistant, an end-of-sequence token is
        added and learned. Messages before index ``first`` are not learned. Raises ValueError if the template does not
        accept them.
        """
        from jinja2 import TemplateError

        self._check_chat(messages, where)
        messages = self.formatter.as_messages(messages)
        try:
            written = write_conversation(self.formatter, messages, first=first)
        except SpecialTokenError:
            raise  # _pending_of adds the row to the message
        except (TemplateError, ValueError) as error:
            raise ValueError(f"{where} is not accepted by the chat template: {error}") from error
        answered = messages[-1]["role"] == "assistant"

        def finish(_: list[list[int]]) -> TokenExample:
            token_ids, mask = span_mask(self.tokenizer, written.text, written.spans)
            end = self.tokenizer.eos_token_id
            if answered and written.spans and written.stop == "missing" and end is not None:
                return TokenExample([*token_ids, end], [*mask, True])
            return TokenExample(token_ids, mask)

        return PendingExample([], True, finish, self.formatter.attachments(messages))

    def _check_chat(self, messages: Any, where: str) -> None:
        if not is_chat(messages):
            raise ValueError(f"{where} must hold chat messages (role and content), it holds {str(messages)[:80]!r}")
        self.formatter.check(messages, where)

    def _with_eos(self, token_ids: list[int]) -> list[int]:
        """Append the end-of-sequence token if it is missing."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ValueError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token")
        return token_ids if token_ids and token_ids[-1] == end else [*token_ids, end]


def log_counts(source: str, rows: int, counts: Mapping[str, int], max_length: int) -> None:
    """Log how many rows were truncated or dropped."""
    meanings = {
        "truncated": f"were truncated at max_length {max_length}",
        "split": f"were split into parts of max_length {max_length}",
        "dropped": f"were dropped at max_length {max_length}",
        "empty": "have no token to learn and are left out",
    }
    for name, meaning in meanings.items():
        if counts.get(name):
            log.warning("%s: %d of %d rows %s", source, counts[name], rows, meaning)
