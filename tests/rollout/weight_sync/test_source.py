"""Weights out of a module, in buckets, over real gloo groups.

Covers ``sender.py``, ``transport.py``, ``gloo.py`` and ``shared_memory.py`` too. ``nccl.py`` needs GPUs.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model
from torch import Tensor, nn

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.gloo import GlooGroup
from rlhfkit.rollout.weight_sync.sender import GlooSender, verified
from rlhfkit.rollout.weight_sync.shared_memory import SharedBlocks
from rlhfkit.rollout.weight_sync.source import ModuleWeights, plan_buckets
from rlhfkit.rollout.weight_sync.transport import NetworkTransport, SharedMemoryTransport, Transport
from rollout.zero3_ranks import run_ranks

infos = st.lists(
    st.builds(
        WeightInfo,
        name=st.just("weight"),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]),
    ),
    max_size=20,
)


class TestBuckets:
    """Cutting tensors into blocks of bytes."""

    @given(infos=infos, capacity=st.integers(1, 5000))
    def test_every_tensor_is_in_one_bucket_in_order_and_overlaps_none(
        self, infos: list[WeightInfo], capacity: int
    ) -> None:
        buckets = plan_buckets(infos, capacity)
        assert [b.first + n for b in buckets for n in range(len(b.offsets))] == list(range(len(infos)))
        for bucket in buckets:
            ends = [o + i.num_bytes for o, i in zip(bucket.offsets, infos[bucket.first :], strict=False)]
            assert all(end <= start for end, start in zip(ends, [*bucket.offsets[1:], bucket.num_bytes], strict=True))
            assert bucket.num_bytes <= capacity or len(bucket.offsets) == 1

    @given(infos=infos, seed=st.integers(0, 100))
    @settings(max_examples=50)
    def test_tensors_of_mixed_types_come_back_unchanged(self, infos: list[WeightInfo], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        tensors = [(100 * torch.rand(info.shape, generator=generator)).to(info.dtype) for info in infos]
        for bucket in plan_buckets(infos, 512):
            block = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            own = tensors[bucket.first : bucket.first + len(bucket.offsets)]
            for (_, view), tensor in zip(bucket.views(block, infos), own, strict=True):
                view.copy_(tensor)
            for (_, view), tensor in zip(bucket.views(block.clone(), infos), own, strict=True):
                assert torch.equal(view, tensor)


class Wrapper(nn.Module):
    """Holds a module as ``module``, as DistributedDataParallel and DeepSpeed engines do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class TestModuleWeights:
    """Names, shapes, types; each weight once."""

    @pytest.mark.parametrize("tied", [True, False])
    def test_yields_what_a_checkpoint_holds(self, tmp_path: Path, tied: bool) -> None:
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        folder = tiny_model(tmp_path, tied=tied)
        saved = load_file(folder / "model.safetensors")  # save_pretrained leaves out tied weights too
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.model.embed_tokens.requires_grad_(False)  # frozen weights are served like any others
        weights = ModuleWeights(Wrapper(Wrapper(model)))
        yielded = dict(weights)
        assert yielded.keys() == saved.keys()
        assert all(torch.equal(yielded[name], saved[name]) for name in saved)
        assert [info.name for info in weights.metadata()] == list(yielded)
        assert all(not tensor.requires_grad for tensor in yielded.values())
        assert ("lm_head.weight" in yielded) is not tied

    def test_names_are_those_of_the_module_inside_torch_compile(self) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        assert [info.name for info in ModuleWeights(torch.compile(model)).metadata()] == [
            "0.weight", "0.bias", "1.weight", "1.bias",
        ]  # and the batch norm's buffers are left out  # fmt: skip

    def test_dtype_is_that_asked_for(self) -> None:
        model = nn.Linear(3, 2)
        weights = ModuleWeights(model, dtype=torch.bfloat16)
        assert {info.dtype for info in weights.metadata()} == {torch.bfloat16}
        assert all(torch.equal(t, model.get_parameter(n).detach().bfloat16()) for n, t in weights)
        assert {tensor.dtype for _, tensor in weights} == {torch.bfloat16}

    def test_finite_weights_whose_sum_is_not_are_sent(self) -> None:
        model = nn.Linear(3, 3)
        nn.init.constant_(model.weight, 3e38)
        assert len(list(ModuleWeights(model))) == 2

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_weight_that_is_not_finite_raises_before_the_first_is_yielded(self, value: float) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with torch.no_grad():
            model[1].weight[2, 1] = value
        with pytest.raises(ValueError, match=r"1 of 4 weights are not finite \(first: '1.weight'\)"):
            next(iter(ModuleWeights(model)))
        assert len(list(ModuleWeights(model, check_finite=False))) == 4

    def test_modules_that_cannot_be_sent_say_why(self) -> None:
        with pytest.raises(ValueError, match="Identity has no parameters"):
            ModuleWeights(nn.Identity())
        from peft import LoraConfig, get_peft_model

        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        adapted = get_peft_model(layers, LoraConfig(r=1, target_modules=["0"], modules_to_save=["1"]))
        with pytest.raises(NotImplementedError, match="leave out modules_to_save"):
            ModuleWeights(adapted)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda pairs: pairs[:-1], "announced 2 tensors and yields 1"),
            (lambda pairs: [*pairs, ("extra", torch.ones(1))], "'extra' after the 2 tensors"),
            (lambda pairs: [pairs[1], pairs[0]], "announced WeightInfo.*'weight'.*and yields WeightInfo.*'bias'"),
        ],
    )
    def test_a_stream_that_differs_from_its_announcement_is_refused(
        self, change: Callable[[list[Any]], list[Any]], message: str
    ) -> None:
        weights = ModuleWeights(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=message):
            list(verified(weights.metadata(), iter(change(list(weights)))))


