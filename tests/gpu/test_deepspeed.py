"""DeepSpeed on a device, over NCCL on a GPU; and ranks that compute forward passes together."""

from pathlib import Path

import pytest

from gpu.comparing import Figures
from gpu.launch import launch

pytestmark = pytest.mark.distributed
APART = 2e-4
"""Largest difference of a loss, or of a weight that SGD has moved: DeepSpeed sums in another order."""
STAGES = ["rlhf_zero0", "rlhf_zero1", "rlhf_zero2", "rlhf_zero3"]


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("deepspeed")


@pytest.mark.parametrize("names", [STAGES, ["rlhf_zero2_offload", "rlhf_zero3_offload"]], ids=["stages", "offload"])
def test_a_step_is_that_of_plain_lightning(device: str, names: list[str], tmp_path: Path, figures: Figures) -> None:
    """With a frozen reference, and with an engine that is sent the weights; offloaded states are updated on the CPU."""
    figures.add(launch("gpu.cases:deepspeed", 1, tmp_path, on=device, device=device, names=names)[0], APART)


def test_fp16_finds_a_loss_scale_that_fits(device: str, tmp_path: Path) -> None:
    launch("gpu.cases:overflows", 1, tmp_path, on=device, device=device)


def test_a_fused_optimizer_goes_on_after_a_resume_on_other_ranks(device: str, tmp_path: Path, figures: Figures) -> None:
    figures.add(launch("gpu.cases:resumed_on_other_ranks", 1, tmp_path, on=device, device=device)[0], 1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda(2))], indirect=True)
def test_ranks_that_share_forward_passes_are_one_rank(device: str, tmp_path: Path, figures: Figures) -> None:
    found = launch("strategies.test_tensor_parallel:shared_forwards", 2, tmp_path, on=device, device=device)
    figures.add(found[0], APART)
