"""What ranks on Ray do in the tests. Only the standard library at the top: ranks that need no torch start fast."""

import contextlib
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


class OddError(Exception):
    """Cannot be made again from ``args``, as pickle wants to."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


class PlainError(Exception):
    """An error of the user's own."""


def rank() -> int:
    return int(os.environ["RANK"])


def note_pid(folder: str) -> None:
    """Let the test find this process, and know that it runs."""
    started = Path(folder) / f"starting_{rank()}"
    started.write_text(str(os.getpid()))
    started.rename(Path(folder) / f"pid_{rank()}")


def wait_for(file: Path) -> None:
    """Until it is there, ten minutes at most."""
    deadline = time.monotonic() + 600
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.02)


def look_around(folder: str) -> dict[str, Any]:
    """What a rank sees; also prints in pieces, and redraws a line as bars do."""
    note_pid(folder)
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "DS_ACCELERATOR", "FROM_THE_DRIVER", "PL_GLOBAL_SEED")
    print("hel", end="")
    print("lo")
    if rank() == 1:
        print("10%\r50%\r100%", file=sys.stderr)
        print("no end", end="")
    return {name: os.environ.get(name) for name in names} | {
        "folder": os.getcwd(),
        "torch": "torch" in sys.modules,
        "threads": threading.current_thread() is threading.main_thread(),
    }


def fail_on_rank_one(folder: str) -> None:
    """Rank 1 fails; rank 0 waits as it would in a collective."""
    note_pid(folder)
    wait_for(Path(folder) / "pid_0")
    if rank() == 1:
        raise PlainError("rank one is unhappy")
    time.sleep(600)


def fail_after_a_neighbour_noticed(folder: str) -> None:
    """Rank 0 notices first, as gloo does when a connection breaks; rank 1 has the cause."""
    note_pid(folder)
    if rank() == 0:
        raise RuntimeError("Connection closed by peer")
    wait_for(Path(folder) / "the driver knows of rank 0")
    raise KeyError("the cause")


def fail_oddly(folder: str) -> None:
    """An error that cannot travel."""
    note_pid(folder)
    raise OddError(3, reason="odd")


def die_on_rank_one(folder: str) -> None:
    """Rank 0 notices that rank 1 is killed, before the driver does."""
    note_pid(folder)
    if rank() == 1:
        wait_for(Path(folder) / "the driver knows of rank 0")
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("Connection closed by peer")


def wait_for_ever(folder: str) -> None:
    """Until the driver ends this process."""
    note_pid(folder)
    time.sleep(600)


def drive(folder: Path, address: str) -> None:
    """A driver, itself forked, that is interrupted: two ranks under the suite's Ray."""
    from rlhfkit.strategies.ray.launcher import RayLauncher

    # Tests that a shell runs in the background would have it ignore the signal, as they do themselves.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["RAY_ADDRESS"] = address
    launcher(RayLauncher).launch(wait_for_ever, str(folder))


def drive_around(folder: Path, address: str) -> dict[str, Any]:
    """A driver that joined the suite's Ray, whose ranks are no forks: what one sees, and what the driver prints."""
    from rlhfkit.strategies.ray.launcher import RayLauncher

    os.environ |= {"RAY_ADDRESS": address, "FROM_THE_DRIVER": "set after Ray was started", "PL_GLOBAL_SEED": "17"}
    os.chdir(folder)
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        seen = launcher(RayLauncher).launch(look_around, str(folder))
    return {"seen": seen, "output": output.getvalue(), "errors": errors.getvalue()}


def note_place(folder: str) -> None:
    """What a rank knows of its machine."""
    names = ("NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    (Path(folder) / f"place_{rank()}").write_text(" ".join(os.environ[name] for name in names))


def drive_two_machines(folder: Path) -> None:
    """A driver, itself forked: three ranks on Ray nodes of one and two cores, as machines; then one rank on each."""
    import ray
    from ray.cluster_utils import Cluster

    from rlhfkit.strategies.ray.launcher import RayLauncher

    os.environ.pop("RAY_ADDRESS", None)
    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False, include_log_monitor=False, object_store_memory=80 * 2**20)
    cluster.add_node(num_cpus=2, include_log_monitor=False, object_store_memory=80 * 2**20)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        for ranks in (3, 2):
            (folder / str(ranks)).mkdir()
            kind = launcher(RayLauncher, num_ranks=ranks, num_nodes=2, resources_per_rank={"CPU": 1})
            kind.launch(note_place, f"{folder}/{ranks}")
    finally:
        ray.shutdown()
        cluster.shutdown()


def launcher(kind: Any, **changes: Any) -> Any:
    """Two ranks with half a core each, whose ends are waited for however busy the machine is."""
    sys.modules["rlhfkit.strategies.ray.ranks"]._KILL_SECONDS = 300.0  # type: ignore[attr-defined]
    options = {
        "num_ranks": 2,
        "num_nodes": 1,
        "resources_per_rank": {"CPU": 0.5},
        "device": "cpu",
        "timeout": 600.0,
        "return_weights": True,
    }
    return kind(**(options | changes))
