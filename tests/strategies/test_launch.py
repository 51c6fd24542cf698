"""Plain scripts, of which this file is one, ranks that do not join, locks of interrupted builds.

Covers strategies/strategy.py, deepspeed/rendezvous.py and deepspeed/process_group.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.deepspeed import rendezvous
from strategies import ranks, toys


def script(model: str) -> None:
    """Two ranks; the Trainer finds or starts them."""
    module = toys.Toy(model)
    trainer = toys.trainer("rlhf_zero2", 2, enable_model_summary=False)
    rank = trainer.global_rank
    trainer.fit(module, toys.ShareLoader(toys.global_batches(3), rank, 2))
    if trainer.is_global_zero:
        Path("result.json").write_text(json.dumps({"losses": module.losses, "world_size": trainer.world_size}))


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
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["world_size"] == 2
    # The first loss is that of the untrained model on the whole batch, whoever starts the ranks.
    assert result["losses"][0] == pytest.approx(4.0216, abs=1e-3)
    assert result["losses"][2] != result["losses"][0]


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


if __name__ == "__main__":
    script(sys.argv[1])
