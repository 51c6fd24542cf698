"""Supervised examples: from rows to tokens, which of them are learned, what is cut and left out.

A completion begins where the tokens of the whole text leave those of the prompt (**common token prefixes**; a token
that straddles the border is learned); turns of the assistant are found in the text that the template writes
(:mod:`~rlhfkit.datamodules.tokenization.assistant_mask`). No text is tokenised in pieces that are glued.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rlhfkit.data.batch import TokenExample
from rlhfkit.datamodules.tokenization.assistant_mask import common_prefix, span_mask, write_conversation
from rlhfkit.datamodules.tokenization.cache import CHUNK, TokenCache, tokenise_rows
from rlhfkit.datamodules.tokenization.chat import PromptFormat, SpecialTokenError, as_messages, is_chat
from rlhfkit.datamodules.tokenization.token_examples import TokenExamples

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

__all__ = ["ExampleBuilder", "Recipe", "TokenExamples", "common_prefix"]


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

    def __init__(
        self,
        style: PromptFormat,
        max_length: int,
        overlong: str,
        source: str,
        *,
        context: int | None = None,
        cache: TokenCache | None = None,
    ) -> None:
        """Set the rules.

        Args:
            style: How prompts and chats are written.
            max_length: Tokens per example.
            overlong: ``"truncate"``, ``"drop"`` or ``"error"``.
            source: Where the rows come from, for messages.
            context: Tokens that the model can see; ``None``: any number. What is longer is refused.
            cache: Keeps the examples for the next start; ``None``: they are not kept.
        """
        self.style = style
        self.tokenizer = style.tokenizer
        self.max_length = max_length
        self.overlong = overlong
        self.source = source
        self.context = context
        self.cache = cache

    def for_row(self, row: Mapping[str, Any]) -> Self:
        """The builder of one row: with its own template arguments, where it has any.

        Args:
            row: One row of the data.
        """
        style = self.style.for_row(row)
        if style is self.style:
            return self
        changed = copy.copy(self)
        changed.style = style
        return changed

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
            ValueError: If a value has the wrong type, a sequence is too long under ``overlong="error"`` or for the
                model's context, or no example is left.
        """
        columns = {"prompt": prompt, "completion": completion, "messages": messages, "text": text}
        self.check_first(rows[0], columns)
        kept = self.kept(rows, columns, lambda: self._make(rows, columns))
        log_counts(self.source, len(rows), kept.counts, self.max_length)
        return kept

    def kept(self, rows: "Dataset", columns: Mapping[str, Any], make: Callable[[], TokenExamples]) -> TokenExamples:
        """Examples from the cache, or made and kept there; all of them within the model's context.

        Args:
            rows: The data.
            columns: Which columns of it are read, and how.
            make: Makes the examples.

        Raises:
            ValueError: If one is longer than the model's context. The cache holds it all the same, for other models.
        """
        examples = self._cached(rows, columns, make)
        longest = max(range(len(examples)), key=lambda index: examples.lengths[index])
        self.check_context(examples.lengths[longest], f"{self.source}, row {examples.rows[longest]},")
        return examples

    def check_context(self, length: int, where: str) -> None:
        """Raise if an example is longer than the model's context.

        Args:
            length: Its tokens, after it was cut to ``max_length``.
            where: Source and row, for the message.

        Raises:
            ValueError: With the length and the cure.
        """
        if self.context is not None and length > self.context:
            raise ValueError(
                f"{where} has {length} tokens within max_length {self.max_length}, more than the model's context of "
                f"{self.context}: lower it, max_length={self.context}, or use a model with a longer context"
            )

    def _cached(self, rows: "Dataset", columns: Mapping[str, Any], make: Callable[[], TokenExamples]) -> TokenExamples:
        if self.cache is None:
            return make()
        style = self.style
        arguments = {
            "builder": type(self).__name__,
            "columns": dict(columns),
            "max_length": self.max_length,
            "overlong": self.overlong,
            "style": [style.wraps_text, style.system, style.arguments, style.special_tokens_in_text],
        }
        return self.cache.examples(rows, self.tokenizer, arguments, make)

    def _make(self, rows: "Dataset", columns: Mapping[str, str | None]) -> TokenExamples:
        counts: dict[str, int] = {"truncated": 0, "dropped": 0, "empty": 0}
        made_from: list[int] = []
        tokenised = self.tokenised(rows, lambda builder, row, where: [builder.recipe(row, where, columns)])
        made = TokenExamples(self._fitting(tokenised, made_from, counts))
        made.rows, made.counts = made_from, counts
        if not len(made):
            raise ValueError(
                f"{self.source}: none of its {len(rows)} rows has a token to learn within max_length {self.max_length} "
                f"({counts['truncated'] + counts['dropped']} are longer): raise max_length or check the columns"
            )
        return made

    def tokenised(
        self, rows: "Dataset", recipes: Callable[[Self, Mapping[str, Any], str], Iterable[Recipe]]
    ) -> Iterator[TokenExample]:
        """The examples of all rows, before anything is cut or left out.

        Args:
            rows: The data.
            recipes: From the builder of a row, the row, and its place for messages, to the recipes of its examples.
        """

        def tokenise(chunk: list[dict[str, Any]], first: int) -> list[TokenExample]:
            return list(self.tokenized(enumerate(chunk, first), recipes))

        num_proc = 1 if self.cache is None else self.cache.num_proc
        return tokenise_rows(rows, tokenise, num_proc=num_proc, title=f"Tokenising {self.source}")

    def tokenized(
        self,
        rows: Iterable[tuple[int, Mapping[str, Any]]],
        recipes: Callable[[Self, Mapping[str, Any], str], Iterable[Recipe]],
    ) -> Iterator[TokenExample]:
        """The examples of some rows.

        Args:
            rows: Index (for messages) and row of each.
            recipes: See :meth:`tokenised`.
        """
        places = ((row, f"{self.source}, row {index},") for index, row in rows)
        return self._cooked(recipe for row, where in places for recipe in self._of_row(row, where, recipes))

    def _of_row(
        self,
        row: Mapping[str, Any],
        where: str,
        recipes: Callable[[Self, Mapping[str, Any], str], Iterable[Recipe]],
    ) -> Iterator[Recipe]:
        """The recipes of one row; control tokens that are refused are told with their place."""
        try:
            yield from recipes(self.for_row(row), row, where)
        except SpecialTokenError as error:
            raise ValueError(f"{where} {error}") from None

    def check_first(self, row: Mapping[str, Any], columns: Mapping[str, str | None]) -> None:
        """Warn if the template's marks leave out what ends a turn: the model would not learn to stop.

        Args:
            row: The first row; what ends a turn is the same in all of them.
            columns: Column by argument of :meth:`build`.
        """
        column = columns.get("messages")
        if column is None:
            return
        builder, where = self.for_row(row), f"column {column!r} of {self.source}, row 0,"
        builder._check_chat(row[column], where)
        try:
            written = write_conversation(builder.style, builder.style.messages(row[column]))
        except SpecialTokenError as error:
            raise ValueError(f"{where} {error}") from None
        if written.stop == "left out":
            log.warning(
                "%s: the chat template's {%% generation %%} marks leave out the end-of-turn token, so the model does "
                "not learn to stop: put the token in front of {%% endgeneration %%}",
                self.source,
            )

    def recipe(self, row: Mapping[str, Any], where: str, columns: Mapping[str, str | None]) -> Recipe:
        """How one row becomes an example; override for other columns.

        Args:
            row: One row of the data.
            where: Source and row, for messages.
            columns: Column by argument of :meth:`build`.
        """
        messages, text = columns.get("messages"), columns.get("text")
        if messages is not None:
            place = f"column {messages!r} of {where}"
            self._check_chat(row[messages], place)
            return self.conversation(self.style.messages(row[messages]), place)
        if text is not None:
            return self.plain(self._text(row[text], text, where))
        prompt, completion = str(columns["prompt"]), str(columns["completion"])
        self.style.check(row[prompt], f"column {prompt!r} of {where}")
        answer = row[completion]
        return self.completion(row[prompt], answer if is_chat(answer) else self._text(answer, completion, where), where)

    def _cooked(self, recipes: Iterable["Recipe"]) -> Iterator[TokenExample]:
        """Tokenise many texts at a time: a fast tokenizer does them on all cores."""
        recipes = iter(recipes)
        while chunk := list(itertools.islice(recipes, CHUNK)):
            tokenised: dict[bool, Iterator[list[int]]] = {}
            for templated in (False, True):
                texts = [text for recipe in chunk if recipe.templated is templated for text in recipe.texts]
                tokenised[templated] = iter(self.style.tokenize(texts, templated=templated) if texts else [])
            for recipe in chunk:
                parts = tokenised[recipe.templated]
                yield recipe.finish([next(parts) for _ in recipe.texts])

    def _fitting(
        self, examples: Iterable[TokenExample], made_from: list[int], counts: dict[str, int]
    ) -> Iterator[TokenExample]:
        """Those that can be learned from, cut to the limit; their rows go to ``made_from``."""
        for index, example in enumerate(examples):
            fitting = self.fit(example, f"{self.source}, row {index},", counts)
            if fitting is not None:
                made_from.append(index)
                yield fitting

    def fit(self, example: TokenExample, where: str, counts: dict[str, int]) -> TokenExample | None:
        """An example within the limit, or ``None`` if there is nothing to learn in it; what is done is counted.

        Args:
            example: As tokenised.
            where: Source and row, for messages.
            counts: By what was done: ``truncated``, ``dropped``, ``empty``.

        Raises:
            ValueError: If it is too long under ``overlong="error"``.
        """
        length = len(example.input_ids)
        if length > self.max_length:
            if self.overlong == "error":
                raise ValueError(
                    f"{where} has {length} tokens, more than max_length {self.max_length}: raise it, or let "
                    "overlong='truncate' or 'drop' deal with such rows"
                )
            counts["dropped" if self.overlong == "drop" else "truncated"] += 1
            if self.overlong == "drop":
                return None
            example = TokenExample(example.input_ids[: self.max_length], example.loss_mask[: self.max_length])
        if example.targets:
            return example
        counts["empty"] += 1
        return None

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

        return Recipe([self.style.guarded(text, templated=False)], False, finish)

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

        prompt, both = (self.style.guarded(text, templated=False) for text in (prompt, prompt + completion))
        return Recipe([prompt, both], False, finish)

    def conversation(self, messages: Any, where: str = "the conversation", *, first: int = 0) -> "Recipe":
        """Chat messages; only what the assistant says (with its end-of-turn token) is learned.

        Where the template writes nothing that ends a last word of the assistant, an end-of-sequence token is put behind
        it and learned.

        Args:
            messages: Roles and contents.
            where: Column, source and row, for messages.
            first: Messages in front of this one are not learned, whoever says them.

        Raises:
            ValueError: If these are no chat messages, or the template does not take them.
        """
        from jinja2 import TemplateError

        self._check_chat(messages, where)
        messages = as_messages(messages)
        try:
            written = write_conversation(self.style, messages, first=first)
        except SpecialTokenError:
            raise  # the row is put in front of it where the row is known
        except (TemplateError, ValueError) as error:
            raise ValueError(f"{where} is not accepted by the chat template: {error}") from error
        answered = messages[-1]["role"] == "assistant"

        def finish(_: list[list[int]]) -> TokenExample:
            token_ids, mask = span_mask(self.tokenizer, written.text, written.spans)
            end = self.tokenizer.eos_token_id
            if answered and written.spans and written.stop == "missing" and end is not None:
                return TokenExample([*token_ids, end], [*mask, True])
            return TokenExample(token_ids, mask)

        return Recipe([], True, finish)

    def _check_chat(self, messages: Any, where: str) -> None:
        if not is_chat(messages):
            raise ValueError(f"{where} must hold chat messages (role and content), it holds {str(messages)[:80]!r}")
        self.style.check(messages, where)

    def _ended(self, token_ids: list[int]) -> list[int]:
        """With the end-of-sequence token behind it, once."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ValueError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token")
        return token_ids if token_ids and token_ids[-1] == end else [*token_ids, end]


def log_counts(source: str, rows: int, counts: Mapping[str, int], max_length: int) -> None:
    """Say what was cut and left out.

    Args:
        source: Where the rows come from.
        rows: How many there are.
        counts: See :attr:`TokenExamples.counts`.
        max_length: Tokens per example.
    """
    meanings = {
        "truncated": f"were truncated at max_length {max_length}",
        "dropped": f"were dropped at max_length {max_length}",
        "empty": "have no token to learn and are left out",
    }
    for name, meaning in meanings.items():
        if counts.get(name):
            log.warning("%s: %d of %d rows %s", source, counts[name], rows, meaning)
