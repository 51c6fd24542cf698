"""The plugin inside vLLM: found, registered once, strict about what it is sent."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

# vLLM changes torch and the environment when imported, so it is looked at in a process of its own.
LOOK = """
import torch
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
assert "rlhfkit" in WeightTransferEngineFactory._registry, "the entry point did not register the engine"
from rlhfkit.rollout.vllm import plugin as vllm_plugin
made = WeightTransferEngineFactory._registry["rlhfkit"]()
vllm_plugin.register()
vllm_plugin.register()
assert WeightTransferEngineFactory._registry["rlhfkit"]() is made is vllm_plugin.ProcessGroupTransferEngine
assert {"nccl", "ipc"} <= set(WeightTransferEngineFactory._registry), "vLLM's own engines are gone"

from vllm.v1.worker.gpu_worker import Worker
clashes = [name for name in dir(vllm_plugin.WorkerExtension) if not name.startswith("__") and hasattr(Worker, name)]
assert not clashes, clashes

# An engine has as many processes as we count, and their ranks in a transfer (init_transfer_engine) have no gaps.
import dataclasses
from itertools import product
from vllm import EngineArgs
from vllm.config.parallel import ParallelConfig
from rlhfkit.rollout.vllm import parallelism
fields = {field.name for field in dataclasses.fields(EngineArgs)}
assert fields >= parallelism._OTHER_PROCESSES, parallelism._OTHER_PROCESSES - fields
for sizes in product((1, 2), (1, 3), (1, 2)):
    ours = parallelism.Parallelism(*sizes)
    assert fields >= set(ours.arguments())
    ranks = []
    for index in range(ours.data):
        theirs = ParallelConfig(**ours.arguments(), data_parallel_rank=index)
        assert (theirs.world_size, theirs.data_parallel_index) == (ours.tensor * ours.pipeline, index)
        assert theirs.world_size_across_dp == ours.processes
        ranks += [index * theirs.world_size + rank for rank in range(theirs.world_size)]
    assert ranks == list(range(ours.processes)), sizes

engine = object.__new__(vllm_plugin.ProcessGroupTransferEngine)
update = engine.parse_update_info({"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]})
for wrong in ({"names": ["a"]}, {"names": [], "dtype_names": [], "shapes": [], "more": 1}):
    try:
        engine.parse_update_info(wrong)
    except ValueError as error:
        assert "ProcessGroupTransferEngine" in str(error)
    else:
        raise AssertionError(f"accepted {wrong}")
engine._receiver = vllm_plugin.WeightReceiver(torch.device("cpu"))
engine._loader = vllm_plugin.BucketLoader(torch.nn.Module())
try:
    engine.receive_weights(update)
except RuntimeError as error:
    assert "before the trainer's group was joined" in str(error)
print("fine")
"""


def test_the_installed_package_announces_the_plugin() -> None:
    announced = [entry.value for entry in entry_points(group="vllm.general_plugins")]
    assert announced.count("rlhfkit.rollout.vllm.plugin:register") == 1


@pytest.mark.vllm
def test_vllm_finds_the_engine_and_registering_again_does_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip().endswith("fine"), done.stderr[-3000:]
