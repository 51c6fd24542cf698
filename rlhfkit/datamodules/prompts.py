"""``PromptDataModule``: the prompts of reinforcement learning, and the cursor that says which come next.

The cursor lives here and not in the loader, because Lightning always restores a DataModule's state, but a loader's only
in the middle of an epoch. Prompts are shuffled anew in each pass over the data, as a function of (seed, pass) and
nothing else, and each row is used exactly once per pass.
"""

import logging
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import lightning as L

from rlhfkit.data.experience import Prompt
from rlhfkit.data.loader import ExperienceLoader, ExperienceSource
from rlhfkit.data.shuffling import permutation
from rlhfkit.datamodules.prompt_rows import PromptBatches, PromptRows
from rlhfkit.datamodules.sources import Source, describe, load_tokenizer, no_loader, read_rows

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


class _Cursor(NamedTuple):
    """Where in the endless sequence of shuffled passes the next prompt is."""

    number: int = 0
    """Passes finished."""
    offset: int = 0
    """Rows of the current pass that were taken or put off."""
    postponed: tuple[int, ...] = ()
    """Rows of the current pass that were put off, because the batch that reached them had them already."""


class PromptDataModule(L.LightningDataModule):
    """Prompts from a file, a ``datasets`` folder, the hub or memory; a chat template when the tokenizer has one.

    ``train_dataloader`` yields the experience that the trainer's rollout callback makes of the prompts; the callback
    asks for :meth:`next_prompts` and, when they are trained on, calls :meth:`advance`.

    Example::

        data = PromptDataModule("gsm8k.jsonl", prompt="question", answer="answer", rollout_batch_size=72)
    """

    def __init__(
        self,
        data: Source,
        *,
        prompt: str = "prompt",
        answer: str | None = None,
        answer_extractor: Callable[[Any], Any] = final_answer,
        validation_data: Source | None = None,
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
        apply_chat_template: bool | None = None,
        system: str | None = None,
        chat_template_arguments: dict[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Remember what to read; nothing is opened before ``setup``.

        Args:
            data: Where the prompts are, see :data:`~rlhfkit.datamodules.sources.Source`.
            prompt: Column of the prompts: text, or a list of chat messages ``{"role": ..., "content": ...}``.
            answer: Column of the reference answers; ``None``: there are none.
            answer_extractor: Applied to each value of the answer column.
            validation_data: Where the validation prompts are; same columns.
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
            apply_chat_template: Wrap text prompts as a user message; ``None``: when the tokenizer has a template. Chat
                messages always go through the template.
            system: System message put in front; needs the chat template.
            chat_template_arguments: Passed to the template, e.g. ``{"enable_thinking": False}``.
            tokenizer: A tokenizer or its name; ``None``: the LightningModule's attribute ``tokenizer``.

        Raises:
            ValueError: If an argument is out of range.
        """
        super().__init__()
        sizes = {
            "rollout_batch_size": rollout_batch_size,
            "micro_batch_size": micro_batch_size,
            "validation_batch_size": validation_batch_size,
            "max_prompt_length": 1 if max_prompt_length is None else max_prompt_length,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"PromptDataModule({name}=...) must be at least 1, got {size}")
        if overlong_prompts not in ("error", "drop"):
            raise ValueError(f"overlong_prompts must be 'error' or 'drop', got {overlong_prompts!r}")
        self.data = data
        self.prompt = prompt
        self.answer = answer
        self.answer_extractor = answer_extractor
        self.validation_data = validation_data
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
        self.apply_chat_template = apply_chat_template
        self.system = system
        self.chat_template_arguments = dict(chat_template_arguments or {})
        self.tokenizer = tokenizer
        self._rows: PromptRows | None = None
        self._validation_rows: PromptRows | None = None
        self._cursor = _Cursor()
        self._saved_fingerprint: str | None = None
        self._permutations: dict[int, list[int]] = {}

    # -- reading -------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download and convert once per machine, so that the other ranks find it done."""
        read_rows(self.data, split=self.split, subset=self.subset)
        if self.validation_data is not None:
            read_rows(self.validation_data, split=self.validation_split, subset=self.subset)

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
        rows = PromptRows(self, read_rows(self.data, split=self.split, subset=self.subset), self.data, tokenizer)
        if len(rows) < self.rollout_batch_size:
            raise ValueError(
                f"{describe(self.data)} has {len(rows)} prompts, fewer than rollout_batch_size "
                f"{self.rollout_batch_size}, and a prompt cannot be in an iteration twice: lower rollout_batch_size or "
                "add prompts"
            )
        if self.validation_data is not None:
            self._validation_rows = PromptRows(
                self,
                read_rows(self.validation_data, split=self.validation_split, subset=self.subset),
                self.validation_data,
                tokenizer,
            )
        self._rows = rows
        self._check_fingerprint()

    # -- prompts -------------------------------------------------------------------------------------------------------

    @property
    def num_prompts(self) -> int:
        """Different prompts there are."""
        return len(self._ready(self._rows))

    def next_prompts(self, count: int, *, ahead: int = 0) -> list[Prompt]:
        """The coming prompts, no two of them the same row; the cursor stays where it is.

        Args:
            count: Prompts.
            ahead: Skip that many batches of the same size first (what the iteration ``ahead`` later will get).

        Returns:
            ``count`` prompts.

        Raises:
            ValueError: If ``count`` is below 1 or above the number of prompts.
        """
        cursor = self._cursor
        for _ in range(ahead):
            _, cursor = self._take(count, cursor)
        taken, _ = self._take(count, cursor)
        rows = self._ready(self._rows)
        return [rows[position] for position in taken]

    def advance(self, count: int) -> None:
        """Move the cursor past :meth:`next_prompts` of the same count.

        Args:
            count: Prompts.
        """
        _, self._cursor = self._take(count, self._cursor)

    def _take(self, count: int, cursor: _Cursor) -> tuple[list[int], _Cursor]:
        """``count`` different positions from the cursor on, and the cursor behind them.

        A batch that spans two passes may meet a row that it has from the first of them; that row is put off to the
        front of the next batch, so no batch has a row twice and no pass loses one.
        """
        total = self.num_prompts
        if not 1 <= count <= total:
            raise ValueError(f"cannot take {count} different prompts: there are {total}")
        number, offset = cursor.number, cursor.offset
        taken, postponed = list(cursor.postponed[:count]), list(cursor.postponed[count:])
        seen = set(taken)
        while len(taken) < count:
            if offset == total:
                number, offset = number + 1, 0
            row = self._permutation(number)[offset]
            offset += 1
            (postponed if row in seen else taken).append(row)
            seen.add(row)
        return taken, _Cursor(number, offset, tuple(postponed))

    def _permutation(self, number: int) -> list[int]:
        """Order of one pass over the data."""
        if number not in self._permutations:
            total = self.num_prompts
            order = list(range(total))
            if self.shuffle:
                order = permutation(total, seed=self.seed, number=number)
            self._permutations = {key: self._permutations[key] for key in self._permutations if key >= number - 1}
            self._permutations[number] = order
        return self._permutations[number]

    def validation_prompts(self) -> list[Prompt]:
        """All validation prompts, in the order of the file; none without ``validation_data``."""
        if self.validation_data is None:
            return []
        rows = self._ready(self._validation_rows)
        return [rows[position] for position in range(len(rows))]

    @staticmethod
    def _ready(rows: "PromptRows | None") -> "PromptRows":
        if rows is None:
            raise RuntimeError("the data is not open yet: call PromptDataModule.setup() first (the Trainer does)")
        return rows

    # -- loaders -------------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> ExperienceLoader[Any]:
        """The experience that the trainer's rollout callback makes, iteration by iteration.

        Raises:
            ValueError: If the trainer has no such callback or several, or the sizes do not divide.
        """
        trainer: Any = self._trainer()  # Lightning sets most of its attributes where type checkers do not see it
        sources = [callback for callback in trainer.callbacks if isinstance(callback, ExperienceSource)]
        if len(sources) != 1:
            found = ", ".join(type(source).__name__ for source in sources) or "none"
            raise ValueError(
                "PromptDataModule needs exactly one callback that collects experience, e.g. Trainer(callbacks="
                f"[RolloutCallback(...)]); found {found}"
            )
        source = sources[0]
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
            "pass": self._cursor.number,
            "offset": self._cursor.offset,
            "postponed": list(self._cursor.postponed),
            "fingerprint": self._saved_fingerprint if self._rows is None else self._rows.fingerprint(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved prompt; with a warning and at the start of a new pass if the data has changed.

        Args:
            state_dict: From :meth:`state_dict`.
        """
        self._cursor = _Cursor(state_dict["pass"], state_dict["offset"], tuple(state_dict["postponed"]))
        self._saved_fingerprint = state_dict["fingerprint"]
        if self._rows is not None:
            self._check_fingerprint()

    def _check_fingerprint(self) -> None:
        rows, saved = self._ready(self._rows), self._saved_fingerprint
        if saved is not None and saved != rows.fingerprint():
            log.warning(
                "The prompts of %s are not those that the checkpoint was saved with (%d rows now); the order cannot be "
                "continued, so a new pass over them begins",
                describe(self.data),
                len(rows),
            )
            self._cursor = _Cursor(self._cursor.number + 1)
        self._saved_fingerprint = None
