"""A warning before training where an estimate comes near the memory of the GPUs."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from tiny_models import tiny_model

from rlhfkit import (
    GRPOModule,
    PromptDataModule,
    RLHFDeepSpeedStrategy,
    RolloutCallback,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
)
from rlhfkit.costs import GPU, MemoryCheck, estimate
from rlhfkit.costs.memory.parts import TRAINING
from rlhfkit.costs.memory_check import memory_warning


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


def trainer_of(module: Any, data: Any, *callbacks: Any, **arguments: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[MemoryCheck(), *callbacks], **arguments
    )
    trainer.datamodule = data  # type: ignore[attr-defined]  # as trainer.fit sets it
    return trainer


@pytest.mark.parametrize("kind", ["supervised", "own samples"])
def test_the_fullest_phase_is_compared_with_the_free_memory(model: str, kind: str) -> None:
    gpu = GPU(name="toy", memory=1e12, flops=1.0, bandwidth=1.0, link=1.0)
    if kind == "supervised":
        module: Any = SFTModule(model)
        data: Any = SFTDataModule([{"prompt": "1+1=", "completion": "2"}])
        callbacks: list[Any] = []
    else:
        module, data = GRPOModule(model), PromptDataModule([{"prompt": "1+1="}], rollout_batch_size=8)
        callbacks = [RolloutCallback(len, sampling=SamplingSpec(group_size=4, max_new_tokens=32))]
    strategy = RLHFDeepSpeedStrategy(stage=2)
    trainer = trainer_of(module, data, *callbacks, strategy=strategy, devices=4, precision="bf16-true")
    expected = estimate(module, data, *callbacks, gpu=gpu, strategy=strategy, devices=4, precision="bf16-true")
    peak = expected.peak[TRAINING]
    assert memory_warning(trainer, module, "toy", peak / 0.85) is None
    near, far = (memory_warning(trainer, module, "toy", peak / share) for share in (0.95, 1.3))
    assert near is not None
    assert far is not None
    assert near.startswith("The run may not fit into toy: about")
    assert "(95%)" in near
    assert "process: CUDA and NCCL 1.5 GiB" in near
    assert far.startswith("The run will probably not fit into toy")


def test_what_cannot_be_estimated_is_not_warned_of(model: str) -> None:
    module = GRPOModule(model)
    trainer = trainer_of(module, None)  # no prompts, no callback: the run fails on its own
    assert memory_warning(trainer, module, "toy", 1.0) is None


def test_nothing_is_estimated_on_cpus(model: str, tmp_path: Path) -> None:
    trainer = trainer_of(SFTModule(model), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MemoryCheck().setup(trainer, SFTModule(model), "fit")
