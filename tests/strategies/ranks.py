"""Start a function of this folder on several ranks, each a real process over gloo, and collect what it returns."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, ranks: int, port: int, folder: Path) -> dict[str, str]:
    """What a launcher sets for one rank; extensions would be built in ``folder``, one thread per rank."""
    return os.environ | {
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def start(function: str, ranks: int, folder: Path, **arguments: Any) -> list[subprocess.Popen[bytes]]:
    """Start ``"module:function"`` of this folder on all ranks; each writes a result and a log into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = []
    for rank in range(ranks):
        (folder / f"result_{rank}.json").unlink(missing_ok=True)
        with open(folder / f"rank_{rank}.log", "wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, function, str(folder), json.dumps(arguments)],
                    env=rank_environment(rank, ranks, port, folder),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return processes


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs, children included."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(function: str, ranks: int, folder: Path, timeout: float = 240, **arguments: Any) -> list[Any]:
    """Run ``"module:function"`` on all ranks and return their results in order; fails with the logs."""
    processes = start(function, ranks, folder, **arguments)
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() not in (None, 0) for process in processes)
            if time.monotonic() > deadline or failed:
                time.sleep(1.0)
                break
            time.sleep(0.05)
    finally:
        stop(processes)
    results = [folder / f"result_{rank}.json" for rank in range(ranks)]
    if not all(result.exists() for result in results):
        logs = "\n".join(f"--- rank {r}\n{(folder / f'rank_{r}.log').read_text()[-5000:]}" for r in range(ranks))
        raise AssertionError(f"{function} on {ranks} rank(s) failed or took longer than {timeout} s\n{logs}")
    return [json.loads(result.read_text()) for result in results]


def main() -> None:
    """Entry point of one rank."""
    function, folder, arguments = sys.argv[1:]
    module, name = function.split(":")
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    value = getattr(importlib.import_module(module), name)(folder=Path(folder), **json.loads(arguments))
    (Path(folder) / f"result_{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(value))


if __name__ == "__main__":
    main()
