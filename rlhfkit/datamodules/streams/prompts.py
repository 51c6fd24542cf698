"""``StreamingPromptDataModule``: prompts that are read during training, for data too large to be opened as a whole."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from rlhfkit.data.loaders.experience import ExperienceLoader
from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.prompts.columns import PromptColumns
from rlhfkit.datamodules.prompts.datamodule import PromptDataModule
from rlhfkit.datamodules.prompts.mixed import source_names
from rlhfkit.datamodules.streams.ending import StreamEnding
from rlhfkit.datamodules.streams.prompt_queue import PromptStream, StreamCursor, StreamQueue
from rlhfkit.datamodules.streams.reader import PlacedRow, RowReader
from rlhfkit.datamodules.streams.rows import SourceStream, fingerprint, interleave
from rlhfkit.datamodules.tokenization.mixture import Mixture, list_sources
from rlhfkit.datamodules.tokenization.sources import check_columns
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)

_CHUNK = 100
"""Rows that are tokenised together, ahead of those that are drawn."""


class StreamingPromptDataModule(PromptDataModule):
    """:class:`PromptDataModule` over streams: rows are read and tokenised when they are drawn.

    At most ``shuffle_block`` rows of each source are in memory, and the prompts of iterations that were not trained on.
    The ``index`` of a prompt is its number in the stream, not its row, and goes on in the next pass, so an iteration in
    which a pass ends may have a row twice. All ranks draw the same prompts, and a checkpoint can be continued by any
    number of ranks. Prompts that are drawn and not used come first in the next iteration, also after a resume.

    Example::

        data = StreamingPromptDataModule("prompts/*.jsonl", answer="answer", rollout_batch_size=64)
    """

    def __init__(self, data: Any, *, shuffle_block: int = 10_000, passes: int | None = None, **kwargs: Any) -> None:
        """Check the arguments; streams are opened in ``setup``.

        Args:
            data: What :class:`~rlhfkit.datamodules.streams.reader.RowReader` reads: a path, a pattern of files, a hub
                name, a ``datasets.IterableDataset``, a function that returns an iterable of rows; or several with their
                weights.
            shuffle_block: Rows that are read into memory and shuffled together.
            passes: End the run with the iteration in which this many passes over the data are finished (over all
                sources, or with ``Mixture(until="first")`` over the first to be); the iteration is filled from the next
                pass. ``None``: the Trainer's limits end it.
            **kwargs: Arguments of :class:`PromptDataModule`. ``validation_data`` is read as a whole.

        Raises:
            ValueError: If an argument is out of range, or there is a ``curriculum``, which orders whole passes.
        """
        if kwargs.get("curriculum") is not None:
            raise ValueError(
                f"curriculum={kwargs['curriculum']!r} orders all prompts of a pass, which a stream does not know: use "
                "PromptDataModule, or sort the files and give shuffle=False"
            )
        check_integer("shuffle_block", shuffle_block, minimum=1)
        super().__init__(data, **kwargs)
        self.shuffle_block = shuffle_block
        self.passes = passes
        self._ending = StreamEnding(self.data, passes)
        self._stream: PromptStream | None = None
        self._sources: list[SourceStream[Prompt]] = []
        self._stream_cursor = StreamCursor()
        self._limits: list[tuple[int, str]] = []
        if self.max_prompt_length is not None:
            self._limits.append((self.max_prompt_length, f"max_prompt_length {self.max_prompt_length}"))
        self._vocabulary: int | None = None

    # -- reading -------------------------------------------------------------------------------------------------------

    def _prepare_training_data(self) -> None:
        """Do nothing: rows are read during training."""

    def _open_training_data(self, tokenizer: Any) -> None:
        sources = list_sources(self.data)
        names = source_names(sources) if isinstance(self.data, Mixture) else [None]
        columns = self._prompt_columns(tokenizer)
        self._sources = [self._open_stream(*each, columns) for each in zip(sources, names, strict=True)]
        weights = self.data.weights if isinstance(self.data, Mixture) else [1.0]
        self._stream = PromptStream(
            lambda position: interleave(self._sources, weights, position), fingerprint(self._sources, weights)
        )
        self._check_fingerprint()

    def _open_stream(self, source: Any, name: str | None, columns: PromptColumns) -> SourceStream[Prompt]:
        reader = RowReader(source, split=self.split, subset=self.subset)
        check_columns(reader.head, source, prompt=columns.prompt, answer=columns.answer)
        columns.text(reader.head[0], f"{reader.name}, row 0,")
        return SourceStream(
            reader,
            lambda rows: self._make_prompts(rows, columns, name, reader.name),
            columns=[column for column in (columns.prompt, columns.answer) if column is not None],
            block=self.shuffle_block,
            seed=self.seed if self.shuffle else None,
            what="a prompt that is short enough",
        )

    def _make_prompts(
        self, rows: Sequence[PlacedRow], columns: PromptColumns, name: str | None, source: str
    ) -> Iterator[list[Prompt]]:
        """Yield the prompt of each row, or none for one that is dropped."""
        dropped = 0
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            texts = [columns.text(row, where) for where, row in chunk]
            tokenized = columns.tokenize([row for _, row in chunk], texts)
            for (where, row), text, token_ids in zip(chunk, texts, tokenized, strict=True):
                columns.check_tokens(row, where, token_ids)
                columns.check_token(max(token_ids), self._vocabulary, where)
                if not self._fits(len(token_ids), where):
                    dropped += 1
                    yield []
                    continue
                prompt = columns.make(row, 0, text, token_ids)
                if name is not None:
                    prompt.metadata.setdefault("source", name)
                yield [prompt]
        if dropped:
            log.warning("%s: %d of %d prompts are too long and are dropped", source, dropped, len(rows))

    def _fits(self, length: int, where: str) -> bool:
        limit, reason = min(self._limits, default=(length, ""))
        if length > limit and self.overlong_prompts == "error":
            raise ValueError(
                f"the prompt of {where} has {length} tokens, more than {limit} ({reason}): raise the limit, shorten "
                "it, or drop such prompts with overlong_prompts='drop'"
            )
        return length <= limit

    def check_prompts(
        self, *, longest: int, reason: str, vocabulary: int | None = None, validation: bool = False
    ) -> None:
        """Check all validation prompts now, and those for training when they are read; see :class:`PromptDataModule`.

        Raises:
            ValueError: As in :class:`PromptDataModule`, for validation prompts.
        """
        if validation:
            super().check_prompts(longest=longest, reason=reason, vocabulary=vocabulary, validation=True)
            return
        self._limits, self._vocabulary = [*self._limits, (longest, reason)], vocabulary
        self._opened_stream().restart()

    def _columns(self, validation: bool) -> list[tuple[Any, list[str]]]:
        """Each source of the prompts, with the columns of its first row."""
        if validation:
            return super()._columns(validation)
        source = ["source"] if isinstance(self.data, Mixture) else []
        heads = [one.reader.head for one in self._sources]
        return [(one, [*head.column_names, *source]) for one, head in zip(list_sources(self.data), heads, strict=True)]

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _opened_stream(self) -> PromptStream:
        if self._stream is None:
            raise RuntimeError("the data is not open yet: call setup() first (the Trainer does)")
        return self._stream

    @property
    def num_prompts(self) -> int:
        """Raise RuntimeError: the number of prompts of a stream is not known."""
        raise RuntimeError("the number of prompts of a stream is not known: use PromptDataModule")

    def prompt_queue(self, after: dict[str, Any] | None = None) -> StreamQueue:  # type: ignore[override]  # same protocol
        """Make the queue of an iteration's prompts, without moving the cursor; see :class:`PromptDataModule`."""
        cursor = self._stream_cursor if after is None else StreamCursor.from_state_dict(after)
        return StreamQueue(self._opened_stream(), cursor)

    def prompt_column(self, name: str) -> dict[int, Any]:
        """Raise ValueError: the values of prompts that were not read are not known."""
        raise ValueError(
            f"the column {name!r} is needed for all prompts before training, which a stream does not know: use "
            "PromptDataModule"
        )

    def set_cursor(self, after: dict[str, Any]) -> None:
        """Move the cursor to the end of a trained iteration, and end the run if it was the last one."""
        stream = self._opened_stream()
        if after["fingerprint"] != stream.fingerprint:
            return
        self._stream_cursor = StreamCursor.from_state_dict(after)
        stream.forget(self._stream_cursor)
        self._stop_at_end()

    def train_dataloader(self) -> ExperienceLoader[Any]:
        """The experience that the Trainer's rollout callback makes; see :class:`PromptDataModule`."""
        loader = super().train_dataloader()
        self._stop_at_end()
        return loader

    def _stop_at_end(self) -> None:
        if self.trainer is not None:
            cursor = self._stream_cursor
            _, first = min((cursor.next, *cursor.postponed), key=lambda place: place[0])  # that was not trained on
            self._ending.stop_at(self.trainer, first)

    # -- saving --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The cursor and a fingerprint of the data, as plain values."""
        fingerprint = self._saved_fingerprint if self._stream is None else self._stream.fingerprint
        return {**self._stream_cursor.state_dict(), "fingerprint": fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved prompt; if data, weights, seed or block have changed, warn and begin a new pass."""
        self._stream_cursor = StreamCursor.from_state_dict(state_dict)
        self._saved_fingerprint = state_dict["fingerprint"]
        if self._stream is not None:
            self._check_fingerprint()

    def _check_fingerprint(self) -> None:
        saved = self._saved_fingerprint
        if saved is not None and saved != self._opened_stream().fingerprint:
            log.warning(
                "The stream of %s, its weights, seed or shuffle_block are not those that the checkpoint was saved "
                "with; the order cannot be continued, so a new pass begins",
                self._description,
            )
            self._stream_cursor = StreamCursor((self._stream_cursor.next[0], None))
        self._saved_fingerprint = None
