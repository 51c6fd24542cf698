"""``WeightSender``, the trainer's side of a weight transfer, and what it knows of the engines.

One remote call announces names, types and shapes; the bytes follow, bucket by bucket.
"""

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


class Receivers(Protocol):
    """The engines, as a sender sees them."""

    @property
    def num_workers(self) -> int:
        """Number of receiving processes of all engines."""
        ...

    @property
    def worker_numbers(self) -> tuple[int, ...]:
        """Number of each receiving process among those of all engines, dead ones included; colocated: its rank."""
        ...

    @property
    def address(self) -> str:
        """Address at which they reach this process."""
        ...

    def worker(self, rank: int) -> str:
        """Name the worker of a rank from 1 on, for messages."""
        ...

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> Pending:
        """Have every worker prepare for transfers; if ``ranked``, each engine is also told its ``rank_offset``."""
        ...

    def update(self, update_info: dict[str, Any]) -> Pending:
        """Have every worker receive weights."""
        ...


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
