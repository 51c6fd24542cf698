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

# A bucket looks at no module but those that it brings weights of, and what they keep of it is copied.
from torch import nn
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, param, loaded, part):
        param.data[part].copy_(loaded)

class Model(nn.Module):
    visited = 0

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Fused() for _ in range(50))

    def modules(self):
        for module in super().modules():
            self.visited += 1
            yield module

    def load_weights(self, weights):
        for name, tensor in weights:
            layer, part = map(int, name.split("."))
            param = self.layers[layer].weight
            param.weight_loader(param, tensor, part)

model = Model()
record_metadata_for_reloading(model)
loader = vllm_plugin.BucketLoader(model)
parts = [(layer, part) for layer in range(50) for part in range(2)]
infos = [vllm_plugin.WeightInfo(f"{layer}.{part}", (4,), torch.float32) for layer, part in parts]
for transfer in range(2):
    assert loader.begin(infos)
    initialize_layerwise_reload(model)
    loader.begin_reload()
    visited, block = model.visited, torch.empty(32, dtype=torch.uint8)
    for start in range(-1, 100, 2):  # the second part of a layer and the first of the next one
        named = []
        for place, number in enumerate(range(max(start, 0), min(start + 2, 100))):
            view = block[16 * place : 16 * place + 16].view(torch.float32)
            named.append((infos[number].name, view.fill_(1000 * transfer + number)))
        loader.load(named, block)
        block.fill_(255)
    assert model.visited == visited, (model.visited - visited) / 51
    finalize_layerwise_reload(model, None)
    loader.finish()
    for number, (layer, part) in enumerate(parts):
        assert model.layers[layer].weight[part].tolist() == [1000 * transfer + number] * 4, (layer, part)

loader.begin(infos)
initialize_layerwise_reload(model)
loader.begin_reload()
get_layerwise_info(model.layers[3]).loaded_weights = []  # as a version that makes lists of its own
loader.load([("3.0", torch.ones(4))], None)
try:
    loader.finish()
except RuntimeError as error:
    assert "keeps weights of 'layers.3' (Fused) where rlhfkit does not look" in str(error)
else:
    raise AssertionError("weights that may have been overwritten were taken")
print("fine")
"""


def test_the_installed_package_announces_the_plugin() -> None:
    announced = [entry.value for entry in entry_points(group="vllm.general_plugins")]
    assert announced.count("rlhfkit.rollout.vllm.plugin:register") == 1


@pytest.mark.vllm
def test_vllm_finds_the_engine_and_registering_again_does_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip().endswith("fine"), done.stderr[-3000:]
