"""Stages per child, offloading, experts, sharded building, LoRA: on two ranks, against plain Lightning.

Covers strategies/deepspeed/zero3.py and deepspeed/engines.py, with feature_cases.py.
"""

from typing import Any

import pytest

from strategies import ranks, toys

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def report(tmp_path_factory: Any, model_folder: str) -> dict[str, Any]:
    """Everything in one launch."""
    folder = tmp_path_factory.mktemp("features")
    models = {"model": model_folder, "mixtral": toys.save_tiny_mixtral(folder / "mixtral")}
    return ranks.run("strategies.feature_cases:everything", 2, folder, **models)[0]


@pytest.mark.parametrize(
    "case",
    [
        "policy 3, critic 1, reference plain",
        "policy 2, critic 3, reference 3",
        "reference offloaded",
        "partitions within nodes",
        "rlhf_zero2_offload",
        "rlhf_zero3_offload",
    ],
)
def test_mixed_stages_and_offloading_train_like_plain_lightning(report: dict[str, Any], case: str) -> None:
    loss, weight = report["equal"][case]
    assert loss <= 1e-6
    assert weight <= 1e-6


@pytest.mark.parametrize("stage", range(4))
def test_mixtures_of_experts_and_offloaded_activations_train_like_plain_lightning(
    report: dict[str, Any], stage: int
) -> None:
    # Mixtral, and experts of our own of which each rank uses only one. Without leaf modules stage 3 would never end.
    loss, weight = report["experts"][str(stage)]
    assert loss <= 1e-6
    assert weight <= 1e-6


def test_at_stage_3_no_rank_ever_holds_a_whole_model(report: dict[str, Any]) -> None:
    assert report["sharded"] == {"built": [0, 0], "after_step": 0}


def test_one_module_is_trained_at_several_stages_in_turn(report: dict[str, Any]) -> None:
    difference, moved = report["stages"]
    assert moved > 0.5
    assert difference <= 2e-6  # four fits, each within 1e-6 at most of its start


@pytest.mark.parametrize("stage", range(4))
def test_lora_saves_adapters_only_and_resumes_bitwise(report: dict[str, Any], stage: int) -> None:
    values = report["adapters"][str(stage)]
    assert values["moved"]
    assert values["saved_base"] == []
    assert (values["loss"], values["weight"]) == (0.0, 0.0)
