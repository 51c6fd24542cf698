"""Engines over several machines, and what ends them."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from strategies import ranks
from waiting import has_ended, until

from rlhfkit.rollout.vllm.machines import WorkerMachines


class OtherMachine:
    """Plays the actor of another machine, whose workers run until the actor ends."""

    def run_workers(self, error: str | None) -> None:
        if error is None:
            threading.Event().wait()
        if error:
            raise RuntimeError(error)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("error", "says"),
    [("", "a worker has ended"), ("no such GPU", "no such GPU"), (None, "died")],
)
def test_an_engine_ends_with_any_of_its_machines(ray_session: None, error: str | None, says: str) -> None:
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers of Ray cannot import tests
    actor = ray.remote(OtherMachine).options(num_cpus=0).remote()
    ended = threading.Event()
    machines = WorkerMachines([actor], [actor.run_workers.remote(error)], end=ended.set)
    if error is None:
        machines.check()
        ray.kill(actor)
    assert ended.wait(60)
    with pytest.raises(RuntimeError, match=f"machine 1 of the engine is lost: (.|\\n)*{says}"):
        machines.check()


@pytest.mark.ray
@pytest.mark.vllm
def test_an_engine_over_two_machines_computes_with_the_weights_it_is_sent(vllm_model: Path, tmp_path: Path) -> None:
    """Two Ray nodes with one core each, and tensor parallelism over both; then a worker of the second one dies."""
    ranks.run("rollout.remote.two_machines:use_an_engine", 1, tmp_path, model=str(vllm_model))


PARENT = """
import multiprocessing, os, time
from rlhfkit.rollout.vllm.machines import end_with_parent

def child():
    end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(100)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=child).start()
    time.sleep(100)
"""


def test_a_worker_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not has_ended(child)
    parent.kill()
    parent.wait()
    until(lambda: has_ended(child))
