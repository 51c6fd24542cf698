"""Ranks on Ray: who starts them, where they are placed, how they fail, and that none of them is left.

Covers strategies/ray/launcher.py, ray/environment.py and ray/ranks.py, with ray_cases.py.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from rlhfkit.rank_store import RankError
from rlhfkit.ray_placement import PlacementError
from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.ray.launcher import RayEnvironment, RayLauncher
from rlhfkit.strategies.ray.ranks import Ranks, rank_environments
from strategies import ranks, ray_cases


def make_trainer(devices: Any = 2, *, accelerator: str = "cpu", num_nodes: int = 1, **arguments: Any) -> L.Trainer:
    return L.Trainer(
        strategy=RLHFDeepSpeedStrategy(**arguments),
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        logger=False,
        enable_checkpointing=False,
    )


@pytest.fixture
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver waits for ranks that end, however busy the machine is, and writes down that it knows of rank 0."""
    limit = Ranks._time_limit

    def noted(self: Ranks, waiting: Any, failures: dict[int, Any]) -> float:
        if 0 in failures:
            (tmp_path / "the driver knows of rank 0").touch()
        return limit(self, waiting, failures)

    monkeypatch.setattr(Ranks, "_time_limit", noted)
    monkeypatch.setattr("rlhfkit.strategies.ray.ranks._GRACE_SECONDS", 300.0)


def alive(folder: Path) -> list[int]:
    """Processes of ranks that still exist."""
    pids = [int(path.read_text()) for path in folder.glob("pid_*")]
    assert pids
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


# ------------------------------------------------------------------------------------------------------ no Ray needed


def test_scripts_keep_lightnings_launcher() -> None:
    for launcher in (None, "subprocess"):
        strategy = make_trainer(launcher=launcher).strategy
        assert isinstance(strategy.launcher, _SubprocessScriptLauncher)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "a1",
}


@pytest.mark.parametrize("per_node", [None, "2"])
@pytest.mark.parametrize("written", [{}, {"cluster_environment": None}], ids=["script", "configuration file"])
def test_ray_starts_ranks_in_the_batch_script_of_a_slurm_job(
    monkeypatch: pytest.MonkeyPatch, per_node: str | None, written: dict[str, Any]
) -> None:
    """Lightning takes ``--ntasks`` for a sign that srun has started this process as a rank."""
    for name, value in (SLURM | ({"SLURM_NTASKS_PER_NODE": per_node} if per_node else {})).items():
        monkeypatch.setenv(name, value)
    strategy = make_trainer(3, launcher="ray", **written).strategy
    assert isinstance(strategy.launcher, RayLauncher)
    assert strategy.launcher.num_ranks == 3
    assert isinstance(strategy.cluster_environment, RayEnvironment)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(MisconfigurationException, match=r"one of 4 tasks: start it once \(srun --ntasks=1"):
        make_trainer(3, launcher="ray")


def test_the_launcher_gets_what_the_strategy_and_the_trainer_say() -> None:
    trainer = make_trainer(launcher="ray", num_nodes=3, resources_per_rank={"CPU": 2, "fast_disk": 1}, init_timeout=7)
    launcher = trainer.strategy.launcher
    assert isinstance(launcher, RayLauncher)
    assert isinstance(trainer.strategy.cluster_environment, RayEnvironment)
    assert trainer.num_nodes == launcher.num_nodes == 3
    assert trainer.world_size == launcher.num_ranks == 6
    assert launcher.resources_per_rank == {"CPU": 2, "fast_disk": 1}
    assert launcher.timeout == 7
    assert trainer.is_global_zero
    assert trainer.strategy.root_device == torch.device("cpu")


def test_ray_inside_ranks_that_somebody_else_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # what Lightning takes as a sign of a launcher
    with pytest.raises(MisconfigurationException, match="one of several already"):
        make_trainer(launcher="ray")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver must have no GPU")
def test_a_driver_without_gpus_prepares_ranks_with_gpus() -> None:
    trainer = make_trainer(4, accelerator="auto", launcher="ray", resources_per_rank={"CPU": 8, "GPU": 1}, num_nodes=2)
    assert trainer.num_devices == 4
    assert trainer.strategy.launcher.resources_per_rank == {"CPU": 8, "GPU": 1}
    assert trainer.strategy.launcher.device == "cuda"
    assert trainer.strategy.root_device == torch.device("cuda", 0)
    trainer.strategy.teardown()  # what Lightning does in the driver after an error
    with pytest.raises(MisconfigurationException, match="must say how many ranks"):
        make_trainer("auto", accelerator="auto", launcher="ray", resources_per_rank={"GPU": 1})


def test_ranks_of_a_machine_see_each_others_gpus_and_uneven_machines_work() -> None:
    places = [("a", ["3"]), ("a", ["1"]), ("a", ["0"]), ("b", ["5"])]
    found = [
        {"node": node, "host": node, "address": f"10.0.0.{node}", "port": 7000 + i, "gpus": gpus, "pid": i}
        for i, (node, gpus) in enumerate(places)
    ]
    environments = rank_environments(found, "cuda")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments] == ["3,1,0"] * 3 + ["5"]
    assert [(one["RANK"], one["NODE_RANK"], one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in environments] == [
        ("0", "0", "0", "3"),
        ("1", "0", "1", "3"),
        ("2", "0", "2", "3"),
        ("3", "1", "0", "1"),
    ]
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"], one["WORLD_SIZE"]) for one in environments} == {
        ("10.0.0.a", "7000", "4")
    }


def test_a_rank_computes_on_the_gpu_with_its_local_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert RayEnvironment(4).device("cuda") == torch.device("cuda", 2)
    assert RayEnvironment(4).device("cpu") == torch.device("cpu")


