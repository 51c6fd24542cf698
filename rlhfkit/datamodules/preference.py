"""``PreferenceDataModule``: pairs of answers of which one is preferred, for DPO, its relatives and reward models."""

import logging
from typing import Any

from rlhfkit.data.formats.preferences import PreferenceExamples, collate_preferences
from rlhfkit.data.loaders.steps import StepLoader
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.tokenization.columns import IMPLICIT_PREFERENCE, PREFERENCE, find_columns
from rlhfkit.datamodules.tokenization.mixture import Sources
from rlhfkit.datamodules.tokenization.preference_rows import PreferenceBuilder
from rlhfkit.datamodules.tokenization.sources import Source, check_columns, describe, read_rows

log = logging.getLogger(__name__)


class PreferenceDataModule(SFTDataModule):
    """Preference pairs from files, the hub or memory, in optimizer steps that are the same on any number of ranks.

    Answers are text or chat messages. The prompt is a column of its own, or what both answers begin with alike: whole
    messages of conversations, characters of texts (up to white space; such texts are taken as they are, without a chat
    template). Both answers keep the same prompt tokens, and tokens of answers are found by common token prefixes.

    Example::

        data = PreferenceDataModule("pairs.jsonl", prompt="question", micro_batch_size=8)
    """

    def __init__(
        self,
        data: Sources,
        *,
        chosen: str = "chosen",
        rejected: str = "rejected",
        prompt: str | None = None,
        margin: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember what to read; nothing is opened before ``setup``.

        Args:
            data: Where the pairs are, see :data:`~rlhfkit.datamodules.tokenization.sources.Source`.
            chosen: Column of the preferred answers: text or chat messages.
            rejected: Column of the other answers, likewise.
            prompt: Column of the prompts: text or chat messages. ``None``: ``"prompt"`` where the data has that column,
                else the prompt is what both answers begin with alike. Answers that repeat the prompt's messages are
                understood.
            margin: Column of numbers, by how much the chosen answer is better (reward models use it). ``None``:
                ``"margin"`` where the data has that column.
            **kwargs: See :class:`SFTDataModule`: validation data, splits, lengths, chat template. ``micro_batch_size``
                counts pairs; ``max_length`` is tokens of a prompt with an answer: longer answers are cut and the
                prompt is not, and pairs whose prompt leaves no room are left out.

        Raises:
            ValueError: If an argument is out of range.
        """
        unfit = [name for name in ("messages", "text", "completion") if kwargs.get(name) is not None]
        if unfit:
            raise ValueError(
                f"{type(self).__name__} has no argument {min(unfit)!r}: name the columns chosen, rejected and prompt"
            )
        super().__init__(data, **kwargs)
        self.chosen = chosen
        self.rejected = rejected
        self.prompt_column = prompt
        self.margin = margin

    def _build(self, source: Source, split: str, tokenizer: Any) -> PreferenceExamples:
        rows = read_rows(source, split=split, subset=self.subset)
        margin = self.margin or ("margin" if "margin" in rows.column_names else None)
        check_columns(rows, source, margin=margin)
        named = {"prompt": self.prompt_column, "chosen": self.chosen, "rejected": self.rejected}
        prompt = find_columns(rows, source, (PREFERENCE, IMPLICIT_PREFERENCE), named).get("prompt")
        if prompt is None:
            self._check_implicit(source, isinstance(rows[0][self.chosen], str))
        builder = self._builder(PreferenceBuilder, source, tokenizer)
        pairs = builder.build_pairs(rows, chosen=self.chosen, rejected=self.rejected, prompt=prompt, margin=margin)
        where = "their common beginning" if prompt is None else f"column {prompt!r}"
        log.info("%s: %d pairs, prompts from %s, margins %s", describe(source), len(pairs), where, margin or "none")
        return pairs

    def _check_implicit(self, source: Source, text: bool) -> None:
        if text and self.apply_chat_template:
            raise ValueError(
                f"{describe(source)} has no prompt column, so its texts are whole dialogues, which cannot be put into "
                "a chat template: name the column, prompt='...', or leave apply_chat_template out"
            )

    def _step_loader(self, examples: Any, **arguments: Any) -> StepLoader[Any]:
        return StepLoader(examples, collate_preferences, **arguments)
