"""``UnpairedPreferenceDataModule``: answers labelled desirable or undesirable, for KTO; a pair becomes two of them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhfkit.data.formats.unpaired import UnpairedExample, UnpairedExamples, UnpairedLoader, collate_unpaired
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.streaming import SourceStream
from rlhfkit.datamodules.tokenization.cache import TokenExamples
from rlhfkit.datamodules.tokenization.columns import PREFERENCE, UNPAIRED_PREFERENCE, find_columns
from rlhfkit.datamodules.tokenization.examples import ExampleBuilder, log_counts
from rlhfkit.datamodules.tokenization.mixture import Sources
from rlhfkit.datamodules.tokenization.sources import RowPreview, Source, describe, no_loader, read_rows

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_TRUE, _FALSE = ("true", "yes", "1", "desirable", "chosen"), ("false", "no", "0", "undesirable", "rejected")


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

    def _build(self, source: Source, split: str, tokenizer: Any) -> UnpairedExamples:
        rows = read_rows(source, split=split, subset=self.subset)
        columns = self._answer_columns(rows, source)
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
        return UnpairedExamples(answers, desirable, seed=self.seed, max_length=self._longest_mismatched)

    def _answer_columns(self, rows: "Dataset | RowPreview", source: Source) -> dict[str, str]:
        """Return the columns by argument: prompt, and completion and label or chosen and rejected."""
        named = {name: getattr(self, name) for name in ("prompt", "completion", "label", "chosen", "rejected")}
        return find_columns(rows, source, (UNPAIRED_PREFERENCE, PREFERENCE), named)

    @property
    def _longest_mismatched(self) -> int:
        """Tokens of a mismatched pair: the prompt of one row with the completion of another may be longer than both."""
        return min(self.max_length, self._context_length() or self.max_length)

    def val_dataloader(self) -> Any:
        """All validation micro-batches as one step, so that one KL estimate covers all of them."""
        if self.validation_examples is None:
            return no_loader()
        micro_batches = len(self._loader(self.validation_examples, accumulate=1, shuffle=False))
        return self._loader(self.validation_examples, accumulate=micro_batches, shuffle=False)

    def _open_source(self, source: Any, tokenizer: Any) -> SourceStream[Any]:
        reader = self._reader(source)
        columns = self._answer_columns(reader.head, source)
        builder = self._builder(UnpairedBuilder, source, tokenizer)
        return self._source_stream(reader, lambda rows: builder.answers_of_rows(rows, columns), columns.values())

    def _step_loader(self, *args: Any, **arguments: Any) -> UnpairedLoader:
        return UnpairedLoader(*args, max_length=self._longest_mismatched, **arguments)


class UnpairedBuilder(ExampleBuilder):
    """Tokenises rows of a stream as labelled answers."""

    def answers_of_rows(
        self, rows: Sequence[tuple[str, Mapping[str, Any]]], columns: Mapping[str, str]
    ) -> Iterator[list[UnpairedExample]]:
        """Yield the answers of each of some (place, row) pairs: one with a label, or two of a pair; log counts.

        Raises ValueError if a value has the wrong type, or an answer is too long under ``overlong="error"`` or for the
        model's context.
        """
        label, counts = columns.get("label"), {"truncated": 0, "dropped": 0, "empty": 0}
        completions = [columns[name] for name in ("completion", "chosen", "rejected") if name in columns]
        texts = [{"prompt": columns["prompt"], "completion": completion} for completion in completions]
        answers = self.tokenize_rows(
            rows, lambda builder, row, where: [builder.pending(row, where, each) for each in texts]
        )
        for where, row in rows:
            wanted = [True, False] if label is None else [_is_desirable(row[label], f"column {label!r} of {where}")]
            made = []
            for desirable in wanted:
                for answer in self.limit_lengths(next(answers), where, counts):
                    self.check_context(answer.num_tokens, where)
                    made.append(UnpairedExample(answer, desirable))
            yield made
        log_counts(self.source, len(rows), counts, self.max_length)


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
    readers = better.attachments, worse.attachments

    def read(index: int) -> tuple[Any, ...]:
        _, rejected, place = places[index]
        reader = readers[rejected]
        return () if reader is None else reader(place)

    answers.attachments = None if readers == (None, None) else read
    return answers, [not rejected for _, rejected, _ in places]
