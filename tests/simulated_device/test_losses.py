"""Every function of the losses gives on the simulated device what it gives on the CPU, and never waits."""

from typing import Any

import pytest
from strategies import ranks

from simulated_device.loss_cases import FUNCTIONS

pytestmark = pytest.mark.distributed

ON_HOST = {"best_and_worst", "density_ratio_weights"}  # of an iteration or a data set, before its first update
NAMES = sorted({*FUNCTIONS} - {"turn_advantages"})  # which is of an iteration, on the CPU


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ranks.run("simulated_device.loss_cases:every_function", 1, tmp_path_factory.mktemp("losses"), names=NAMES)[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_the_losses_stays_on_the_device_and_does_not_wait(found: dict[str, Any], name: str) -> None:
    assert found[name]["problem"] is None
    assert found[name]["tensors"]
    assert found[name]["waits"] == {} or name in ON_HOST
