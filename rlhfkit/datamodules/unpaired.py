"""``UnpairedPreferenceDataModule``: answers labelled desirable or not, for KTO; a pair becomes two of them."""

import logging
import math
from typing import Any

from rlhfkit.data.step_loader import CountedRows
from rlhfkit.data.unpaired import UnpairedExamples, UnpairedLoader, collate_unpaired
from rlhfkit.datamodules.examples import TokenExamples
from rlhfkit.datamodules.instructions import SFTDataModule
from rlhfkit.datamodules.sources import Source, check_columns, describe, no_loader, read_rows

log = logging.getLogger(__name__)

_TRUE, _FALSE = ("true", "yes", "1", "desirable", "chosen"), ("false", "no", "0", "undesirable", "rejected")


class UnpairedPreferenceDataModule(SFTDataModule):
    """Prompts with completions and a label each, in optimizer steps that are the same on any number of ranks.

    Two kinds of data, by the columns that are named:

    - prompt, completion and label (the default): true, 1 or "desirable" where the completion is wanted;
    - ``chosen="chosen", rejected="rejected"`` with a prompt: each row becomes a desirable and an undesirable one.

    Example::

        data = UnpairedPreferenceDataModule("feedback.jsonl", prompt="question", completion="answer", label="liked")
    """

    def __init__(
        self,
        data: Source,
        *,
        prompt: str = "prompt",
        completion: str = "completion",
        label: str = "label",
        chosen: str | None = None,
        rejected: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember what to read; nothing is opened before ``setup``.

        Args:
            data: Where the rows are, see :data:`~rlhfkit.datamodules.sources.Source`.
            prompt: Column of the prompts: text or chat messages.
            completion: Column of the completions: text, or the chat messages of the answer.
            label: Column of the labels: booleans, 0 and 1, or one of the words true, yes, desirable, chosen and their
                opposites.
            chosen: Column of the better of two completions; together with ``rejected`` it takes the place of
                ``completion`` and ``label``.
            rejected: Column of the worse.
            **kwargs: See :class:`SFTDataModule`: validation data, splits, micro-batch size, lengths, chat template.

        Raises:
            ValueError: If an argument is out of range, or only one of ``chosen`` and ``rejected`` is given.
        """
        unfit = {"messages", "text"} & set(kwargs)
        if unfit:
            raise ValueError(
                f"{type(self).__name__} has no argument {min(unfit)!r}: name prompt and completion columns"
            )
        if (chosen is None) != (rejected is None):
            raise ValueError(f"chosen and rejected belong together, got {chosen=} and {rejected=}")
        super().__init__(data, prompt=prompt, completion=completion, **kwargs)
        self.label = label
        self.chosen = chosen
        self.rejected = rejected

    def _build(self, source: Source, split: str, tokenizer: Any) -> UnpairedExamples:
        rows = read_rows(source, split=split, subset=self.subset)
        if self.chosen is not None and self.rejected is not None:
            check_columns(rows, source, chosen=self.chosen, rejected=self.rejected)
            better = self._tokenised(rows, source, tokenizer, prompt=self.prompt, completion=self.chosen)
            worse = self._tokenised(rows, source, tokenizer, prompt=self.prompt, completion=self.rejected)
            answers, desirable = _side_by_side(better, worse)
        else:
            check_columns(rows, source, label=self.label)
            labels = [self._is_desirable(value, source, row) for row, value in enumerate(rows[self.label])]
            answers = self._tokenised(rows, source, tokenizer, prompt=self.prompt, completion=self.completion)
            desirable = [labels[row] for row in answers.rows]
        log.info("%s: %d desirable answers of %d", describe(source), sum(desirable), len(desirable))
        return UnpairedExamples(answers, desirable, seed=self.seed, max_length=self.max_length)

    def _is_desirable(self, value: Any, source: Source, row: int) -> bool:
        """A label as a boolean; a score of 0.7 or the word "maybe" is nobody's yes."""
        word = str(int(value) if value in (0, 1) else value).strip().lower()
        if word not in _TRUE + _FALSE:
            raise ValueError(
                f"column {self.label!r} of {describe(source)}, row {row}, must hold a boolean, 0 or 1, or one of "
                f"{', '.join(_TRUE + _FALSE)}, it holds {value!r}"
            )
        return word in _TRUE

    def val_dataloader(self) -> Any:
        """All validation micro-batches as one step, so that their KL estimate is that of all of them; or no loader."""
        if self.validation_examples is None:
            return no_loader()
        per_round = self.micro_batch_size * self._attached().world_size
        accumulate = math.ceil(len(self.validation_examples.lengths) / per_round)
        return self._loader(self.validation_examples, accumulate=accumulate, shuffle=False)

    def _step_loader(self, examples: CountedRows, **arguments: Any) -> UnpairedLoader:
        return UnpairedLoader(examples, collate_unpaired, **arguments)


def _side_by_side(better: TokenExamples, worse: TokenExamples) -> tuple[TokenExamples, list[bool]]:
    """Both answers of a row next to each other, in the order of the rows."""
    places = [(row, False, place) for place, row in enumerate(better.rows)]
    places += [(row, True, place) for place, row in enumerate(worse.rows)]
    places.sort()
    answers = TokenExamples((worse if rejected else better)[place] for _, rejected, place in places)
    return answers, [not rejected for _, rejected, _ in places]
