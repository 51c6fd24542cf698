"""``PromptDataModule``: the prompts of reinforcement learning, and the cursor that says which come next.

The cursor lives here and not in the loader, because Lightning always restores a DataModule's state, but a loader's only
in the middle of an epoch. Prompts are shuffled anew in each pass over the data, as a function of (seed, pass) and
nothing else, and each row is used exactly once per pass.
"""

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import lightning as L

from rlhfkit.data.batch import TokenBatch
from rlhfkit.data.loaders.experience import ExperienceLoader
from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.prompts.curriculum import DeclaresHistoryUse, Order
from rlhfkit.datamodules.prompts.cursor import PromptCursor, PromptDraws, PromptOrder
from rlhfkit.datamodules.prompts.mixed import MixedPrompts, as_mixture, sources_of
from rlhfkit.datamodules.prompts.pretraining import PretrainingText
from rlhfkit.datamodules.prompts.rows import PromptBatches, PromptRows
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.tokenization.chat import SpecialTokensInText, check_special_tokens_in_text
from rlhfkit.datamodules.tokenization.mixture import Sources
from rlhfkit.datamodules.tokenization.sources import describe, load_tokenizer, no_loader, read_rows
from rlhfkit.protocols import experience_source_of
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)


def final_answer(answer: Any) -> Any:
    """What stands behind the last ``####``, as in GSM8K (Cobbe et al., 2021, arXiv:2110.14168); else the answer itself.

    Thousands separators are removed there: ``"... #### 1,234"`` becomes ``"1234"``.

    Args:
        answer: The answer column's value.

    Returns:
        The text that a completion is compared with, or ``answer`` unchanged.
    """
    if not isinstance(answer, str) or "####" not in answer:
        return answer
    return re.sub(r"(?<=\d),(?=\d{3})", "", answer.rsplit("####", 1)[1].strip())


