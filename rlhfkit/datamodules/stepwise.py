"""``StepwiseDataModule``: answers in reasoning steps with one label per step, for process reward models."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rlhfkit.data.batch import TokenExample
from rlhfkit.data.formats import StepwiseExample, collate_stepwise
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.tokenization.assistant_mask import common_prefix
from rlhfkit.datamodules.tokenization.columns import STEPWISE, find_columns
from rlhfkit.datamodules.tokenization.examples import Answer, ExampleBuilder, PendingExample, RowResult
from rlhfkit.datamodules.tokenization.mixture import Sources
from rlhfkit.datamodules.tokenization.sources import RowPreview, Source, check_columns

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_WORDS = {"+": 1.0, "good": 1.0, "true": 1.0, "1": 1.0, "-": 0.0, "bad": 0.0, "false": 0.0, "0": 0.0}


class StepwiseBuilder(ExampleBuilder):
    """Tokenises rows with a mask of the last token of each step, and reads the labels."""

    example = StepwiseExample
    ends = "\n"
    """Text at the end of each step."""
    step_token_id: int | None = None
    """The token that ends steps in a text."""

    def end_steps_with(self, ends: str) -> None:
        """Set what ends a step; ValueError if that is not one token of a text."""
        self.ends = ends
        self.step_token_id = self._step_token_id(ends) if "text" in self.columns else None

    def settings(self) -> dict[str, Any]:
        """Everything that answers depend on."""
        return super().settings() | {"ends": self.ends}

    def values(self, labels: Sequence[Sequence[float]]) -> dict[str, Sequence[Any]]:
        """The labels of steps."""
        return {"labels": labels}

    def pending(self, row: Mapping[str, Any], where: str) -> list[PendingExample]:
        """One answer, which must have as many steps as labels."""
        labels = self._labels(row, where)
        if "text" in self.columns:
            text = self._text(row[self.columns["text"]], self.columns["text"], where)
            if self.formatter.images:
                text = self.formatter.handle_special_tokens(text, templated=False)
            made = self._ended_by_token(text, labels, where)
        else:
            prompt = self.columns["prompt"]
            self.formatter.check(row[prompt], f"column {prompt!r} of {where}")
            made = self._steps(row[prompt], row[self.columns["completions"]], labels, where)
        return [made._replace(labels=labels)]

    def fit(self, answers: Sequence[Answer], where: str) -> RowResult:
        """The answer cut to ``max_length``, which cuts its last steps, so that the labels left are the first ones."""
        result = super().fit(answers, where)
        given = sum(len(answer.labels) for answer in answers)
        for answer in result.answers:
            answer.labels = answer.labels[: answer.tokens.targets]
        result.outcomes += ["behind"] * (given - sum(answer.tokens.targets for answer in result.answers))
        return result

    def report(self, rows: int, counts: Mapping[str, int], targets: int) -> None:
        """Log how many rows and steps were cut or left out."""
        super().report(rows, counts, targets)
        if behind := counts.get("behind"):
            limit = self.max_length
            log.warning("%s: %d of %d steps lie behind max_length %d", self.source, behind, targets + behind, limit)

    def _ended_by_token(self, text: str, labels: Sequence[Any], where: str) -> PendingExample:
        """The example of a text in which the step token ends each step."""

        def finish(parts: list[list[int]]) -> TokenExample:
            mask = [token == self.step_token_id for token in parts[0]]
            _check_count(sum(mask), len(labels), where)
            return TokenExample(parts[0], mask)

        return PendingExample([text], False, finish, self.formatter.images)

    def _steps(self, prompt: Any, steps: Any, labels: Sequence[Any], where: str) -> PendingExample:
        """The example of a list of steps; the last token of each is found by common token prefixes."""
        column = self.columns["completions"]
        if not isinstance(steps, list):
            raise ValueError(f"column {column!r} of {where} must hold a list of steps, it holds {steps!r}")
        _check_count(len(steps), len(labels), where)
        prefixes = [self.formatter.prompt(prompt)]
        for step in steps:
            prefixes.append(prefixes[-1] + self._text(step, column, where) + self.ends)

        def finish(parts: list[list[int]]) -> TokenExample:
            whole = parts[-1]
            last = [common_prefix(part, whole) - 1 for part in parts]
            if any(end <= before for before, end in itertools.pairwise(last)):
                raise ValueError(f"{where} has a step without a token of its own: the tokenizer joins it with others")
            return TokenExample(whole, [position in last[1:] for position in range(len(whole))])

        return PendingExample(prefixes, self.formatter.templated(prompt), finish, self.formatter.images_of(prompt))

    def _step_token_id(self, token: str) -> int:
        found = self.tokenizer(token, add_special_tokens=False)["input_ids"]
        if len(found) != 1 or found[0] == self.tokenizer.unk_token_id:
            raise ValueError(
                f"step_token must be one token of the tokenizer, {token!r} is {found}: add it to the tokenizer, or "
                "give steps as lists (column completions)"
            )
        token_id: int = found[0]
        return token_id

    def _labels(self, row: Mapping[str, Any], where: str) -> list[float]:
        """Return the labels of a row as probabilities that the steps are correct."""
        values, where = row[self.columns["labels"]], f"column {self.columns['labels']!r} of {where}"
        if isinstance(values, str) and "text" in self.columns:
            values = _labels_in_text(row[self.columns["text"]], values, self.ends, where)
        if not isinstance(values, list):
            raise ValueError(f"{where} must hold a list of labels, it holds {values!r}")
        return [self._label(value, where) for value in values]

    @staticmethod
    def _label(value: Any, where: str) -> float:
        number = _WORDS.get(value.strip().lower()) if isinstance(value, str) else value
        if number is None or not 0.0 <= float(number) <= 1.0:
            raise ValueError(
                f"{where} must hold booleans, 0 and 1, one of the words {', '.join(_WORDS)}, or probabilities, it "
                f"holds {value!r}"
            )
        return float(number)


def _labels_in_text(text: str, labelled: str, step_token: str, where: str) -> list[str]:
    """The labels that stand in a text where ``step_token`` stands in the other (Math-Shepherd's format)."""
    *pieces, rest = text.split(step_token)
    labels, position = [], 0
    for piece in pieces:
        label = labelled[position + len(piece) :][:1]
        if not labelled.startswith(piece, position) or label not in ("+", "-"):
            break
        labels.append(label)
        position += len(piece) + 1
    if len(labels) < len(pieces) or labelled[position:] != rest:
        raise ValueError(
            f"{where} must hold a list of labels, or the text with + or - in place of each {step_token!r}; it differs "
            f"from that text at {labelled[position : position + 40]!r}"
        )
    return labels


def _check_count(steps: int, labels: int, where: str) -> None:
    if steps != labels:
        raise ValueError(f"{where} has {steps} steps and {labels} labels; each step needs one")


class StepwiseDataModule(SFTDataModule):
    r"""Reasoning steps with labels, in optimizer steps that are the same on any number of ranks.

    - prompt, completions and labels (the default, TRL's format): a list of steps and a list of as many labels. Each
      step is followed by ``separator`` and predicted at its last token;
    - ``text="input"`` with ``step_token`` (OpenRLHF's format): one text in which that token ends each step. In place of
      a list of labels there may be the same text with ``+`` or ``-`` where that token stands (Math-Shepherd's format,
      Wang et al., 2023, arXiv:2312.08935).

    A label is a boolean, 0 or 1, one of the words ``+``, ``-``, good, bad, true and false, or a soft label between 0
    and 1, the probability that the step leads to a correct answer.

    Example::

        data = StepwiseDataModule("steps.jsonl", separator="\n\n", micro_batch_size=8)
        data = StepwiseDataModule("shepherd.jsonl", text="input", labels="value", step_token="ки")
        data = StepwiseDataModule("math-shepherd.jsonl", text="input", labels="label", step_token="ки")
    """

    splits_rows = False
    collate = staticmethod(collate_stepwise)
    builder = StepwiseBuilder

    def __init__(
        self,
        data: Sources,
        *,
        prompt: str | None = None,
        completions: str | None = None,
        labels: str | None = None,
        separator: str = "\n",
        text: str | None = None,
        step_token: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the arguments; data is opened in ``setup``.

        Args:
            data: The rows, see :data:`~rlhfkit.datamodules.tokenization.sources.Source`.
            prompt: Column of the prompts: text or chat messages. ``None`` here and for the columns below:
                found by its usual name.
            completions: Column of lists of steps, each a text.
            labels: Column of lists of labels.
            separator: Text after each step (a line break, TRL's default); may be a special token.
            text: Column of whole texts, instead of ``prompt``, ``completions`` and ``separator``.
            step_token: The token that ends a step in ``text``.
            **kwargs: Arguments of :class:`SFTDataModule`.

        Raises:
            ValueError: If an argument is out of range, or only one of ``text`` and ``step_token`` is given.
        """
        self._refuse_columns(kwargs, instead="prompt, completions and labels")
        if (text is None) != (step_token is None):
            raise ValueError(f"text and step_token belong together, got {text=} and {step_token=}")
        if not separator:
            raise ValueError("separator must have at least one character: a step is judged at its last token")
        super().__init__(data, prompt=prompt, text=text, **kwargs)
        self.completions = completions
        self.labels = labels
        self.separator = separator
        self.step_token = step_token

    def _find_columns(self, rows: "Dataset | RowPreview", source: Source) -> Mapping[str, str]:
        if self.text is None:
            named = {"prompt": self.prompt, "completions": self.completions, "labels": self.labels}
            return find_columns(rows, source, (STEPWISE,), named, beside=self.numbers)
        columns = {"text": self.text, "labels": self.labels or "labels"}
        check_columns(rows, source, **columns)
        return columns

    def _builder(self, columns: Mapping[str, str], source: Source, tokenizer: Any) -> ExampleBuilder:
        builder = cast(StepwiseBuilder, super()._builder(columns, source, tokenizer))
        builder.end_steps_with(self.separator if self.step_token is None else self.step_token)
        return builder
