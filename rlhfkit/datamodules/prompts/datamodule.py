"""``PromptDataModule``: the prompts of reinforcement learning, and the cursor that says which come next.

The cursor is state of the DataModule because Lightning restores a loader's state only in the middle of an epoch.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import lightning as L

from rlhfkit.data.batch import TokenBatch
from rlhfkit.data.loaders.experience import ExperienceLoader
from rlhfkit.data.loaders.steps import StepLoader
from rlhfkit.datamodules.base import TextDataModule
from rlhfkit.datamodules.prompts.curriculum import Curriculum, DeclaresHistoryUse
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor
from rlhfkit.datamodules.prompts.rows import PromptColumns, PromptRows
from rlhfkit.datamodules.prompts.stream import StreamedPrompts
from rlhfkit.datamodules.prompts.table import PromptBatches, TablePrompts
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.tokenization.chat import SpecialTokensInText
from rlhfkit.datamodules.tokenization.mixture import Mixture, Sources, as_mixture, list_sources
from rlhfkit.datamodules.tokenization.sources import Source, describe, no_loader, read_rows
from rlhfkit.trainer_parts import experience_source_of, learns_from_text
from rlhfkit.validation import check_integer


def final_answer(answer: Any) -> Any:
    """Return what follows the last ``####``, as in GSM8K (Cobbe et al., 2021, arXiv:2110.14168).

    Thousands separators are removed: ``"... #### 1,234"`` becomes ``"1234"``. Other answers are returned unchanged.
    """
    if not isinstance(answer, str) or "####" not in answer:
        return answer
    return re.sub(r"(?<=\d),(?=\d{3})", "", answer.rsplit("####", 1)[1].strip())


class IterationLength:
    """Sets the number of micro-batches of the current iteration in a Trainer, and ``accumulate_grad_batches``.

    With ``max_tokens_per_micro_batch`` the number follows from the samples, so it is unknown when Lightning (2.6.6)
    asks for the length of the loader. What Lightning derived from it is set again inside the ``next()`` of the first
    micro-batch, before the fetcher compares its count with the length.

    Every iteration has the same number of optimizer updates, and all updates of an iteration equally many
    micro-batches; ``global_step``, schedules and ``estimated_stepping_batches`` count updates as ever.
    """

    def __init__(self, trainer: L.Trainer, updates: int) -> None:
        """``updates``: optimizer updates of each iteration.

        Raises:
            ValueError: If the Trainer has a number of micro-batches of its own.
        """
        check_trainer(trainer)
        self._trainer = trainer
        self._updates = updates

    def set(self, micro_batches: int) -> None:
        """Set the number of micro-batches of the iteration whose first micro-batch comes next, or whose rest."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        trainer.accumulate_grad_batches = micro_batches // self._updates
        if loop._combined_loader is not None:
            loop._combined_loader.limits = [micro_batches]
        fetcher = loop._data_fetcher
        if fetcher is None:  # a checkpoint is being restored: Lightning asks the loader again after this
            return
        fetcher.length = micro_batches
        if loop.max_batches == micro_batches:
            return
        loop.max_batches = micro_batches
        if trainer.val_check_batch is not None:  # None: validation by time
            trainer.val_check_batch = max(1, int(micro_batches * trainer.val_check_interval))
        bar = trainer.progress_bar_callback
        if bar is not None:
            bar.on_train_epoch_start(trainer, trainer.lightning_module)  # reads the number of batches

    def reset(self) -> None:
        """Give the Trainer its own ``accumulate_grad_batches`` back, for the next run."""
        self._trainer.accumulate_grad_batches = 1


def check_trainer(trainer: L.Trainer) -> None:
    """Raise ValueError if arguments of the Trainer count micro-batches, whose number differs between iterations."""
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: with max_tokens_per_micro_batch the number of "
            "micro-batches of an update follows from the tokens of its samples. Leave it out, and say how many updates "
            "an iteration has: PromptDataModule(updates_per_iteration=...)"
        )
    if isinstance(trainer.val_check_interval, int):
        raise ValueError(
            f"val_check_interval={trainer.val_check_interval} counts micro-batches, whose number differs between "
            "iterations with max_tokens_per_micro_batch: give a share of an iteration (0.5), or check_val_every_n_epoch"
        )


