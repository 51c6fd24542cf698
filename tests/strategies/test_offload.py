"""Training states in CPU memory while something else needs the device: equal runs, and no memory left behind.

Covers strategy.py.
"""

from typing import Any

import pytest

from strategies import ranks

RUNS: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    *({"stage": stage, "precision": "bf16-true"} for stage in (0, 3)),
    {"stage": 2, "offload_optimizer": True},
]


@pytest.fixture(scope="module", params=[1, 2])
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of each run: of each rank: without and with offloading."""
    runs = RUNS if request.param == 1 else RUNS[:4]
    folder = tmp_path_factory.mktemp("offload")
    found = ranks.run("strategies.offload_cases:compare", ranks=request.param, folder=folder, runs=runs)
    return list(zip(*found, strict=True))


@pytest.mark.distributed
def test_a_run_with_offloading_equals_one_without_bit_for_bit(compared: list[Any]) -> None:
    for run in compared:
        for without, with_offloading in run:
            for name in ("losses", "weights", "states", "resident"):
                assert without[name] == with_offloading[name]


@pytest.mark.distributed
def test_a_checkpoint_that_is_saved_meanwhile_is_the_same(compared: list[Any]) -> None:
    for run in compared:
        for without, with_offloading in run:
            assert without["saved"] == with_offloading["saved"]


@pytest.mark.distributed
def test_all_of_weights_and_optimizer_is_moved(compared: list[Any]) -> None:
    for run in compared:
        for _, offloaded in run:
            for moved, resident in zip(offloaded["moved"], offloaded["resident"], strict=True):
                assert sum(moved.values()) == resident
            assert offloaded["moved"][-1]["weights"] > 80_000
            assert offloaded["moved"][-1]["optimizer"] > 80_000


@pytest.mark.distributed
def test_no_other_tensor_of_the_run_keeps_memory(compared: list[Any]) -> None:
    """What is left: the batch, generators' states and other things smaller than any weight matrix."""
    for run in compared:
        for _, offloaded in run:
            assert max(offloaded["left"]) < 30_000
