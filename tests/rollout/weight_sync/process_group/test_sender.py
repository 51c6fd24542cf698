"""A whole transfer, over real gloo; NCCL differs in ``NcclGroup`` only.

Covers ``groups.py``, ``rendezvous.py``, ``transfer.py`` and ``transport.py``.
"""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.multiprocessing.reductions import StorageWeakRef
from waiting import until

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.supervision.calls import EngineReceivers
from rlhfkit.rollout.weight_sync.process_group.rendezvous import (
    Rendezvous,
    TrainerWatch,
    announce_leave,
    connect,
    open_store,
    report,
)
from rlhfkit.rollout.weight_sync.process_group.transfer import ProcessGroupSender, WeightReceiver
from rlhfkit.rollout.weight_sync.process_group.transport import Transport

CPU = torch.device("cpu")


class Calls:
    """Calls in progress, as :class:`rlhfkit.rollout.weight_sync.sender.Pending`."""

    def __init__(self, futures: list[Future[Any]]) -> None:
        self.futures = futures

    def poll(self) -> None:
        for future in self.futures:
            if future.done():
                future.result()

    def result(self) -> list[Any]:
        return [future.result(timeout=120) for future in self.futures]


class ReceiverThreads:
    """Receivers in threads of this process: real sockets and real gloo, no vLLM.

    Args:
        num_workers: Receivers.
        absent: Receivers that take the calls and do nothing.
    """

    address = "127.0.0.1"

    def __init__(self, num_workers: int, absent: tuple[int, ...] = ()) -> None:
        self.num_workers = num_workers
        self.absent = absent
        self.receivers = [WeightReceiver(CPU) for _ in range(num_workers)]
        self.received: list[dict[str, Tensor]] = []
        self.failed: dict[int, Exception] = {}
        """What ended each receiver's last connection attempt, if it failed."""
        self._threads = ThreadPoolExecutor(2 * num_workers)

    def worker(self, rank: int) -> str:
        return f"receiver {rank - 1}"

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> Calls:
        here = [number for number in range(self.num_workers) if number not in self.absent]
        calls = Calls([self._threads.submit(self._join, number, init_info) for number in here])
        if self.absent:  # the time limit is for those: the others have reported when it begins
            store = TCPStore(self.address, init_info["port"], is_master=False)
            PrefixStore(init_info["prefix"], store).wait([f"reported/{1 + number}" for number in here])
        return calls

    def _join(self, number: int, init_info: dict[str, Any]) -> None:
        try:
            self.receivers[number].join(Rendezvous(**init_info | {"rank_offset": 1}), number)
        except Exception as error:
            self.failed[number] = error
            raise

    def update(self, update_info: dict[str, Any]) -> Calls:
        names, shapes, types = (update_info[key] for key in ("names", "shapes", "dtype_names"))
        infos = [
            WeightInfo(name, tuple(shape), getattr(torch, dtype))
            for name, shape, dtype in zip(names, shapes, types, strict=True)
        ]
        self.received = [{} for _ in self.receivers]
        return Calls([self._threads.submit(self._receive, number, infos) for number in range(self.num_workers)])

    def _receive(self, number: int, infos: list[WeightInfo]) -> None:
        for tensors, block in self.receivers[number].receive(infos):
            self.received[number].update({name: view.clone() for name, view in tensors})
            del tensors, block

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.leave()
        self._threads.shutdown(wait=False)


def test_every_receiver_gets_every_bit_again_and_again_and_no_large_tensor_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocate, capacity, lock = Transport._allocate, 1000, threading.Lock()
    alive: dict[Transport, list[tuple[StorageWeakRef, int]]] = {}
    most: dict[Transport, int] = {}

    def counted(self: Transport, num_bytes: int) -> Tensor:
        block = allocate(self, num_bytes)
        with lock:
            mine = alive.setdefault(self, [])
        mine.append((StorageWeakRef(block.untyped_storage()), num_bytes))
        allowed, deadline = 2 * capacity if num_bytes <= capacity else largest, time.monotonic() + 3
        while (held := sum(size for one, size in mine if not one.expired())) > allowed:
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)  # a thread of gloo lets go of a block a moment after the wait for it has ended
        most[self] = max(most.get(self, 0), held)
        return block

    monkeypatch.setattr(Transport, "_allocate", counted)
    shapes = [(3, 40), (50, 100), (7,), (100,), (60, 90), (49, 101), (0,), (2, 9)]
    sent = {f"t{number}": torch.randn(shape) for number, shape in enumerate(shapes)}
    sent["t9"] = torch.arange(2003, dtype=torch.int8).reshape(2003)  # a last piece of three bytes
    sent |= {"half": torch.randn(11).bfloat16(), "double": torch.randn(7, 30).double()}
    infos = [WeightInfo(name, tuple(one.shape), one.dtype) for name, one in sent.items()]
    largest = max(info.num_bytes for info in infos)
    sender, receivers = ProcessGroupSender("gloo", timeout=120, bucket_bytes=capacity), ReceiverThreads(2)
    try:
        sender.connect(receivers)
        for _ in range(2):
            sender.send(receivers, infos, iter(sent.items()))
            assert len(receivers.received) == 2
            for received in receivers.received:
                assert received.keys() == sent.keys()
                assert all(torch.equal(received[name], tensor) for name, tensor in sent.items())
        assert largest == 60 * 90 * 4
        assert sender._transport is not None
        assert most.pop(sender._transport) == 2 * capacity
        assert list(most.values()) == [largest] * 2
    finally:
        sender.close()
        receivers.close()


