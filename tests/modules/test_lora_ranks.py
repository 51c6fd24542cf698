"""Adapters and exports under DeepSpeed on two ranks, against plain Lightning. Covers ``checkpointing.py``."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from strategies import ranks
from tiny_models import tiny_model

from modules import lora_cases
from rlhfkit.cli.export import export
from rlhfkit.models import LoRA, load_causal_lm

pytestmark = pytest.mark.distributed
STAGES = range(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(folder / "model")
    rows = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(48)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    """All stages in one launch."""
    arguments = {"model": str(folder / "model"), "data": str(folder / "data.jsonl")}
    return ranks.run("modules.lora_cases:everything", 2, folder, **arguments)[0]


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[bool, dict[str, Any]]:
    """The same runs in one process without DeepSpeed, for LoRA and DoRA."""
    return {
        dora: lora_cases.reinforce(folder / f"plain{dora}", "auto", LoRA(rank=4, dora=dora), world=1)
        for dora in (False, True)
    }


def weights(folder: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / file)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_adapters_as_plain_lightning_does(
    report: dict[str, Any], plain: dict[bool, Any], folder: Path, stage: int
) -> None:
    dora = stage % 2 == 1
    values = report[str(stage)]
    assert values["children"] == ["policy"]  # and no reference
    trained, alone = weights(folder / f"zero{stage}" / "merged"), weights(folder / f"plain{dora}" / "merged")
    assert difference(trained, alone) <= 1e-5
    assert difference(trained, weights(folder / "model")) > 1e-3
    assert max(values["probes"]) <= 1e-5  # the merged policy is the one that is trained
    assert max(values["reference"]) <= 1e-5  # without its adapter it is the one that sampled first


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_any_stage_is_exported_without_ranks(
    report: dict[str, Any], folder: Path, tmp_path: Path, stage: int
) -> None:
    place = folder / f"zero{stage}"
    merged = export(place / "lora.ckpt", tmp_path / "merged")
    assert difference(weights(merged), weights(place / "merged")) == 0.0
    adapter, file = export(place / "lora.ckpt", tmp_path / "adapter", adapter=True), "adapter_model.safetensors"
    assert difference(weights(adapter, file), weights(place / "adapter", file)) == 0.0
    again = load_causal_lm(str(adapter))
    assert sum(parameter.requires_grad for parameter in again.parameters()) == 2 * 7 * (2 + stage % 2)
    full = export(place / "full.ckpt", tmp_path / "full")
    assert difference(weights(full), weights(place / "full")) == 0.0
    assert difference(weights(full), weights(folder / "model")) > 1e-3
    assert (full / "tokenizer_config.json").exists()
    assert load_causal_lm(str(full)).config.tie_word_embeddings


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_of_4_bits_train_and_merge_under_ranks(report: dict[str, Any], folder: Path, stage: int) -> None:
    alone = folder / "alone"
    if not alone.exists():
        data, model = str(folder / "data.jsonl"), str(folder / "model")
        lora_cases.supervise(alone, data, model, "auto", 1, "qlora", **lora_cases.QLORA)
    trained = weights(folder / f"zero{stage}" / "qlora")
    assert difference(trained, weights(alone / "qlora")) <= 1e-4  # AdamW's first step divides by tiny numbers
    assert difference(trained, weights(folder / "model")) > 1e-2


@pytest.mark.parametrize("stage", [2, 3])
def test_a_saved_adapter_is_trained_further_with_its_start_as_the_reference(
    report: dict[str, Any], folder: Path, tmp_path: Path, stage: int
) -> None:
    place, (data, file) = folder / f"zero{stage}", (str(folder / "data.jsonl"), "adapter_model.safetensors")
    moved = report[str(stage)]["moved"]
    alone = lora_cases.supervise(tmp_path, data, str(place / "adapter"), "auto", 1, "further")
    assert moved[0] <= 1e-6
    assert moved[-1] > 0.1
    assert alone[0] <= 1e-6
    assert difference(weights(place / "further"), weights(tmp_path / "further")) <= 1e-4
    again = export(place / "further.ckpt", tmp_path / "again", adapter=True)
    assert weights(again, file).keys() == weights(place / "adapter", file).keys()
