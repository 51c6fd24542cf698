"""``Mixture``: several sources in one data set, each with a share of the examples."""

import logging
from collections.abc import Mapping, Sequence
from math import floor
from typing import TYPE_CHECKING, Any, Literal

from rlhfkit.data.loaders.steps import TokenizedDataset
from rlhfkit.data.packing import permutation
from rlhfkit.datamodules.tokenization.sources import Source, describe
from rlhfkit.validation import check_number

log = logging.getLogger(__name__)


class Mixture:
    """Several sources and their weights.

    Every epoch has the same examples, so its length is known. If a source gives only a part of its examples, the seed
    selects them.

    Example::

        data = SFTDataModule(Mixture({"chat.jsonl": 0.7, "code.parquet": 0.3}, until="first"))
    """

    def __init__(
        self,
        weights: Mapping[Any, float] | Sequence[tuple[Any, float]],
        *,
        until: Literal["all", "first"] = "all",
    ) -> None:
        """Check and normalise the weights.

        Args:
            weights: Weight by source, or pairs of both; they are divided by their sum.
            until: End of an epoch: ``"all"``: every example was used, and some sources repeat theirs; ``"first"``: the
                first source is used up, and no example is repeated.

        Raises:
            ValueError: If there is no source, or a weight is not positive.
        """
        pairs = list(weights.items()) if isinstance(weights, Mapping) else list(weights)
        if not pairs:
            raise ValueError(f"a Mixture needs at least one source and its weight, got {weights!r}")
        for source, weight in pairs:
            why = "a mapping has sources and their weights; of a DatasetDict give one split"
            check_number(f"the weight of {str(source)[:80]}", weight, above=0, why=why)
        if until not in ("all", "first"):
            raise ValueError(f"until must be 'all' or 'first', got {until!r}")
        total = sum(weight for _, weight in pairs)
        self.sources = [source for source, _ in pairs]
        self.weights = [weight / total for _, weight in pairs]
        self.until = until

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """Return the number of examples of each source in an epoch."""
        lengths = [size / weight for size, weight in zip(sizes, self.weights, strict=True)]
        length = max(lengths) if self.until == "all" else min(lengths)
        # Up to rounding, a source that decides the length is used exactly once.
        return [max(1, floor(length * weight + 1e-6)) for weight in self.weights]

    def mix(self, examples: Sequence[TokenizedDataset], *, seed: int) -> "MixedExamples":
        """Combine the examples of all sources into one data set."""
        sizes = [len(source.lengths) for source in examples]
        counts = self.counts(sizes)
        for name, size, count in zip(self.sources, sizes, counts, strict=True):
            log.info("%s: %d of an epoch's %d examples, from %d", describe(name), count, sum(counts), size)
            if count < size:
                log.warning("%s: %d of %d examples are left out of the mixture", describe(name), size - count, size)
        orders = []
        for source, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            rounds, rest = divmod(count, size)
            orders.append([*range(size)] * rounds + sorted(permutation(size, seed=seed, number=source)[:rest]))
        return MixedExamples(examples, [(source, orders[source][turn]) for source, turn in interleaved(counts)])


def next_source(shares: Sequence[float], taken: Sequence[int]) -> int:
    """The source to take the next example from, so that each one's share is spread evenly.

    Webster's method: the smallest ``(taken + 1/2) / share``; the first of equal ones.
    """
    return min(range(len(shares)), key=lambda source: (taken[source] + 0.5) / shares[source])


def interleaved(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(source, number in the source) of that many examples of each, in the order of :func:`next_source`."""
    turns = [((turn + 0.5) / count, source, turn) for source, count in enumerate(counts) for turn in range(count)]
    return [(source, turn) for _, source, turn in sorted(turns)]


# A command line reads these types. With a class among them, jsonargparse would take the file that a text names for the
# configuration of an object of that class, and hand over what is in the file: our data would be its name.
if TYPE_CHECKING:
    Sources = Mapping[str, float] | Mixture | Source
else:
    Sources = Mapping[str, Any] | Source
"""One source, or several with their weights; in YAML also ``class_path: rlhfkit.Mixture`` with ``init_args``."""


def as_mixture(data: Sources) -> Mixture | Source:
    """Convert a mapping of sources to weights, or the ``class_path`` and ``init_args`` of a :class:`Mixture`, to one.

    Other sources are returned unchanged. Raises ValueError for another class.
    """
    if not isinstance(data, Mapping):
        return data
    if "class_path" not in data:
        return Mixture(data)
    described: Mapping[str, Any] = data
    if str(described["class_path"]).rpartition(".")[2] != Mixture.__name__:
        raise ValueError(
            f"data is a file, a folder, a hub name, rows, a mapping of such to weights, or class_path: "
            f"rlhfkit.{Mixture.__name__} with init_args; got class_path {described['class_path']!r}"
        )
    return Mixture(**described.get("init_args") or {})


def list_sources(data: Mixture | Source) -> list[Any]:
    """Return the sources of a mixture, or a list of the single source."""
    return data.sources if isinstance(data, Mixture) else [data]


class MixedExamples:
    """Examples of several sources in a given order, some more than once."""

    def __init__(self, sources: Sequence[TokenizedDataset], places: Sequence[tuple[int, int]]) -> None:
        self.sources = sources
        self.places = places
        self.lengths = [sources[source].lengths[index] for source, index in places]
        """Tokens of each example."""
        self.targets = [sources[source].targets[index] for source, index in places]
        """Learned tokens of each example."""

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        """One example."""
        source, position = self.places[index]
        return self.sources[source][position]
