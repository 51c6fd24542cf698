"""Rows with a chosen and a rejected answer as tokenised pairs: where the prompt ends, what is cut, what is left out.

Both answers of a pair keep the same prompt tokens. Truncation cuts the ends of answers, never the prompt; a pair of
which an answer has nothing left, or whose answers are the same tokens, says nothing about preferences and is left out.
"""

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhfkit.data.batch import TokenExample
from rlhfkit.data.formats.preferences import PreferenceExamples
from rlhfkit.datamodules.tokenization.chat import PromptFormat, as_messages, is_chat
from rlhfkit.datamodules.tokenization.examples import ExampleBuilder, Recipe, TokenExamples, common_prefix

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_LEFT_OUT = {
    "dropped": "are longer than max_length {limit} and dropped",
    "truncated": "were truncated at max_length {limit}",
    "no_answer": "have no answer within max_length {limit} and are left out",
    "same": "have the same tokens in both answers and are left out",
}


def split_conversations(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How many messages two conversations begin with alike; each keeps at least one of its own.

    Args:
        chosen: Chat messages.
        rejected: Chat messages.
    """
    return min(common_prefix(chosen, rejected), len(chosen) - 1, len(rejected) - 1)


def split_texts(chosen: str, rejected: str) -> int:
    """How many characters two texts begin with alike, without white space that the answers begin with.

    Args:
        chosen: Any text.
        rejected: Any text.
    """
    return len(chosen[: common_prefix(chosen, rejected)].rstrip())


class PreferenceBuilder(ExampleBuilder):
    """Turns rows into preference pairs."""

    def build_pairs(
        self, rows: "Dataset", *, chosen: str, rejected: str, prompt: str | None, margin: str | None
    ) -> PreferenceExamples:
        """Tokenise rows; what is left out or cut is counted and logged.

        Args:
            rows: The data.
            chosen: Column of the preferred answers.
            rejected: Column of the others.
            prompt: Column of the prompts; ``None``: what both begin with alike.
            margin: Column of numbers, by how much the chosen answer is better; ``None``: there is none.

        Returns:
            At least one pair.

        Raises:
            ValueError: If a value has the wrong type, a pair is too long under ``overlong="error"`` or for the model's
                context, or no pair is left.
        """
        columns = {"chosen": chosen, "rejected": rejected, "prompt": prompt}
        answers = self.kept(rows, columns, lambda: self._make_pairs(rows, columns))
        for what, count in sorted(answers.counts.items()):
            if count:
                text = _LEFT_OUT[what].format(limit=self.max_length)
                log.warning("%s: %d of %d pairs %s", self.source, count, len(rows), text)
        if margin is None:
            return PreferenceExamples(answers)
        margins = [self._number(value, margin, row) for row, value in enumerate(rows[margin])]
        return PreferenceExamples(answers, margins=[margins[row] for row in answers.rows[::2]])

    def _make_pairs(self, rows: "Dataset", columns: Mapping[str, str | None]) -> TokenExamples:
        counts: Counter[str] = Counter()
        made_from: list[int] = []
        tokenised = self.tokenised(rows, lambda builder, row, where: builder._pair(row, where, columns))
        answers = TokenExamples(self._fitting_pairs(tokenised, made_from, counts))
        answers.rows, answers.counts = made_from, dict(counts)
        if not made_from:
            raise ValueError(
                f"{self.source}: none of its {len(rows)} rows makes a preference pair within max_length "
                f"{self.max_length} ({answers.counts}): raise max_length or check the columns"
            )
        return answers

    def _number(self, value: Any, column: str, row: int) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"column {column!r} of {self.source}, row {row}, must hold a number, it holds {value!r}")
        return float(value)

    def _pair(self, row: Mapping[str, Any], where: str, columns: Mapping[str, str | None]) -> list[Recipe]:
        """Recipes of both answers of a row."""
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
            self.style.check(question, f"column {prompt!r} of {where}")
            if all(chats):
                better, worse = _without_prompt(question, better, worse)
            return [self.completion(question, answer, where) for answer in (better, worse)]
        if all(chats):
            better, worse = as_messages(better), as_messages(worse)
            turns = split_conversations(better, worse)
            recipes = [self._dialogue(messages, turns, where) for messages in (better, worse)]
        else:
            plain = copy.copy(self)  # these texts are whole dialogues already
            plain.style = PromptFormat(
                self.tokenizer,
                apply_chat_template=False,
                system=self.style.system,
                special_tokens_in_text=self.style.special_tokens_in_text,
            )
            plain.style.check(better, f"column {columns['chosen']!r} of {where}")
            start = split_texts(better, worse)
            recipes = [plain.completion(text[:start], text[start:], where) for text in (better, worse)]
        return recipes

    def _dialogue(self, messages: Sequence[Any], turns: int, where: str) -> Recipe:
        """A conversation of which the first turns are the prompt."""
        written = self.style.messages(messages)  # a system message may have come in front
        return self.conversation(written, where, first=turns + len(written) - len(messages))

    def _fitting_pairs(
        self, answers: Iterable[TokenExample], made_from: list[int], counts: Counter[str]
    ) -> Iterator[TokenExample]:
        """Both answers of each pair that can be learned from, cut to the limit."""
        stream = iter(answers)
        for row, (chosen, rejected) in enumerate(zip(stream, stream, strict=True)):
            pair = _same_prompt(chosen, rejected)
            longest = max(len(answer.input_ids) for answer in pair)
            if longest > self.max_length:
                if self.overlong == "error":
                    raise ValueError(
                        f"{self.source}, row {row}, has {longest} tokens, more than max_length {self.max_length}: "
                        "raise it, or let overlong='truncate' or 'drop' deal with such rows"
                    )
                if self.overlong == "drop":
                    counts["dropped"] += 1
                    continue
                pair = [TokenExample(a.input_ids[: self.max_length], a.loss_mask[: self.max_length]) for a in pair]
            if not all(answer.targets for answer in pair):
                counts["no_answer"] += 1
            elif pair[0].input_ids == pair[1].input_ids:
                counts["same"] += 1
            else:
                counts["truncated"] += longest > self.max_length
                made_from += [row, row]
                yield from pair


def _without_prompt(prompt: Any, chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any]]:
    """Two answers without the prompt's messages, which data often repeats at the beginning of both."""
    chosen, rejected = as_messages(chosen), as_messages(rejected)
    messages = as_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    count = len(messages)
    repeated = all(answer[:count] == messages and len(answer) > count for answer in (chosen, rejected))
    return (chosen[count:], rejected[count:]) if repeated else (chosen, rejected)


def _same_prompt(chosen: TokenExample, rejected: TokenExample) -> list[TokenExample]:
    """Both answers from the same token on.

    Where one answer's first token swallows the end of the prompt, the other's begins a token later: that token is then
    learned in both.
    """
    pair = [chosen, rejected]
    if not all(answer.targets for answer in pair):
        return pair
    starts = [answer.loss_mask.index(True) for answer in pair]
    first, last = min(starts), max(starts)
    straddles = last - first == 1  # further apart are turns of a conversation, which begin where they begin
    if straddles:
        for answer in pair:
            answer.loss_mask[first] = True
    return pair
