"""``SFTDataModule``: prompts with completions, conversations, or plain text, for supervised fine-tuning."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from rlhfkit.data.batch import collate_tokens
from rlhfkit.data.loaders.steps import StepLoader, TokenizedDataset
from rlhfkit.datamodules.base import TextDataModule
from rlhfkit.datamodules.streaming import MixedStream, SourceStream
from rlhfkit.datamodules.tokenization.cache import TokenCache
from rlhfkit.datamodules.tokenization.chat import SpecialTokensInText
from rlhfkit.datamodules.tokenization.columns import SUPERVISED, find_columns
from rlhfkit.datamodules.tokenization.examples import ExampleBuilder
from rlhfkit.datamodules.tokenization.mixture import Mixture, Sources, list_sources
from rlhfkit.datamodules.tokenization.sources import RowPreview, Source, check_columns, describe, no_loader, read_rows
from rlhfkit.protocols import HasModelLimits
from rlhfkit.trainer_parts import callbacks_of
from rlhfkit.validation import check_integer

if TYPE_CHECKING:
    from datasets import Dataset


class SFTDataModule(TextDataModule):
    """Tokenised examples for supervised fine-tuning, in optimizer steps that are the same on any number of ranks.

    The columns decide the kind of data; columns with other names are given as arguments:

    - ``messages`` (or ``conversations``): chat messages, through the tokenizer's template; only the assistant's turns
      are learned;
    - ``prompt`` and ``completion``: only the completion and the token that ends it are learned;
    - ``text``: all tokens are learned, as in pretraining;
    - ``input_ids``, alone or with ``labels`` or ``loss_mask``: rows that are tokenised already.

    Columns ``system``, ``tools`` and ``chat_template_kwargs`` are for the chat template of their row.

    With ``streaming=True`` nothing is converted, tokenised or counted before training: every rank reads and tokenises
    the whole stream, in the training process. An epoch is then a number of optimizer steps; the next one continues in
    the data, and a new pass begins at its end. Rows are shuffled within blocks only: shuffle sorted files beforehand.

    Example::

        data = SFTDataModule("sft.jsonl", prompt="question", completion="answer", micro_batch_size=16)
        data = SFTDataModule("corpus/*.jsonl.gz", streaming=True, steps_per_epoch=1000, micro_batch_size=8)
    """

    collate: ClassVar[Any] = staticmethod(collate_tokens)
    """Makes batches of examples."""
    builder: ClassVar[type[ExampleBuilder]] = ExampleBuilder
    """Makes examples of rows."""
    splits_rows: ClassVar[bool] = True
    """Whether an example may become several, ``overlong="split"``."""
    column_arguments: ClassVar[tuple[str, ...]] = (
        *("messages", "prompt", "completion", "text"),
        *("input_ids", "labels", "loss_mask"),
    )
    """Arguments that name columns of supervised data."""

    def __init__(
        self,
        data: Sources,
        *,
        prompt: str | None = None,
        completion: str | None = None,
        messages: str | None = None,
        text: str | None = None,
        input_ids: str | None = None,
        labels: str | None = None,
        loss_mask: str | None = None,
        numbers: Sequence[str] = (),
        validation_data: Source | None = None,
        split: str = "train",
        validation_split: str = "test",
        subset: str | None = None,
        micro_batch_size: int | None = None,
        max_tokens_per_micro_batch: int | None = None,
        max_length: int = 2048,
        overlong: Literal["truncate", "split", "drop", "error"] = "truncate",
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        apply_chat_template: bool | None = None,
        system: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        special_tokens_in_text: SpecialTokensInText | None = None,
        tokenizer: Any = None,
        allow_image_urls: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        num_proc: int = 1,
        streaming: bool = False,
        steps_per_epoch: int | None = None,
        shuffle_buffer_size: int = 10_000,
        passes: int | None = None,
    ) -> None:
        """Check the arguments; data is opened in ``setup``.

        Args:
            data: The examples, see :data:`~rlhfkit.datamodules.tokenization.sources.Source`; or several sources with
                their weights, ``{"a.jsonl": 0.7, "b.jsonl": 0.3}``, see :class:`~rlhfkit.Mixture`.
            prompt: Column of the prompts: text or chat messages, formatted as in ``PromptDataModule``. ``None`` here
                and for the columns below: found by its usual name.
            completion: Column of the completions: text, or the chat messages of the answer.
            messages: Column of whole conversations: chat messages, or ShareGPT's turns (``from`` and ``value``).
            text: Column of plain text.
            input_ids: Column of token ids; tokens at which a column ``attention_mask`` is 0 are left out.
            labels: Column of the same ids, with -100 where a token is not learned.
            loss_mask: Column of 1 or true where a token is learned (``completion_mask`` and ``assistant_masks`` too).
            numbers: Columns of numbers that batches have too, for losses of your own: ``batch.numbers["weight"]`` (B,).
            validation_data: The validation examples, in the same columns.
            split: Split of ``data``, if it has several.
            validation_split: Split of ``validation_data``, if it has several.
            subset: Configuration of a hub data set.
            micro_batch_size: Sequences per micro-batch on average (micro-batches have equal tokens, not equal counts);
                8 if ``max_tokens_per_micro_batch`` is not given. Ranks that compute forward passes together
                (``sequence_parallel_size``, ``tensor_parallel_size``) share a micro-batch.
            max_tokens_per_micro_batch: Fill micro-batches up to this many tokens per rank instead; times
                ``sequence_parallel_size`` at least ``max_length``.
            max_length: Tokens per sequence.
            overlong: What to do with longer sequences; ``"truncate"`` cuts their end, ``"split"`` makes several of
                them, in which every token is learned once. Counts are logged; examples with no token left to learn are
                dropped.
            drop_last: Drop the last optimizer step of an epoch if it is not full.
            shuffle: Shuffle each epoch; the order of the file when false.
            seed: Seed of the shuffling.
            apply_chat_template: Wrap text prompts as a user message; ``None``: when the tokenizer has a template.
            system: System message before each conversation; needs the chat template.
            chat_template_kwargs: Passed to the template.
            special_tokens_in_text: What to do with control tokens such as ``<eos>`` in the data: ``"keep"``,
                ``"refuse"`` or ``"escape"``. ``None``: escape them in chat messages, where they could end or forge a
                turn, and keep them in plain text; see
                :data:`~rlhfkit.datamodules.tokenization.chat.SpecialTokensInText`.
            tokenizer: A tokenizer or its name, which the whole run then uses, exports included; ``None``: the
                LightningModule's attribute ``tokenizer``.
            allow_image_urls: Fetch images of rows from ``http`` and ``https`` URLs; else such rows are an error.
            cache_dir: Folder of the cache of tokenised examples, see
                :class:`~rlhfkit.datamodules.tokenization.cache.TokenCache`.
            num_proc: Processes that tokenise.
            streaming: Read ``data`` during training, for data too large to be tokenised before. It can then also be a
                pattern of files, a ``datasets.IterableDataset``, or a function that returns an iterable of rows;
                ``validation_data`` is read as a whole. Arguments that need the whole data are refused
                (``max_tokens_per_micro_batch``, ``drop_last``, ``num_proc``, ``cache_dir``).
            steps_per_epoch: Optimizer steps per Lightning epoch of a stream, which needs it.
            shuffle_buffer_size: Rows of a stream that are read into memory and shuffled together.
            passes: End a run over a stream with the step in which this many passes over the data are finished (over
                all sources, or with ``Mixture(until="first")`` over the first to be); the step is filled from the next
                pass. ``None``: the Trainer's limits end it.

        Raises:
            ValueError: If an argument is out of range, two exclude one another, or ``streaming`` excludes one.
        """
        super().__init__(
            data,
            split=split,
            validation_split=validation_split,
            subset=subset,
            shuffle=shuffle,
            seed=seed,
            apply_chat_template=apply_chat_template,
            system=system,
            chat_template_kwargs=chat_template_kwargs,
            special_tokens_in_text=special_tokens_in_text,
            tokenizer=tokenizer,
            allow_image_urls=allow_image_urls,
            streaming=streaming,
            shuffle_buffer_size=shuffle_buffer_size,
            passes=passes,
        )
        check_integer("steps_per_epoch", steps_per_epoch, minimum=1, optional=True)
        if streaming and steps_per_epoch is None:
            raise ValueError("a stream has no length: give steps_per_epoch, the optimizer steps of a Lightning epoch")
        if steps_per_epoch is not None and not streaming:
            raise ValueError(f"steps_per_epoch={steps_per_epoch} is for streaming=True: other data has a length")
        if streaming:
            whole = {
                "max_tokens_per_micro_batch": (max_tokens_per_micro_batch, None),
                "drop_last": (drop_last, False),
                "num_proc": (num_proc, 1),
                "cache_dir": (cache_dir, None),
            }
            for name, (value, default) in whole.items():
                if value != default:
                    raise ValueError(
                        f"{name}={value!r} needs all of the data at once, which a stream is not: leave it or "
                        "streaming=True out"
                    )
        check_integer("max_length", max_length, minimum=2, why="one token to learn and one in front of it")
        check_integer("micro_batch_size", micro_batch_size, minimum=1, optional=True)
        check_integer("max_tokens_per_micro_batch", max_tokens_per_micro_batch, minimum=1, optional=True)
        if messages is not None and text is not None:
            raise ValueError(f"name messages={messages!r} or text={text!r}, not both: they are two kinds of data")
        if micro_batch_size is not None and max_tokens_per_micro_batch is not None:
            raise ValueError("give micro_batch_size or max_tokens_per_micro_batch, not both")
        ways = ["truncate", *(["split"] if self.splits_rows else []), "drop", "error"]
        if overlong not in ways:
            raise ValueError(f"overlong must be {', '.join(map(repr, ways[:-1]))} or 'error', got {overlong!r}")
        self.prompt = prompt
        self.completion = completion
        self.messages = messages
        self.text = text
        self.input_ids = input_ids
        self.labels = labels
        self.loss_mask = loss_mask
        self.numbers = tuple(numbers)
        self.validation_data = validation_data
        self.micro_batch_size = micro_batch_size or 8
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.max_length = max_length
        self.overlong = overlong
        self.drop_last = drop_last
        self.token_cache = TokenCache(cache_dir, num_proc)
        self._preparing = False
        self._columns: Mapping[str, str] = {}  # that are read, by argument
        self.examples: TokenizedDataset | None = None
        """The training examples, after ``setup``."""
        self.validation_examples: TokenizedDataset | None = None
        """The validation examples, after ``setup``."""
        self.steps_per_epoch = steps_per_epoch
        self.stream: MixedStream[Any] | None = None
        """The training examples of a stream, after ``setup``."""
        self._stream_loader: StepLoader[Any] | None = None
        self._loader_state: dict[str, Any] | None = None

    def _refuse_columns(self, given: Mapping[str, Any], *, instead: str) -> None:
        """Raise ValueError for arguments of columns that only supervised data has; subclasses read others."""
        for name in self.column_arguments:
            if given.get(name) is not None:
                raise ValueError(f"{type(self).__name__} has no argument {name!r}: name the columns {instead}")

    def prepare_data(self) -> None:
        """Download, convert and tokenise once per machine; rows of a stream are read during training."""
        self._check_capacity()
        sources = [] if self.streaming else [(source, self.split) for source in list_sources(self.data)]
        if self.validation_data is not None:
            sources.append((self.validation_data, self.validation_split))
        self._preparing = True
        try:
            for source, split in sources:
                rows = read_rows(source, split=split, subset=self.subset)
                if self.token_cache.keeps(rows):
                    self._open_table(source, split, self._load_tokenizer())
        finally:
            self._preparing = False

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenise the data, or open its stream; a second call does nothing.

        Raises:
            ValueError: If a column is missing, a value has the wrong type, a row is longer than the model's context, no
                row has a token to learn, or ``max_tokens_per_micro_batch`` is too small for a row. Of a stream, only
                the first row is known yet, and that all ranks read the same rows.
        """
        self._check_capacity()
        tokenizer = self._load_tokenizer()
        if self.examples is not None or self.stream is not None:
            return
        if self.validation_data is not None:
            self.validation_examples = self._open_table(self.validation_data, self.validation_split, tokenizer)
        if self.streaming:
            opened = [self._open_source(source, tokenizer) for source in list_sources(self.data)]
            self.stream = MixedStream(self.data, opened)
            return
        examples = [self._open_table(source, self.split, tokenizer) for source in list_sources(self.data)]
        self.examples = self.data.mix(examples, seed=self.seed) if isinstance(self.data, Mixture) else examples[0]

    def describe_data(self) -> str:
        """Sources, columns and numbers of rows in one line, after ``setup``."""
        columns = ", ".join(sorted(set(self._columns.values())))
        text = f"{self._description} (columns {columns})" if columns else self._description
        if self.examples is None:
            text = f"a stream of {text}"
        else:
            counts: Counter[str] = Counter()
            for part in getattr(self.examples, "sources", [self.examples]):
                counts.update(getattr(getattr(part, "answers", part), "counts", {}))
            out = sum(counts[name] for name in ("dropped", "empty", "no_answer", "same"))
            cut = counts["truncated"] + counts["split"]
            text += f": {len(self.examples.lengths)} examples"
            text += f", {out} rows left out" if out else ""
            text += f", {cut} rows cut at max_length {self.max_length}" if cut else ""
        if self.validation_examples is None:
            return text
        return f"{text}; validation on {len(self.validation_examples.lengths)} examples"

    @property
    def max_tokens_of_forward(self) -> int | None:
        """Tokens of a micro-batch: those of the ranks that divide them among themselves."""
        limit = self.max_tokens_per_micro_batch
        return None if limit is None else limit * self._mesh.sequence

    def _check_capacity(self) -> None:
        """Raise ValueError unless each sequence fits into a micro-batch; not known before there is a Trainer."""
        limit, parts = self.max_tokens_of_forward, self._mesh.sequence
        if limit is not None and limit < self.max_length:
            shared = f" * sequence_parallel_size {parts} = {limit}" if parts > 1 else ""
            raise ValueError(
                f"max_tokens_per_micro_batch must be at least max_length {self.max_length}, so that each sequence "
                f"fits, got {self.max_tokens_per_micro_batch}{shared}"
            )

    def _open_table(self, source: Source, split: str, tokenizer: Any) -> TokenizedDataset:
        """Read a source and tokenise it."""
        rows = read_rows(source, split=split, subset=self.subset)
        self._columns = columns = self._check_numbers(self._find_columns(rows, source), rows, source)
        return self._builder(columns, source, tokenizer).table(rows)

    def _open_source(self, source: Any, tokenizer: Any) -> SourceStream[Any]:
        """The stream of a source, by the columns of its first row."""
        reader = self._reader(source)
        columns = self._check_numbers(self._find_columns(reader.head, source), reader.head, source)
        builder = self._builder(columns, source, tokenizer)
        builder.check_first(reader.head[0])
        return self._source_stream(reader, builder.examples, [*columns.values(), *self.numbers])

    def _find_columns(self, rows: "Dataset | RowPreview", source: Source) -> Mapping[str, str]:
        """Columns to read, by argument; override for other columns."""
        named = {name: getattr(self, name) for name in self.column_arguments}
        return find_columns(rows, source, SUPERVISED, named, beside=self.numbers)

    def _check_numbers(
        self, columns: Mapping[str, str], rows: "Dataset | RowPreview", source: Source
    ) -> Mapping[str, str]:
        """The columns; ValueError if there is none of :attr:`numbers`, or values are missing."""
        for name in self.numbers:
            check_columns(rows, source, numbers=name)
        return columns

    def _builder(self, columns: Mapping[str, str], source: Source, tokenizer: Any) -> ExampleBuilder:
        """Make a builder from the arguments and the model's context length."""
        return self.builder(
            self._formatter(tokenizer),
            columns,
            max_length=self.max_length,
            overlong=self.overlong,
            source=describe(source),
            context=self._context_length(),
            cache=self.token_cache,
            numbers=self.numbers,
            reports=not self._preparing,  # setup, which comes next, does
        )

    def _context_length(self) -> int | None:
        """Tokens that the model can see; ``None``: unlimited or unknown."""
        module = None if self.trainer is None else self.trainer.lightning_module
        return module.context_length if isinstance(module, HasModelLimits) else None

    def train_dataloader(self) -> StepLoader[Any]:
        """Micro-batches of this rank, each with the token count of its whole optimizer step."""
        trainer = self._attached_trainer()
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer)):
            raise ValueError(
                "GradientAccumulationScheduler changes the optimizer steps, which are planned before the first epoch: "
                "losses would be means of means; give Trainer(accumulate_grad_batches=...)"
            )
        if self.streaming:
            return self._train_stream(trainer)
        return self.loader(
            self.examples,
            accumulate=trainer.accumulate_grad_batches,
            shuffle=self.shuffle and not trainer.overfit_batches,  # type: ignore[attr-defined]  # set outside its class
            epoch=lambda: trainer.current_epoch,
            drop_last=self.drop_last,
            limit_batches=trainer.limit_train_batches,
        )

    def _train_stream(self, trainer: L.Trainer) -> StepLoader[Any]:
        if self._stream_loader is not None and trainer.fit_loop._combined_loader is not None:
            self._loader_state = self._stream_loader.state_dict()  # Trainer(reload_dataloaders_every_n_epochs)
        stream = self.stream
        self._stream_loader = loader = self.loader(
            stream,
            steps_per_epoch=self.steps_per_epoch,
            accumulate=trainer.accumulate_grad_batches,
            limit_batches=trainer.limit_train_batches,
            on_last_batch=lambda place: self._stop_after_passes(cast(MixedStream[Any], stream), place),
        )
        if self._loader_state is not None:
            loader.load_state_dict(self._loader_state)
            self._loader_state = None
            state = loader.state_dict()
            if state["position"] % trainer.accumulate_grad_batches == 0:
                self._stop_after_passes(cast(MixedStream[Any], stream), state["place"])
        return loader

    def val_dataloader(self) -> Any:
        """Validation micro-batches, normalised so that the plain mean of their losses is the mean over all tokens."""
        if self.validation_data is None:
            return no_loader()
        return self.loader(
            self.validation_examples,
            accumulate=1,
            shuffle=False,
            normalize_over_epoch=True,
            limit_batches=self._attached_trainer().limit_val_batches,
        )

    def predict_dataloader(self) -> StepLoader[Any]:
        """Micro-batches of ``data``; in the order of its rows on one rank without a token budget.

        Raises:
            RuntimeError: If it is a stream, which has no end and is shuffled.
        """
        if self.streaming:
            raise RuntimeError("a stream has no end and no order to predict in: leave streaming=True out")
        return self.loader(self.examples, accumulate=1, shuffle=False)

    def loader(self, examples: TokenizedDataset | MixedStream[Any] | None, **arguments: Any) -> StepLoader[Any]:
        """This rank's loader of examples; ``arguments`` are further ones of :class:`StepLoader`."""
        trainer = self._attached_trainer()
        if examples is None:
            raise RuntimeError(f"the data is not open yet: call {type(self).__name__}.setup() first (the Trainer does)")
        return self._step_loader(
            examples,
            self.collate,
            micro_batch_size=None if self.max_tokens_per_micro_batch else self.micro_batch_size,
            max_tokens_per_micro_batch=self.max_tokens_of_forward,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            ranks_per_forward=self._mesh.forward_group_size,
            seed=self.seed,
            **arguments,
        )

    def _step_loader(self, *args: Any, **arguments: Any) -> StepLoader[Any]:
        """Make the loader; override for one of another class."""
        return StepLoader(*args, **arguments)

    # ------------------------------------------------------------------ the position in a stream

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream; saved here because Lightning saves a loader's state only inside an epoch."""
        state = self._loader_state if self._stream_loader is None else self._stream_loader.state_dict()
        return {} if state is None else {"stream": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position of a stream."""
        self._loader_state = state_dict.get("stream")
        if self._stream_loader is not None and self._loader_state is not None:
            self._stream_loader.load_state_dict(self._loader_state)
