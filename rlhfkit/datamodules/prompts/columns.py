"""``PromptColumns``: how a row of a table becomes a prompt."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.tokenization.chat import PromptFormatter, SpecialTokenError


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
        content, where = row[self.prompt], f"column {self.prompt!r} of {where}"
        self.formatter.check(content, where)
        try:
            return self.formatter.for_row(row).prompt(content)
        except SpecialTokenError as error:
            raise ValueError(f"{where} {error}") from None

    def tokenize(self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[list[int]]:
        """Token ids of the prompts of rows, given their :meth:`text`; some may be texts and others chat messages."""
        kinds = [self.formatter.templated(row[self.prompt]) for row in rows]
        found: dict[bool, Iterator[list[int]]] = {}
        for kind in set(kinds):
            group = [text for text, one in zip(texts, kinds, strict=True) if one is kind]
            found[kind] = iter(self.formatter.tokenize(group, templated=kind))
        return [next(found[kind]) for kind in kinds]

    def check_tokens(self, row: Mapping[str, Any], where: str, token_ids: Sequence[int]) -> None:
        """Raise ValueError if a prompt has no token."""
        if not token_ids:
            raise ValueError(
                f"column {self.prompt!r} of {where} is a prompt without a token ({row[self.prompt]!r}); a policy needs "
                "at least one to begin with: remove such rows"
            )

    def check_token(self, token: int, vocabulary: int | None, where: str) -> None:
        """Raise ValueError if the model has no embedding of a token."""
        if vocabulary is not None and token >= vocabulary:
            text = self.formatter.tokenizer.convert_ids_to_tokens(token)
            raise ValueError(
                f"{where} has the token {token} ({text!r}), and the model knows the tokens "
                f"0 to {vocabulary - 1}: use the model's own tokenizer, or resize its embeddings before training "
                "(model.resize_token_embeddings(len(tokenizer)), save_pretrained)"
            )

    def make(self, row: Mapping[str, Any], index: int, rendered: str, token_ids: list[int]) -> Prompt:
        """Make the prompt of a row; ``rendered`` is its :meth:`text`."""
        others = dict(row)
        content = others.pop(self.prompt)
        answer = None if self.answer is None else self.answer_extractor(others.pop(self.answer))
        text = content if isinstance(content, str) else rendered
        return Prompt(index=index, token_ids=token_ids, text=text, answer=answer, metadata=others)
