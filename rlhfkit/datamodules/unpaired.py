"""``UnpairedPreferenceDataModule``: answers labelled desirable or undesirable, for KTO; a pair becomes two of them."""

import logging
from typing import Any

from rlhfkit.data.formats.unpaired import UnpairedExamples, UnpairedLoader, collate_unpaired
from rlhfkit.data.loaders.steps import TokenizedDataset
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.tokenization.columns import PREFERENCE, UNPAIRED_PREFERENCE, find_columns
from rlhfkit.datamodules.tokenization.mixture import Sources
from rlhfkit.datamodules.tokenization.sources import Source, describe, no_loader, read_rows
from rlhfkit.datamodules.tokenization.token_examples import TokenExamples

log = logging.getLogger(__name__)

_TRUE, _FALSE = ("true", "yes", "1", "desirable", "chosen"), ("false", "no", "0", "undesirable", "rejected")


class UnpairedPreferenceDataModule(SFTDataModule):
    """Prompts with labelled completions, in optimizer steps that are the same on any number of ranks.

    The columns decide the kind of data; columns with other names are given as arguments:

    - ``prompt``, ``completion`` and ``label``: true, 1 or "desirable" for wanted completions;
    - ``prompt``, ``chosen`` and ``rejected``: each row becomes a desirable and an undesirable answer.

    Example::

        data = UnpairedPreferenceDataModule("feedback.jsonl", prompt="question", completion="answer", label="liked")
    """

    splits_rows = False

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
        unfit = [
            name for name in ("messages", "text", "input_ids", "labels", "loss_mask") if kwargs.get(name) is not None
        ]
        if unfit:
            raise ValueError(f"{type(self).__name__} has no argument {unfit[0]!r}: name prompt and completion columns")
        super().__init__(data, prompt=prompt, completion=completion, **kwargs)
        self.label = label
        self.chosen = chosen
        self.rejected = rejected

    def _build(self, source: Source, split: str, tokenizer: Any) -> UnpairedExamples:
        rows = read_rows(source, split=split, subset=self.subset)
        named = {name: getattr(self, name) for name in ("prompt", "completion", "label", "chosen", "rejected")}
        columns = find_columns(rows, source, (UNPAIRED_PREFERENCE, PREFERENCE), named)
        prompt = columns["prompt"]
        if "label" in columns:
            labels = [
                _is_desirable(value, f"column {columns['label']!r} of {describe(source)}, row {row},")
                for row, value in enumerate(rows[columns["label"]])
            ]
            answers = self._tokenize(rows, source, tokenizer, prompt=prompt, completion=columns["completion"])
            desirable = [labels[row] for row in answers.rows]
        else:
            better = self._tokenize(rows, source, tokenizer, prompt=prompt, completion=columns["chosen"])
            worse = self._tokenize(rows, source, tokenizer, prompt=prompt, completion=columns["rejected"])
            answers, desirable = _interleave(better, worse)
        log.info("%s: %d desirable answers of %d", describe(source), sum(desirable), len(desirable))
        # A mismatched pair, the prompt of one row with the completion of another, may be longer than any row.
        limit = min(self.max_length, self._context_length() or self.max_length)
        return UnpairedExamples(answers, desirable, seed=self.seed, max_length=limit)

    def val_dataloader(self) -> Any:
        """All validation micro-batches as one step, so that one KL estimate covers all of them."""
        if self.validation_examples is None:
            return no_loader()
        micro_batches = len(self._loader(self.validation_examples, accumulate=1, shuffle=False))
        return self._loader(self.validation_examples, accumulate=micro_batches, shuffle=False)

    def _step_loader(self, examples: TokenizedDataset, **arguments: Any) -> UnpairedLoader:
        return UnpairedLoader(examples, collate_unpaired, **arguments)


def _is_desirable(value: Any, where: str) -> bool:
    """Convert a label to a boolean; ValueError for scores such as 0.7 and other words."""
    word = str(int(value) if value in (0, 1) else value).strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(
            f"{where} must hold a boolean, 0 or 1, or one of {', '.join(_TRUE + _FALSE)}, it holds {value!r}"
        )
    return word in _TRUE


def _interleave(better: TokenExamples, worse: TokenExamples) -> tuple[TokenExamples, list[bool]]:
    """Put both answers of a row next to each other, in the order of the rows."""
    places = [(row, False, place) for place, row in enumerate(better.rows)]
    places += [(row, True, place) for place, row in enumerate(worse.rows)]
    places.sort()
    answers = TokenExamples((worse if rejected else better)[place] for _, rejected, place in places)
    return answers, [not rejected for _, rejected, _ in places]