class ReceiverThreads:
    """Receivers in threads of this process: real sockets and real gloo, no vLLM.

    Args:
        num_workers: Receivers.
        dies_after: Buckets after which receiver 1 leaves; ``None``: never.
    """

    address = "127.0.0.1"

    def __init__(self, num_workers: int, dies_after: int | None = None) -> None:
        self.num_workers = num_workers
        self.dies_after = dies_after
        self.transports: list[Transport] = []
        self.received: list[dict[str, Tensor]] = []
        self._threads = ThreadPoolExecutor(2 * num_workers)

    def connect(self, init_info: dict[str, Any]) -> "Calls":
        self._init_info = init_info
        return Calls([self._threads.submit(self._join, 1 + worker) for worker in range(self.num_workers)])

    def _join(self, rank: int) -> None:
        r = self._init_info
        limit = timedelta(seconds=r["timeout"])
        store = dist.TCPStore(r["address"], r["port"], is_master=False, timeout=limit)
        if r["shared_memory"] is None:
            group = GlooGroup(store, r["prefix"], rank, r["world_size"], r["timeout"], "127.0.0.1")
            self.transports.append(NetworkTransport(group))
        else:
            blocks = SharedBlocks.open(r["shared_memory"], r["bucket_bytes"])
            named = dist.PrefixStore(r["prefix"], store)
            self.transports.append(SharedMemoryTransport(named, blocks, self.num_workers, r["timeout"]))

    def update(self, update: dict[str, Any]) -> "Calls":
        infos = [
            WeightInfo(name, tuple(shape), getattr(torch, dtype))
            for name, shape, dtype in zip(update["names"], update["shapes"], update["dtype_names"], strict=True)
        ]
        self.received = [{} for _ in self.transports]
        return Calls([self._threads.submit(self._receive, index, infos) for index in range(len(self.transports))])

    def _receive(self, index: int, infos: list[WeightInfo]) -> None:
        buckets = plan_buckets(infos, self._init_info["bucket_bytes"])
        blocks = self.transports[index].receive_blocks([bucket.num_bytes for bucket in buckets])
        for number, block in enumerate(blocks):
            if index == 1 and number == self.dies_after:
                blocks.close()
                self.transports[index].close()
                raise RuntimeError("receiver 1 is gone")
            self.received[index].update({name: view.clone() for name, view in buckets[number].views(block, infos)})

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        self._threads.shutdown(wait=False)


class Calls:
    """Calls in progress, as :class:`rlhfkit.rollout.weight_sync.sender.Pending`."""

    def __init__(self, futures: list[Future[Any]]) -> None:
        self.futures = futures

    def poll(self) -> None:
        for future in self.futures:
            if future.done():
                future.result()

    def result(self) -> list[Any]:
        return [future.result(timeout=30) for future in self.futures]


