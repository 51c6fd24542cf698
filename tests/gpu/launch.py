"""Ranks on a device: on a GPU each is started from nothing, as CUDA does not work in a process that is forked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from strategies import ranks as forked
from strategies.ranks import free_port, rank_environment

TESTS = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
CODE = """
import importlib, json, os, pathlib, sys, torch
torch.set_num_threads(1)
if importlib.util.find_spec("deepspeed"):
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for a minute
module, name = sys.argv[1].split(":")
rank, folder = os.environ["LOCAL_RANK"], pathlib.Path(sys.argv[2])
value = getattr(importlib.import_module(module), name)(folder=folder, **json.loads(sys.argv[3]))
(folder / f"result_{rank}.json").write_text(json.dumps(value))
"""


def launch(function: str, ranks: int, folder: Path, *, on: str, timeout: float = 200, **arguments: Any) -> list[Any]:
    """What ``"module:function"`` of the tests returns on each rank; fails with their logs."""
    if on == "cpu":
        return forked.run(function, ranks, folder, **arguments)
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, function, str(folder), json.dumps(arguments)],
            # cuBLAS is deterministic with this setting.
            env=rank_environment(rank, ranks, port, folder)
            | {"PYTHONPATH": PYTHONPATH, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            stdout=(folder / f"rank_{rank}.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [-1]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join(f"--- rank {rank}\n{(folder / f'rank_{rank}.log').read_text()[-5000:]}" for rank in range(ranks))
    assert codes == [0] * ranks, f"{function} on {ranks} rank(s) failed or took longer than {timeout} s\n{logs}"
    return [json.loads((folder / f"result_{rank}.json").read_text()) for rank in range(ranks)]
