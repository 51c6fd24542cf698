"""What a module's weights need of a GPU, per rank and before they are loaded; here no GPU is asked."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from rlhfkit import DPOModule, LoRA, SFTModule
from rlhfkit.models import ModelLoading, load_causal_lm
from rlhfkit.models.lora import save_adapter
from rlhfkit.modules.gpu_memory import check_parts, weight_bytes, weight_shards
from rlhfkit.strategies import RLHFDeepSpeedStrategy

GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


def parts_of(module: Any, **trainer: Any) -> dict[str, float]:
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **trainer)
    return weight_bytes(module)


def test_bytes_are_those_of_the_loaded_weights(model: str) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    count = sum(parameter.numel() for parameter in loaded.parameters())
    assert parts_of(SFTModule(model)) == {"weights of the policy": 4 * count}
    assert parts_of(SFTModule(model), precision="bf16-true") == {"weights of the policy": 2 * count}
    assert parts_of(SFTModule(model, lora=LoRA(), loading=ModelLoading(quantization="nf4"))) == {
        "weights of the policy": count / 2
    }
    both = {"weights of the policy": 4 * count, "weights of the reference": 4 * count}
    assert parts_of(DPOModule(model)) == both
    assert parts_of(DPOModule(model, lora=LoRA())) == {"weights of the policy": 4 * count}


def test_a_folder_with_an_adapter_needs_no_copy_as_reference(model: str, tmp_path: Path) -> None:
    loaded = load_causal_lm(model, lora=LoRA())
    save_adapter(loaded, tmp_path, loaded.state_dict())
    assert parts_of(DPOModule(str(tmp_path))).keys() == {"weights of the policy"}


def test_only_zero_3_divides_weights_and_unknown_strategies_are_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="the strategy needs it (extra deepspeed)")

    def shards(strategy: Any) -> int | None:
        L.Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False, enable_checkpointing=False)
        return weight_shards(strategy)

    assert shards(RLHFDeepSpeedStrategy(stage=2)) == 1
    assert shards(RLHFDeepSpeedStrategy(stage=3)) == 4
    assert shards(RLHFDeepSpeedStrategy(stage=3, offload_parameters=True)) is None
    assert shards(DDPStrategy()) == 1
    assert weight_shards(SingleDeviceStrategy()) == 1
    assert weight_shards(FSDPStrategy()) is None


def test_weights_that_exceed_the_gpu_are_an_error_and_a_gpu_in_use_a_warning() -> None:
    parts = {"weights of the policy": 30.0 * GIB}
    with pytest.raises(RuntimeError, match=r"policy 30\.0 GiB do not fit into A10 \(24\.0 GiB\).*rlhf_zero3"):
        check_parts(parts, "A10", 24 * GIB, 24 * GIB)
    with pytest.warns(UserWarning, match=r"20\.0 GiB that are free of A100 \(40\.0 GiB\): another process"):
        check_parts(parts, "A100", 20 * GIB, 40 * GIB)
