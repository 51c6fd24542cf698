"""Plain scripts, of which this file is one, and what ranks check together before anything is loaded.

Covers strategies/strategy.py, deepspeed/rendezvous.py and deepspeed/process_group.py.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.environments import LightningEnvironment

from rlhfkit.gpus import GIB, VisibleGPU
from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.deepspeed import rendezvous
from rlhfkit.strategies.deepspeed.process_group import examine_ranks, run_first_collective
from strategies import ranks, toys


def script(model: str) -> None:
    """Two ranks, of which Lightning starts the second."""
    module = toys.Toy(model)
    trainer = toys.trainer("rlhf_zero2", 2, enable_model_summary=False)
    rank = trainer.global_rank
    trainer.fit(module, toys.ShareLoader(toys.global_batches(3), rank, 2))
    assert trainer.world_size == 2
    # The first loss is that of the untrained model on the whole batch, whoever starts the ranks.
    assert module.losses[0] == pytest.approx(4.0216, abs=1e-3)
    assert module.losses[2] != module.losses[0]
    Path(f"trained {rank}").touch()


@pytest.mark.distributed
def test_two_ranks_from_a_script(tmp_path: Path, model_folder: str) -> None:
    """Of which Lightning starts the second; torchrun and Slurm start those of tests/test_cluster.py."""
    environment = ranks.rank_environment(0, 2, ranks.free_port(), tmp_path)
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        environment.pop(name)
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, __file__, model_folder],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=600)[0].decode()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output[-3000:]
    assert {path.name for path in tmp_path.glob("trained *")} == {"trained 0", "trained 1"}


def test_a_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 0 of 3 waited 1 s at 127\.0\.0\.1:\d+ for rank\(s\) 1, 2 to join"):
        rendezvous.join_process_group(
            "gloo", rank=0, world_size=3, address="127.0.0.1", port=ranks.free_port(), init_timeout=1.0, timeout=None
        )
    assert time.monotonic() - started < 300
    assert not dist.is_initialized()


def test_only_ranks_that_did_not_join_are_missing() -> None:
    store = dist.HashStore()
    for rank in (0, 2):
        store.set(f"joined/{rank}", "")
    assert rendezvous.wait_for_ranks(store, 4, 0.2) == [1, 3]
    assert rendezvous.wait_for_ranks(store, 1, 0.2) == []


def test_an_old_build_lock_is_found_and_a_running_build_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name, age in (("cpu_adam", 3600), ("shm_comm", 5)):
        (tmp_path / name).mkdir()
        lock = tmp_path / name / "lock"
        lock.touch()
        os.utime(lock, (time.time() - age,) * 2)
    assert rendezvous.extension_locks() == [tmp_path / "cpu_adam" / "lock"]


def test_missing_deepspeed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"rlhfkit\[deepspeed\]"):
        RLHFDeepSpeedStrategy()


# ---------------------------------------------------------------- GPUs, which are only described

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

    rank: dict[str, Any] = {"rank": 1, "world_size": 2, "address": "10.0.0.1:29500"}

    def test_one_that_hangs_ends_with_the_address_and_the_time_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
        hangs = threading.Event()
        with pytest.raises(
            TimeoutError,
            match=r"rank 1 of 2 on .*: the first collective over NCCL did not end within 0\.2 s\. .*met at "
            r"10\.0\.0\.1:29500, .*NCCL_SOCKET_IFNAME=eth7.*firewall",
        ):
            run_first_collective(lambda: hangs.wait(600) and None, seconds=0.2, **self.rank)
        hangs.set()

    def test_one_that_fails_says_why_and_one_that_ends_is_silent(self) -> None:
        def fails() -> None:
            raise RuntimeError("ncclSystemError: connection refused")

        with pytest.raises(RuntimeError, match=r"failed: ncclSystemError: connection refused\. The ranks have met at"):
            run_first_collective(fails, seconds=300, **self.rank)
        run_first_collective(lambda: None, seconds=300, **self.rank)


if __name__ == "__main__":
    script(sys.argv[1])
