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
assert "gloo" in WeightTransferEngineFactory._registry, "the entry point did not register the engine"
from rlhfkit.rollout.vllm import plugin as vllm_plugin
made = WeightTransferEngineFactory._registry["gloo"]()
vllm_plugin.register()
vllm_plugin.register()
assert WeightTransferEngineFactory._registry["gloo"]() is made is vllm_plugin.GlooWeightTransferEngine
assert {"nccl", "ipc"} <= set(WeightTransferEngineFactory._registry), "vLLM's own engines are gone"

from vllm.v1.worker.gpu_worker import Worker
clashes = [name for name in dir(vllm_plugin.WorkerExtension) if not name.startswith("__") and hasattr(Worker, name)]
assert not clashes, clashes

engine = object.__new__(vllm_plugin.GlooWeightTransferEngine)
update = engine.parse_update_info({"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]})
for wrong in ({"names": ["a"]}, {"names": [], "dtype_names": [], "shapes": [], "more": 1}):
    try:
        engine.parse_update_info(wrong)
    except ValueError as error:
        assert "GlooWeightTransferEngine" in str(error)
    else:
        raise AssertionError(f"accepted {wrong}")
engine._transport = None
try:
    engine.receive_weights(update)
except RuntimeError as error:
    assert "before init_weight_transfer_engine" in str(error)
print("fine")
"""


def test_the_installed_package_announces_the_plugin() -> None:
    (found,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "rlhfkit_gloo"]
    assert found.value == "rlhfkit.rollout.vllm.plugin:register"


@pytest.mark.vllm
def test_vllm_finds_the_engine_and_registering_again_does_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip().endswith("fine"), done.stderr[-3000:]