def test_the_driver_saves_no_checkpoint_without_engines(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="The ranks on Ray have ended"):
        make_trainer(launcher="ray").strategy.save_checkpoint({}, tmp_path / "driver.ckpt")


# -------------------------------------------------------------------------------------------------- real Ray, no torch


@pytest.mark.ray
def test_ranks_know_where_they_are_and_their_text_reaches_the_driver(ray_session: None, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    (found,) = ranks.run("strategies.ray_cases:drive_around", 1, tmp_path, address=address)
    assert found["seen"] == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "NODE_RANK": "0",
        "WORLD_SIZE": "2",
        "DS_ACCELERATOR": "cpu",
        "FROM_THE_DRIVER": "set after Ray was started",
        "PL_GLOBAL_SEED": "17",
        "folder": str(tmp_path),
        "torch": False,  # nothing heavy is imported before the environment is complete
        "threads": True,  # signal handlers and CUDA want the main thread
    }
    assert sorted(found["output"].splitlines()) == ["[rank 1] hello", "[rank 1] no end", "hello"]
    own = [line for line in found["errors"].splitlines() if "INFO worker.py" not in line]  # Ray says that it connects
    assert own == ["[rank 1] 100%"]
    assert alive(tmp_path) == []


FAILURES: list[tuple[Any, type[Exception], str]] = [
    (ray_cases.fail_on_rank_one, ray_cases.PlainError, r"^rank one is unhappy$"),
    # What a neighbour noticed is not the cause.
    (ray_cases.fail_after_a_neighbour_noticed, KeyError, "the cause"),
    (ray_cases.die_on_rank_one, RankError, r"rank 1 of 2 \(process \d+ on .*\) died"),
    # An error that cannot travel.
    (ray_cases.fail_oddly, RankError, r"rank [01] of 2 .* failed:\n(.*\n)*.*OddError: odd \(3\)"),
]


@pytest.mark.ray
@pytest.mark.parametrize(("fail", "kind", "message"), FAILURES)
def test_a_failure_is_raised_with_its_rank_and_traceback_and_ends_all_ranks(
    ray_session: None, tmp_path: Path, request: pytest.FixtureRequest, fail: Any, kind: type[Exception], message: str
) -> None:
    if fail is not ray_cases.fail_on_rank_one:  # where the other rank would be waited for
        request.getfixturevalue("patient")
    started = time.monotonic()
    with pytest.raises(kind, match=message) as caught:
        ray_cases.launcher(RayLauncher).launch(fail, str(tmp_path))
    assert time.monotonic() - started < 500  # ranks would wait for 600 s
    if kind is not RankError:
        cause = str(caught.value.__cause__)
        assert isinstance(caught.value.__cause__, RankError)
        assert f"rank 1 of 2 (process {(tmp_path / 'pid_1').read_text()} on " in cause
        assert f"in {fail.__name__}" in cause
    assert alive(tmp_path) == []


@pytest.mark.ray
def test_a_placement_that_cannot_be_had_says_what_is_missing(ray_session: None) -> None:
    import ray

    before = set(ray.util.placement_group_table())
    launcher = ray_cases.launcher(RayLauncher, resources_per_rank={"CPU": 1, "moonstone": 2}, timeout=1.0)
    with pytest.raises(
        PlacementError,
        # Engines that other tests share hold CPUs meanwhile, which it says as well.
        match=r"2 rank\(s\) of 1 CPU \+ 2 moonstone \(STRICT_PACK\) within 1 s: .*4 moon"
        r"stone are needed and the cluster has 0\.",
    ):
        launcher.launch(ray_cases.wait_for_ever, "")
    launcher = ray_cases.launcher(RayLauncher, num_nodes=2, timeout=1.0)
    with pytest.raises(PlacementError, match=r"STRICT_SPREAD.*2 machines are needed and the cluster has 1"):
        launcher.launch(ray_cases.wait_for_ever, "")
    made = [group["state"] for name, group in ray.util.placement_group_table().items() if name not in before]
    assert made == ["REMOVED"] * 2


@pytest.mark.ray
def test_what_cannot_be_pickled_is_named(ray_session: None) -> None:
    with pytest.raises(TypeError, match=r"must be picklable.*cannot pickle '_thread.lock' object"):
        ray_cases.launcher(RayLauncher).launch(print, threading.Lock())


@pytest.mark.ray
def test_ctrl_c_in_the_driver_leaves_no_rank(ray_session: None, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    (driver,) = ranks.start("strategies.ray_cases:drive", 1, tmp_path, address=address)
    log = tmp_path / "rank_0.log"
    try:
        deadline = time.monotonic() + 600
        while len(list(tmp_path.glob("pid_*"))) < 2:
            assert driver.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(driver.pid, signal.SIGINT)
        deadline = time.monotonic() + 300
        while driver.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        driver.kill()
    assert log.read_text().rstrip().endswith("KeyboardInterrupt")
    assert alive(tmp_path) == []


@pytest.mark.ray
def test_ranks_are_numbered_machine_by_machine(tmp_path: Path) -> None:
    ranks.run("strategies.ray_cases:drive_two_machines", 1, tmp_path)

    def places(count: int) -> list[list[str]]:
        return [(tmp_path / str(count) / f"place_{rank}").read_text().split() for rank in range(count)]

    packed = [tuple(map(int, place[:3])) for place in places(3)]
    assert packed in ([(0, 0, 1), (1, 0, 2), (1, 1, 2)], [(0, 0, 2), (0, 1, 2), (1, 0, 1)])
    assert [place[:3] for place in places(2)] == [["0", "0", "1"], ["1", "0", "1"]]
    assert "127.0.0.1" not in {place[3] for place in places(2)}  # the other machine must find rank 0
