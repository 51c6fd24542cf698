"""Rows that are token ids already, and examples that are split instead of cut."""

from collections.abc import Mapping
from typing import Any

from rlhfkit.data.batch import TokenExample
from rlhfkit.datamodules.tokenization.columns import ATTENTION_MASK

IGNORED = -100
"""The label of a token that is not learned, in Transformers' data sets."""


def tokenized_row(
    row: Mapping[str, Any], where: str, columns: Mapping[str, str | None], *, vocabulary: int
) -> TokenExample:
    """Make an example of a row of token ids; nothing is added, no end-of-sequence token either.

    Args:
        row: The row; tokens at which a column ``attention_mask`` is 0 are padding and left out.
        where: Its place, for messages.
        columns: Column of ``input_ids``, and of ``labels`` (the same ids, -100 where a token is not learned) or of
            ``loss_mask`` (true or 1 where it is learned); with neither, all are learned.
        vocabulary: Number of tokens of the tokenizer.

    Raises:
        ValueError: If a value is no list of integers, lists have different lengths, a token is unknown, or labels are
            other tokens than ``input_ids``, for example shifted ones.
    """
    token_ids = _numbers(row, str(columns["input_ids"]), where)
    mask = [True] * len(token_ids)
    labels, learned = columns.get("labels"), columns.get("loss_mask")
    if labels is not None:
        values = _numbers(row, labels, where, len(token_ids))
        wrong = [
            i for i, (label, token) in enumerate(zip(values, token_ids, strict=True)) if label not in (IGNORED, token)
        ]
        if wrong:
            raise ValueError(
                f"column {labels!r} of {where} has the label {values[wrong[0]]} at position {wrong[0]}, where the token"
                f" is {token_ids[wrong[0]]}: labels are the tokens themselves, not shifted, or {IGNORED}"
            )
        mask = [label != IGNORED for label in values]
    elif learned is not None:
        values = _numbers(row, learned, where, len(token_ids))
        if not {*values} <= {0, 1}:
            raise ValueError(f"column {learned!r} of {where} must hold 0 and 1, or false and true, got {values!r:.80}")
        mask = [bool(value) for value in values]
    if row.get(ATTENTION_MASK) is not None:
        real = _numbers(row, ATTENTION_MASK, where, len(token_ids))
        token_ids = [token for token, keep in zip(token_ids, real, strict=True) if keep]
        mask = [mark for mark, keep in zip(mask, real, strict=True) if keep]
    unknown = [token for token in token_ids if not 0 <= token < vocabulary]
    if unknown or not token_ids:
        what = f"the token {unknown[0]}, and the tokenizer has 0 to {vocabulary - 1}" if unknown else "no token"
        raise ValueError(f"column {columns['input_ids']!r} of {where} has {what}")
    return TokenExample(token_ids, mask)


def split_example(example: TokenExample, length: int) -> list[TokenExample]:
    """Split an example into parts of ``length`` tokens, of which each begins with the last token of the part before.

    So every token but the first is predicted, and learned, once.
    """
    starts = range(0, max(len(example.input_ids) - 1, 1), length - 1)
    return [
        TokenExample(example.input_ids[start : start + length], example.loss_mask[start : start + length])
        for start in starts
    ]


def _numbers(row: Mapping[str, Any], column: str, where: str, count: int | None = None) -> list[int]:
    values = row[column]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"column {column!r} of {where} must hold a list of integers, it holds {values!r:.80}")
    if count is not None and len(values) != count:
        raise ValueError(f"column {column!r} of {where} has {len(values)} values for {count} tokens")
    return values
