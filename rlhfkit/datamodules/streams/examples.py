"""Supervised examples and preferences that are read during training, for data too large to tokenise before."""

from collections.abc import Callable, Sequence
from typing import Any

from rlhfkit.data.batch import StepTotals, collate_tokens
from rlhfkit.data.formats.preferences import collate_preferences
from rlhfkit.data.formats.stepwise import collate_stepwise
from rlhfkit.data.formats.unpaired import UnpairedStreamLoader, collate_unpaired
from rlhfkit.data.loaders.stream import Stream, StreamLoader
from rlhfkit.datamodules.preference import PreferenceBuilder, PreferenceDataModule
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.stepwise import StepwiseBuilder, StepwiseDataModule
from rlhfkit.datamodules.streams.ending import StreamEnding
from rlhfkit.datamodules.streams.reader import RowReader
from rlhfkit.datamodules.streams.rows import Make, SourceStream, fingerprint, interleave
from rlhfkit.datamodules.tokenization.columns import SUPERVISED, find_columns
from rlhfkit.datamodules.tokenization.examples import ExampleBuilder
from rlhfkit.datamodules.tokenization.mixture import Mixture, list_sources
from rlhfkit.datamodules.tokenization.sources import FirstRow
from rlhfkit.datamodules.unpaired import UnpairedBuilder, UnpairedPreferenceDataModule
from rlhfkit.validation import check_integer


