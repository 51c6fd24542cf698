"""Fixtures for the whole suite. Real vLLM engines are started once and shared by all tests."""

import atexit
import gc
import importlib.metadata
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

# Engines, tests and ranks share a few cores: one thread each is faster than many that wait for one another, by far for
# models this small. OpenMP reads it when torch is imported, so it comes first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray would start processes for a driver's first tasks, and those of most tests are actors with variables of their own,
# which need other processes.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Each process of the tests, and each rank and engine, would compile the package and rewrite the tests' assertions anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import pytest
import ray_worker
import torch
from shared_pool import SMALL, SharedPool
from tiny_models import tiny_model
from vllm_serve import vllm_serve

from rlhfkit.rollout.engine import SamplingSpec

sys.dont_write_bytecode = False
# Each Trainer asks all installed packages for callbacks, which takes most of the time in which it is made.
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)
gc.disable()  # until all tests are collected: imports leave little garbage and many objects to look at
# How long an example takes, or is made, says nothing on a machine with other work.
hypothesis.settings.register_profile("rlhfkit", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("rlhfkit")


def group(item: pytest.Item) -> str | None:
    """Name of those tests that run in one process with this one, as they share what is started once for the session."""
    fixtures = set(getattr(item, "fixturenames", ()))
    if fixtures & {"vllm_pool", "vllm_server"}:
        return "vllm"
    if "ray_session" in fixtures:  # vllm_pool has started one; another pays where a further process has nothing to do
        return "ray" if int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) > 2 else "vllm"
    return None


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        ray_worker.share()  # with the processes of pytest-xdist, too


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Worker processes write there which tests belong together: what they tell the first one are names only."""
    node.workerinput["groups"] = str(Path(_shared_folder().name) / "groups.json")


@cache
def _shared_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``pytest -n``, tests of a group run in one process, and so do the other tests of a file."""
    if config.option.dist != "load":  # asked for otherwise, as by make gpu-check
        return None
    from xdist.scheduler import LoadScopeScheduling

    class LoadGroupsAndFiles(LoadScopeScheduling):
        @cached_property
        def groups(self) -> dict[str, str]:
            return json.loads((Path(_shared_folder().name) / "groups.json").read_text())

        def _split_scope(self, nodeid: str) -> str:
            return self.groups.get(nodeid) or nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return LoadGroupsAndFiles(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``pytest -n``, begin with what takes long, so that no process is left with it in the end."""
    if hasattr(config, "workerinput"):
        groups = {item.nodeid: name for item in items if (name := group(item))}
        Path(config.workerinput["groups"]).write_text(json.dumps(groups))
        items.sort(key=expected_duration, reverse=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``cuda`` where GPUs are missing, of which ``cuda(2)`` needs two, or time is over."""
    needed = [mark.args[0] if mark.args else 1 for mark in item.iter_markers("cuda")]
    if needed and torch.cuda.device_count() < max(needed):
        pytest.skip(f"needs {max(needed)} CUDA device(s), here are {torch.cuda.device_count()}")
    if needed and time.time() > float(os.environ.get("RLHFKIT_GPU_DEADLINE", "inf")):
        pytest.skip("not started, as the time is over: make gpu-check BUDGET=1500 has more than 540 seconds")


def expected_duration(item: pytest.Item) -> int:
    """Larger for what is likely to take longer."""
    marks = {mark.name for mark in item.iter_markers()}
    return 2 * bool("slow" in marks or group(item)) or bool(marks & {"ray", "vllm", "distributed"})


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays, and need not be looked at again and again
    atexit.register(gc.unfreeze)  # or the interpreter would take it for leaks
    gc.enable()


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds for which this thread wants to sleep, and does not."""
    found: list[float] = []
    sleep, own = time.sleep, threading.get_ident()
    monkeypatch.setattr(time, "sleep", lambda wanted: (found.append if threading.get_ident() == own else sleep)(wanted))
    return found


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers of a test do not depend on which tests ran before in the same process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model that the shared engines serve (tied embeddings, 512 tokens of context)."""
    return tiny_model(tmp_path_factory.mktemp("vllm_model"))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A small Ray of the suite's own, whatever else runs on the machine."""
    import ray

    ray_worker.use()
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def vllm_pool(vllm_model: Path, ray_session: None) -> Iterator[SharedPool]:
    """Two vLLM engines on the CPU, started with ``vllm_model``; tests bring weights with ``load``.

    They report log-probs before temperature and truncation, so those at temperatures other than 1 are NaN.
    """
    pool = SharedPool(num_engines=2, **SMALL)
    pool.configure_logprobs(SamplingSpec(top_p=0.9))
    pool.start(str(vllm_model), dtype=torch.float32)
    yield pool
    pool.really_close()


@pytest.fixture(scope="session")
def vllm_server(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a ``vllm serve`` on the CPU that serves ``vllm_model`` and takes weights."""
    with vllm_serve(vllm_model, tmp_path_factory.mktemp("vllm_server") / "log") as url:
        yield url
