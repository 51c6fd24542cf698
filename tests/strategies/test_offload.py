"""Training states in CPU memory while something else needs the device: equal runs, and no memory left behind.

Covers strategy.py.
"""

from typing import Any

import pytest

from strategies import ranks

pytestmark = pytest.mark.distributed
RUNS: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    *({"stage": stage, "precision": "bf16-true"} for stage in (0, 3)),
    {"stage": 2, "offload_optimizer": True},
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of each run: of each of two ranks: without and with offloading."""
    folder = tmp_path_factory.mktemp("offload")
    return list(zip(*ranks.run("strategies.offload_cases:compare", 2, folder, runs=RUNS), strict=True))


def test_a_run_with_offloading_equals_one_without_bit_for_bit(compared: list[Any]) -> None:
    for run in compared:
        for without, with_offloading in run:
            for name in ("losses", "weights", "states", "resident"):
                assert without[name] == with_offloading[name]


def test_a_checkpoint_that_is_saved_meanwhile_is_the_same(compared: list[Any]) -> None:
    for run in compared:
        for without, with_offloading in run:
            assert without["saved"] == with_offloading["saved"]


def test_all_of_weights_and_optimizer_is_moved(compared: list[Any]) -> None:
    for run in compared:
        for _, offloaded in run:
            for moved, resident in zip(offloaded["moved"], offloaded["resident"], strict=True):
                assert sum(moved.values()) == resident
            assert offloaded["moved"][-1]["weights"] > 80_000
            assert offloaded["moved"][-1]["optimizer"] > 80_000


def test_no_other_tensor_of_the_run_keeps_memory(compared: list[Any]) -> None:
    """What is left: the batch, generators' states and other things smaller than any weight matrix."""
    for run in compared:
        for _, offloaded in run:
            assert max(offloaded["left"]) < 30_000