class PretrainingText:
    """Micro-batches of text by number, a function of the number alone, so no cursor is saved.

    A pass over the text takes whole optimizer steps; left-over examples come in later passes, which have other orders.
    ``data`` must be attached to a Trainer and set up. ``accumulate`` is the number of micro-batches per optimizer step
    and rank; ``None``: it differs between steps. Raises ValueError if the text does not fill one optimizer step.
    """

    def __init__(self, data: SFTDataModule, accumulate: int | None) -> None:
        self.loader: StepLoader[TokenBatch] = data.loader(
            data.examples, accumulate=accumulate or 1, shuffle=data.shuffle, drop_last=True
        )
        self._next: int | None = None
        self._batches: Iterator[TokenBatch] = iter(())
        self._step: tuple[range, list[TokenBatch]] = range(0), []

    def batch(self, number: int) -> TokenBatch:
        """Return this rank's micro-batch ``number``, counted from the run's start, with its step's token counts."""
        if number != self._next:
            self._batches = self._iterate_from(number)
        self._next = number + 1
        return next(self._batches)

    def batch_of_step(self, number: int, step: range) -> TokenBatch:
        """Return micro-batch ``number`` of an optimizer step of the micro-batches ``step``, with that step's counts."""
        if self._step[0] != step:
            batches = [self.batch(each) for each in step]
            tokens = sum(batch.step_tokens or 0.0 for batch in batches)
            sequences = sum(batch.step_sequences or 0.0 for batch in batches)
            averaged = sum(batch.step_micro_batches for batch in batches)
            self._step = (
                step,
                [
                    dataclasses.replace(
                        batch, step_tokens=tokens, step_sequences=sequences, step_micro_batches=averaged
                    )
                    for batch in batches
                ],
            )
        return self._step[1][number - step.start]

    def _iterate_from(self, number: int) -> Iterator[TokenBatch]:
        epoch, position = divmod(number, len(self.loader))
        state: dict[str, Any] = self.loader.state_dict() | {"position": position}
        self.loader.load_state_dict(state)
        while True:
            self.loader.set_epoch(epoch)
            yield from self.loader
            epoch += 1