def test_receivers_that_never_report_are_named_with_address_and_port_and_the_others_wait_no_longer() -> None:
    sender = ProcessGroupSender("gloo", timeout=2)
    receivers = ReceiverThreads(4, absent=(1, 3))
    try:
        with pytest.raises(
            EngineError, match=r"^receiver 1, receiver 3 did not report .* 127\.0\.0\.1:(\d+) within 2 s"
        ) as e:
            sender.connect(receivers)
        assert sender._store is not None
        assert f"127.0.0.1:{sender._store.port} " in str(e.value)
        until(lambda: len(receivers.failed) == 2)
        assert all("has given up waiting for other workers" in str(error) for error in receivers.failed.values())
    finally:
        sender.close()
        receivers.close()


def test_every_worker_of_every_engine_has_a_rank_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(EngineReceivers, "submit", lambda self, method, *args, each, doing: told.extend(each))
    EngineReceivers([SimpleNamespace(number=number) for number in (0, 1)], 2, "127.0.0.1", 5.0).connect({})
    assert [info["rank_offset"] for (info,) in told] == [1, 3]


def test_a_receiver_that_cannot_reach_the_trainer_says_where_it_tried() -> None:
    meeting = Rendezvous("127.0.0.1", 9, "weights1", 2, 1.0)  # nobody listens there
    with pytest.raises(RuntimeError, match=r"cannot reach the trainer at 127\.0\.0\.1:9 within 1 s .* firewall"):
        report(meeting, 1)


def test_a_group_that_does_not_connect_is_given_up_with_address_and_port() -> None:
    """The trainer reports and never opens its end, as behind a firewall; gloo's own limit comes later."""
    store = open_store("127.0.0.1", 10)
    meeting = Rendezvous("127.0.0.1", store.port, "weights1", 2, 1.0)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"at 127\.0\.0\.1:{store.port}, but gloo did not connect .* within 1 s"):
        connect(store, meeting, 1, CPU, lambda: None)
    assert time.monotonic() - start < 30


class SilentGroup:
    """A group like NCCL's whose other side is gone: nothing notices, and a broadcast never ends."""

    device = CPU

    def broadcast(self, block: Tensor) -> "SilentGroup":
        return self

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("this would block for ever")


class TestSilence:
    """Waits end although the backend notices nothing."""

    def test_a_receiver_learns_from_the_store_that_the_trainer_has_left_in_any_update(self) -> None:
        store = open_store("127.0.0.1", 120)
        meeting = Rendezvous("127.0.0.1", store.port, "weights1", 2, 120.0)
        watch = TrainerWatch(store, meeting)
        with watch:
            pass  # an update that was complete
        announce_leave(store, "weights2")  # another group's end means nothing
        announce_leave(store, "weights1")
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=rf"trainer at 127\.0\.0\.1:{store.port} has given up sending"):
            next(Transport(SilentGroup(), 8, meeting.timeout, watch).receive_blocks([8, 8]))
        assert time.monotonic() - start < 60

    def test_a_block_that_does_not_come_is_waited_for_no_longer_than_the_limit(self) -> None:
        store = open_store("127.0.0.1", 20)
        watch = TrainerWatch(store, Rendezvous("127.0.0.1", store.port, "weights1", 2, 0.5))
        with pytest.raises(TimeoutError, match=r"block 1 of 2 did not come from the trainer within 0\.5 s"):
            next(Transport(SilentGroup(), 8, 0.5, watch).receive_blocks([8, 8]))

    def test_the_trainer_polls_the_engines_and_then_gives_up(self) -> None:
        blocks = Transport(SilentGroup(), 8, 0.5).send_blocks([8] * 5, lambda: None)
        with pytest.raises(TimeoutError, match=r"block 1 of 5 was not received by all workers within 0\.5 s"):
            list(blocks)
        asked = []

        def dead() -> None:
            asked.append(1)
            if len(asked) == 3:
                raise EngineError("engine 0 died")

        with pytest.raises(EngineError, match="engine 0 died"):
            list(Transport(SilentGroup(), 8, 100.0).send_blocks([8] * 5, dead))
