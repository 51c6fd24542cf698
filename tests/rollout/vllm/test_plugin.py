"""The plugin inside vLLM: found, registered once, strict about what it is sent."""

import dataclasses
from collections.abc import Iterator
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import ranks
from torch import Tensor, nn

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.vllm import parallelism


def test_the_installed_package_announces_the_plugin() -> None:
    announced = [entry.value for entry in entry_points(group="vllm.general_plugins")]
    assert announced.count("rlhfkit.rollout.vllm.plugin:register") == 1


@pytest.mark.vllm
def test_the_plugin_in_a_process_of_vllm(tmp_path: Path) -> None:
    """One of its own, as vLLM changes torch and the environment when it is imported."""
    ranks.run("rollout.vllm.test_plugin:inside_vllm", 1, tmp_path)


def inside_vllm(folder: Path) -> None:
    """Entry point of the process."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    check_registration()
    check_processes()
    check_refusals()
    check_buckets()


def check_registration() -> None:
    """By the entry point, once, and in nobody's way."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    registry = WeightTransferEngineFactory._registry
    made = registry["rlhfkit"]()
    from rlhfkit.rollout.vllm import plugin

    plugin.register()
    assert registry["rlhfkit"]() is made is plugin.ProcessGroupTransferEngine
    assert {"nccl", "ipc"} <= set(registry)
    ours = {name for name in dir(plugin.WorkerExtension) if not name.startswith("__")}
    assert not ours & set(dir(Worker))


def check_processes() -> None:
    """An engine has as many as we count, and their ranks in a transfer (init_transfer_engine) have no gaps."""
    from vllm import EngineArgs
    from vllm.config.parallel import ParallelConfig

    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert fields >= parallelism._OTHER_PROCESSES
    for sizes in product((1, 2), (1, 3), (1, 2)):
        ours = parallelism.Parallelism(*sizes)
        assert fields >= set(ours.arguments())
        found = []
        for index in range(ours.data):
            theirs = ParallelConfig(**ours.arguments(), data_parallel_rank=index)
            assert (theirs.world_size, theirs.data_parallel_index) == (ours.tensor * ours.pipeline, index)
            assert theirs.world_size_across_dp == ours.processes
            found += [index * theirs.world_size + rank for rank in range(theirs.world_size)]
        assert found == list(range(ours.processes)), sizes


def check_refusals() -> None:
    """Updates that are not as announced, and weights before the trainer's group was joined."""
    from rlhfkit.rollout.vllm import plugin

    engine: Any = object.__new__(plugin.ProcessGroupTransferEngine)
    for wrong in ({"names": ["a"]}, {"names": [], "dtype_names": [], "shapes": [], "more": 1}):
        with pytest.raises(ValueError, match="ProcessGroupTransferEngine"):
            engine.parse_update_info(wrong)
    engine._receiver = plugin.WeightReceiver(torch.device("cpu"))
    engine._loader = plugin.BucketLoader(nn.Module())
    with pytest.raises(RuntimeError, match="before the trainer's group was joined"):
        engine.receive_weights(engine.parse_update_info({"names": ["a"], "dtype_names": ["int8"], "shapes": [[2]]}))


class Fused(nn.Module):
    """A layer whose weight arrives in two parts, as vLLM's of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, param: Any, loaded: Tensor, part: int) -> None:
        param.data[part].copy_(loaded)


class Model(nn.Module):
    """Notes how often it was asked for its modules."""

    visited = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Fused() for _ in range(50))

    def modules(self) -> Iterator[nn.Module]:
        for module in super().modules():
            self.visited += 1
            yield module

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            layer, part = map(int, name.split("."))
            weight: Any = self.layers[layer].weight
            weight.weight_loader(weight, tensor, part)


def check_buckets() -> None:
    """A bucket looks at no module but those that it brings weights of; that what they keep is copied: test_pool.py."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from rlhfkit.rollout.vllm.plugin import BucketLoader

    model = Model()
    record_metadata_for_reloading(model)
    loader = BucketLoader(model)
    infos = [WeightInfo(f"{number // 2}.{number % 2}", (4,), torch.float32) for number in range(100)]

    def begin() -> None:
        assert loader.begin(infos)
        initialize_layerwise_reload(model)
        loader.begin_reload()

    begin()
    visited = model.visited
    for info in infos:
        loader.load([(info.name, torch.ones(4))], torch.empty(4, dtype=torch.uint8))
    assert model.visited == visited
    finalize_layerwise_reload(model, None)
    loader.finish()
    assert all(bool(layer.weight.all()) for layer in model.layers)

    begin()
    get_layerwise_info(model.layers[3]).loaded_weights = []  # as a version that makes lists of its own
    loader.load([("3.0", torch.ones(4))], None)
    with pytest.raises(RuntimeError, match=r"keeps weights of 'layers.3' \(Fused\) where rlhfkit does not look"):
        loader.finish()