class PromptDataModule(L.LightningDataModule):
    """Prompts from a file, a ``datasets`` folder, the hub or memory; a chat template when the tokenizer has one.

    ``train_dataloader`` yields the experience that the trainer's rollout callback makes of the prompts; the callback
    asks for :meth:`draws` and, when all that they gave was trained on, calls :meth:`set_cursor`.

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
        micro_batch_size: int = 8,
        validation_batch_size: int = 64,
        max_prompt_length: int | None = None,
        overlong_prompts: Literal["error", "drop"] = "error",
        shuffle: bool = True,
        seed: int = 0,
        order: Order | None = None,
        apply_chat_template: bool | None = None,
        system: str | None = None,
        chat_template_arguments: dict[str, Any] | None = None,
        special_tokens_in_text: SpecialTokensInText | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Remember what to read; nothing is opened before ``setup``.

        Args:
            data: Where the prompts are, see :data:`~rlhfkit.datamodules.tokenization.sources.Source`; several sources
                with their weights as a mapping or a :class:`~rlhfkit.Mixture` are in every iteration in proportion.
            prompt: Column of the prompts: text, or a list of chat messages ``{"role": ..., "content": ...}``.
            answer: Column of the reference answers; ``None``: there are none.
            answer_extractor: Applied to each value of the answer column.
            validation_data: Where the validation prompts are; same columns. Of several sources, every prompt of each
                is used, and metrics are logged for each, too.
            pretraining_data: Text that is learned in every update too, by modules with a ``ptx_coef``: examples of any
                kind, ``micro_batch_size`` of them beside each micro-batch of samples.
            split: Split of ``data``, where it has several.
            validation_split: Split of ``validation_data``, where it has several.
            subset: Configuration of a hub data set.
            rollout_batch_size: Prompts per iteration, all ranks together.
            micro_batch_size: Sequences per micro-batch on average.
            validation_batch_size: Prompts generated for at once in validation, all ranks together.
            max_prompt_length: Tokens, template included; ``None``: no limit of its own.
            overlong_prompts: ``"error"`` or ``"drop"`` (with a logged count) for prompts above that length.
            shuffle: Shuffle each pass over the data; the order of the file when false.
            seed: Of the shuffling.
            order: A curriculum: in which order, and which prompts at all, a pass over the data has; see
                :mod:`rlhfkit.datamodules.prompts.curriculum`.
            apply_chat_template: Wrap text prompts as a user message; ``None``: when the tokenizer has a template. Chat
                messages always go through the template.
            system: System message put in front; needs the chat template.
            chat_template_arguments: Passed to the template, e.g. ``{"enable_thinking": False}``.
            special_tokens_in_text: What becomes of control tokens in texts of the data, such as ``<eos>``: ``"keep"``,
                ``"refuse"`` or ``"escape"``. ``None``: escaped in chat messages, where they could end a turn or forge
                one, kept in plain text; see :data:`~rlhfkit.datamodules.tokenization.chat.SpecialTokensInText`.
            tokenizer: A tokenizer or its name; ``None``: the LightningModule's attribute ``tokenizer``.

        Raises:
            ValueError: If an argument is out of range.
        """
        super().__init__()
        check_integer("rollout_batch_size", rollout_batch_size, minimum=1)
        check_integer("micro_batch_size", micro_batch_size, minimum=1)
        check_integer("validation_batch_size", validation_batch_size, minimum=1)
        check_integer("max_prompt_length", max_prompt_length, minimum=1, optional=True)
        check_integer("seed", seed)
        if overlong_prompts not in ("error", "drop"):
            raise ValueError(f"overlong_prompts must be 'error' or 'drop', got {overlong_prompts!r}")
        self.data = as_mixture(data) or data
        self.prompt = prompt
        self.answer = answer
        self.answer_extractor = answer_extractor
        self.validation_data = None if validation_data is None else as_mixture(validation_data) or validation_data
        self.split = split
        self.validation_split = validation_split
        self.subset = subset
        self.rollout_batch_size = rollout_batch_size
        self.micro_batch_size = micro_batch_size
        self.validation_batch_size = validation_batch_size
        self.max_prompt_length = max_prompt_length
        self.overlong_prompts = overlong_prompts
        self.shuffle = shuffle
        self.seed = seed
        self.order = order
        self.apply_chat_template = apply_chat_template
        self.system = system
        self.chat_template_arguments = dict(chat_template_arguments or {})
        check_special_tokens_in_text(special_tokens_in_text)
        self.special_tokens_in_text = special_tokens_in_text
        self.tokenizer = tokenizer
        self._rows: PromptRows | MixedPrompts | None = None
        self._validation_rows: PromptRows | MixedPrompts | None = None
        self._order: PromptOrder | None = None
        self._cursor = PromptCursor()
        self._saved_fingerprint: str | None = None
        self.pretraining_data = pretraining_data
        self._text: PretrainingText | None = None

    # -- reading -------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download and convert once per machine, so that the other ranks find it done."""
        for source in sources_of(self.data):
            read_rows(source, split=self.split, subset=self.subset)
        for source in [] if self.validation_data is None else sources_of(self.validation_data):
            read_rows(source, split=self.validation_split, subset=self.subset)
        if self.pretraining_data is not None:
            self.pretraining_data.trainer = self.trainer
            self.pretraining_data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Open the data and check it; a second call does nothing.

        Args:
            stage: Not used: training and validation prompts are both needed in ``fit``.

        Raises:
            ValueError: If a column is missing, a prompt is too long, or there are fewer prompts than a batch needs.
        """
        if self._rows is not None:
            return
        trainer = self.trainer
        tokenizer = load_tokenizer(self.tokenizer, None if trainer is None else trainer.lightning_module)
        rows = self._open(self.data, self.split, tokenizer)
        if self.validation_data is not None:
            self._validation_rows = self._open(self.validation_data, self.validation_split, tokenizer)
        if self.pretraining_data is not None:
            self.pretraining_data.trainer = trainer
            self.pretraining_data.setup(stage)
        self._rows = rows
        self._check_count()
        self._check_fingerprint()

    def _check_count(self) -> None:
        rows = self._ready(self._rows)
        if len(rows) < self.rollout_batch_size:
            raise ValueError(
                f"{self._described} has {len(rows)} prompts, fewer than rollout_batch_size "
                f"{self.rollout_batch_size}, and a prompt cannot be in an iteration twice: lower rollout_batch_size or "
                "add prompts"
            )
        if isinstance(rows, MixedPrompts):
            rows.check_share(self.rollout_batch_size)

    def _open(self, data: Any, split: str, tokenizer: Any) -> PromptRows | MixedPrompts:
        parts = [
            PromptRows(self, read_rows(source, split=split, subset=self.subset), source, tokenizer)
            for source in sources_of(data)
        ]
        mixture = as_mixture(data)
        return parts[0] if mixture is None else MixedPrompts(mixture, parts)

    @property
    def _described(self) -> str:
        return " and ".join(describe(source) for source in sources_of(self.data))

    # -- prompts -------------------------------------------------------------------------------------------------------

    @property
    def num_prompts(self) -> int:
        """Different prompts there are."""
        return len(self._ready(self._rows))

    @property
    def order_uses_rewards(self) -> bool:
        """Whether there is a curriculum that reads the rewards of earlier samples."""
        order = self.order
        return order is not None and (not isinstance(order, DeclaresHistoryUse) or order.uses_rewards)

    @property
    def has_validation_prompts(self) -> bool:
        """Whether there is ``validation_data``."""
        return self.validation_data is not None

    def draws(self, after: dict[str, Any] | None = None) -> PromptDraws:
        """An iteration's prompts, drawn as it needs them; the cursor stays where it is.

        Args:
            after: Begin where other draws end (their ``after``); ``None``: at the cursor.
        """
        rows = self._ready(self._rows)
        if self._order is None:
            mixed = (
                partial(rows.order, seed=self.seed, shuffle=self.shuffle) if isinstance(rows, MixedPrompts) else None
            )
            self._order = PromptOrder(
                len(rows),
                seed=self.seed,
                shuffle=self.shuffle,
                plain=mixed,
                curriculum=self.order,
                column=rows.column,
            )
        cursor = self._cursor if after is None else PromptCursor.from_state_dict(after)
        return PromptDraws(self._order, rows.__getitem__, cursor, rows.fingerprint())

    def set_cursor(self, after: dict[str, Any]) -> None:
        """Move the cursor behind an iteration that was trained on; not if it was drawn from data of another checkpoint.

        Args:
            after: Of its :meth:`draws`.
        """
        if after["fingerprint"] == self._ready(self._rows).fingerprint():
            self._cursor = PromptCursor.from_state_dict(after)

    def next_prompts(self, count: int) -> list[Prompt]:
        """The coming prompts, no two of them the same row; the cursor stays where it is.

        Args:
            count: Prompts.

        Raises:
            ValueError: If ``count`` is below 1 or above the number of prompts.
        """
        return self.draws().take(count)

    def advance(self, count: int) -> None:
        """Move the cursor past :meth:`next_prompts` of the same count.

        Args:
            count: Prompts.
        """
        draws = self.draws()
        draws.take(count)
        self.set_cursor(draws.after)

    def validation_prompts(self) -> list[Prompt]:
        """All validation prompts, in the order of the file; none without ``validation_data``."""
        if self.validation_data is None:
            return []
        rows = self._ready(self._validation_rows)
        return [rows[position] for position in range(len(rows))]

    @staticmethod
    def _ready(rows: PromptRows | MixedPrompts | None) -> PromptRows | MixedPrompts:
        if rows is None:
            raise RuntimeError("the data is not open yet: call PromptDataModule.setup() first (the Trainer does)")
        return rows

    def pretraining_batch(self, number: int) -> TokenBatch:
        """The text beside one of this rank's micro-batches of samples.

        Args:
            number: Micro-batches before it, since the run began.

        Raises:
            RuntimeError: If there is no ``pretraining_data``, or the Trainer has not asked for a loader yet.
        """
        if self._text is None:
            raise RuntimeError("there is no pretraining_data, or no training that it would be for")
        return self._text.batch(number)

    def check_prompts(
        self, *, longest: int, reason: str, vocabulary: int | None = None, validation: bool = False
    ) -> None:
        """Check all prompts against what generates, before anything is generated; overlong ones may be dropped.

        Args:
            longest: Tokens that a prompt may have.
            reason: Where that comes from, for messages.
            vocabulary: Tokens of the model; ``None``: not known.
            validation: Check the prompts of validation instead of those of training.

        Raises:
            ValueError: If a prompt is longer and ``overlong_prompts`` is ``"error"``, none or too few are left, or one
                has a token that the model does not know.
        """
        rows = self._ready(self._validation_rows if validation else self._rows)
        for part in rows.parts if isinstance(rows, MixedPrompts) else [rows]:
            part.check_vocabulary(vocabulary)
            part.limit_lengths(longest, reason)
        if not validation:
            self._check_count()

    # -- loaders -------------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> ExperienceLoader[Any]:
        """The experience that the trainer's rollout callback makes, iteration by iteration.

        Raises:
            ValueError: If the trainer has no such callback or several, or the sizes do not divide.
        """
        trainer = self._trainer()
        source = experience_source_of(trainer)
        if self.pretraining_data is not None:
            self.pretraining_data.trainer = trainer
            self._text = PretrainingText(self.pretraining_data)
        return ExperienceLoader(source.collect, source.batches_per_iteration())

    def val_dataloader(self) -> Any:
        """Lists of validation prompts, this rank's share of each; no loader at all without ``validation_data``."""
        if self.validation_data is None:
            return no_loader()
        trainer = self._trainer()
        rows = self._ready(self._validation_rows)
        return PromptBatches(rows, self.validation_batch_size, trainer.global_rank, trainer.world_size)

    def _trainer(self) -> L.Trainer:
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
        """Continue at the saved prompt; with a warning and at the start of a new pass if the data has changed.

        Args:
            state_dict: From :meth:`state_dict`.
        """
        self._cursor = PromptCursor.from_state_dict(state_dict)
        self._saved_fingerprint = state_dict["fingerprint"]
        if self._rows is not None:
            self._check_fingerprint()

    def _check_fingerprint(self) -> None:
        rows, saved = self._ready(self._rows), self._saved_fingerprint
        if saved is not None and saved != rows.fingerprint():
            log.warning(
                "The prompts of %s are not those that the checkpoint was saved with (%d rows now); the order cannot be "
                "continued, so a new pass over them begins",
                self._described,
                len(rows),
            )
            self._cursor = PromptCursor(self._cursor.number + 1)
        self._saved_fingerprint = None
