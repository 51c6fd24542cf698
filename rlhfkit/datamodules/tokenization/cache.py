"""Tokenised examples, compact in memory, their cache on disk, and tokenising in several processes.

A file's name is a digest of the rows, the tokenizer with its chat template, the arguments and the version of this code,
so a changed input never finds an old file.
"""

import itertools
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from rlhfkit._version import __version__
from rlhfkit.data.batch import TokenExample
from rlhfkit.validation import check_integer

if TYPE_CHECKING:
    from datasets import Dataset


class TokenExamples:
    """Examples in two flat tensors: 5 bytes per token instead of 40 as Python numbers. Iterates ``examples`` once."""

    def __init__(self, examples: Iterable[TokenExample]) -> None:
        self.lengths: list[int] = []
        """Tokens of each example."""
        self.targets: list[int] = []
        """Learned tokens of each example."""
        self.rows: list[int] = []
        """Row of the data of each example; set by :class:`ExampleBuilder`."""
        self.counts: dict[str, int] = {}
        """Number of rows that were truncated or dropped, by reason; set by :class:`ExampleBuilder`."""
        self.attachments: Callable[[int], tuple[Any, ...]] | None = None
        """Reads the images of an example from its row, which keeps them; ``None``: no example has any."""
        tokens, masks = [torch.empty(0, dtype=torch.int32)], [torch.empty(0, dtype=torch.bool)]
        for example in examples:
            self.lengths.append(len(example.input_ids))
            self.targets.append(example.targets)
            tokens.append(torch.tensor(example.input_ids, dtype=torch.int32))
            masks.append(torch.tensor(example.loss_mask, dtype=torch.bool))
        self._set_tensors(torch.cat(tokens), torch.cat(masks))

    def _set_tensors(self, tokens: Tensor, mask: Tensor) -> None:
        self._ends = list(itertools.accumulate(self.lengths))
        self._tokens, self._mask = tokens, mask

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenExample:
        """One example."""
        part = slice(self._ends[index] - self.lengths[index], self._ends[index])
        attached = () if self.attachments is None else self.attachments(index)
        return TokenExample(self._tokens[part].tolist(), self._mask[part].tolist(), attached)

    def save(self, path: Path) -> None:
        """Write a file atomically; its folder must exist."""
        state = {
            "tokens": self._tokens,
            "mask": self._mask,
            "lengths": torch.tensor(self.lengths),
            "targets": torch.tensor(self.targets),
            "rows": torch.tensor(self.rows),
            "counts": self.counts,
        }
        partial = path.with_name(f"{path.name}.{torch.randint(2**62, ()).item()}.tmp")
        torch.save(state, partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of :meth:`save`, memory-mapped: tokens are read when used, and ranks share the memory."""
        state: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
        loaded = cls([])
        loaded.lengths, loaded.targets, loaded.rows = (state[name].tolist() for name in ("lengths", "targets", "rows"))
        loaded.counts = state["counts"]
        loaded._set_tensors(state["tokens"], state["mask"])
        return loaded


log = logging.getLogger(__name__)

CHUNK = 512
"""Rows whose texts are tokenised in one call."""

REVISION = 2
"""To be incremented whenever the same rows and arguments give other examples than before."""


class TokenCache:
    """A folder of tokenised examples, and the number of processes that make them.

    Args:
        folder: Created if missing; ``None``: ``rlhfkit`` in the cache folder of ``datasets``, for rows from files only.
        num_proc: Processes that tokenise, at least 1.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, num_proc: int = 1) -> None:
        check_integer("num_proc", num_proc, minimum=1)
        self.folder = folder
        self.num_proc = num_proc

    def keeps(self, rows: "Dataset") -> bool:
        """Whether examples of these rows are cached."""
        return self.folder is not None or bool(rows.cache_files)

    def examples(
        self, rows: "Dataset", tokenizer: Any, arguments: Mapping[str, Any], make: Callable[[], TokenExamples]
    ) -> TokenExamples:
        """Load the examples of rows from their file, or make and save them.

        ``arguments`` holds everything besides rows and tokenizer that the examples depend on, as plain values.
        """
        if not self.keeps(rows):
            return make()
        import datasets

        folder = Path(self.folder or Path(datasets.config.HF_DATASETS_CACHE) / "rlhfkit").expanduser()
        path = folder / f"tokens-{fingerprint(rows, tokenizer, arguments)}.pt"
        if path.exists():
            log.info("examples that were tokenised before: %s", path)
            return TokenExamples.load(path)
        made = make()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            made.save(path)
        except OSError as error:
            log.warning("the tokenised examples cannot be kept for the next start: %s", error)
        return made


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


def tokenize_in_chunks(
    rows: "Dataset",
    tokenize: Callable[[list[dict[str, Any]], int], Sequence[TokenExample]],
    *,
    num_proc: int = 1,
    title: str = "Tokenising",
) -> Iterator[TokenExample]:
    """Yield the examples of all rows, in order, with a progress bar.

    ``tokenize`` is called with some rows and the index of the first, and returns their examples. With ``num_proc``
    above 1 it must be picklable by ``dill``.
    """
    import datasets
    from datasets.utils import tqdm

    if num_proc == 1:
        with tqdm(total=len(rows), desc=title, unit=" rows", delay=2.0) as bar:
            for start, batch in zip(range(0, len(rows), CHUNK), rows.iter(CHUNK), strict=True):
                chunk = _as_rows(batch)
                yield from tokenize(chunk, start)
                bar.update(len(chunk))
        return

    def work(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        examples = tokenize(_as_rows(batch), indices[0])
        return {name: [getattr(example, name) for example in examples] for name in ("input_ids", "loss_mask")}

    numbers, booleans = datasets.List(datasets.Value("int32")), datasets.List(datasets.Value("bool"))
    with tempfile.TemporaryDirectory() as folder:
        made = rows.map(
            work,
            batched=True,
            batch_size=CHUNK,
            with_indices=True,
            num_proc=num_proc,
            remove_columns=rows.column_names,
            features=datasets.Features(input_ids=numbers, loss_mask=booleans),
            cache_file_name=str(Path(folder) / "tokens.arrow"),
            load_from_cache_file=False,
            new_fingerprint=secrets.token_hex(8),  # saves hashing the function; nothing is looked up by it
            desc=title,
        )
        for row in made:
            yield TokenExample(row["input_ids"], row["loss_mask"])


def _as_rows(batch: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
