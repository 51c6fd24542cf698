"""The simulated device behaves as CUDA does, as far as tests rely on it."""

from typing import Any

import pytest
import torch
from strategies import ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("device")
    return ranks.run("simulated_device.device_cases:device_behaviour", ranks=1, folder=folder)[0]


def test_an_operation_waits_if_the_host_needs_its_values_or_their_number(found: dict[str, Any]) -> None:
    assert found["waits"] == {
        "arithmetic": [],
        "new tensors": [],
        "mask = number": [],
        "to the device, not blocking": [],
        "to the host, not blocking": [],
        "item": ["aten::_local_scalar_dense"],
        "if": ["aten::_local_scalar_dense"],
        "tolist": ["tolist"],
        "mask": ["aten::index with a mask"],
        "mask = tensor": ["aten::index_put_ with a mask"],
        "nonzero": ["aten::nonzero"],
        "indices on the host": ["copy to the device"],
        "to the device": ["copy to the device"],
        "torch.tensor": ["copy to the device"],
        "to the host": ["copy to the host"],
        "into the host": ["copy to the host"],
        "backward of masked_scatter": ["aten::masked_scatter_backward"],
    }


def test_tensors_of_two_devices_do_not_mix(found: dict[str, Any]) -> None:
    errors = found["errors"]
    assert errors["mix"].startswith("DeviceMix: aten::add of tensors [[2]] on sim and [[2]] on the CPU")
    assert errors["generator"].startswith("DeviceMix: aten::uniform_ on sim with a generator on the CPU")
    # torch takes it, and the kernel of CUDA reads an address of the CPU.
    assert errors["fused step counted on the CPU"].startswith("DeviceMix: aten::_fused_adamw_ of tensors")
    assert errors["numpy"].startswith("TypeError: can't convert a sim tensor to numpy")


def test_offloaded_checkpoints_leave_the_device_and_come_back_for_the_same_numbers(found: dict[str, Any]) -> None:
    # rlhfkit/models/activation_memory.py: the inputs of the two layers are in CPU memory until the backward pass.
    without, offloaded = found["offloaded"]["without"], found["offloaded"]["with"]
    assert without["left"] - offloaded["left"] == 2
    assert offloaded["gradients"] == without["gradients"]
    assert offloaded["waits"] == []


def test_a_fused_optimizer_that_resumes_from_a_converted_checkpoint_counts_its_steps_on_the_device(
    found: dict[str, Any],
) -> None:
    # rlhfkit/strategies/checkpoint/universal.py: DeepSpeed leaves the counters on the CPU.
    resumed = found["resumed"]
    straight, moved = resumed["weights"]
    for expected, weights in zip(straight, moved, strict=True):
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected), rtol=0, atol=1e-7)
    assert resumed["counted"] == [2]
    assert resumed["counters"] == {
        "0.weight": ["sim", "torch.float32"],
        "0.bias": ["cpu", "torch.float32"],
        "2.weight": ["sim", "torch.float32"],
        "2.bias": ["cpu", "torch.float32"],
    }


def test_at_stage_3_a_converted_checkpoint_gives_each_part_a_counter_where_its_kernel_reads_it(
    found: dict[str, Any],
) -> None:
    places, types = found["resumed at stage 3"]["places"], found["resumed at stage 3"]["types"]
    assert (places, types) == (["sim", "sim", "cpu"], ["torch.float32", "torch.float32", "torch.float64"])
