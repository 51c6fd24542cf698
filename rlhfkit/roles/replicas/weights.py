"""Weights for the replicas of a pool, by the same process group, buckets and receivers as for rollout engines."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.weight_sync.process_group.sender import ProcessGroupSender


class WeightTaker(Protocol):
    """A replica, as the sender sees it."""

    name: str
    actor: Any
    """Ray's handle of a :class:`~rlhfkit.roles.replica.ModelReplica`."""


class _Call:
    """One method called on several replicas, in flight."""

    def __init__(self, waiting: Mapping[Any, WeightTaker], doing: str, timeout: float) -> None:
        self._waiting = dict(waiting)
        self._doing, self._timeout = doing, timeout
        self._deadline = time.monotonic() + timeout

    def poll(self) -> None:
        """Raise EngineError if a replica has failed already."""
        self._collect(0.0)

    def result(self) -> list[Any]:
        """Wait for all replicas; EngineError if one fails or the time is up."""
        while self._waiting:
            if time.monotonic() > self._deadline:
                late = ", ".join(replica.name for replica in self._waiting.values())
                raise EngineError(f"{late} did not finish {self._doing} within {self._timeout:g} s")
            self._collect(1.0)
        return []

    def _collect(self, timeout: float) -> None:
        import ray

        if not self._waiting:
            return
        for ref in ray.wait(list(self._waiting), num_returns=1, timeout=timeout)[0]:
            replica = self._waiting.pop(ref)
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise EngineError(f"{replica.name} failed while {self._doing}: {lines[-1]}") from error


class ReplicaReceivers:
    """Replicas as :class:`~rlhfkit.rollout.weight_sync.sender.Receivers`; each has one rank, or several.

    ``address`` is this process's, as they reach it; ``version`` that of the weights; ``timeout`` in seconds; ``ranks``
    those of each replica.
    """

    def __init__(
        self, replicas: Sequence[WeightTaker], address: str, version: int, timeout: float, ranks: int = 1
    ) -> None:
        self._replicas = list(replicas)
        self._ranks = ranks
        self._version = version
        self._timeout = timeout
        self.address = address

    @property
    def num_workers(self) -> int:
        """Number of ranks of all replicas."""
        return len(self._replicas) * self._ranks

    @property
    def worker_numbers(self) -> tuple[int, ...]:
        """Numbers of the ranks, from 0."""
        return tuple(range(self.num_workers))

    def worker(self, rank: int) -> str:
        """Name the replica of a rank from 1 on."""
        return self._replicas[(rank - 1) // self._ranks].name

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> _Call:
        """Have every replica join the group."""
        firsts = range(1, 1 + self.num_workers, self._ranks)
        calls = {
            # A restarted replica must not join the group of the one that died.
            one.actor.join.options(max_task_retries=0).remote(init_info | {"rank_offset": first}): one
            for first, one in zip(firsts, self._replicas, strict=True)
        }
        return _Call(calls, "joining the group that sends weights", self._timeout)

    def update(self, update_info: dict[str, Any]) -> _Call:
        """Have every replica receive weights."""
        calls = {
            one.actor.receive.options(max_task_retries=0).remote(update_info, self._version): one
            for one in self._replicas
        }
        return _Call(calls, "receiving weights", self._timeout)


def send_weights(
    weights: Mapping[str, Tensor],
    version: int,
    replicas: Sequence[WeightTaker],
    *,
    address: str,
    timeout: float,
    ranks: int = 1,
    dtype: torch.dtype | None = None,
) -> None:
    """Send full weights, which are on the CPU, to replicas of so many ranks each, bucket by bucket.

    ``dtype``: the type in which they are sent; ``None``: their own.

    Raises:
        EngineError: If a replica fails, or a step takes longer than ``timeout`` seconds.
    """
    infos = [WeightInfo(name, tuple(tensor.shape), dtype or tensor.dtype) for name, tensor in weights.items()]
    receivers = ReplicaReceivers(replicas, address, version, timeout, ranks)
    sender = ProcessGroupSender("gloo", timeout=timeout)
    try:
        sender.connect(receivers)
        sender.send(receivers, infos, ((name, tensor.to(dtype or tensor.dtype)) for name, tensor in weights.items()))
    finally:
        sender.close()


def received(update_info: Mapping[str, Any], receiver: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of what a sender announces, as they arrive; each is valid until the next.

    ``receiver`` is a :class:`~rlhfkit.rollout.weight_sync.process_group.receiver.WeightReceiver` in the group.
    """
    infos = [
        WeightInfo(name, tuple(shape), getattr(torch, dtype))
        for name, dtype, shape in zip(
            update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True
        )
    ]
    for named, _ in receiver.receive(infos):
        yield from named
