"""``PreferenceDataModule``: pairs of answers of which one is preferred, for DPO, its relatives and reward models.

Both answers of a pair have the same prompt tokens; only answers are truncated. Pairs with an empty answer or with two
equal answers are dropped.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from rlhfkit.data.batch import TokenExample
from rlhfkit.data.formats import PreferenceExample, collate_preferences
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.tokenization.assistant_mask import common_prefix
from rlhfkit.datamodules.tokenization.chat import is_chat
from rlhfkit.datamodules.tokenization.columns import IMPLICIT_PREFERENCE, PREFERENCE, find_columns
from rlhfkit.datamodules.tokenization.examples import Answer, ExampleBuilder, PendingExample, RowResult, number_in
from rlhfkit.datamodules.tokenization.mixture import Sources
from rlhfkit.datamodules.tokenization.sources import RowPreview, Source, check_columns, describe

if TYPE_CHECKING:
    from datasets import Dataset


class PreferenceBuilder(ExampleBuilder):
    """Tokenises rows as preference pairs."""

    example = PreferenceExample
    answers_each = 2
    meanings: ClassVar[Mapping[str, str]] = {
        "dropped": "pairs are longer than max_length {limit} and dropped",
        "no_answer": "pairs have no answer within max_length {limit} and are left out",
        "same": "pairs have the same tokens in both answers and are left out",
        "truncated": "pairs were truncated at max_length {limit}",
    }
    wanted = "makes a preference pair"

    def values(self, labels: Sequence[Sequence[float]]) -> dict[str, Sequence[Any]]:
        """The margins of pairs."""
        return {"margin": [margin for (margin,) in labels[::2]]} if "margin" in self.columns else {}

    def pending(self, row: Mapping[str, Any], where: str) -> list[PendingExample]:
        """Both answers of a row, the chosen one with the margin."""
        chosen, rejected = self._pair(row, where)
        if "margin" in self.columns:
            column = self.columns["margin"]
            chosen = chosen._replace(labels=[number_in(row[column], column, where)])
        return [chosen, rejected]

    def _pair(self, row: Mapping[str, Any], where: str) -> list[PendingExample]:
        columns, prompt = self.columns, self.columns.get("prompt")
        better, worse = row[columns["chosen"]], row[columns["rejected"]]
        chats = is_chat(better), is_chat(worse)
        if not all(chats) and not (isinstance(better, str) and isinstance(worse, str)):
            raise ValueError(
                f"columns {columns['chosen']!r} and {columns['rejected']!r} of {where} must both hold text or both "
                f"hold chat messages (role and content), they hold {str(better)[:60]!r} and {str(worse)[:60]!r}"
            )
        if prompt is not None:
            question = row[prompt]
            self.formatter.check(question, f"column {prompt!r} of {where}")
            if all(chats):
                better, worse = self._without_prompt(question, better, worse)
            return [self.completion(question, answer, where) for answer in (better, worse)]
        if all(chats):
            better, worse = self.formatter.as_messages(better), self.formatter.as_messages(worse)
            # Each conversation keeps at least one message as its answer.
            turns = min(common_prefix(better, worse), len(better) - 1, len(worse) - 1)
            return [self._dialogue(messages, turns, where) for messages in (better, worse)]
        plain = self.with_formatter(copy.copy(self.formatter))
        plain.formatter.wraps_text = False  # these texts are whole dialogues already
        plain.formatter.check(better, f"column {columns['chosen']!r} of {where}")
        start = len(better[: common_prefix(better, worse)].rstrip())  # white space belongs to the answers
        return [plain.completion(text[:start], text[start:], where) for text in (better, worse)]

    def _without_prompt(self, prompt: Any, chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any]]:
        """Remove the prompt's messages from the beginning of both answers, if both repeat them."""
        chosen, rejected = self.formatter.as_messages(chosen), self.formatter.as_messages(rejected)
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = self.formatter.as_messages(asked)
        count = len(messages)
        repeated = all(answer[:count] == messages and len(answer) > count for answer in (chosen, rejected))
        return (chosen[count:], rejected[count:]) if repeated else (chosen, rejected)

    def _dialogue(self, messages: Sequence[Any], turns: int, where: str) -> PendingExample:
        """The example of a conversation whose first ``turns`` messages are the prompt."""
        written = self.formatter.messages(messages)  # may have added a system message
        return self.conversation(written, where, first=turns + len(written) - len(messages))

    def fit(self, answers: Sequence[Answer], where: str) -> RowResult:
        """Both answers cut to ``max_length``; none if the pair is dropped or cannot be learned from."""
        pair = _same_prompt([answer.tokens for answer in answers])
        longest = max(tokens.num_tokens for tokens in pair)
        if longest > self.max_length:
            self.check_overlong(longest, where)
            if self.drops(pair[0]):
                return RowResult(outcomes=["dropped"])
            pair = [self.cut(tokens) for tokens in pair]
        if not all(tokens.targets for tokens in pair):
            return RowResult(outcomes=["no_answer"])
        if pair[0].input_ids == pair[1].input_ids:
            return RowResult(outcomes=["same"])
        fitting = [replace(answer, tokens=tokens) for answer, tokens in zip(answers, pair, strict=True)]
        return RowResult(fitting, ["truncated"] if longest > self.max_length else [])