class TestGlooSender:
    """The trainer's half of the transfer."""

    @pytest.mark.parametrize("shared_memory", [True, False])
    @pytest.mark.parametrize("num_workers", [1, 3])
    def test_every_receiver_gets_every_bit_again_and_again(
        self, num_workers: int, shared_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rlhfkit.rollout.weight_sync.shared_memory._FOLDER", tmp_path)
        sender = GlooSender(timeout=20, bucket_bytes=1000, shared_memory=shared_memory)  # less than the larger weights
        receivers = ReceiverThreads(num_workers)
        model = nn.Sequential(nn.Linear(7, 90), nn.Linear(90, 3).to(torch.bfloat16), nn.Linear(5, 5).double())
        try:
            sender.connect(receivers)
            kinds = {type(transport) for transport in receivers.transports}
            assert kinds == {SharedMemoryTransport if shared_memory else NetworkTransport}
            assert not [*tmp_path.glob("rlhfkit-*")]  # freed with the processes, whatever ends them
            for _ in range(3):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.normal_()
                weights = ModuleWeights(model)
                sender.send(receivers, weights.metadata(), iter(weights))
                assert len(receivers.received) == num_workers
                for received in receivers.received:
                    assert received.keys() == dict(model.named_parameters()).keys()
                    assert all(torch.equal(received[name], p) for name, p in model.named_parameters())
        finally:
            sender.close()
            receivers.close()

    def test_receivers_that_do_not_see_the_memory_get_weights_over_the_network(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def invisible(path: str, num_bytes: int) -> SharedBlocks:
            return real(path + "-in-another-container", num_bytes)

        real = SharedBlocks.open
        monkeypatch.setattr(SharedBlocks, "open", invisible)
        sender, receivers = GlooSender(timeout=20), ReceiverThreads(2)
        weights = ModuleWeights(nn.Linear(7, 90))
        try:
            sender.connect(receivers)
            sender.send(receivers, weights.metadata(), iter(weights))
            assert [type(transport) for transport in receivers.transports] == [NetworkTransport] * 2
            for received in receivers.received:
                assert all(torch.equal(received[name], tensor) for name, tensor in weights)
        finally:
            sender.close()
            receivers.close()

    @pytest.mark.parametrize("shared_memory", [True, False])
    def test_a_receiver_that_leaves_is_noticed_at_once(self, shared_memory: bool) -> None:
        sender = GlooSender(timeout=20, bucket_bytes=1000, shared_memory=shared_memory)
        receivers = ReceiverThreads(2, dies_after=3)
        weights = ModuleWeights(nn.Sequential(*(nn.Linear(15, 15) for _ in range(20))))
        try:
            sender.connect(receivers)
            start = time.monotonic()
            with pytest.raises(RuntimeError, match=r"receiver 1 is gone|[Cc]onnection closed"):
                sender.send(receivers, weights.metadata(), iter(weights))
            sender.close()
            assert time.monotonic() - start < 10
        finally:
            sender.close()
            receivers.close()

    def test_a_receiver_that_never_comes_is_waited_for_no_longer_than_the_limit(self) -> None:
        class Absent(ReceiverThreads):
            def connect(self, init_info: dict[str, Any]) -> Calls:
                return Calls([])

        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            GlooSender(timeout=2, shared_memory=False).connect(Absent(1))
        assert time.monotonic() - start < 10

    def test_its_store_listens_on_the_given_address_only(self) -> None:
        sender, receivers = GlooSender(timeout=20), ReceiverThreads(1)
        try:
            sender.connect(receivers)
            assert sender._store is not None
            with open("/proc/net/tcp") as table:
                rows = [line.split() for line in table.readlines()[1:]]
            listening = [row[1] for row in rows if row[3] == "0A"]  # state LISTEN
            assert f"0100007F:{sender._store.port:04X}" in listening
            assert f"00000000:{sender._store.port:04X}" not in listening
        finally:
            sender.close()
            receivers.close()

    def test_sending_before_connecting_says_so(self) -> None:
        with pytest.raises(RuntimeError, match="before connect"):
            GlooSender(timeout=1).send(ReceiverThreads(1), [], iter([]))


@pytest.mark.distributed
def test_zero3_shards_come_out_whole_and_a_nan_in_one_shard_stops_all_ranks(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", tied=True)
    reports = run_ranks("publish", folder, tmp_path)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    announced = [[name, list(p.shape), "torch.float32"] for name, p in model.named_parameters()]
    for report in reports:
        for turn in ("first", "second"):
            assert report[turn]["announced"] == announced
            assert report[turn]["sharded"]
            assert report[turn]["equal"] == dict.fromkeys((name for name, *_ in announced), True)
        assert "model.layers.1.mlp.down_proj.weight" in report["diverged"]
