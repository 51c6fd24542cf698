"""``PromptDataModule``: the prompts of reinforcement learning, and the cursor that says which come next.

The cursor is state of the DataModule because Lightning restores a loader's state only in the middle of an epoch.
"""

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import lightning as L

from rlhfkit.argument_names import refuse_arguments
from rlhfkit.data.batch import TokenBatch
from rlhfkit.data.loaders.experience import ExperienceLoader
from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.prompts.columns import PromptColumns
from rlhfkit.datamodules.prompts.curriculum import Curriculum, DeclaresHistoryUse
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor, PromptOrder
from rlhfkit.datamodules.prompts.iteration_length import IterationLength, check_trainer
from rlhfkit.datamodules.prompts.mixed import MixedPrompts
from rlhfkit.datamodules.prompts.pretraining import PretrainingText
from rlhfkit.datamodules.prompts.rows import PromptBatches, PromptRows
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.tokenization.chat import PromptFormatter, SpecialTokensInText, check_special_tokens_in_text
from rlhfkit.datamodules.tokenization.mixture import Mixture, Sources, as_mixture, list_sources
from rlhfkit.datamodules.tokenization.run_tokenizer import RunTokenizer
from rlhfkit.datamodules.tokenization.sources import Source, describe, no_loader, read_rows
from rlhfkit.trainer_parts import experience_source_of
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)


def final_answer(answer: Any) -> Any:
    """Return what follows the last ``####``, as in GSM8K (Cobbe et al., 2021, arXiv:2110.14168).

    Thousands separators are removed: ``"... #### 1,234"`` becomes ``"1234"``. Other answers are returned unchanged.
    """
    if not isinstance(answer, str) or "####" not in answer:
        return answer
    return re.sub(r"(?<=\d),(?=\d{3})", "", answer.rsplit("####", 1)[1].strip())


