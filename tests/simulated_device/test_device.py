"""The simulated device behaves as CUDA does, as far as tests rely on it."""

from typing import Any

import pytest
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
    assert errors["numpy"].startswith("TypeError: can't convert a sim tensor to numpy")


def test_training_gives_what_it_gives_on_the_cpu(found: dict[str, Any]) -> None:
    assert found["training"] == {"equal": True, "device of the copy": "sim:0"}


def test_offloaded_checkpoints_leave_the_device_and_come_back_for_the_same_numbers(found: dict[str, Any]) -> None:
    # rlhfkit/models/activation_memory.py: the inputs of the two layers are in CPU memory until the backward pass.
    without, offloaded = found["offloaded"]["without"], found["offloaded"]["with"]
    assert without["left"] - offloaded["left"] == 2
    assert offloaded["gradients"] == without["gradients"]
