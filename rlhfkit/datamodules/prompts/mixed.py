"""Prompts of several sources: in every iteration in proportion, and told apart by name in validation."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfkit.data.shuffling import permutation
from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.prompts.rows import PromptRows
from rlhfkit.datamodules.tokenization.mixture import Mixture


def as_mixture(data: Any) -> Mixture | None:
    """The mixture that a ``data`` argument is; ``None``: it is one source.

    Args:
        data: See :data:`~rlhfkit.datamodules.tokenization.mixture.Sources`.
    """
    return Mixture(data) if isinstance(data, Mapping) else data if isinstance(data, Mixture) else None


def sources_of(data: Any) -> list[Any]:
    """The sources of a ``data`` argument, one or several.

    Args:
        data: See :data:`~rlhfkit.datamodules.tokenization.mixture.Sources`.
    """
    mixture = as_mixture(data)
    return [data] if mixture is None else mixture.sources


def source_names(sources: Sequence[Any]) -> list[str]:
    """Short names: of files without folder and ending where that tells them apart.

    Args:
        sources: Paths, hub names, or rows in memory.
    """
    paths = [isinstance(source, str | os.PathLike) for source in sources]
    whole = [os.fspath(one) if path else f"rows{i}" for i, (one, path) in enumerate(zip(sources, paths, strict=True))]
    short = [Path(name).name.split(".")[0] for name in whole]
    return short if len(set(short)) == len(short) else whole


class MixedPrompts:
    """The prompts of several sources, one source after the other; and passes in which they take turns by weight."""

    def __init__(self, mixture: Mixture, parts: Sequence[PromptRows]) -> None:
        """Put them together.

        Args:
            mixture: Sources and weights.
            parts: The prompts of each source.
        """
        self.mixture = mixture
        self.parts = parts
        self.names = source_names(mixture.sources)
        self.counts = mixture.counts([len(part) for part in parts])

    def __len__(self) -> int:
        """Prompts of all sources."""
        return sum(map(len, self.parts))

    def __getitem__(self, position: int) -> Prompt:
        """A prompt; its index counts on from source to source, and its metadata has the ``source``, if not already."""
        first = 0
        for name, part in zip(self.names, self.parts, strict=True):
            if position < len(part):
                prompt = part[position]
                prompt.index += first
                prompt.metadata.setdefault("source", name)
                return prompt
            position, first = position - len(part), first + len(part.rows)
        raise IndexError(f"there are {len(self)} prompts")

    def column(self, name: str) -> list[Any]:
        """The values of a column, which every source must have."""
        return [value for part in self.parts for value in part.column(name)]

    def order(self, number: int, *, seed: int, shuffle: bool) -> list[int]:
        """One pass: each source's share, evenly spread. A source goes on where it was in the pass before, so that each
        of its prompts is used as often as the others.

        Args:
            number: Of the pass.
            seed: Of the shuffling.
            shuffle: The order of the file in every source when false.
        """
        places: list[tuple[float, int, int]] = []
        first = 0
        for source, (part, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            size = len(part)
            orders: dict[int, Sequence[int]] = {}
            for turn in range(count):
                times, offset = divmod(number * count + turn, size)
                if times not in orders:
                    orders[times] = permutation(size, seed=seed + source, number=times) if shuffle else range(size)
                places.append(((turn + 0.5) / count, source, first + orders[times][offset]))
            first += size
        return [row for _, _, row in sorted(places, key=lambda place: place[:2])]

    def check_share(self, batch_size: int) -> None:
        """Raise if a source cannot give its share of an iteration without giving a prompt twice.

        Args:
            batch_size: Prompts of an iteration.

        Raises:
            ValueError: Naming the source.
        """
        for name, part, count in zip(self.names, self.parts, self.counts, strict=True):
            share = batch_size * count / sum(self.counts)
            if share > len(part):
                raise ValueError(
                    f"{name} has {len(part)} prompts, and its weight asks for {share:.1f} of the {batch_size} of an "
                    "iteration, in which a prompt cannot be twice: lower its weight or rollout_batch_size, or add "
                    "prompts"
                )

    def fingerprint(self) -> str:
        """Changes with the prompts and with their shares."""
        return "/".join(f"{part.fingerprint()}*{count}" for part, count in zip(self.parts, self.counts, strict=True))
