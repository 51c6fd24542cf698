"""``WeightSender``, the trainer's side of a weight transfer, and what it knows of the engines.

One remote call announces names, types and shapes; the bytes follow, bucket by bucket.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo


class Pending(Protocol):
    """A remote call to several engines, in progress."""

    def poll(self) -> None:
        """Raise if an engine has failed already."""
        ...

    def result(self) -> list[Any]:
        """Wait for all engines; raises if one fails or the time is up."""
        ...


class Receivers:
    """Several engines as those that send weights to them see them. A subclass implements :meth:`submit`.

    Args:
        names: Of the engines, for messages.
        workers: Processes of each that hold weights.
        address: Address at which they reach this process.
        numbers: Of each of these processes among those of all engines, dead ones included; colocated, the rank whose
            GPU it uses. ``None``: from 0 on.
    """

    def __init__(
        self, names: Sequence[str], workers: Sequence[int], address: str, numbers: Sequence[int] | None = None
    ) -> None:
        self.names = list(names)
        self.address = address
        self.num_workers = sum(workers)
        self.worker_numbers = tuple(range(self.num_workers) if numbers is None else numbers)
        self._ends = list(itertools.accumulate(workers))  # rank of the last worker of each, as the trainer is rank 0

    def worker(self, rank: int) -> str:
        """Name the engine whose worker has a rank from 1 on in the group of a transfer."""
        return self.names[bisect.bisect_left(self._ends, rank)]

    def submit(self, method: str, *args: Any, doing: str, each: Sequence[tuple[Any, ...]] | None = None) -> Pending:
        """Call a method of every engine, with ``args`` or with its own arguments in ``each``.

        Args:
            method: One of :class:`~rlhfkit.rollout.vllm.actor.VLLMActor` on weights.
            *args: Of all.
            doing: Names the work in messages.
            each: Of each engine.
        """
        raise NotImplementedError

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> Pending:
        """Have every worker prepare for transfers; if ``ranked``, each engine learns the rank of its first worker."""
        first = [1, *(end + 1 for end in self._ends)]
        each = [(init_info | ({"rank_offset": first[place]} if ranked else {}),) for place in range(len(self.names))]
        return self.submit("connect", doing="joining the weight transfer", each=each)

    def update(self, update_info: dict[str, Any]) -> Pending:
        """Have every worker receive weights."""
        return self.submit("update", update_info, doing="loading weights")


class WeightSender(Protocol):
    """Sends the same weights to all engines."""

    backend: str
    """Name of the weight-transfer engine on vLLM's workers: ``"rlhfkit"`` is ours, the others are vLLM's own."""
    recoverable: bool
    """Whether engines can be sent weights again after a transfer broke off."""

    def connect(self, receivers: Receivers) -> None:
        """Connect to the workers."""
        ...

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send everything and wait until every worker has it."""
        ...

    def close(self) -> None:
        """Disconnect; workers that wait for data fail at once."""
        ...


def verified(infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights; ValueError if one differs from its announced info, by which receivers split the bytes."""
    count = 0
    for count, (name, tensor) in enumerate(weights, start=1):
        if count > len(infos):
            raise ValueError(f"the weight source yields {name!r} after the {len(infos)} tensors that it announced")
        expected, actual = infos[count - 1], WeightInfo(name, tuple(tensor.shape), tensor.dtype)
        if actual != expected:
            raise ValueError(f"the weight source announced {expected} and yields {actual}")
        yield name, tensor
    if count != len(infos):
        raise ValueError(f"the weight source announced {len(infos)} tensors and yields {count}")
