"""``PreferenceDataModule``: pairs of answers of which one is preferred, for DPO, its relatives and reward models.

Both answers of a pair have the same prompt tokens; only answers are truncated. Pairs with an empty answer or with two
equal answers are dropped.
"""

import copy
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rlhfkit.data.batch import TokenExample
from rlhfkit.data.formats.preferences import PreferenceExample, PreferenceExamples, collate_preferences
from rlhfkit.datamodules.sft import SFTDataModule
from rlhfkit.datamodules.streaming import SourceStream
from rlhfkit.datamodules.tokenization.assistant_mask import common_prefix
from rlhfkit.datamodules.tokenization.cache import TokenExamples
from rlhfkit.datamodules.tokenization.chat import is_chat
from rlhfkit.datamodules.tokenization.columns import IMPLICIT_PREFERENCE, PREFERENCE, find_columns
from rlhfkit.datamodules.tokenization.examples import ExampleBuilder, PendingExample, PendingOf
from rlhfkit.datamodules.tokenization.mixture import Sources
from rlhfkit.datamodules.tokenization.sources import RowPreview, Source, check_columns, describe, read_rows

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_LEFT_OUT = {
    "dropped": "are longer than max_length {limit} and dropped",
    "truncated": "were truncated at max_length {limit}",
    "no_answer": "have no answer within max_length {limit} and are left out",
    "same": "have the same tokens in both answers and are left out",
}


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

    def _build(self, source: Source, split: str, tokenizer: Any) -> PreferenceExamples:
        rows = read_rows(source, split=split, subset=self.subset)
        columns = self._pair_columns(rows, source)
        self._columns = {argument: column for argument, column in columns.items() if column is not None}
        builder = self._builder(PreferenceBuilder, source, tokenizer)
        pairs = builder.build_pairs(rows, columns)
        prompt, margin = columns["prompt"], columns["margin"]
        where = "their common beginning" if prompt is None else f"column {prompt!r}"
        log.info("%s: %d pairs, prompts from %s, margins %s", describe(source), len(pairs), where, margin or "none")
        return pairs

    def _pair_columns(self, rows: "Dataset | RowPreview", source: Source) -> dict[str, str | None]:
        """Return the columns ``chosen``, ``rejected``, ``prompt`` and ``margin``; ``None`` where there is none."""
        margin = self.margin or ("margin" if "margin" in rows.column_names else None)
        check_columns(rows, source, margin=margin)
        named = {"prompt": self.prompt_column, "chosen": self.chosen, "rejected": self.rejected}
        prompt = find_columns(rows, source, (PREFERENCE, IMPLICIT_PREFERENCE), named).get("prompt")
        if prompt is None:
            self._check_implicit(source, isinstance(rows[0][self.chosen], str))
        return {"chosen": self.chosen, "rejected": self.rejected, "prompt": prompt, "margin": margin}

    def _check_implicit(self, source: Source, text: bool) -> None:
        if text and self.apply_chat_template:
            raise ValueError(
                f"{describe(source)} has no prompt column, so its texts are whole dialogues, which cannot be put into "
                "a chat template: name the column, prompt='...', or leave apply_chat_template out"
            )

    def _open_source(self, source: Any, tokenizer: Any) -> SourceStream[Any]:
        reader = self._reader(source)
        columns = self._pair_columns(reader.head, source)
        builder = self._builder(PreferenceBuilder, source, tokenizer)
        return self._source_stream(reader, lambda rows: builder.pairs_of_rows(rows, columns), columns.values())


