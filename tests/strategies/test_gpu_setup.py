"""What ranks on GPUs check together before anything is loaded: here with GPUs that are only described."""

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.environments import LightningEnvironment

from rlhfkit.gpus import GIB, VisibleGPU
from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.deepspeed import rendezvous
from rlhfkit.strategies.deepspeed.process_group import examine_ranks, run_first_collective
from strategies import ranks

A100 = VisibleGPU("a", "NVIDIA A100", (8, 0), 80 * GIB)
V100 = VisibleGPU("v", "Tesla V100", (7, 0), 32 * GIB)


def described(*gpus: VisibleGPU) -> list[str]:
    return [json.dumps([rank, "node1", dataclasses.asdict(gpu)]) for rank, gpu in enumerate(gpus)]


def test_types_that_only_some_gpus_have_are_an_error_and_mixed_kinds_a_warning() -> None:
    pair = described(A100, V100)
    found = examine_ranks(pair, torch.bfloat16)
    assert found is not None
    assert "rank 1 on node1 of 2 cannot compute in bfloat16" in found
    with pytest.warns(UserWarning, match=r"GPUs differ, and every step waits for the slowest"):
        assert examine_ranks(pair, torch.float16) is None
    with pytest.warns(UserWarning, match="torch emulates it, slowly"):
        assert examine_ranks(described(V100, dataclasses.replace(V100, uuid="w")), torch.bfloat16) is None


def test_two_ranks_on_one_gpu_are_an_error_on_all_ranks_before_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    port = ranks.free_port()

    def join(rank: int) -> str:
        with pytest.raises(RuntimeError) as raised:
            rendezvous.join_process_group(
                "gloo", rank=rank, world_size=3, address="127.0.0.1", port=port, init_timeout=300.0, timeout=None,
                description=described(A100, V100, A100)[rank], examine=lambda found: examine_ranks(found, torch.float32)
            )  # fmt: skip
        return str(raised.value)

    with ThreadPoolExecutor(3) as threads:
        errors = set(threads.map(join, range(3)))
    assert len(errors) == 1
    assert "rank 0 on node1 and rank 2 on node1 are on one GPU" in errors.pop()
    assert not dist.is_initialized()


def test_a_rank_beyond_the_visible_gpus_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    strategy = RLHFDeepSpeedStrategy(stage=2)
    environment = LightningEnvironment()
    monkeypatch.setattr(environment, "local_rank", lambda: 1)
    strategy.cluster_environment = environment
    strategy.parallel_devices = [torch.device("cpu")]
    strategy._accelerator = object()
    with pytest.raises(MisconfigurationException, match=r"rank 1 of this machine sees 1 GPU\(s\)"):
        strategy.setup_environment()


class TestFirstCollective:
    """NCCL has no time limit of its own while it connects."""

    def test_one_that_hangs_ends_with_the_address_and_the_time_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
        hangs = threading.Event()
        with pytest.raises(
            TimeoutError,
            match=r"rank 1 of 2 on .*: the first collective over NCCL did not end within 0\.2 s\. .*met at "
            r"10\.0\.0\.1:29500, .*NCCL_SOCKET_IFNAME=eth7.*firewall",
        ):
            run_first_collective(
                lambda: hangs.wait(600) and None, rank=1, world_size=2, address="10.0.0.1:29500", seconds=0.2
            )
        hangs.set()

    def test_one_that_fails_says_why(self) -> None:
        def fails() -> None:
            raise RuntimeError("ncclSystemError: connection refused")

        with pytest.raises(RuntimeError, match=r"failed: ncclSystemError: connection refused\. The ranks have met at"):
            run_first_collective(fails, rank=0, world_size=2, address="a:1", seconds=300)

    def test_one_that_ends_is_silent(self) -> None:
        run_first_collective(lambda: None, rank=0, world_size=2, address="a:1", seconds=300)
