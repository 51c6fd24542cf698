"""Two processes: weights over gloo and NCCL, handles to GPU memory, and NCCL where it cannot connect; without vLLM."""

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpu.comparing import Figures
from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.cuda_ipc import without_expandable_segments
from rlhfkit.rollout.weight_sync.process_group.groups import NcclGroup, call_with_limit
from rlhfkit.rollout.weight_sync.process_group.rendezvous import Rendezvous, open_store
from rlhfkit.rollout.weight_sync.process_group.transfer import ProcessGroupSender, WeightReceiver
from rlhfkit.rollout.weight_sync.source import ModuleWeights


class Other:
    """Another process that runs a function of this file with a pipe, on which it answers each object with one."""

    def __init__(self, function: Callable[..., None], *arguments: Any, **variables: str) -> None:
        start = multiprocessing.get_context("spawn")
        self._pipe, theirs = start.Pipe()
        self._process = start.Process(target=function, args=(theirs, *arguments))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            self._process.start()
        theirs.close()  # or its end would not be noticed

    def ask(self, given: Any) -> Any:
        self._pipe.send(given)
        return self.answer()

    def answer(self) -> Any:
        """The next object; raised if it is an error."""
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.join()


# ---------------------------------------------------------------- weights over a process group


def receive(pipe: Connection, name: str) -> None:
    """The other process: joins groups, receives weights on a device and answers with their sums."""
    device, held = torch.device(name), {}
    receiver = WeightReceiver(device)
    while True:
        kind, given = pipe.recv()
        try:
            if kind == "connect":
                receiver.join(Rendezvous(**given), 0)
            elif kind == "update":
                for named, _ in receiver.receive([WeightInfo(*info) for info in given]):
                    held |= {name: tensor.to(device, copy=True) for name, tensor in named}
                if device.type == "cuda":
                    torch.cuda.synchronize()
            pipe.send({name: float(tensor.double().sum()) for name, tensor in held.items()})
        except Exception as error:
            pipe.send(error)


class Receivers:
    """The other process as a sender knows it."""

    num_workers = 1
    worker_numbers = (0,)
    address = "127.0.0.1"

    def __init__(self, device: str) -> None:
        self.process = Other(receive, device)

    def worker(self, rank: int) -> str:
        return "the other process"

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> Any:
        return call(self.process, ("connect", init_info | {"rank_offset": 1}))

    def update(self, update_info: dict[str, Any]) -> Any:
        columns = zip(update_info["names"], update_info["shapes"], update_info["dtype_names"], strict=True)
        return call(
            self.process, ("update", [(name, tuple(shape), getattr(torch, kind)) for name, shape, kind in columns])
        )


def call(process: Other, given: Any) -> Any:
    """A request to the other process, in progress in a thread."""
    answer = ThreadPoolExecutor(1).submit(process.ask, given)
    return SimpleNamespace(poll=lambda: answer.done() and answer.result(), result=lambda: [answer.result(timeout=300)])


def six_tensors(device: str) -> nn.Module:
    """Of two types."""
    generator, kinds = torch.Generator().manual_seed(0), (torch.float32, torch.bfloat16)
    size = 100_000 if device == "cuda" else 300
    return nn.ParameterList(
        torch.randn(size + 7 * number, 64, generator=generator).to(device, kinds[number % 2]) for number in range(6)
    )


def transfer(backend: Any, device: str, target: str) -> None:
    """Two updates, in buckets that are smaller than the largest tensor."""
    model, receivers = six_tensors(device), Receivers(target)
    weights = ModuleWeights(model)
    receivers.process.ask(("sums", None))  # it has imported what it needs
    largest = max(info.num_bytes for info in weights.metadata())
    sender = ProcessGroupSender(backend, timeout=120, bucket_bytes=largest // 2)
    try:
        sender.connect(receivers)
        for number in (1, 2):
            for tensor in model.parameters():
                tensor.data.add_(number)
            sender.send(receivers, weights.metadata(), iter(weights))
            assert receivers.process.ask(("sums", None)) == {name: float(one.double().sum()) for name, one in weights}
    finally:
        sender.close()
        receivers.process.close()


def test_weights_over_gloo_are_those_that_were_sent(device: str) -> None:
    transfer("gloo", device, device)


@pytest.mark.cuda(2)
def test_weights_over_nccl_are_those_that_were_sent() -> None:
    transfer("nccl", "cuda", "cuda:1")


# ---------------------------------------------------------------- NCCL that cannot connect


def join(pipe: Connection, rank: int, port: int, limit: float) -> None:
    """A rank of a group of two with a store at a port; all are on GPU 0."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=limit))
    try:
        group = NcclGroup(store, "weights", rank, 2, limit, torch.device("cuda", 0))
        call_with_limit(group.connect, lambda: None, limit, lambda: "the peer did not come")
        pipe.send("connected")
    except Exception as error:
        pipe.send(f"error: {type(error).__name__}: {error}")
    os._exit(0)


@pytest.mark.cuda
@pytest.mark.parametrize(("ranks", "limit"), [([0, 1], 20.0), ([0], 5.0)], ids=["two on one GPU", "a peer never comes"])
def test_ranks_of_nccl_that_cannot_connect_are_told_so_in_time(
    ranks: list[int], limit: float, figures: Figures
) -> None:
    """NCCL refuses two processes on one GPU."""
    store, start = open_store("127.0.0.1", 30), time.perf_counter()
    processes = [Other(join, rank, store.port, limit) for rank in ranks]
    try:
        said = [process.answer() for process in processes]
    finally:
        for process in processes:
            process.close()
    assert all(one.startswith("error") for one in said), said
    figures("seconds", time.perf_counter() - start, limit + 40)


# ---------------------------------------------------------------- handles to GPU memory


def read_handles(pipe: Connection) -> None:
    """The other process: opens each handle, answers with the sum of its bytes, and closes it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    torch.cuda.init()
    while True:
        tensor = rebuild_cuda_tensor(*pipe.recv())  # type: ignore[no-untyped-call]
        total = float(tensor.sum(dtype=torch.float64))
        del tensor
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        pipe.send(total)


def sum_elsewhere(other: Other, tensor: Tensor) -> float:
    from torch.multiprocessing.reductions import reduce_tensor

    found: float = other.ask(reduce_tensor(tensor)[1])  # type: ignore[no-untyped-call]
    return found


@pytest.mark.cuda
def test_a_buffer_is_read_by_handle_and_its_memory_is_free_again(figures: Figures) -> None:
    size, other = 2**30, Other(read_handles)
    try:
        sum_elsewhere(other, torch.ones(1000, device="cuda"))  # CUDA is up on both sides
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        for value in (1, 2):  # the same buffer holds one chunk after another
            buffer = torch.full((size,), value, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            assert sum_elsewhere(other, buffer) == value * size
            del buffer
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        figures("GiB that are not free again", (before - torch.cuda.mem_get_info()[0]) / 2**30, 0.1)
    finally:
        other.close()


def share_expandable(pipe: Connection) -> None:
    """A process, with the allocator's variable of its environment, that shares a buffer with another."""
    other = Other(read_handles)
    try:
        expandable = torch.ones(2**24, device="cuda")  # freed, and not to be given away again
        del expandable
        with without_expandable_segments():
            tensor = torch.ones(2**24, device="cuda")
        torch.cuda.synchronize()
        pipe.send(sum_elsewhere(other, tensor))
    finally:
        other.close()


@pytest.mark.cuda
def test_a_buffer_is_read_by_handle_beside_expandable_segments() -> None:
    other = Other(share_expandable, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    try:
        assert other.answer() == 2.0**24
    finally:
        other.close()
