"""The kinds of data that can be read, and the columns of a table that hold one of them."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhfkit.datamodules.tokenization.sources import IMAGES, RowPreview, check_columns, describe

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)


class DataFormat(NamedTuple):
    """A kind of data, defined by its columns."""

    name: str
    """Name in messages."""
    columns: Mapping[str, tuple[str, ...]]
    """Usual column names by DataModule argument, the preferred one first."""


SUPERVISED = (
    DataFormat("conversation", {"messages": ("messages", "conversations", "conversation")}),
    DataFormat("prompt and completion", {"prompt": ("prompt",), "completion": ("completion",)}),
    DataFormat("language modelling", {"text": ("text",)}),
    DataFormat("token ids, all learned", {"input_ids": ("input_ids",)}),
    DataFormat("token ids and labels", {"input_ids": ("input_ids",), "labels": ("labels",)}),
    DataFormat(
        "token ids and a mask of the learned ones",
        {"input_ids": ("input_ids",), "loss_mask": ("loss_mask", "completion_mask", "assistant_masks")},
    ),
)
PREFERENCE = DataFormat("preference", {"prompt": ("prompt",), "chosen": ("chosen",), "rejected": ("rejected",)})
IMPLICIT_PREFERENCE = DataFormat(
    "preference with the prompt in both answers", {"chosen": ("chosen",), "rejected": ("rejected",)}
)
UNPAIRED_PREFERENCE = DataFormat(
    "unpaired preference", {"prompt": ("prompt",), "completion": ("completion",), "label": ("label",)}
)
STEPWISE = DataFormat(
    "stepwise supervision", {"prompt": ("prompt",), "completions": ("completions",), "labels": ("labels",)}
)

READERS: Mapping[str, tuple[DataFormat, ...]] = {
    "SFTDataModule": SUPERVISED,
    "PreferenceDataModule": (PREFERENCE, IMPLICIT_PREFERENCE),
    "UnpairedPreferenceDataModule": (UNPAIRED_PREFERENCE,),
    "StepwiseDataModule": (STEPWISE,),
    "PromptDataModule": (DataFormat("prompts", {"prompt": ("prompt",)}),),
}
"""What to use for which data, for messages."""

TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""Column of additional arguments for the chat template, per row."""

TOOLS = "tools"
"""Column of the tools that a row's chat template is given: JSON schemas, or JSON text of them."""

SYSTEM = "system"
"""Column of a row's system message; empty: none."""

ATTENTION_MASK = "attention_mask"
"""Column of tokenised rows that is 0 where there is padding, which is left out."""

_PER_ROW = {TEMPLATE_ARGUMENTS, TOOLS, SYSTEM, ATTENTION_MASK, *IMAGES}


def find_columns(
    rows: "Dataset | RowPreview",
    source: Any,
    formats: Sequence[DataFormat],
    named: Mapping[str, str | None],
    *,
    beside: Sequence[str] = (),
) -> dict[str, str]:
    """Return the columns to read, by argument; all of them exist and have no missing values.

    ``named`` holds the columns that the user has named, by argument; ``source`` is for messages, as are ``beside``:
    other columns that are read.

    Raises ValueError if none of ``formats`` fits, several do, a named column or values are missing, or there are
    columns of videos or sound.
    """
    check_columns(rows, source, **named)
    given = {argument: column for argument, column in named.items() if column is not None}
    kinds = [kind for kind in formats if set(given) <= set(kind.columns)]
    fitting = [columns for kind in kinds if (columns := _fit(kind, rows.column_names, given)) is not None]
    fitting = [one for one in fitting if not any(set(one) < set(other) for other in fitting)]
    if len(fitting) != 1:
        raise ValueError(_explain(rows.column_names, source, formats, fitting))
    check_columns(rows, source, **fitting[0])
    unused = set(rows.column_names) - {*fitting[0].values(), *beside} - _PER_ROW
    if unused:
        log.info("%s: columns that are not used: %s", describe(source), ", ".join(sorted(unused)))
    return fitting[0]


def _fit(kind: DataFormat, found: Sequence[str], given: Mapping[str, str]) -> dict[str, str] | None:
    columns = {}
    for argument, names in kind.columns.items():
        column = given.get(argument) or next((name for name in names if name in found), None)
        if column is None:
            return None
        columns[argument] = column
    return columns


def _explain(
    found: Sequence[str], source: Any, formats: Sequence[DataFormat], fitting: Sequence[Mapping[str, str]]
) -> str:
    """Return the error message for columns that no format, or more than one, fits."""
    message = f"{describe(source)} has the columns {', '.join(found)}"
    if fitting:
        choices = " or ".join(", ".join(f"{key}={value!r}" for key, value in columns.items()) for columns in fitting)
        return f"{message}, which fit several kinds of data: name the one that is meant, {choices}"
    wanted = "; ".join(
        f"{kind.name}: " + " and ".join(" or ".join(names) for names in kind.columns.values()) for kind in formats
    )
    example = next(iter(max(formats, key=lambda kind: len(kind.columns)).columns))
    message += f", which is none of the kinds it could be ({wanted}). Name columns that are called otherwise, e.g. "
    message += f"{example}='{found[0]}'"
    others = [
        reader
        for reader, kinds in sorted(READERS.items())
        if any(kind not in formats and _fit(kind, found, {}) is not None for kind in kinds)
    ]
    if others:
        message += f"; or use {' or '.join(others)}, which reads such columns"
    return message
