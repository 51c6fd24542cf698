"""``TablePrompts``: training prompts that were all read before training, and the cursor."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from rlhfkit.datamodules.prompts.curriculum import Curriculum
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor, PromptOrder
from rlhfkit.datamodules.prompts.rows import MixedPrompts, PromptRows

log = logging.getLogger(__name__)


class TablePrompts:
    """Prompts of tables, drawn in passes that have each once.

    Args:
        rows: The prompts.
        batch_size: Prompts per iteration, of which none may be twice; ``None``: they are for validation.
        seed: Of the shuffling.
        shuffle: Shuffle each pass.
        curriculum: Orders each pass; ``None``: there is none.
        description: Of the data, for messages.

    Raises:
        ValueError: If there are fewer prompts than an iteration needs.
    """

    def __init__(
        self,
        rows: PromptRows | MixedPrompts,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
        description: str = "",
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.curriculum = curriculum
        self.description = description
        self.cursor = PromptCursor()
        self._order: PromptOrder | None = None
        self._check_count()

    @property
    def parts(self) -> list[PromptRows]:
        """The prompts of each source."""
        return list(self.rows.parts) if isinstance(self.rows, MixedPrompts) else [self.rows]

    def _check_count(self) -> None:
        if self.batch_size is None:
            return
        if len(self.rows) < self.batch_size:
            raise ValueError(
                f"{self.description} has {len(self.rows)} prompts, fewer than rollout_batch_size {self.batch_size}, "
                "and a prompt cannot be in an iteration twice: lower rollout_batch_size or add prompts"
            )
        if isinstance(self.rows, MixedPrompts):
            self.rows.check_share(self.batch_size)

    def check(self, *, longest: int, reason: str, vocabulary: int | None) -> None:
        """Check the length of all prompts, and that the model knows their tokens.

        Raises:
            ValueError: If one is too long and such are errors, too few are left, or one has an unknown token.
        """
        for part in self.parts:
            part.check_vocabulary(vocabulary)
            part.limit_lengths(longest, reason)
        self._order = None  # some rows may be gone
        self._check_count()

    def source_columns(self) -> list[tuple[Any, list[str]]]:
        """Each source, with its columns; prompts of a mixture have the name of their source too."""
        if isinstance(self.rows, MixedPrompts):
            return [(part.source, sorted({*part.rows.column_names, "source"})) for part in self.parts]
        return [(self.rows.source, list(self.rows.rows.column_names))]

    def describe(self, text: str) -> str:
        """``text``, the names of sources and columns, as a description of these prompts."""
        out = sum(len(part.rows) - len(part.kept) for part in self.parts)
        return f"{text}: {len(self.rows)} prompts" + (f", {out} rows left out" if out else "")

    @property
    def count(self) -> int:
        """Number of prompts."""
        return len(self.rows)

    def column(self, name: str) -> dict[int, Any]:
        """The values of a column by the prompts' ``index``; ValueError if there is none."""
        return self.rows.column_by_index(name)

    def queue(self, after: dict[str, Any] | None) -> IterationQueue:
        """The queue of an iteration's prompts."""
        if self._order is None:
            pass_order = self.rows.pass_order if isinstance(self.rows, MixedPrompts) else None
            self._order = PromptOrder(
                len(self.rows),
                seed=self.seed,
                shuffle=self.shuffle,
                base_order=pass_order and partial(pass_order, seed=self.seed, shuffle=self.shuffle),
                curriculum=self.curriculum,
                column=self.rows.column,
            )
        cursor = self.cursor if after is None else PromptCursor.from_state_dict(after)
        return IterationQueue(self._order, self.rows.__getitem__, cursor, self.rows.fingerprint())

    def set_cursor(self, after: dict[str, Any]) -> None:
        """Move the cursor to the end of a trained iteration, unless the data differs."""
        if after["fingerprint"] == self.rows.fingerprint():
            self.cursor = PromptCursor.from_state_dict(after)

    def state_dict(self) -> dict[str, Any]:
        """The cursor and a fingerprint of the data, as plain values."""
        return {**self.cursor.state_dict(), "fingerprint": self.rows.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the saved prompt; if the data has changed, warn and begin a new pass."""
        self.cursor = PromptCursor.from_state_dict(dict(state))
        if state["fingerprint"] not in (None, self.rows.fingerprint()):
            log.warning(
                "The prompts of %s are not those that the checkpoint was saved with (%d rows now); the order cannot be "
                "continued, so a new pass over them begins",
                self.description,
                len(self.rows),
            )
            self.cursor = PromptCursor(self.cursor.number + 1)
