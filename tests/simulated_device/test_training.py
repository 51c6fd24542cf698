"""Losses and modules give on the simulated device what they give on the CPU: no tensors of two devices meet."""

from pathlib import Path
from typing import Any

import pytest
from step_cases import KINDS
from strategies import ranks

from simulated_device.loss_cases import NAMES

pytestmark = pytest.mark.distributed

ON_HOST = {"best_and_worst", "density_ratio_weights"}  # of an iteration or a data set, before its first update

SETTINGS = [f"{kind} {setting}" for kind, (_, _, settings) in KINDS.items() for setting in range(len(settings))]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("modules")
    return ranks.run("simulated_device.training_cases:every_module", ranks=1, folder=folder)[0]


@pytest.mark.parametrize("setting", SETTINGS)
def test_two_steps_are_those_of_the_cpu(found: dict[str, Any], setting: str) -> None:
    """Up to rounding: PyTorch's attention on the device of another backend is the plain one, in another order."""
    run = found["runs"][setting]
    assert run["losses"][0] == pytest.approx(run["losses"][1], rel=1e-5, abs=1e-6)
    assert run["weights"] < 5e-5


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_optimizer_step_never_waits_for_the_device(found: dict[str, Any], setting: str) -> None:
    assert found["runs"][setting]["waits"] == {}


def test_iterations_with_further_settings_are_those_of_the_cpu(tmp_path: Path) -> None:
    apart = ranks.run("simulated_device.training_cases:further_settings", ranks=1, folder=tmp_path)[0]
    assert len(apart) == 5
    assert max(apart.values()) < 5e-5, apart


def test_the_library_takes_no_slower_way_on_the_device(found: dict[str, Any]) -> None:
    assert not [message for message in found["warnings"] if "slow" in message]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ranks.run("simulated_device.loss_cases:every_function", 1, tmp_path_factory.mktemp("losses"), names=NAMES)[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_the_losses_stays_on_the_device_and_does_not_wait(functions: dict[str, Any], name: str) -> None:
    assert functions[name]["problem"] is None
    assert functions[name]["tensors"]
    assert functions[name]["waits"] == {} or name in ON_HOST