def _same_prompt(pair: list[TokenExample]) -> list[TokenExample]:
    """Make both answers begin at the same token.

    A token that contains the end of the prompt and the beginning of one answer is learned in both answers.
    """
    if not all(answer.targets for answer in pair):
        return pair
    starts = [answer.loss_mask.index(True) for answer in pair]
    first, last = min(starts), max(starts)
    if last - first == 1:  # answers further apart are turns of conversations, which keep their beginnings
        for answer in pair:
            answer.loss_mask[first] = True
    return pair


class PreferenceDataModule(SFTDataModule):
    """Tokenised preference pairs, in optimizer steps that are the same on any number of ranks.

    The prompt is a separate column, or the common beginning of both answers: whole messages of conversations,
    characters of texts (up to white space; no chat template is applied to such texts). A reference model's log-probs of
    a stream cannot be computed before training (``precompute_ref_log_probs``).

    Example::

        data = PreferenceDataModule("pairs.jsonl", prompt="question", micro_batch_size=8)
    """

    splits_rows = False
    collate = staticmethod(collate_preferences)
    builder = PreferenceBuilder

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
        """Check the arguments; data is opened in ``setup``.

        Args:
            data: The pairs, see :data:`~rlhfkit.datamodules.tokenization.sources.Source`.
            chosen: Column of the preferred answers: text or chat messages.
            rejected: Column of the other answers: text or chat messages.
            prompt: Column of the prompts: text or chat messages; answers may repeat the prompt's messages. ``None``:
                ``"prompt"`` if there is such a column, else the common beginning of both answers.
            margin: Column of numbers, for reward models: how much better the chosen answer is. ``None``: ``"margin"``
                if there is such a column.
            **kwargs: Arguments of :class:`SFTDataModule`. ``micro_batch_size`` counts pairs; ``max_length`` counts the
                tokens of a prompt with one answer.

        Raises:
            ValueError: If an argument is out of range.
        """
        self._refuse_columns(kwargs, instead="chosen, rejected and prompt")
        super().__init__(data, **kwargs)
        self.chosen = chosen
        self.rejected = rejected
        self.prompt_column = prompt
        self.margin = margin

    def _find_columns(self, rows: "Dataset | RowPreview", source: Source) -> Mapping[str, str]:
        margin = self.margin or ("margin" if "margin" in rows.column_names else None)
        check_columns(rows, source, margin=margin)
        named = {"prompt": self.prompt_column, "chosen": self.chosen, "rejected": self.rejected}
        columns = find_columns(rows, source, (PREFERENCE, IMPLICIT_PREFERENCE), named, beside=self.numbers)
        if "prompt" not in columns and self.apply_chat_template and isinstance(rows[0][self.chosen], str):
            raise ValueError(
                f"{describe(source)} has no prompt column, so its texts are whole dialogues, which cannot be put into "
                "a chat template: name the column, prompt='...', or leave apply_chat_template out"
            )
        return columns if margin is None else columns | {"margin": margin}