class StreamedDataModule(SFTDataModule):
    """The base of supervised DataModules over streams: nothing is converted, tokenised or counted before training.

    An epoch is a number of optimizer steps; the next one continues in the data, and a new pass begins at its end. Every
    rank reads and tokenises the whole stream, in the training process. Rows are shuffled within blocks only: shuffle
    sorted files beforehand. Subclasses say what rows become (:meth:`_maker`) and how batches are made of it
    (``collate``).
    """

    keeps_tokens = False
    collate: Callable[[Sequence[Any], StepTotals], Any] = staticmethod(collate_tokens)

    def __init__(
        self,
        data: Any,
        *,
        steps_per_epoch: int,
        shuffle_block: int = 10_000,
        passes: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the arguments; streams are opened in ``setup``.

        Args:
            data: What :class:`~rlhfkit.datamodules.streams.reader.RowReader` reads: a path, a pattern of files, a hub
                name, a ``datasets.IterableDataset``, a function that returns an iterable of rows; or several with their
                weights.
            steps_per_epoch: Optimizer steps per Lightning epoch.
            shuffle_block: Rows that are read into memory and shuffled together.
            passes: End the run with the step in which this many passes over the data are finished (over all sources,
                or with ``Mixture(until="first")`` over the first to be); the step is filled from the next pass.
                ``None``: the Trainer's limits end it.
            **kwargs: Arguments of the DataModule without a stream. ``validation_data`` is read as a whole.

        Raises:
            ValueError: If an argument is out of range, or needs the whole data (``max_tokens_per_micro_batch``,
                ``drop_last``, ``num_proc``, ``cache_dir``).
        """
        # Defaults are allowed, because the command line passes them.
        defaults = {"max_tokens_per_micro_batch": None, "drop_last": False, "num_proc": 1, "cache_dir": None}
        for name, default in defaults.items():
            if kwargs.get(name, default) != default:
                raise ValueError(
                    f"{name}={kwargs[name]!r} needs all of the data at once, which a stream is not: use a DataModule "
                    "without a stream, such as SFTDataModule"
                )
        check_integer("steps_per_epoch", steps_per_epoch, minimum=1)
        check_integer("shuffle_block", shuffle_block, minimum=1)
        super().__init__(data, **kwargs)
        self.steps_per_epoch = steps_per_epoch
        self.shuffle_block = shuffle_block
        self.passes = passes
        self._ending = StreamEnding(self.data, passes)
        self._streams: list[SourceStream[Any]] | None = None
        self._fingerprint = ""
        self._loader_state: dict[str, Any] | None = None
        self._stream_loader: StreamLoader[Any] | None = None

    def prepare_data(self) -> None:
        """Do nothing: rows are read during training."""

    def setup(self, stage: str | None = None) -> None:
        """Open the streams and find their columns.

        Raises:
            ValueError: If a column is missing, the first row has a wrong type, or ranks read different rows.
        """
        tokenizer = self._load_tokenizer()
        if self._streams is not None:
            return
        if self.validation_data is not None:
            self.validation_examples = self._build(self.validation_data, self.validation_split, tokenizer)
        self._streams = [self._open_source(source, tokenizer) for source in list_sources(self.data)]
        self._fingerprint = fingerprint(self._streams, self._weights)

    @property
    def _weights(self) -> list[float]:
        return self.data.weights if isinstance(self.data, Mixture) else [1.0]

    def _open_source(self, source: Any, tokenizer: Any) -> SourceStream[Any]:
        reader = RowReader(source, split=self.split, subset=self.subset)
        make, columns = self._maker(source, reader.head, tokenizer)
        seed = self.seed if self.shuffle else None
        return SourceStream(reader, make, columns=columns, block=self.shuffle_block, seed=seed)

    def _maker(self, source: Any, head: FirstRow, tokenizer: Any) -> tuple[Make[Any], list[str]]:
        """Return what rows become, and the columns they need, found in a table of the first row."""
        named = {name: getattr(self, name) for name in self.column_arguments}
        columns = find_columns(head, source, SUPERVISED, named)
        builder = self._builder(ExampleBuilder, source, tokenizer)
        builder.check_first(head[0], columns)
        return (lambda rows: builder.examples_of_rows(rows, columns)), [*columns.values()]

    def predict_dataloader(self) -> Any:
        """Raise RuntimeError: a stream has no end, and its rows are shuffled."""
        raise RuntimeError("a stream has no end and no order to predict in: use a DataModule without a stream")

    def open_stream(self, place: Any = None) -> Stream:
        """Yield (position after the example, example) endlessly from ``place``, interleaving sources by weight."""
        assert self._streams is not None
        return interleave(self._streams, self._weights, place)

    def train_dataloader(self) -> StreamLoader[Any]:  # type: ignore[override]  # a loader of the same protocol
        """Micro-batches of this rank, each with the token count of its whole optimizer step."""
        trainer = self._attached_trainer()
        if self._stream_loader is not None and trainer.fit_loop._combined_loader is not None:
            self._loader_state = self._stream_loader.state_dict()  # Trainer(reload_dataloaders_every_n_epochs)
        self._stream_loader = self._make_loader(
            steps_per_epoch=self.steps_per_epoch,
            micro_batch_size=self.micro_batch_size,
            accumulate=trainer.accumulate_grad_batches,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            ranks_per_forward=self._mesh.forward_group_size,
            limit_batches=trainer.limit_train_batches,
            fingerprint=self._fingerprint,
            on_last_batch=lambda place: self._ending.stop_at(trainer, place),
        )
        if self._loader_state is not None:
            self._stream_loader.load_state_dict(self._loader_state)
            self._loader_state = None
            state = self._stream_loader.state_dict()
            if state["position"] % trainer.accumulate_grad_batches == 0:
                self._ending.stop_at(trainer, state["place"])
        return self._stream_loader

    def _make_loader(self, **arguments: Any) -> StreamLoader[Any]:
        return StreamLoader(self.open_stream, self.collate, **arguments)

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream; saved here because Lightning saves a loader's state only inside an epoch."""
        state = self._loader_state if self._stream_loader is None else self._stream_loader.state_dict()
        return {} if state is None else {"stream": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position."""
        self._loader_state = state_dict.get("stream")
        if self._stream_loader is not None and self._loader_state is not None:
            self._stream_loader.load_state_dict(self._loader_state)


class StreamingSFTDataModule(StreamedDataModule):
    """:class:`SFTDataModule` over streams, see :class:`StreamedDataModule`.

    Example::

        data = StreamingSFTDataModule("corpus.jsonl.gz", text="text", steps_per_epoch=1000, micro_batch_size=8)
    """


class StreamingPreferenceDataModule(StreamedDataModule, PreferenceDataModule):
    """:class:`PreferenceDataModule` over streams of pairs, see :class:`StreamedDataModule`.

    A reference model's log-probs cannot be computed before training (``precompute_ref_log_probs``).

    Example::

        data = StreamingPreferenceDataModule("pairs/*.jsonl", steps_per_epoch=1000, micro_batch_size=8)
    """

    collate = staticmethod(collate_preferences)

    def _maker(self, source: Any, head: FirstRow, tokenizer: Any) -> tuple[Make[Any], list[str]]:
        columns = self._pair_columns(head, source)
        builder = self._builder(PreferenceBuilder, source, tokenizer)
        needed = [column for column in columns.values() if column is not None]
        return (lambda rows: builder.pairs_of_rows(rows, columns)), needed


class StreamingStepwiseDataModule(StreamedDataModule, StepwiseDataModule):
    """:class:`StepwiseDataModule` over streams, see :class:`StreamedDataModule`.

    Example::

        data = StreamingStepwiseDataModule("steps/*.jsonl", steps_per_epoch=1000, micro_batch_size=8)
    """

    collate = staticmethod(collate_stepwise)

    def _maker(self, source: Any, head: FirstRow, tokenizer: Any) -> tuple[Make[Any], list[str]]:
        columns = self._step_columns(head, source)
        builder = self._builder(StepwiseBuilder, source, tokenizer)
        builder.set_columns(columns, self._step_ends)
        return builder.answers_of_rows, [*columns.values()]


class StreamingUnpairedPreferenceDataModule(StreamedDataModule, UnpairedPreferenceDataModule):
    """:class:`UnpairedPreferenceDataModule` over streams of labelled answers or pairs, see :class:`StreamedDataModule`.

    The mismatched pairs of KTO are drawn among the answers of each optimizer step, of all ranks, and not over all data.
    With ``shuffle=False`` data must not be sorted by prompts: the answers of a step must be to two prompts at least.

    Example::

        data = StreamingUnpairedPreferenceDataModule("feedback/*.jsonl", steps_per_epoch=1000, micro_batch_size=8)
    """

    collate = staticmethod(collate_unpaired)

    def _maker(self, source: Any, head: FirstRow, tokenizer: Any) -> tuple[Make[Any], list[str]]:
        columns = self._answer_columns(head, source)
        builder = self._builder(UnpairedBuilder, source, tokenizer)
        return (lambda rows: builder.answers_of_rows(rows, columns)), [*columns.values()]

    def _make_loader(self, **arguments: Any) -> UnpairedStreamLoader:
        return UnpairedStreamLoader(
            self.open_stream, self.collate, seed=self.seed, max_length=self._longest_mismatched, **arguments
        )
