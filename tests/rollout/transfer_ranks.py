"""What one rank of a sharded training does in ``test_transfer.py``; started by it as ``python transfer_ranks.py``."""

import json
import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhfkit.rollout.transfer import ModuleWeights

BUCKET_BYTES = 2**15  # several buckets, and tensors larger than one


def zero3_engine(folder: str) -> Any:
    """The model in folder as a ZeRO-3 engine."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def compare(engine: Any, expected: dict[str, Tensor]) -> dict[str, Any]:
    """What the source yields against the whole weights."""
    weights = ModuleWeights(engine, bucket_bytes=BUCKET_BYTES)
    announced = [[info.name, list(info.shape), str(info.dtype)] for info in weights.metadata()]
    yielded = {name: tensor.clone() for name, tensor in weights}
    return {
        "announced": announced,
        "sharded": all(parameter.numel() == 0 for parameter in engine.module.parameters() if parameter.ds_numel > 100),
        "equal": {name: bool(torch.equal(tensor, expected[name])) for name, tensor in yielded.items()},
    }


def diverge_on_the_last_rank(module: nn.Module) -> None:
    """A NaN in the last rank's shard of one weight."""
    parameter: Any = module.get_parameter("model.layers.1.mlp.down_proj.weight")
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter.ds_tensor.data[-1] = float("nan")


def main() -> None:
    """Write what this rank saw as JSON."""
    folder, result = sys.argv[1:]
    deepspeed.init_distributed(dist_backend="gloo")
    from transformers import AutoModelForCausalLM

    expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    engine = zero3_engine(folder)
    report = {"first": compare(engine, expected), "second": compare(engine, expected)}
    diverge_on_the_last_rank(engine.module)
    try:
        list(ModuleWeights(engine))
    except ValueError as error:
        report["diverged"] = str(error)
    with open(f"{result}/{os.environ['RANK']}.json", "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
