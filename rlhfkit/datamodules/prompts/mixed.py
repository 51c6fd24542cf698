"""Prompts of several sources: in proportion in every iteration, and named by source in validation."""

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rlhfkit.data.packing import permutation
from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.prompts.rows import PromptRows
from rlhfkit.datamodules.tokenization.mixture import Mixture, interleaved


class MixedPrompts:
    """The prompts of several sources, concatenated, with passes that interleave them by weight."""

    def __init__(self, mixture: Mixture, parts: Sequence[PromptRows]) -> None:
        self.mixture = mixture
        self.parts = parts
        self.names = source_names(mixture.sources)

    @property
    def counts(self) -> list[int]:
        """Prompts of each source in a pass."""
        return self.mixture.counts([len(part) for part in self.parts])

    def __len__(self) -> int:
        """Number of prompts of all sources."""
        return sum(map(len, self.parts))

    def __getitem__(self, position: int) -> Prompt:
        """Return a prompt whose ``index`` counts on over the sources; ``metadata["source"]`` is set if missing."""
        first = 0
        for name, part in zip(self.names, self.parts, strict=True):
            if position < len(part):
                prompt = part[position]
                prompt.index += first
                prompt.metadata.setdefault("source", name)
                return prompt
            position, first = position - len(part), first + len(part.rows)
        raise IndexError(f"there are {len(self)} prompts")

    def column_by_index(self, name: str) -> dict[int, Any]:
        """Return the values of a column by ``index``; ``source`` is the name of a part that does not have it."""
        found: dict[int, Any] = {}
        first = 0
        for part_name, part in zip(self.names, self.parts, strict=True):
            missing = name == "source" and name not in part.rows.column_names
            values = dict.fromkeys(part.kept, part_name) if missing else part.column_by_index(name)
            found |= {first + index: value for index, value in values.items()}
            first += len(part.rows)
        return found

    def column(self, name: str) -> list[Any]:
        """Return the values of a column that every source must have."""
        return [value for part in self.parts for value in part.column(name)]

    def pass_order(self, number: int, *, seed: int, shuffle: bool) -> list[int]:
        """Return the positions of one pass: each source's share, evenly spread.

        A source continues where the previous pass left it, so that all of its prompts are used equally often.
        """
        counts, firsts = self.counts, list(accumulate((len(part) for part in self.parts), initial=0))
        orders: dict[tuple[int, int], Sequence[int]] = {}
        rows = []
        for source, turn in interleaved(counts):
            size = len(self.parts[source])
            times, offset = divmod(number * counts[source] + turn, size)
            if (source, times) not in orders:
                shuffled = permutation(size, seed=seed + source, number=times) if shuffle else range(size)
                orders[source, times] = shuffled
            rows.append(firsts[source] + orders[source, times][offset])
        return rows

    def check_share(self, batch_size: int) -> None:
        """Raise ValueError if a source has fewer prompts than its share of an iteration, which has no prompt twice."""
        for name, part, count in zip(self.names, self.parts, self.counts, strict=True):
            share = batch_size * count / sum(self.counts)
            if share > len(part):
                raise ValueError(
                    f"{name} has {len(part)} prompts, and its weight asks for {share:.1f} of the {batch_size} of an "
                    "iteration, in which a prompt cannot be twice: lower its weight or rollout_batch_size, or add "
                    "prompts"
                )

    def fingerprint(self) -> str:
        """Digest that changes with the prompts and with their shares."""
        return "/".join(f"{part.fingerprint()}*{count}" for part, count in zip(self.parts, self.counts, strict=True))


def source_names(sources: Sequence[Any]) -> list[str]:
    """Return the names of sources for metrics: file names without folder and suffix if these are unique."""
    paths = [isinstance(source, str | os.PathLike) for source in sources]
    whole = [os.fspath(one) if path else f"rows{i}" for i, (one, path) in enumerate(zip(sources, paths, strict=True))]
    short = [Path(name).name.split(".")[0] for name in whole]
    return short if len(set(short)) == len(short) else whole