class PreferenceBuilder(ExampleBuilder):
    """Tokenises rows as preference pairs."""

    def build_pairs(self, rows: "Dataset", columns: Mapping[str, str | None]) -> PreferenceExamples:
        """Tokenise the columns ``chosen``, ``rejected``, ``prompt`` and ``margin``, of which the last two may be none.

        Logs how many pairs were truncated or dropped.

        Raises ValueError if a value has the wrong type, a pair is too long under ``overlong="error"`` or for the
        model's context, or no pair is left.
        """
        margin = columns["margin"]
        texts = {name: column for name, column in columns.items() if name != "margin"}
        answers = self.cached_examples(rows, texts, lambda: self._make_pairs(rows, texts))
        self._log_pairs(len(rows), answers.counts)
        if margin is None:
            return PreferenceExamples(answers)
        margins = [self._number(value, margin, f"{self.source}, row {row},") for row, value in enumerate(rows[margin])]
        return PreferenceExamples(answers, margins=[margins[row] for row in answers.rows[::2]])

    def pairs_of_rows(
        self, rows: Sequence[tuple[str, Mapping[str, Any]]], columns: Mapping[str, str | None]
    ) -> Iterator[list[PreferenceExample]]:
        """Yield the pair of each of some (place, row) pairs of a stream, or none; as :meth:`build_pairs` makes them."""
        counts: Counter[str] = Counter()
        answers = self.tokenize_rows(rows, self.pending_of(columns))
        margin = columns["margin"]
        for (where, row), (chosen, rejected) in zip(rows, zip(answers, answers, strict=True), strict=True):
            pair = self._limit_pair(chosen, rejected, where, counts)
            for answer in pair:
                self.check_context(len(answer.input_ids), where)
            value = None if margin is None else self._number(row[margin], margin, where)
            yield [PreferenceExample(pair[0], pair[1], value)] if pair else []
        self._log_pairs(len(rows), counts)

    def _log_pairs(self, rows: int, counts: Mapping[str, int]) -> None:
        for what, count in sorted(counts.items()):
            if count and self.reports:
                text = _LEFT_OUT[what].format(limit=self.max_length)
                log.warning("%s: %d of %d pairs %s", self.source, count, rows, text)

    def _make_pairs(self, rows: "Dataset", columns: Mapping[str, str | None]) -> TokenExamples:
        counts: Counter[str] = Counter()
        made_from: list[int] = []
        tokenized = self.tokenize_dataset(rows, self.pending_of(columns))
        answers = TokenExamples(self._limit_pairs(tokenized, made_from, counts))
        answers.rows, answers.counts = made_from, dict(counts)
        if not made_from:
            raise ValueError(
                f"{self.source}: none of its {len(rows)} rows makes a preference pair within max_length "
                f"{self.max_length} ({answers.counts}): raise max_length or check the columns"
            )
        return answers

    @staticmethod
    def _number(value: Any, column: str, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"column {column!r} of {where} must hold a number, it holds {value!r}")
        return float(value)

    def pending_of(self, columns: Mapping[str, Any]) -> PendingOf:
        """Both answers of a row."""
        return lambda builder, row, where: cast(PreferenceBuilder, builder)._pair(row, where, columns)

    def _pair(self, row: Mapping[str, Any], where: str, columns: Mapping[str, str | None]) -> list[PendingExample]:
        """The examples of both answers of a row."""
        prompt = columns["prompt"]
        better, worse = (row[str(columns[name])] for name in ("chosen", "rejected"))
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
        plain = copy.copy(self)  # these texts are whole dialogues already
        plain.formatter = copy.copy(self.formatter)
        plain.formatter.wraps_text = False
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

    def _limit_pairs(
        self, answers: Iterable[TokenExample], made_from: list[int], counts: Counter[str]
    ) -> Iterator[TokenExample]:
        """Yield both answers of each pair that can be learned from, cut to ``max_length``."""
        stream = iter(answers)
        for row, (chosen, rejected) in enumerate(zip(stream, stream, strict=True)):
            pair = self._limit_pair(chosen, rejected, f"{self.source}, row {row},", counts)
            made_from += [row] * len(pair)
            yield from pair

    def _limit_pair(
        self, chosen: TokenExample, rejected: TokenExample, where: str, counts: Counter[str]
    ) -> list[TokenExample]:
        """Both answers cut to ``max_length``; none if the pair is dropped or cannot be learned from."""
        pair = _same_prompt(chosen, rejected)
        longest = max(len(answer.input_ids) for answer in pair)
        if longest > self.max_length:
            self.check_overlong(longest, where)
            if self.drops(pair[0]):
                counts["dropped"] += 1
                return []
            pair = [TokenExample(a.input_ids[: self.max_length], a.loss_mask[: self.max_length]) for a in pair]
        if not all(answer.targets for answer in pair):
            counts["no_answer"] += 1
            return []
        if pair[0].input_ids == pair[1].input_ids:
            counts["same"] += 1
            return []
        counts["truncated"] += longest > self.max_length
        return pair


def _same_prompt(chosen: TokenExample, rejected: TokenExample) -> list[TokenExample]:
    """Make both answers begin at the same token.

    A token that contains the end of the prompt and the beginning of one answer is learned in both answers.
    """
    pair = [chosen, rejected]
    if not all(answer.targets for answer in pair):
        return pair
    starts = [answer.loss_mask.index(True) for answer in pair]
    first, last = min(starts), max(starts)
    if last - first == 1:  # answers further apart are turns of conversations, which keep their beginnings
        for answer in pair:
            answer.loss_mask[first] = True
    return pair