class PromptDataModule(L.LightningDataModule):
    """Prompts from files, saved data sets, the hub or memory, for modules that learn from their own samples.

    The Trainer's rollout callback takes the prompts of an iteration from :meth:`prompt_queue`, and calls
    :meth:`set_cursor` once it was trained on; ``train_dataloader`` yields the callback's experience. Each pass over the
    data uses every prompt once, in an order that is a function of (seed, pass) alone.

    Example::

        data = PromptDataModule("gsm8k.jsonl", prompt="question", answer="answer", rollout_batch_size=72)
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
        **unknown: Any,
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
            pretraining_data: Text for modules with a ``ptx_coef``: ``micro_batch_size`` of its examples beside each
                micro-batch of samples. Not a stream.
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

        Raises:
            ValueError: If an argument is out of range.
        """
        refuse_arguments(type(self), unknown)
        super().__init__()
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
        check_integer("seed", seed)
        if overlong_prompts not in ("error", "drop"):
            raise ValueError(f"overlong_prompts must be 'error' or 'drop', got {overlong_prompts!r}")
        check_special_tokens_in_text(special_tokens_in_text)
        if pretraining_data is not None and not pretraining_data.keeps_tokens:
            raise ValueError(
                f"pretraining_data is a {type(pretraining_data).__name__}, and text beside samples is drawn by its "
                "number, which a stream does not know: use SFTDataModule"
            )
        self.data = as_mixture(data)
        self.prompt = prompt
        self.answer = answer
        self.answer_extractor = answer_extractor
        self.validation_data = None if validation_data is None else as_mixture(validation_data)
        self.pretraining_data = pretraining_data
        self.split = split
        self.validation_split = validation_split
        self.subset = subset
        self.rollout_batch_size = rollout_batch_size
        self.micro_batch_size = 8 if micro_batch_size is None else micro_batch_size
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.updates_per_iteration = updates_per_iteration or 1
        self.epochs_per_iteration = epochs_per_iteration
        self.validation_batch_size = validation_batch_size
        self.max_prompt_length = max_prompt_length
        self.overlong_prompts = overlong_prompts
        self.shuffle = shuffle
        self.seed = seed
        self.curriculum = curriculum
        self.apply_chat_template = apply_chat_template
        self.system = system
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.special_tokens_in_text = special_tokens_in_text
        self.tokenizer = tokenizer
        self._run_tokenizer = RunTokenizer(self)
        self._is_open = False
        self._rows: PromptRows | MixedPrompts | None = None
        self._validation_rows: PromptRows | MixedPrompts | None = None
        self._order: PromptOrder | None = None
        self._cursor = PromptCursor()
        self._saved_fingerprint: str | None = None
        self._text: PretrainingText | None = None
        self._length: IterationLength | None = None

    # -- reading -------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download and convert once per machine."""
        self._prepare_training_data()
        for source in [] if self.validation_data is None else list_sources(self.validation_data):
            read_rows(source, split=self.validation_split, subset=self.subset)
        if self.pretraining_data is not None:
            self.pretraining_data.trainer = self.trainer
            self.pretraining_data.prepare_data()

    def _prepare_training_data(self) -> None:
        for source in list_sources(self.data):
            read_rows(source, split=self.split, subset=self.subset)

    def setup(self, stage: str | None = None) -> None:
        """Open the data and check it; a second call does nothing.

        Raises:
            ValueError: If a column is missing, a prompt is too long, there are fewer prompts than a batch needs, or
                ``max_tokens_per_micro_batch`` meets a Trainer that counts micro-batches.
        """
        trainer = self.trainer
        if trainer is not None and self.max_tokens_per_micro_batch is not None and stage == "fit":
            check_trainer(trainer)
        tokenizer = self._run_tokenizer.find(None if trainer is None else trainer.lightning_module)
        if self._is_open:
            return
        self._open_training_data(tokenizer)
        if self.validation_data is not None:
            self._validation_rows = self._open(self.validation_data, self.validation_split, tokenizer)
        if self.pretraining_data is not None:
            self.pretraining_data.trainer = trainer
            self.pretraining_data.setup(stage)
        self._is_open = True

    def _open_training_data(self, tokenizer: Any) -> None:
        self._rows = self._open(self.data, self.split, tokenizer)
        self._check_count()
        self._check_fingerprint()

    def _open(self, data: Mixture | Source, split: str, tokenizer: Any) -> PromptRows | MixedPrompts:
        parts = [self._open_source(source, split, tokenizer) for source in list_sources(data)]
        return MixedPrompts(data, parts) if isinstance(data, Mixture) else parts[0]

    def _open_source(self, source: Source, split: str, tokenizer: Any) -> PromptRows:
        return PromptRows(
            read_rows(source, split=split, subset=self.subset),
            source,
            self._prompt_columns(tokenizer),
            max_length=self.max_prompt_length,
            overlong=self.overlong_prompts,
        )

    def _prompt_columns(self, tokenizer: Any) -> PromptColumns:
        formatter = PromptFormatter(
            tokenizer,
            apply_chat_template=self.apply_chat_template,
            system=self.system,
            chat_template_kwargs=self.chat_template_kwargs,
            special_tokens_in_text=self.special_tokens_in_text,
        )
        return PromptColumns(formatter, self.prompt, self.answer, self.answer_extractor)

    @staticmethod
    def _opened(rows: PromptRows | MixedPrompts | None) -> PromptRows | MixedPrompts:
        if rows is None:
            raise RuntimeError("the data is not open yet: call PromptDataModule.setup() first (the Trainer does)")
        return rows

    def _check_count(self) -> None:
        rows = self._opened(self._rows)
        if len(rows) < self.rollout_batch_size:
            raise ValueError(
                f"{self._description} has {len(rows)} prompts, fewer than rollout_batch_size "
                f"{self.rollout_batch_size}, and a prompt cannot be in an iteration twice: lower rollout_batch_size or "
                "add prompts"
            )
        if isinstance(rows, MixedPrompts):
            rows.check_share(self.rollout_batch_size)

    def check_prompts(
        self, *, longest: int, reason: str, vocabulary: int | None = None, validation: bool = False
    ) -> None:
        """Check all prompts against the limits of the engine before anything is generated.

        Args:
            longest: Tokens that a prompt may have.
            reason: Where that limit comes from, for messages.
            vocabulary: Number of tokens of the model; ``None``: unknown.
            validation: Check the validation prompts instead of the training prompts.

        Raises:
            ValueError: If a prompt is too long and ``overlong_prompts`` is ``"error"``, too few prompts are left, or
                one has a token outside the vocabulary.
        """
        rows = self._opened(self._validation_rows if validation else self._rows)
        for part in rows.parts if isinstance(rows, MixedPrompts) else [rows]:
            part.check_vocabulary(vocabulary)
            part.limit_lengths(longest, reason)
        if not validation:
            self._order = None  # some rows may be gone
            self._check_count()

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
        for source, found in self._columns(validation):
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

    def _columns(self, validation: bool) -> list[tuple[Source, list[str]]]:
        """Each source of the prompts, with its columns."""
        rows = self._opened(self._validation_rows if validation else self._rows)
        if isinstance(rows, MixedPrompts):  # its prompts have the name of their source
            return [(part.source, sorted({*part.rows.column_names, "source"})) for part in rows.parts]
        return [(rows.source, list(rows.rows.column_names))]

    @property
    def _description(self) -> str:
        return " and ".join(describe(source) for source in list_sources(self.data))

    def describe_data(self) -> str:
        """Sources, columns and numbers of prompts in one line, after ``setup``."""
        columns = ", ".join(name for name in (self.prompt, self.answer) if name is not None)
        text = f"{self._description} (columns {columns})" if columns else self._description
        if self._rows is None:
            text = f"a stream of {text}"
        else:
            parts = self._rows.parts if isinstance(self._rows, MixedPrompts) else [self._rows]
            out = sum(len(part.rows) - len(part.kept) for part in parts)
            text += f": {len(self._rows)} prompts" + (f", {out} rows left out" if out else "")
        if self._validation_rows is None:
            return text
        return f"{text}; validation on {len(self._validation_rows)} prompts"

    # -- prompts -------------------------------------------------------------------------------------------------------

    @property
    def num_prompts(self) -> int:
        """Number of training prompts."""
        return len(self._opened(self._rows))

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
        rows = self._opened(self._rows)
        if self._order is None:
            pass_order = rows.pass_order if isinstance(rows, MixedPrompts) else None
            self._order = PromptOrder(
                len(rows),
                seed=self.seed,
                shuffle=self.shuffle,
                plain=pass_order and partial(pass_order, seed=self.seed, shuffle=self.shuffle),
                curriculum=self.curriculum,
                column=rows.column,
            )
        cursor = self._cursor if after is None else PromptCursor.from_state_dict(after)
        return IterationQueue(self._order, rows.__getitem__, cursor, rows.fingerprint())

    def prompt_column(self, name: str) -> dict[int, Any]:
        """Return the values of a column of the training prompts, by their ``index``; ValueError if there is none."""
        rows = self._opened(self._rows)
        return rows.column_by_index(name)

    def set_cursor(self, after: dict[str, Any]) -> None:
        """Move the cursor to :attr:`IterationQueue.after` of a trained iteration, unless the data differs."""
        if after["fingerprint"] == self._opened(self._rows).fingerprint():
            self._cursor = PromptCursor.from_state_dict(after)

    def next_prompts(self, count: int) -> list[Prompt]:
        """Return the next prompts, all of different rows, without moving the cursor.

        Raises:
            ValueError: If ``count`` is below 1 or above the number of prompts.
        """
        return self.prompt_queue().take(count)

    def advance(self, count: int) -> None:
        """Move the cursor past what :meth:`next_prompts` returns for the same count."""
        queue = self.prompt_queue()
        queue.take(count)
        self.set_cursor(queue.after)

    def validation_prompts(self) -> list[Prompt]:
        """Return all validation prompts in the order of the file; none without ``validation_data``."""
        if self.validation_data is None:
            return []
        rows = self._opened(self._validation_rows)
        return [rows[position] for position in range(len(rows))]

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

    def train_dataloader(self) -> ExperienceLoader[Any]:
        """The experience that the Trainer's rollout callback makes, one iteration per epoch of the Trainer.

        Raises:
            ValueError: If the Trainer has no such callback or several, or the sizes do not divide.
        """
        trainer = self._attached_trainer()
        source = experience_source_of(trainer)
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
        rows = self._opened(self._validation_rows)
        return PromptBatches(rows, self.validation_batch_size, trainer.global_rank, trainer.world_size)

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

    def _attached_trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError(
                "PromptDataModule is not attached to a Trainer: pass it to trainer.fit(module, datamodule)"
            )
        return self.trainer

    # -- saving --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The cursor and a fingerprint of the data, as plain values."""
        return {
            **self._cursor.state_dict(),
            "fingerprint": self._saved_fingerprint if self._rows is None else self._rows.fingerprint(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved prompt; if the data has changed, warn and begin a new pass."""
        self._cursor = PromptCursor.from_state_dict(state_dict)
        self._saved_fingerprint = state_dict["fingerprint"]
        if self._rows is not None:
            self._check_fingerprint()

    def _check_fingerprint(self) -> None:
        rows, saved = self._opened(self._rows), self._saved_fingerprint
        if saved is not None and saved != rows.fingerprint():
            log.warning(
                "The prompts of %s are not those that the checkpoint was saved with (%d rows now); the order cannot be "
                "continued, so a new pass over them begins",
                self._description,
                len(rows),
            )
            self._cursor = PromptCursor(self._cursor.number + 1)
        self._saved_fingerprint = None
