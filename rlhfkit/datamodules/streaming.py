"""``StreamingSFTDataModule``: supervised data that is read during training, for files too large to tokenise before.

A position in a stream is plain numbers (pass over the data, row); resuming skips the rows before it. Rows are shuffled
within blocks, as a function of (seed, pass, block).
"""

import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from rlhfkit.data.batch import TokenExample, collate_tokens
from rlhfkit.data.loaders.stream import Stream, StreamLoader
from rlhfkit.data.packing import permutation
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.tokenization.columns import SUPERVISED, find_columns
from rlhfkit.datamodules.tokenization.examples import ExampleBuilder, Recipe, log_counts
from rlhfkit.datamodules.tokenization.mixture import Mixture, list_sources
from rlhfkit.datamodules.tokenization.sources import describe, readable, stream_rows
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)


class StreamingSFTDataModule(SFTDataModule):
    """:class:`SFTDataModule` over streams: nothing is converted, tokenised or counted before training.

    An epoch is a number of optimizer steps; the next one continues in the data, and a new pass begins at its end. Every
    rank reads and tokenises the whole stream, in the training process. Rows are shuffled within blocks only: shuffle
    sorted files beforehand.

    Example::

        data = StreamingSFTDataModule("corpus.jsonl.gz", text="text", steps_per_epoch=1000, micro_batch_size=8)
    """

    keeps_tokens = False

    def __init__(self, data: Any, *, steps_per_epoch: int, shuffle_block: int = 10_000, **kwargs: Any) -> None:
        """Check the arguments; streams are opened in ``setup``.

        Args:
            data: A path, hub name, ``datasets.IterableDataset``, or several with their weights.
            steps_per_epoch: Optimizer steps per Lightning epoch.
            shuffle_block: Rows that are read into memory and shuffled together.
            **kwargs: Arguments of :class:`SFTDataModule`. ``validation_data`` is read as a whole.

        Raises:
            ValueError: If an argument is out of range, or needs the whole data (``max_tokens_per_micro_batch``,
                ``drop_last``, ``num_proc``, ``cache_dir``).
        """
        # Defaults are allowed, because the command line passes them.
        defaults = {"max_tokens_per_micro_batch": None, "drop_last": False, "num_proc": 1, "cache_dir": None}
        for name, default in defaults.items():
            if kwargs.get(name, default) != default:
                raise ValueError(
                    f"{name}={kwargs[name]!r} needs all of the data at once, which a stream is not: use SFTDataModule"
                )
        check_integer("steps_per_epoch", steps_per_epoch, minimum=1)
        check_integer("shuffle_block", shuffle_block, minimum=1)
        super().__init__(data, **kwargs)
        self.steps_per_epoch = steps_per_epoch
        self.shuffle_block = shuffle_block
        self._streams: list[_SourceStream] | None = None
        self._loader_state: dict[str, Any] | None = None
        self._stream_loader: StreamLoader[Any] | None = None

    def prepare_data(self) -> None:
        """Do nothing: rows are read during training."""

    def setup(self, stage: str | None = None) -> None:
        """Open the streams and find their columns; ValueError if one is missing or the first row has a wrong type."""
        if self._streams is not None:
            return
        tokenizer = self._load_tokenizer()
        if self.validation_data is not None:
            self.validation_examples = self._build(self.validation_data, self.validation_split, tokenizer)
        self._streams = [_SourceStream(self, source, tokenizer) for source in list_sources(self.data)]

    def predict_dataloader(self) -> Any:
        """Raise RuntimeError: a stream has no end, and its rows are shuffled."""
        raise RuntimeError("a stream has no end and no order to predict in: use SFTDataModule")

    def open_stream(self, place: Any = None) -> Stream:
        """Yield (position after the example, example) endlessly from ``place``, interleaving sources by weight."""
        assert self._streams is not None
        weights = self.data.weights if isinstance(self.data, Mixture) else [1.0]
        # Of each source: pass, row, examples so far, and parts of that row that were used (overlong="split").
        places = [[*one, 0][:4] for one in place] if place is not None else [[0, 0, 0, 0] for _ in weights]
        opened = [stream.examples(one[0], one[1], one[3]) for stream, one in zip(self._streams, places, strict=True)]
        while True:
            total = sum(one[2] for one in places) + 1
            missing = [weight * total - one[2] for weight, one in zip(weights, places, strict=True)]
            source = missing.index(max(missing))
            number, row, part, example = next(opened[source])
            places[source] = [number, row, places[source][2] + 1, part]
            yield [list(one) for one in places], example

    def train_dataloader(self) -> StreamLoader[Any]:  # type: ignore[override]  # a loader of the same protocol
        """Micro-batches of this rank, each with the token count of its whole optimizer step."""
        trainer = self._attached_trainer()
        self._stream_loader = StreamLoader(
            self.open_stream,
            collate_tokens,
            steps_per_epoch=self.steps_per_epoch,
            micro_batch_size=self.micro_batch_size,
            accumulate=trainer.accumulate_grad_batches,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            ranks_per_forward=self._mesh.forward_group_size,
        )
        if self._loader_state is not None:
            self._stream_loader.load_state_dict(self._loader_state)
        return self._stream_loader

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream; saved here because Lightning saves a loader's state only inside an epoch."""
        return {} if self._stream_loader is None else {"stream": self._stream_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position."""
        self._loader_state = state_dict.get("stream")
        if self._stream_loader is not None and self._loader_state is not None:
            self._stream_loader.load_state_dict(self._loader_state)


class _SourceStream:
    """The examples of one source, pass after pass."""

    def __init__(self, options: StreamingSFTDataModule, source: Any, tokenizer: Any) -> None:
        """Open the source, and find the columns by its first row."""
        import datasets

        self.rows = stream_rows(source, split=options.split, subset=options.subset)
        self.source = describe(source)
        with readable(source):
            head = [dict(row) for row in self.rows.take(1)]
        if not head:
            raise ValueError(f"{self.source} has no rows; at least one is needed")
        named = {name: getattr(options, name) for name in options.column_arguments}
        self.columns = find_columns(datasets.Dataset.from_list(head), source, SUPERVISED, named)
        self.builder = options._builder(ExampleBuilder, source, tokenizer)
        self.builder.check_first(head[0], self.columns)
        self.block = options.shuffle_block
        self.seed = options.seed if options.shuffle else None

    def examples(self, number: int, row: int, part: int = 0) -> Iterator[tuple[int, int, int, TokenExample]]:
        """Yield (pass, row and part after the example, example) without end, from a part of a row of a pass on."""
        while True:
            kept = 0
            for next_row, next_part, example in self._pass(number, row, part):
                kept += 1
                yield number, next_row, next_part, example
            if not kept and row == 0:
                raise ValueError(f"{self.source}: no row of the whole data has a token to learn: check the columns")
            number, row, part = number + 1, 0, 0
            log.info("%s: pass %d begins", self.source, number + 1)

    def _pass(self, number: int, row: int, part: int) -> Iterator[tuple[int, int, TokenExample]]:
        """Yield (row and part after the example, example) until the end of the pass."""
        first = row // self.block * self.block
        rows = iter(self.rows.skip(first))
        while block := self._block(rows):
            order = list(range(len(block)))
            if self.seed is not None:
                order = permutation(len(block), seed=self.seed, number=(number << 40) + first)
            counts = {"truncated": 0, "dropped": 0, "empty": 0}
            places = [first + turn for turn in range(len(block)) if first + turn >= row]
            chosen = [(first + order[place - first], block[order[place - first]]) for place in places]
            tokenized = self.builder.tokenize_rows(chosen, self._recipes)
            for place, (index, _), example in zip(places, chosen, tokenized, strict=True):
                where = f"{self.source}, row {index},"
                parts = self.builder.limit_lengths(example, where, counts)
                for done, fitting in enumerate(parts, 1):
                    if place == row and done <= part:
                        continue  # before the position at which the stream was opened
                    self.builder.check_context(len(fitting.input_ids), where)
                    yield (place + 1, 0, fitting) if done == len(parts) else (place, done, fitting)
            log_counts(self.source, len(block), counts, self.builder.max_length)
            first += len(block)

    def _block(self, rows: Iterator[Any]) -> list[Any]:
        """Read the next block of rows."""
        with readable(self.source):
            return list(itertools.islice(rows, self.block))

    def _recipes(self, builder: ExampleBuilder, row: Mapping[str, Any], where: str) -> list[Recipe]:
        return [builder.recipe(row, where, self.columns)]
