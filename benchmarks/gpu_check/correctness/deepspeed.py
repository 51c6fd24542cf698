"""DeepSpeed on one device (NCCL on a GPU): ZeRO 0 to 3, offload, fp16 overflow, and publishing from ZeRO 3."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.compare import distance
from benchmarks.gpu_check.models import tiny_model

BOUND = 1e-3
"""Distance of what the weights have moved, relative in norm: DeepSpeed flattens gradients and sums in another order."""


def fit(setting: Setting, folder: Path, kind: str, strategy: Any, **arguments: Any) -> tuple[Any, Any]:
    """Train on pairs with a frozen reference, or by GRPO."""
    from benchmarks.gpu_check.runs import Answers, Prompts, Published, digits, trainer, with_sgd
    from rlhfkit import DPOModule, GRPOModule, RolloutCallback, SamplingSpec

    published = Published()
    callbacks: list[Any] = [published]
    model = str(folder / "model")
    if kind == "prompts":
        sampling = SamplingSpec(group_size=4, max_new_tokens=8)
        callbacks.insert(0, RolloutCallback(digits, sampling=sampling))
        module, data = with_sgd(GRPOModule)(model, lr=0.05), Prompts()
    else:
        module, data = with_sgd(DPOModule)(model, lr=0.05), Answers("pairs")
    plain = {"max_epochs": setting.size(2, 1), "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    run = trainer(setting, folder, **plain | {"strategy": strategy, "callbacks": callbacks} | arguments)
    run.fit(module, data)
    return published, run


def moved(published: Any) -> list[Tensor]:
    """What was added to each weight."""
    return [published.end[name] - published.start[name] for name in sorted(published.end)]


def prepare() -> None:
    """One rank, which finds itself."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed

    # Would be compiled for a minute, and is for several ranks on CPUs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@check("deepspeed/stages", seconds=120, packages=("deepspeed",), process="deepspeed", simulated=False)
def stages(setting: Setting) -> Iterator[Figure]:
    """Each ZeRO stage against plain Lightning, for DPO; the weights are those that engines are sent."""
    prepare()
    with tempfile.TemporaryDirectory() as name:
        tiny_model(Path(name) / "model")
        plain = moved(fit(setting, Path(name), "pairs", "auto")[0])
        for stage in range(4):
            found, _ = fit(setting, Path(name), "pairs", f"rlhf_zero{stage}")
            yield Figure(f"ZeRO {stage}: what the weights have moved", distance(moved(found), plain), BOUND)
        backend = torch.distributed.get_backend()
        yield Figure("process group", backend)
        yield Figure("process group is not NCCL", float(setting.on_gpu and backend != "nccl"), 0)


@check("deepspeed/publish", seconds=90, packages=("deepspeed",), process="deepspeed", simulated=False)
def publish(setting: Setting) -> Iterator[Figure]:
    """GRPO under ZeRO 3, which gathers weights for the engine, against plain Lightning."""
    prepare()
    with tempfile.TemporaryDirectory() as name:
        tiny_model(Path(name) / "model")
        plain = moved(fit(setting, Path(name), "prompts", "auto")[0])
        found = moved(fit(setting, Path(name), "prompts", "rlhf_zero3")[0])
        yield Figure("ZeRO 3: what the weights have moved", distance(found, plain), BOUND)


@check("deepspeed/fp16", seconds=90, packages=("deepspeed",), process="deepspeed", simulated=False)
def overflow(setting: Setting) -> Iterator[Figure]:
    """fp16 whose first loss scale is too large: updates are skipped until it fits, and weights stay finite."""
    from deepspeed.accelerator import get_accelerator

    from rlhfkit import RLHFDeepSpeedStrategy

    prepare()
    if not setting.on_gpu:  # torch computes in fp16 on every CPU, slowly; DeepSpeed asks for instructions for it
        type(get_accelerator()).is_fp16_supported = lambda self: True
    for stage in (0, 2, 3):
        with tempfile.TemporaryDirectory() as name:
            tiny_model(Path(name) / "model")
            strategy = RLHFDeepSpeedStrategy(stage=stage, initial_scale_power=20, hysteresis=1)
            found, run = fit(setting, Path(name), "pairs", strategy, precision="16-true", max_epochs=4)
        finite = all(bool(tensor.isfinite().all()) for tensor in found.end.values())
        yield Figure(f"ZeRO {stage}: weights are not finite", float(not finite), 0)
        lowered = run.strategy.rescaled_updates + run.strategy.skipped_updates
        yield Figure(f"ZeRO {stage}: the loss scale was never lowered", float(lowered == 0), 0)
        change = max(float(tensor.abs().max()) for tensor in moved(found))
        yield Figure(f"ZeRO {stage}: the weights never moved", float(change == 0), 0)


@check("deepspeed/offload", seconds=150, packages=("deepspeed",), process="deepspeed", simulated=False)
def offload(setting: Setting) -> Iterator[Figure]:
    """Optimizer states, and with ZeRO 3 weights, in CPU memory."""
    from rlhfkit import RLHFDeepSpeedStrategy

    prepare()
    with tempfile.TemporaryDirectory() as name:
        tiny_model(Path(name) / "model")
        plain = moved(fit(setting, Path(name), "pairs", "auto")[0])
        for stage, more in ((2, {}), (3, {}), (3, {"offload_parameters": True})):
            strategy = RLHFDeepSpeedStrategy(stage=stage, offload_optimizer=True, **more)
            found, _ = fit(setting, Path(name), "pairs", strategy)
            what = "optimizer and weights" if more else "optimizer"
            yield Figure(f"ZeRO {stage}, {what} on the CPU", distance(moved(found), plain), BOUND)


@check("deepspeed/cpu_adam", seconds=150, packages=("deepspeed",), gpus=1, process="deepspeed")
def cpu_adam(setting: Setting) -> Iterator[Figure]:
    """AdamW whose states are in CPU memory, by DeepSpeed's kernel where it can be built, and AdamW on the GPU."""
    from benchmarks.gpu_check.runs import Answers, Published, trainer
    from rlhfkit import DPOModule, RLHFDeepSpeedStrategy

    prepare()
    ends = []
    with tempfile.TemporaryDirectory() as name:
        tiny_model(Path(name) / "model")
        for strategy in ("auto", RLHFDeepSpeedStrategy(stage=2, offload_optimizer=True)):
            published = Published()
            run = trainer(setting, Path(name), strategy=strategy, callbacks=[published], max_epochs=2)
            run.fit(DPOModule(str(Path(name) / "model"), lr=1e-3), Answers("pairs"))
            ends.append(moved(published))
    # Adam divides by the size of the gradient: rounding of the smallest gradients becomes whole steps.
    yield Figure("what the weights have moved", distance(*ends), 0.2)
