"""``ExperienceLoader``: the loader that Lightning iterates over in reinforcement learning, one iteration per epoch.

It has a length: Lightning reads a loader without one a batch ahead (``_PrefetchDataFetcher``), so the next iteration
would be sampled from weights one update old. It is lazy: Lightning asks for the length before there are weights to
generate from. Saved inside an iteration, it keeps the remaining batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from rlhfkit.data.types import Experience
from rlhfkit.validation import check_integer


class ExperienceLoader:
    """A sized, lazy, resumable iterable over the batches that ``collect`` makes.

    Example::

        loader = ExperienceLoader(callback.collect, length=24)
        len(loader)              # 24; nothing is generated
        for batch in loader:     # collect() is called when the first batch is asked for
            ...
    """

    restore = staticmethod(Experience.from_state_dict)
    """Inverse of a batch's ``state_dict``."""

    def __init__(
        self,
        collect: Callable[[], Sequence[Experience]],
        length: int,
        *,
        resized: Callable[[int], None] | None = None,
    ) -> None:
        """Set the number of batches per iteration.

        Args:
            collect: Makes the batches of one iteration.
            length: Number of these batches.
            resized: If given, an iteration has ``length`` batches or a multiple, and this is called with their number
                as soon as it is known: before the first is yielded, or when the rest of an iteration is restored.

        Raises:
            ValueError: If the length is below 1.
        """
        check_integer("length", length, minimum=1, why="it is the batches of an iteration")
        self.collect = collect
        self.length = length
        """Batches of the current iteration; of the coming one as far as is known."""
        self.smallest = length
        """The number of which each iteration has a multiple."""
        self._resized = resized
        self._batches: Sequence[Experience] = []
        self._position = length  # batches yielded; ``length`` at the end of the iteration
        self._ready = False  # whether the next iterator starts with batches collected already

    def __len__(self) -> int:
        """Batches per iteration, also after some were yielded."""
        return self.length

    def prefetch(self) -> None:
        """Collect the next iteration now, unless that was done or a checkpoint contained the rest of one.

        Raises:
            ValueError: If ``collect`` returned another number of batches than ``length``, or no multiple of it.
        """
        if self._ready:
            return
        self._batches = []  # free the last iteration before the next one is made
        batches = self.collect()  # may select each batch when it is asked for
        if self._resized is None and len(batches) != self.length:
            raise ValueError(
                f"collect() returned {len(batches)} batches, but the loader promised {self.length} per iteration; all "
                "ranks must train on equally many"
            )
        if not batches or len(batches) % self.smallest:
            raise ValueError(
                f"collect() returned {len(batches)} batches, but an iteration of {self.smallest} updates needs equally "
                "many for each"
            )
        self._set_length(len(batches))
        self._batches, self._position, self._ready = batches, 0, True

    @property
    def _multiples(self) -> str:
        return str(self.length) if self._resized is None else f"{self.smallest}, or a multiple for long samples"

    def _set_length(self, length: int) -> None:
        self.length = length
        if self._resized is not None:
            self._resized(length)

    def __iter__(self) -> Iterator[Experience]:
        """A new iteration, or the rest of a restored one."""
        self.prefetch()
        self._ready = False
        while self._position < self.length:
            batch = self._batches[self._position]
            # Counted before the yield: code after the last yield never runs, because Lightning does not ask again.
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Position in the iteration and the batches not yielded yet, as tensors and plain values."""
        return self.state_dict_before(0)

    def state_dict_before(self, batches: int) -> dict[str, Any]:
        """The state ``batches`` batches ago, to repeat those that no optimizer step has used."""
        remaining = self._batches[self._position - batches :]
        return {
            "length": self.length,
            "smallest": self.smallest,
            "position": self.length - len(remaining),
            "remaining": [batch.state_dict() for batch in remaining],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue inside the saved iteration: its remaining batches come first, then ``collect`` is called.

        Raises:
            ValueError: If an iteration of this run cannot have the saved one's number of batches.
        """
        remaining = [self.restore(batch) for batch in state["remaining"]]
        fixed = self._resized is None
        fits = state["length"] == self.length if fixed else state["smallest"] == self.smallest or not remaining
        if not fits:
            raise ValueError(
                f"the checkpoint was saved inside an iteration of {state['length']} micro-batches per rank, this run "
                f"has {self._multiples}: resume with the same batch sizes, number of updates, "
                "accumulate_grad_batches, ranks and ranks per forward pass (sequence_parallel_size, "
                "tensor_parallel_size), or from a checkpoint of the end of an iteration"
            )
        if remaining:
            self._set_length(state["length"])
        self._position = self.length - len(remaining)
        self._batches = cast(list[Experience], [None] * self._position) + remaining
        self._ready = bool(remaining)
