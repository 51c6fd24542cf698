"""``StepwiseDataModule``: answers in reasoning steps with a label each, for process reward models."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfkit.data.collate import TokenExample
from rlhfkit.data.step_loader import StepLoader
from rlhfkit.data.stepwise import StepwiseExamples, collate_stepwise
from rlhfkit.datamodules.chat import PromptFormat
from rlhfkit.datamodules.examples import ExampleBuilder, Recipe, common_prefix
from rlhfkit.datamodules.instructions import SFTDataModule
from rlhfkit.datamodules.sources import Source, check_columns, describe, read_rows

log = logging.getLogger(__name__)

_WORDS = {"+": 1.0, "good": 1.0, "true": 1.0, "1": 1.0, "-": 0.0, "bad": 0.0, "false": 0.0, "0": 0.0}


class StepwiseDataModule(SFTDataModule):
    r"""Judged reasoning steps, in optimizer steps that are the same on any number of ranks.

    Two kinds of data, by the columns that are named:

    - prompt, completions and labels (the default, TRL's format): a list of steps and a list of as many labels. Behind
      each step ``separator`` is written, and the step is judged at the last token of it;
    - ``text="input"`` with ``step_token`` (OpenRLHF's format): one text in which that token ends each step.

    A label is a boolean, 0 or 1, one of the words ``+``, ``-``, good, bad, true and false, or a number between 0 and 1:
    the probability that the step leads to a right answer (a soft label).

    Example::

        data = StepwiseDataModule("steps.jsonl", separator="\n\n", micro_batch_size=8)
        data = StepwiseDataModule("shepherd.jsonl", text="input", labels="value", step_token="ки")
    """

    keeps_tokens = False

    def __init__(
        self,
        data: Source,
        *,
        prompt: str = "prompt",
        completions: str = "completions",
        labels: str = "labels",
        separator: str = "\n",
        text: str | None = None,
        step_token: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember what to read; nothing is opened before ``setup``.

        Args:
            data: Where the rows are, see :data:`~rlhfkit.datamodules.sources.Source`.
            prompt: Column of the prompts: text or chat messages.
            completions: Column of lists of steps, each a text.
            labels: Column of lists of labels.
            separator: Written behind each step (a line break: TRL's default). May be a special token.
            text: Column of whole texts; takes the place of ``prompt``, ``completions`` and ``separator``.
            step_token: The token that ends a step in ``text``.
            **kwargs: See :class:`SFTDataModule`: validation data, splits, micro-batch size, lengths, chat template.

        Raises:
            ValueError: If an argument is out of range, or only one of ``text`` and ``step_token`` is given.
        """
        unfit = {"messages", "completion"} & set(kwargs)
        if unfit:
            raise ValueError(
                f"{type(self).__name__} has no argument {min(unfit)!r}: name the columns prompt, completions and labels"
            )
        if (text is None) != (step_token is None):
            raise ValueError(f"text and step_token belong together, got {text=} and {step_token=}")
        if not separator:
            raise ValueError("separator must have at least one character: a step is judged at its last token")
        super().__init__(data, prompt=prompt, text=text, **kwargs)
        self.completions = completions
        self.labels = labels
        self.separator = separator
        self.step_token = step_token

    def _build(self, source: Source, split: str, tokenizer: Any) -> StepwiseExamples:
        rows = read_rows(source, split=split, subset=self.subset)
        columns = {"text": self.text} if self.text else {"prompt": self.prompt, "completions": self.completions}
        check_columns(rows, source, labels=self.labels, **columns)
        style = PromptFormat(
            tokenizer,
            apply_chat_template=self.apply_chat_template,
            system=self.system,
            chat_template_arguments=self.chat_template_arguments,
        )
        builder = StepwiseBuilder(self, style, describe(source))
        answers = builder.build(rows)
        # Cutting a sequence cuts its last steps, so the labels that are left are the first ones.
        kept = [builder.labels[row][:steps] for row, steps in zip(answers.rows, answers.targets, strict=True)]
        given, used = sum(map(len, builder.labels)), sum(answers.targets)
        log.info("%s: %d steps of %d answers", describe(source), used, len(kept))
        if used < given:
            log.warning(
                "%s: %d of %d steps lie behind max_length %d", describe(source), given - used, given, self.max_length
            )
        return StepwiseExamples(answers, kept)

    def _step_loader(self, examples: Any, **arguments: Any) -> StepLoader[Any]:
        return StepLoader(examples, collate_stepwise, **arguments)


class StepwiseBuilder(ExampleBuilder):
    """Turns rows into sequences that mark the last token of each step, and reads the labels."""

    def __init__(self, data: StepwiseDataModule, style: PromptFormat, source: str) -> None:
        """Set the rules.

        Args:
            data: Names the columns.
            style: How prompts are written.
            source: Where the rows come from, for messages.

        Raises:
            ValueError: If ``step_token`` is not one token.
        """
        super().__init__(style, data.max_length, data.overlong, source)
        self.data = data
        self.labels: list[list[float]] = []
        """Of each row, one per step."""
        self.step_token_id: int | None = None
        if data.step_token is not None:
            found = self.tokenizer(data.step_token, add_special_tokens=False)["input_ids"]
            if len(found) != 1 or found[0] == self.tokenizer.unk_token_id:
                raise ValueError(
                    f"step_token must be one token of the tokenizer, {data.step_token!r} is {found}: add it to the "
                    "tokenizer, or give steps as a list (column completions)"
                )
            self.step_token_id = found[0]

    def _recipe(self, row: Mapping[str, Any], where: str, *columns: Any) -> Recipe:
        labels = row[self.data.labels]
        if not isinstance(labels, Sequence) or isinstance(labels, str):
            raise ValueError(f"column {self.data.labels!r} of {where} must hold a list of labels, it holds {labels!r}")
        self.labels.append([_label(value, f"column {self.data.labels!r} of {where}") for value in labels])
        if self.data.text is not None:
            return self._placeholders(self._text(row[self.data.text], self.data.text, where), where)
        self.style.check(row[self.data.prompt], f"column {self.data.prompt!r} of {where}")
        return self._steps(row[self.data.prompt], row[self.data.completions], where)

    def _placeholders(self, text: str, where: str) -> Recipe:
        """Steps that end with the step token."""
        labels = len(self.labels[-1])

        def finish(parts: list[list[int]]) -> TokenExample:
            mask = [token == self.step_token_id for token in parts[0]]
            self._check_count(sum(mask), labels, where)
            return TokenExample(parts[0], mask)

        return Recipe([text], False, finish)

    def _steps(self, prompt: Any, steps: Any, where: str) -> Recipe:
        """A list of steps; where each ends among the tokens is found by common token prefixes."""
        if not isinstance(steps, Sequence) or isinstance(steps, str):
            raise ValueError(
                f"column {self.data.completions!r} of {where} must hold a list of steps, it holds {steps!r}"
            )
        self._check_count(len(steps), len(self.labels[-1]), where)
        borders = [self.style.prompt(prompt)]
        for step in steps:
            borders.append(borders[-1] + self._text(step, self.data.completions, where) + self.data.separator)

        def finish(parts: list[list[int]]) -> TokenExample:
            whole = parts[-1]
            ends = [common_prefix(part, whole) - 1 for part in parts]
            if any(end <= before for before, end in itertools.pairwise(ends)):
                raise ValueError(f"{where} has a step without a token of its own: the tokenizer joins it with others")
            last = set(ends[1:])
            return TokenExample(whole, [position in last for position in range(len(whole))])

        return Recipe(borders, self.style.templated(prompt), finish)

    @staticmethod
    def _check_count(steps: int, labels: int, where: str) -> None:
        if steps != labels:
            raise ValueError(f"{where} has {steps} steps and {labels} labels; each step needs one")


def _label(value: Any, where: str) -> float:
    """A label as the probability that the step is good."""
    number = _WORDS.get(value.strip().lower()) if isinstance(value, str) else value
    if number is None or not 0.0 <= float(number) <= 1.0:
        raise ValueError(
            f"{where} must hold booleans, 0 and 1, one of the words {', '.join(_WORDS)}, or probabilities, it holds "
            f"{value!r}"
        )
    return float(number)
