"""Tokenised answers as a table: made once by ``datasets``, in several processes if asked, and memory-mapped from disk.

A file's name is a digest of the rows, the tokenizer with its chat template, the arguments and the version of this code,
so a changed input never finds an old file.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfkit._version import __version__
from rlhfkit.data.batch import TokenExample
from rlhfkit.first_lines import without_file_bars
from rlhfkit.validation import check_integer

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

CHUNK = 512
"""Rows whose texts are tokenised in one call."""

REVISION = 3
"""To be incremented whenever the same rows and arguments give other examples than before."""

_ROWS_WITH_A_BAR = 10_000
"""Rows whose tokenising takes long enough for a progress bar."""


class TokenExamples:
    """The answers in a table of :meth:`TokenCache.tokenize`, read when they are used.

    Columns of the table: ``input_ids``, ``loss_mask``, ``targets`` and ``labels`` of an answer, the ``row`` of the data
    that it comes from, its ``place`` among the answers of that row, and ``outcomes``, what became of the row. A row
    that is left out has an entry without tokens.
    """

    def __init__(self, table: "Dataset") -> None:
        import pyarrow.compute as compute  # type: ignore[import-untyped]  # it ships none

        columns = table.data
        self._tokens, self._masks = columns.column("input_ids"), columns.column("loss_mask")
        lengths = compute.list_value_length(self._tokens).to_numpy()
        self._used = lengths.nonzero()[0].tolist()
        self.lengths: list[int] = lengths[self._used].tolist()
        """Tokens of each answer."""
        of_answers = (columns.column(name).to_numpy()[self._used].tolist() for name in ("targets", "row", "place"))
        self.targets: list[int]
        """Learned tokens of each answer."""
        self.rows: list[int]
        """Row of the data of each answer."""
        self.places: list[int]
        """Which of the answers of its row each is, before some were left out."""
        self.targets, self.rows, self.places = of_answers
        outcomes = compute.value_counts(compute.list_flatten(columns.column("outcomes"))).to_pylist()
        self.counts: Counter[str] = Counter({each["values"]: each["counts"] for each in outcomes})
        """Number of rows that were truncated or left out, by reason."""
        self._labels = columns.column("labels")
        self.attachments: Callable[[int], tuple[Any, ...]] | None = None
        """Reads the images of an answer from its row, which keeps them; ``None``: no answer has any."""
        self.numbers: Mapping[str, Sequence[float]] = {}
        """Columns of numbers of all rows of the data, by name."""

    @cached_property
    def labels(self) -> list[list[float]]:
        """What the data says of each answer: a label, one for each step, or nothing."""
        every = self._labels.to_pylist()
        return [every[place] for place in self._used]

    def __len__(self) -> int:
        """Number of answers."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenExample:
        """One answer."""
        place = self._used[index]
        attached = () if self.attachments is None else self.attachments(index)
        mask = self._masks[place].values.to_numpy(zero_copy_only=False)
        numbers = {name: values[self.rows[index]] for name, values in self.numbers.items()}
        return TokenExample(self._tokens[place].values.to_numpy().tolist(), mask.tolist(), attached, numbers)


class TokenCache:
    """A folder of tokenised answers, and the number of processes that make them.

    Args:
        folder: Created if missing; ``None``: ``rlhfkit`` in the cache folder of ``datasets``, for rows from files only.
        num_proc: Processes that tokenise, at least 1.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, num_proc: int = 1) -> None:
        check_integer("num_proc", num_proc, minimum=1)
        self.folder = folder
        self.num_proc = num_proc

    def keeps(self, rows: "Dataset") -> bool:
        """Whether answers of these rows are cached."""
        return self.folder is not None or bool(rows.cache_files)

    def tokenize(
        self,
        rows: "Dataset",
        work: Callable[[Mapping[str, list[Any]], list[int]], dict[str, list[Any]]],
        *,
        digest: str,
        title: str,
    ) -> TokenExamples:
        """Load the answers of rows from their file, or make and save them.

        Args:
            rows: The data.
            work: Makes the columns of :class:`TokenExamples` of columns of some rows and the numbers of these rows.
            digest: Of everything that the answers depend on, see :func:`fingerprint`.
            title: Of the progress bar.
        """
        import datasets

        whole, truth, number = datasets.Value("int32"), datasets.Value("bool"), datasets.Value("float64")
        features = datasets.Features(
            row=datasets.Value("int64"),
            place=whole,
            input_ids=datasets.List(whole),
            loss_mask=datasets.List(truth),
            targets=whole,
            labels=datasets.List(number),
            outcomes=datasets.List(datasets.Value("string")),
        )

        def mapped(**kept: Any) -> TokenExamples:
            with nullcontext() if len(rows) > _ROWS_WITH_A_BAR else without_file_bars():
                table = rows.map(
                    work,
                    batched=True,
                    batch_size=CHUNK,
                    with_indices=True,
                    num_proc=None if self.num_proc == 1 else self.num_proc,
                    remove_columns=rows.column_names,
                    features=features,
                    new_fingerprint=digest,  # saves hashing the function
                    load_from_cache_file=True,
                    desc=title,
                    **kept,
                )
            return TokenExamples(table)

        if not self.keeps(rows):
            return mapped(keep_in_memory=True)
        folder = Path(self.folder or Path(datasets.config.HF_DATASETS_CACHE) / "rlhfkit").expanduser()
        path = folder / f"tokens-{digest}.arrow"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.glob(f"{path.stem}*.arrow")):  # several, if several processes have made them
                log.info("examples that were tokenised before: %s", path)
            return mapped(cache_file_name=str(path))
        except FileNotFoundError:  # an image of a row
            raise
        except OSError as error:
            log.warning("the tokenised examples cannot be kept for the next start: %s", error)
        return mapped(keep_in_memory=True)


def fingerprint(rows: "Dataset", tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    """Return a digest of everything that examples depend on, 32 hexadecimal digits."""
    digest = blake2b(digest_size=16)
    # datasets' fingerprint is a digest of the content of rows in memory, else of the path and time of the file.
    for part in (__version__, REVISION, rows._fingerprint, json.dumps(arguments, sort_keys=True, default=repr)):
        digest.update(f"{part}\n".encode())
    digest.update(_tokenizer_text(tokenizer).encode())
    return digest.hexdigest()


def _tokenizer_text(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = {"init_kwargs": tokenizer.init_kwargs, "vocabulary": tokenizer.get_vocab()}
    if backend is not None:
        state = json.loads(backend.to_str())
        for changed_by_calls in ("truncation", "padding"):
            state.pop(changed_by_calls, None)
    state |= {
        "class": type(tokenizer).__name__,
        "special": tokenizer.special_tokens_map,
        "template": tokenizer.chat_template,
    }
    return json.dumps(state, sort_keys=True, default=repr)
