"""Supervised examples: rows become token ids with a mask of the learned tokens, truncated to a maximum length.

Texts are tokenised as a whole. A completion begins at the first token that differs from the tokens of the prompt alone,
so a token that spans both is learned. Rows may be token ids already, and examples may be split instead of cut.
"""

import copy
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from rlhfkit.data.batch import TokenExample
from rlhfkit.data.loaders.steps import ExampleTable, TokenizedDataset
from rlhfkit.datamodules.tokenization.assistant_mask import common_prefix, span_mask, write_conversation
from rlhfkit.datamodules.tokenization.cache import CHUNK, TokenCache, fingerprint
from rlhfkit.datamodules.tokenization.chat import PromptFormatter, SpecialTokenError, is_chat
from rlhfkit.datamodules.tokenization.columns import ATTENTION_MASK
from rlhfkit.datamodules.tokenization.sources import PlacedRow

if TYPE_CHECKING:
    from datasets import Dataset


IGNORED = -100
"""The label of a token that is not learned, in Transformers' data sets."""


def tokenized_row(row: Mapping[str, Any], where: str, columns: Mapping[str, str], *, vocabulary: int) -> TokenExample:
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
    token_ids = _numbers(row, columns["input_ids"], where)
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


def number_in(value: Any, column: str, where: str) -> float:
    """The number that a column holds.

    Raises:
        ValueError: If it holds something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"column {column!r} of {where} must hold a number, it holds {value!r}")
    return float(value)


def _numbers(row: Mapping[str, Any], column: str, where: str, count: int | None = None) -> list[int]:
    values = row[column]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"column {column!r} of {where} must hold a list of integers, it holds {values!r:.80}")
    if count is not None and len(values) != count:
        raise ValueError(f"column {column!r} of {where} has {len(values)} values for {count} tokens")
    return values


log = logging.getLogger(__name__)


class PendingExample(NamedTuple):
    """How to make one answer: texts, which are tokenised in batches, and a function of their token ids."""

    texts: list[str]
    """Texts to tokenise."""
    templated: bool
    """Whether the texts went through the chat template."""
    finish: Callable[[list[list[int]]], TokenExample]
    """Makes the answer from the token ids of the texts."""
    attachments: tuple[Any, ...] = ()
    """The images of the answer, in the order of their tokens."""
    labels: Sequence[float] = ()
    """What the data says of the answer."""


@dataclass(slots=True)
class Answer:
    """A tokenised answer of a row."""

    tokens: TokenExample
    place: int
    """Which of the answers of its row it is."""
    labels: Sequence[float] = ()
    """What the data says of it."""


@dataclass(slots=True)
class RowResult:
    """What became of a row."""

    answers: list[Answer] = field(default_factory=list)
    """Its answers that are learned."""
    outcomes: list[str] = field(default_factory=list)
    """Why it was cut or left out, if it was: keys of :attr:`ExampleBuilder.meanings`."""


class ExampleBuilder:
    """Makes examples of supervised fine-tuning of rows, of a table or of a stream; subclasses read other columns.

    Args:
        formatter: Renders prompts and chats.
        columns: Columns that are read, by argument of the DataModule.
        max_length: Tokens per answer.
        overlong: ``"truncate"``, ``"split"``, ``"drop"`` or ``"error"`` for longer ones.
        source: Where the rows come from, for messages.
        context: The model's context length; longer answers are an error; ``None``: unlimited.
        cache: Stores the answers of a table for later runs.
        numbers: Columns of numbers that examples have too.
        reports: Log how many rows were truncated or dropped.
    """

    example: ClassVar[type[Any] | None] = None
    """Class of examples, made of their answers and :meth:`values`; ``None``: an answer is an example."""
    answers_each: ClassVar[int] = 1
    """Answers of an example."""
    meanings: ClassVar[Mapping[str, str]] = {
        "truncated": "rows were truncated at max_length {limit}",
        "split": "rows were split into parts of max_length {limit}",
        "dropped": "rows were dropped at max_length {limit}",
        "empty": "rows have no token to learn and are left out",
    }
    """What is logged of each outcome of rows."""
    wanted: ClassVar[str] = "has a token to learn"
    """What no row of the data does if there is no example."""

    def __init__(
        self,
        formatter: PromptFormatter,
        columns: Mapping[str, str],
        *,
        max_length: int,
        overlong: str,
        source: str,
        context: int | None = None,
        cache: TokenCache | None = None,
        numbers: Sequence[str] = (),
        reports: bool = True,
    ) -> None:
        self.formatter = formatter
        self.tokenizer = formatter.tokenizer
        self.columns = columns
        self.max_length = max_length
        self.overlong = overlong
        self.source = source
        self.context = context
        self.cache = TokenCache() if cache is None else cache
        self.numbers = tuple(numbers)
        self.reports = reports

    # ------------------------------------------------------------------ tables and streams

    def table(self, rows: "Dataset") -> TokenizedDataset:
        """The examples of all rows, from the cache if it has them; logs how many rows were cut or left out.

        Raises ValueError if a value has the wrong type, an answer is too long under ``overlong="error"`` or for the
        model's context (the cache keeps it, for other models), or no example is left.
        """
        self.check_first(rows[0])
        digest = fingerprint(rows, self.tokenizer, self.settings())
        answers = self.cache.tokenize(rows, self._columns_of_answers, digest=digest, title=f"Tokenising {self.source}")
        if not len(answers):
            raise ValueError(
                f"{self.source}: none of its {len(rows)} rows {self.wanted} within max_length {self.max_length} "
                f"({', '.join(f'{name}: {count}' for name, count in answers.counts.items())}): raise max_length, or "
                "check the columns and the roles of messages (user, assistant)"
            )
        if self.reports:
            self.report(len(rows), answers.counts, sum(answers.targets))
        longest = max(range(len(answers)), key=lambda index: answers.lengths[index])
        self.check_context(answers.lengths[longest], f"{self.source}, row {answers.rows[longest]},")
        answers.numbers = {
            name: [number_in(value, name, f"{self.source}, row {row},") for row, value in enumerate(rows[name])]
            for name in self.numbers
        }
        if self.formatter.sees_images:

            def read(index: int) -> tuple[Any, ...]:
                """Images are read again from their row: those of all rows would be much to keep."""
                row = answers.rows[index]
                return self._pending(rows[row], f"{self.source}, row {row},")[answers.places[index]].attachments

            answers.attachments = read
        if self.example is None:
            return answers
        return ExampleTable(answers, self.example, each=self.answers_each, **self.values(answers.labels))

    def examples(self, rows: Sequence[PlacedRow]) -> Iterator[list[Any]]:
        """Yield the examples of each of some rows of a stream, in their order; log how many were cut or left out.

        Raises ValueError as :meth:`table` does.
        """
        counts: Counter[str] = Counter()
        targets = 0
        for (where, row), result in zip(rows, self.results(rows), strict=True):
            counts.update(result.outcomes)
            tokens = [answer.tokens for answer in result.answers]
            numbers = {name: number_in(row[name], name, where) for name in self.numbers}
            for one in tokens:
                one.numbers = numbers
                self.check_context(one.num_tokens, where)
                targets += one.targets
            if self.example is None:
                yield tokens
                continue
            found = self.values([answer.labels for answer in result.answers])
            yield [
                self.example(
                    *tokens[number * self.answers_each : (number + 1) * self.answers_each],
                    **{name: values[number] for name, values in found.items()},
                )
                for number in range(len(tokens) // self.answers_each)
            ]
        if self.reports:
            self.report(len(rows), counts, targets)

    def results(self, rows: Iterable[PlacedRow]) -> Iterator[RowResult]:
        """Yield what becomes of each row."""
        remaining = iter(rows)
        # A fast tokenizer uses all cores for many texts at once.
        while chunk := list(itertools.islice(remaining, CHUNK)):
            pending = [self._pending(row, where) for where, row in chunk]
            texts = [(text, one.templated) for each in pending for one in each for text in one.texts]
            tokenized = iter(self.formatter.tokenize(texts))
            for (where, _), each in zip(chunk, pending, strict=True):
                answers = []
                for place, one in enumerate(each):
                    tokens = one.finish([next(tokenized) for _ in one.texts])
                    tokens.attachments = one.attachments
                    answers.append(Answer(tokens, place, one.labels))
                yield self.fit(answers, where)

    def _columns_of_answers(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        """The columns of :class:`TokenExamples` of some rows of a table."""
        names = list(batch)
        rows = [dict(zip(names, values, strict=True)) for values in zip(*(batch[name] for name in names), strict=True)]
        placed = [(f"{self.source}, row {index},", row) for index, row in zip(indices, rows, strict=True)]
        lines: list[tuple[Any, ...]] = []
        for index, result in zip(indices, self.results(placed), strict=True):
            outcomes = result.outcomes
            for answer in result.answers:
                tokens = answer.tokens
                lines.append(
                    (index, answer.place, tokens.input_ids, tokens.loss_mask, tokens.targets, answer.labels, outcomes)
                )
                outcomes = []
            if outcomes:  # of a row without answers
                lines.append((index, 0, [], [], 0, [], outcomes))
        columns = ("row", "place", "input_ids", "loss_mask", "targets", "labels", "outcomes")
        return {name: [line[number] for line in lines] for number, name in enumerate(columns)}

    def settings(self) -> dict[str, Any]:
        """Everything besides rows and tokenizer that answers depend on, as plain values."""
        return {
            "builder": type(self).__name__,
            "columns": dict(self.columns),
            "max_length": self.max_length,
            "overlong": self.overlong,
            "style": self.formatter.style(),
        }

    def report(self, rows: int, counts: Mapping[str, int], targets: int) -> None:
        """Log how many of some rows were cut or left out; ``targets`` are learned tokens of all answers."""
        for name, meaning in self.meanings.items():
            if counts.get(name):
                log.warning("%s: %d of %d %s", self.source, counts[name], rows, meaning.format(limit=self.max_length))

    # ------------------------------------------------------------------ what subclasses override

    def values(self, labels: Sequence[Sequence[float]]) -> dict[str, Sequence[Any]]:
        """Values of examples by the name of :attr:`example`'s argument, from the labels of all their answers."""
        return {}

    def pending(self, row: Mapping[str, Any], where: str) -> list[PendingExample]:
        """The answers of one row."""
        return [self.supervised(row, where, self.columns)]

    def fit(self, answers: Sequence[Answer], where: str) -> RowResult:
        """The answers of a row with a token to learn, cut to ``max_length``.

        Raises ValueError if one is too long under ``overlong="error"``.
        """
        result = RowResult()
        for answer in answers:
            for tokens in self._limited(answer.tokens, where, result.outcomes):
                result.answers.append(Answer(tokens, answer.place, answer.labels))
        return result

    # ------------------------------------------------------------------ rows

    def _pending(self, row: Mapping[str, Any], where: str) -> list[PendingExample]:
        """:meth:`pending` with the template arguments and images of the row."""
        builder, formatter = self, self.formatter.for_row(row, where)
        if formatter is not self.formatter:
            builder = self.with_formatter(formatter)
        try:
            return builder.pending(row, where)
        except SpecialTokenError as error:
            raise ValueError(f"{where} {error}") from None

    def with_formatter(self, formatter: PromptFormatter) -> Self:
        """A copy with another formatter."""
        changed = copy.copy(self)
        changed.formatter = formatter
        return changed

    def supervised(self, row: Mapping[str, Any], where: str, columns: Mapping[str, str]) -> PendingExample:
        """The answer in columns ``prompt`` and ``completion``, ``messages``, ``text``, or token ids in ``input_ids``.

        Of token ids, ``labels`` or ``loss_mask`` say which are learned, else all are.
        """
        messages, text = columns.get("messages"), columns.get("text")
        if columns.get("input_ids") is not None:
            made = tokenized_row(row, where, columns, vocabulary=len(self.tokenizer))
            return PendingExample([], True, lambda _: made, self.formatter.images)
        if messages is not None:
            place = f"column {messages!r} of {where}"
            self._check_chat(row[messages], place)
            return self.conversation(self.formatter.messages(row[messages]), place)
        if text is not None:
            return self.plain(self._text(row[text], text, where))
        prompt, completion = columns["prompt"], columns["completion"]
        self.formatter.check(row[prompt], f"column {prompt!r} of {where}")
        answer = row[completion]
        return self.completion(row[prompt], answer if is_chat(answer) else self._text(answer, completion, where), where)

    def check_first(self, row: Mapping[str, Any]) -> None:
        """Warn if the template's generation marks leave out the end-of-turn token, so that it would not be learned."""
        column = self.columns.get("messages")
        if column is None:
            return
        where = f"column {column!r} of {self.source}, row 0,"
        builder = self.with_formatter(self.formatter.for_row(row, f"{self.source}, row 0,"))
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

    # ------------------------------------------------------------------ lengths

    def _limited(self, tokens: TokenExample, where: str, outcomes: list[str]) -> list[TokenExample]:
        """Apply ``max_length``: the sequence, a part, several under ``overlong="split"``, or none to learn from."""
        length, pieces = tokens.num_tokens, [tokens]
        if length > self.max_length:
            self.check_overlong(length, where)
            if self.drops(tokens):
                outcomes.append("dropped")
                return []
            splits = self.overlong == "split"
            outcomes.append("split" if splits else "truncated")
            pieces = split_example(tokens, self.max_length) if splits else [self.cut(tokens)]
        learned = [piece for piece in pieces if piece.targets]
        outcomes += [] if learned else ["empty"]
        return learned

    def cut(self, tokens: TokenExample) -> TokenExample:
        """A sequence cut to ``max_length``."""
        return TokenExample(tokens.input_ids[: self.max_length], tokens.loss_mask[: self.max_length])

    def drops(self, tokens: TokenExample) -> bool:
        """Whether a sequence above ``max_length`` is left out; one with images always is, as they cannot be cut."""
        return self.overlong == "drop" or bool(tokens.attachments)

    def check_overlong(self, length: int, where: str) -> None:
        """Raise ValueError for a sequence above ``max_length`` if ``overlong`` is ``"error"``."""
        if self.overlong == "error":
            raise ValueError(
                f"{where} has {length} tokens, more than max_length {self.max_length}: raise it, or let "
                "overlong='truncate' or 'drop' deal with such rows"
            )

    def check_context(self, length: int, where: str) -> None:
        """Raise ValueError if a sequence is longer than the model's context."""
        if self.context is not None and length > self.context:
            raise ValueError(
                f"{where} has {length} tokens within max_length {self.max_length}, more than the model's context of "
                f"{self.context}: lower it, max_length={self.context}, or use a model with a longer context"
            )

    # ------------------------------------------------------------------ kinds of answers

    @staticmethod
    def _text(value: Any, column: str, where: str) -> str:
        if not isinstance(value, str):
            cure = (
                f": give rows with text (datasets: rows.cast_column({column!r}, datasets.Value('string')))"
                if isinstance(value, int | float)  # a CSV file has them where each value looks like a number
                else ""
            )
            raise ValueError(
                f"column {column!r} of {where} must hold text, it holds {type(value).__name__}: {value!r}{cure}"
            )
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
            raise  # _pending adds the row to the message
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
