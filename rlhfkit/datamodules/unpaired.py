"""``UnpairedPreferenceDataModule``: answers labelled desirable or undesirable, for KTO; a pair becomes two of them."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rlhfkit.data.formats import UnpairedExample, UnpairedLoader, add_mismatched, collate_unpaired
from rlhfkit.data.loaders.steps import ExampleTable, TokenizedDataset
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.tokenization.columns import PREFERENCE, UNPAIRED_PREFERENCE, find_columns
from rlhfkit.datamodules.tokenization.examples import ExampleBuilder, PendingExample
from rlhfkit.datamodules.tokenization.mixture import Sources
from rlhfkit.datamodules.tokenization.sources import RowPreview, Source, describe, no_loader

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_TRUE, _FALSE = ("true", "yes", "1", "desirable", "chosen"), ("false", "no", "0", "undesirable", "rejected")


class UnpairedBuilder(ExampleBuilder):
    """Tokenises rows as labelled answers: one with a label, or two of a pair."""

    example = UnpairedExample

    def values(self, labels: Sequence[Sequence[float]]) -> dict[str, Sequence[Any]]:
        """The labels of answers."""
        return {"desirable": [bool(label) for (label,) in labels]}

    def pending(self, row: Mapping[str, Any], where: str) -> list[PendingExample]:
        """The answers of a row, with their labels.

        Raises ValueError if one has images, which would have to come along when it is the answer to another prompt.
        """
        label, prompt = self.columns.get("label"), self.columns["prompt"]
        if label is not None:
            answers = {self.columns["completion"]: _is_desirable(row[label], f"column {label!r} of {where}")}
        else:
            answers = {self.columns["chosen"]: True, self.columns["rejected"]: False}
        made = {name: self.supervised(row, where, {"prompt": prompt, "completion": name}) for name in answers}
        known = len(self.formatter.images_of(row[prompt]))
        for name, one in made.items():
            if len(one.attachments) > known:
                raise ValueError(
                    f"column {name!r} of {where} has images, and only prompts of labelled answers can have some: put "
                    "the turns up to the last image into the prompt"
                )
        return [made[name]._replace(labels=[float(desirable)]) for name, desirable in answers.items()]


def _is_desirable(value: Any, where: str) -> bool:
    """Convert a label to a boolean; ValueError for scores such as 0.7 and other words."""
    word = str(int(value) if value in (0, 1) else value).strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(
            f"{where} must hold a boolean, 0 or 1, or one of {', '.join(_TRUE + _FALSE)}, it holds {value!r}"
        )
    return word in _TRUE


class UnpairedPreferenceDataModule(SFTDataModule):
    """Prompts with labelled completions, in optimizer steps that are the same on any number of ranks.

    The columns decide the kind of data; columns with other names are given as arguments:

    - ``prompt``, ``completion`` and ``label``: true, 1 or "desirable" for wanted completions;
    - ``prompt``, ``chosen`` and ``rejected``: each row becomes a desirable and an undesirable answer.

    The mismatched pairs of KTO are drawn over all data; with ``streaming=True`` among the answers of each optimizer
    step, of all ranks. With ``shuffle=False`` a stream must not be sorted by prompts: the answers of a step must be to
    two prompts at least.

    Example::

        data = UnpairedPreferenceDataModule("feedback.jsonl", prompt="question", completion="answer", label="liked")
    """

    splits_rows = False
    collate = staticmethod(collate_unpaired)
    builder = UnpairedBuilder

    def __init__(
        self,
        data: Sources,
        *,
        prompt: str | None = None,
        completion: str | None = None,
        label: str | None = None,
        chosen: str | None = None,
        rejected: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the arguments; data is opened in ``setup``.

        Args:
            data: The rows, see :class:`SFTDataModule`.
            prompt: Column of the prompts: text or chat messages. ``None`` here and for the columns below: found by its
                usual name.
            completion: Column of the completions: text, or the chat messages of the answer.
            label: Column of the labels: booleans, 0 and 1, or one of the words true, yes, desirable, chosen and their
                opposites.
            chosen: Column of the preferred completions.
            rejected: Column of the other completions.
            **kwargs: Arguments of :class:`SFTDataModule`.

        Raises:
            ValueError: If an argument is out of range.
        """
        self._refuse_columns(kwargs, instead="prompt and completion")
        super().__init__(data, prompt=prompt, completion=completion, **kwargs)
        self.label = label
        self.chosen = chosen
        self.rejected = rejected

    def _find_columns(self, rows: "Dataset | RowPreview", source: Source) -> Mapping[str, str]:
        named = {name: getattr(self, name) for name in ("prompt", "completion", "label", "chosen", "rejected")}
        return find_columns(rows, source, (UNPAIRED_PREFERENCE, PREFERENCE), named, beside=self.numbers)

    def _open_table(self, source: Source, split: str, tokenizer: Any) -> TokenizedDataset:
        examples = cast(ExampleTable[UnpairedExample], super()._open_table(source, split, tokenizer))
        labels = examples.values["desirable"]
        log.info("%s: %d desirable answers of %d", describe(source), sum(labels), len(labels))
        add_mismatched(examples, seed=self.seed, max_length=self._longest_mismatched)
        return examples

    @property
    def _longest_mismatched(self) -> int:
        """Tokens of a mismatched pair: the prompt of one row with the completion of another may be longer than both."""
        return min(self.max_length, self._context_length() or self.max_length)

    def val_dataloader(self) -> Any:
        """All validation micro-batches as one step, so that one KL estimate covers all of them."""
        if self.validation_examples is None:
            return no_loader()
        micro_batches = len(self.loader(self.validation_examples, accumulate=1, shuffle=False))
        return self.loader(self.validation_examples, accumulate=micro_batches, shuffle=False)

    def _step_loader(self, *args: Any, **arguments: Any) -> UnpairedLoader:
        return UnpairedLoader(*args, max_length=self._longest_mismatched, **arguments)