class PromptDataModule(TextDataModule):
    """Prompts from files, saved data sets, the hub or memory, for modules that learn from their own samples.

    The Trainer's rollout callback takes the prompts of an iteration from :meth:`prompt_queue`, and calls
    :meth:`set_cursor` once it was trained on; ``train_dataloader`` yields the callback's experience. Each pass over the
    data uses every prompt once, in an order that is a function of (seed, pass) alone.

    With ``streaming=True`` rows are read and tokenised when they are drawn: at most ``shuffle_buffer_size`` rows of
    each source are in memory, and the prompts of iterations that were not trained on. The ``index`` of a prompt is then
    its number in the stream, not its row. A checkpoint can be continued by any number of ranks.

    Example::

        data = PromptDataModule("gsm8k.jsonl", prompt="question", answer="answer", rollout_batch_size=72)
        data = PromptDataModule("prompts/*.jsonl", streaming=True, answer="answer", rollout_batch_size=64)
    """

    def __init__(
        self,
        data: Sources,
        *,
        prompt: str = "prompt",
        answer: str | None = None,
        answer_extractor: Callable[[Any], Any] = final_answer,
        validation_data: Sources | None = None,
        pretraining_data: SFTDataModule | None = None,
        split: str = "train",
        validation_split: str = "test",
        subset: str | None = None,
        rollout_batch_size: int = 64,
        micro_batch_size: int | None = None,
        max_tokens_per_micro_batch: int | None = None,
        updates_per_iteration: int | None = None,
        epochs_per_iteration: int = 1,
        validation_batch_size: int = 64,
        max_prompt_length: int | None = None,
        overlong_prompts: Literal["error", "drop"] = "error",
        shuffle: bool = True,
        seed: int = 0,
        curriculum: Curriculum | None = None,
        apply_chat_template: bool | None = None,
        system: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        special_tokens_in_text: SpecialTokensInText | None = None,
        tokenizer: Any = None,
        allow_image_urls: bool = False,
        streaming: bool = False,
        shuffle_buffer_size: int = 10_000,
        passes: int | None = None,
    ) -> None:
        """Check the arguments; data is opened in ``setup``.

        Args:
            data: The prompts, see :data:`~rlhfkit.datamodules.tokenization.sources.Source`. Several sources with their
                weights, as a mapping or a :class:`~rlhfkit.Mixture`, are in every iteration in proportion.
            prompt: Column of the prompts: text, or a list of chat messages ``{"role": ..., "content": ...}``.
            answer: Column of the reference answers; ``None``: there are none.
            answer_extractor: Applied to each value of the answer column.
            validation_data: The validation prompts, in the same columns; all are used, and metrics are logged per
                source too.
            pretraining_data: Text for :class:`~rlhfkit.modules.parts.pretraining_loss.PretrainingLoss`:
                ``micro_batch_size`` of its examples beside each micro-batch of samples. Not a stream.
            split: Split of ``data``, if it has several.
            validation_split: Split of ``validation_data``, if it has several.
            subset: Configuration of a hub data set.
            rollout_batch_size: Prompts per iteration, all ranks together.
            micro_batch_size: Sequences per micro-batch on average; 8 if ``max_tokens_per_micro_batch`` is not given.
                Ranks that compute forward passes together (``sequence_parallel_size``, ``tensor_parallel_size``) share
                a micro-batch.
            max_tokens_per_micro_batch: Tokens that a rank may compute in a forward pass of training, instead of
                ``micro_batch_size`` and ``accumulate_grad_batches``: the number of micro-batches then follows from the
                samples of each iteration, so that memory is bounded however long they are. Packed batches count a
                prompt once for the samples of its group in a micro-batch; padded ones count rows times the longest.
                With ``sequence_parallel_size=s`` a micro-batch has s times as many tokens, of which each rank computes
                its part. A longer sequence is a micro-batch of its own, with a warning.
            updates_per_iteration: Optimizer updates of an epoch of an iteration with ``max_tokens_per_micro_batch``,
                each on equally many sequences of all ranks; 1 (fully on-policy) if not given.
            epochs_per_iteration: How often an iteration is trained on (PPO's epochs: 3 to 10 in Schulman et al., 2017,
                arXiv:1707.06347; 1 by default in TRL's GRPO, OpenRLHF and verl). Later epochs are shuffled by prompts,
                with ``seed``, and use the old log-probs of the policy before the iteration.
            validation_batch_size: Prompts per batch of validation, all ranks together.
            max_prompt_length: Tokens of a prompt, template included; ``None``: as many as the model and engine take.
            overlong_prompts: ``"error"`` or ``"drop"`` (with a logged count) for prompts above that length.
            shuffle: Shuffle each pass over the data; the order of the file when false.
            seed: Seed of the shuffling, of passes over the data and of epochs of an iteration.
            curriculum: Orders each pass over the prompts and may leave some out, see
                :mod:`rlhfkit.datamodules.prompts.curriculum`.
            apply_chat_template: Wrap text prompts as a user message; ``None``: when the tokenizer has a template. Chat
                messages always go through the template.
            system: System message before each prompt; needs the chat template.
            chat_template_kwargs: Passed to the template, for example ``{"enable_thinking": False}``.
            special_tokens_in_text: What to do with control tokens such as ``<eos>`` in the data: ``"keep"``,
                ``"refuse"`` or ``"escape"``. ``None``: escape them in chat messages, where they could end or forge a
                turn, and keep them in plain text; see
                :data:`~rlhfkit.datamodules.tokenization.chat.SpecialTokensInText`.
            tokenizer: A tokenizer or its name, which the whole run then uses, exports included; ``None``: the
                LightningModule's attribute ``tokenizer``.
            allow_image_urls: Fetch images of rows from ``http`` and ``https`` URLs; else such rows are an error.
            streaming: Read ``data`` during training, for data too large to be opened as a whole. It can then also be a
                pattern of files, a ``datasets.IterableDataset``, or a function that returns an iterable of rows;
                ``validation_data`` is read as a whole.
            shuffle_buffer_size: Rows of a stream that are read into memory and shuffled together.
            passes: End a run over a stream with the iteration in which this many passes over the data are finished
                (over all sources, or with ``Mixture(until="first")`` over the first to be); the iteration is filled
                from the next pass. ``None``: the Trainer's limits end it.

        Raises:
            ValueError: If an argument is out of range, or there is a ``curriculum``, which orders whole passes, for a
                stream.
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
        if streaming and curriculum is not None:
            raise ValueError(
                f"curriculum={curriculum!r} orders all prompts of a pass, which a stream does not know: leave "
                "streaming=True out, or sort the files and give shuffle=False"
            )
        check_integer("rollout_batch_size", rollout_batch_size, minimum=1)
        check_integer("micro_batch_size", micro_batch_size, minimum=1, optional=True)
        check_integer("max_tokens_per_micro_batch", max_tokens_per_micro_batch, minimum=1, optional=True)
        check_integer("updates_per_iteration", updates_per_iteration, minimum=1, optional=True)
        check_integer("epochs_per_iteration", epochs_per_iteration, minimum=1)
        if max_tokens_per_micro_batch is not None and micro_batch_size is not None:
            raise ValueError("give micro_batch_size or max_tokens_per_micro_batch, not both")
        if max_tokens_per_micro_batch is None and updates_per_iteration is not None:
            raise ValueError(
                f"updates_per_iteration={updates_per_iteration} needs max_tokens_per_micro_batch: without it, the "
                "updates follow from micro_batch_size and Trainer(accumulate_grad_batches=...)"
            )
        check_integer("validation_batch_size", validation_batch_size, minimum=1)
        check_integer("max_prompt_length", max_prompt_length, minimum=1, optional=True)
        if overlong_prompts not in ("error", "drop"):
            raise ValueError(f"overlong_prompts must be 'error' or 'drop', got {overlong_prompts!r}")
        if pretraining_data is not None and pretraining_data.builder.example is not None:
            raise ValueError(
                f"pretraining_data is a {type(pretraining_data).__name__}, whose examples are more than text: give an "
                "SFTDataModule"
            )
        if pretraining_data is not None and pretraining_data.streaming:
            raise ValueError(
                f"pretraining_data is a {type(pretraining_data).__name__} with streaming=True, and text beside samples "
                "is drawn by its number, which a stream does not know: leave streaming=True out"
            )
        self.prompt = prompt
        self.answer = answer
        self.answer_extractor = answer_extractor
        self.validation_data = None if validation_data is None else as_mixture(validation_data)
        self.pretraining_data = pretraining_data
        self.rollout_batch_size = rollout_batch_size
        self.micro_batch_size = 8 if micro_batch_size is None else micro_batch_size
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.updates_per_iteration = updates_per_iteration or 1
        self.epochs_per_iteration = epochs_per_iteration
        self.validation_batch_size = validation_batch_size
        self.max_prompt_length = max_prompt_length
        self.overlong_prompts = overlong_prompts
        self.curriculum = curriculum
        self._prompts: TablePrompts | StreamedPrompts | None = None
        self._validation: TablePrompts | None = None
        self._saved: dict[str, Any] | None = None  # state that is restored when the data is opened
        self._text: PretrainingText | None = None
        self._length: IterationLength | None = None

    # -- reading -------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download and convert once per machine; rows of a stream are read during training."""
        for source in [] if self.streaming else list_sources(self.data):
            read_rows(source, split=self.split, subset=self.subset)
        for source in [] if self.validation_data is None else list_sources(self.validation_data):
            read_rows(source, split=self.validation_split, subset=self.subset)
        if self.pretraining_data is not None:
            self.pretraining_data.trainer = self.trainer
            self.pretraining_data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Open the data and check it; a second call does nothing.

        Raises:
            ValueError: If a column is missing, a prompt is too long, there are fewer prompts than a batch needs,
                ``max_tokens_per_micro_batch`` meets a Trainer that counts micro-batches, or nothing learns from
                ``pretraining_data``.
        """
        trainer = self.trainer
        fitting = trainer if stage == "fit" else None
        if fitting is not None and self.pretraining_data is not None and not learns_from_text(fitting):
            raise ValueError(
                "PromptDataModule(pretraining_data=...) gives text that nothing learns from: give the module "
                "parts=[PretrainingLoss(0.05)], of rlhfkit.modules.parts.pretraining_loss (0.05 in OpenRLHF)"
            )
        if trainer is not None and self.max_tokens_per_micro_batch is not None and stage == "fit":
            check_trainer(trainer)
        tokenizer = self._load_tokenizer()
        if self._prompts is not None:
            return
        prompts: TablePrompts | StreamedPrompts
        if self.streaming:
            prompts = self._open_stream(tokenizer)
        else:
            prompts = self._open_table(
                self.data,
                self.split,
                tokenizer,
                batch_size=self.rollout_batch_size,
                seed=self.seed,
                shuffle=self.shuffle,
                curriculum=self.curriculum,
                description=self._description,
            )
        if self.validation_data is not None:
            self._validation = self._open_table(self.validation_data, self.validation_split, tokenizer)
        if self.pretraining_data is not None:
            self.pretraining_data.trainer = trainer
            self.pretraining_data.setup(stage)
        if self._saved is not None:
            prompts.load_state_dict(self._saved)
        self._prompts = prompts

    def _open_table(self, data: Mixture | Source, split: str, tokenizer: Any, **options: Any) -> TablePrompts:
        columns = self._prompt_columns(tokenizer)
        parts = [
            PromptRows(
                read_rows(source, split=split, subset=self.subset),
                source,
                columns,
                max_length=self.max_prompt_length,
                overlong=self.overlong_prompts,
            )
            for source in list_sources(data)
        ]
        return TablePrompts(parts, data if isinstance(data, Mixture) else None, **options)

    def _open_stream(self, tokenizer: Any) -> StreamedPrompts:
        return StreamedPrompts(
            self.data,
            self._prompt_columns(tokenizer),
            lambda source, *arguments: self._source_stream(self._reader(source), *arguments),
            description=self._description,
            max_length=self.max_prompt_length,
            overlong=self.overlong_prompts,
        )

    def _prompt_columns(self, tokenizer: Any) -> PromptColumns:
        return PromptColumns(self._formatter(tokenizer), self.prompt, self.answer, self.answer_extractor)

    def _opened(self, *, validation: bool = False) -> TablePrompts | StreamedPrompts:
        prompts = self._validation if validation else self._prompts
        if prompts is None:
            raise RuntimeError("the data is not open yet: call PromptDataModule.setup() first (the Trainer does)")
        return prompts

    def check_prompts(
        self, *, longest: int, reason: str, vocabulary: int | None = None, validation: bool = False
    ) -> None:
        """Check all prompts against the limits of the engine before anything is generated.

        Those of a stream are checked when they are read.

        Args:
            longest: Tokens that a prompt may have.
            reason: Where that limit comes from, for messages.
            vocabulary: Number of tokens of the model; ``None``: unknown.
            validation: Check the validation prompts instead of the training prompts.

        Raises:
            ValueError: If a prompt is too long and ``overlong_prompts`` is ``"error"``, too few prompts are left, or
                one has a token outside the vocabulary.
        """
        self._opened(validation=validation).check(longest=longest, reason=reason, vocabulary=vocabulary)

    def check_columns(self, reader: str, *, answer: bool, columns: Sequence[str], validation: bool = False) -> None:
        """Check that the prompts have what a reward reads, before anything is generated.

        Args:
            reader: Name of the reward, for messages.
            answer: Whether it reads ``prompt.answer``.
            columns: What it reads in ``prompt.metadata``.
            validation: Check the validation prompts instead of the training prompts.

        Raises:
            ValueError: If no column of answers was named, or a column does not exist.
        """
        for source, found in self._opened(validation=validation).source_columns():
            if answer and self.answer is None:
                raise ValueError(
                    f"reward {reader!r} compares with the prompts' answers, and no column of answers was named: give "
                    f"{type(self).__name__}(answer=...); {describe(source)} has the columns {', '.join(found)}"
                )
            left = [name for name in found if name not in (self.prompt, self.answer)]
            missing = [name for name in columns if name not in left]
            if missing:
                taken = [name for name in missing if name in found]
                used = f" ({', '.join(taken)} is read as the prompt or answer)" if taken else ""
                raise ValueError(
                    f"reward {reader!r} reads the column {missing[0]!r} of the prompts' metadata, which "
                    f"{describe(source)} does not have{used}; it has {', '.join(left) or 'none'}"
                )

    def describe_data(self) -> str:
        """Sources, columns and numbers of prompts in one line, after ``setup``."""
        columns = ", ".join(name for name in (self.prompt, self.answer) if name is not None)
        text = f"{self._description} (columns {columns})" if columns else self._description
        text = self._opened().describe(text)
        return text if self._validation is None else f"{text}; validation on {self._validation.total} prompts"

    # -- prompts -------------------------------------------------------------------------------------------------------

    @property
    def has_validation_prompts(self) -> bool:
        """Whether there are prompts for validation."""
        return self.validation_data is not None

    @property
    def curriculum_uses_rewards(self) -> bool:
        """Whether there is a curriculum that reads the rewards of earlier samples."""
        curriculum = self.curriculum
        return curriculum is not None and (not isinstance(curriculum, DeclaresHistoryUse) or curriculum.uses_rewards)

    def prompt_queue(self, after: dict[str, Any] | None = None) -> IterationQueue:
        """Make the queue of an iteration's prompts, without moving the cursor.

        Args:
            after: Where to begin: :attr:`IterationQueue.after` of the previous iteration; ``None``: at the cursor.
        """
        return self._opened().queue(after)

    def prompt_column(self, name: str) -> dict[int, Any]:
        """The values of a column of training prompts, by ``index``; ValueError if there is none, or for a stream."""
        prompts = self._opened()
        if not isinstance(prompts, TablePrompts):
            raise ValueError(
                f"the column {name!r} is needed for all prompts before training, which a stream does not know: leave "
                "streaming=True out"
            )
        return prompts.column_by_index(name)

    def set_cursor(self, after: dict[str, Any]) -> None:
        """Move the cursor to :attr:`IterationQueue.after` of a trained iteration, unless the data differs.

        Ends the run if ``passes`` are finished.
        """
        self._opened().set_cursor(after)
        self._stop_at_end()

    def _stop_at_end(self) -> None:
        if isinstance(self._prompts, StreamedPrompts):
            self._stop_after_passes(self._prompts.stream, self._prompts.untrained)

    def pretraining_batch(self, number: int) -> TokenBatch:
        """Return the pretraining text beside one of this rank's micro-batches of samples.

        Args:
            number: Number of that micro-batch, counted from the start of the run.

        Raises:
            RuntimeError: If there is no ``pretraining_data``, or no training.
        """
        if self._text is None:
            raise RuntimeError("there is no pretraining_data, or no training that it would be for")
        if self.max_tokens_per_micro_batch is None:
            return self._text.batch(number)
        trainer = self._attached_trainer()
        first = number - trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches
        return self._text.batch_of_step(number, range(first, first + trainer.accumulate_grad_batches))

    # -- loaders -------------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> ExperienceLoader:
        """The experience that the Trainer's rollout callback makes, one iteration per epoch of the Trainer.

        Raises:
            ValueError: If the Trainer has no such callback or several, or the sizes do not divide.
        """
        trainer = self._attached_trainer()
        source = experience_source_of(trainer)
        self._stop_at_end()
        if self.pretraining_data is not None:
            self.pretraining_data.trainer = trainer
            fixed = self.max_tokens_per_micro_batch is None
            self._text = PretrainingText(self.pretraining_data, trainer.accumulate_grad_batches if fixed else None)
        if self.max_tokens_per_micro_batch is None:
            return ExperienceLoader(source.collect, source.batches_per_iteration())
        self._reset_length()
        self._length = IterationLength(trainer, source.batches_per_iteration())
        return ExperienceLoader(source.collect, source.batches_per_iteration(), resized=self._length.set)

    def val_dataloader(self) -> Any:
        """Lists of validation prompts, this rank's share of each batch; an empty list without ``validation_data``."""
        if self.validation_data is None:
            return no_loader()
        trainer = self._attached_trainer()
        prompts = cast(TablePrompts, self._opened(validation=True))
        return PromptBatches(prompts, self.validation_batch_size, trainer.global_rank, trainer.world_size)

    def teardown(self, stage: str) -> None:
        """Give the Trainer its own ``accumulate_grad_batches`` back."""
        self._reset_length()

    def on_exception(self, exception: BaseException) -> None:
        """Give the Trainer its own ``accumulate_grad_batches`` back; Lightning calls no ``teardown`` then."""
        self._reset_length()

    def _reset_length(self) -> None:
        if self._length is not None:
            self._length.reset()
            self._length = None

    # -- saving --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The cursor and a fingerprint of the data, as plain values."""
        if self._prompts is not None:
            return self._prompts.state_dict()
        return self._saved or {**PromptCursor().state_dict(), "fingerprint": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved prompt; if data, weights, seed or block have changed, warn and begin a new pass."""
        self._saved = state_dict
        if self._prompts is not None:
            self._prompts.load_state_dict(state_dict)
