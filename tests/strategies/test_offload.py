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
    """Of each of two ranks and each run: without and with offloading."""
    first, second = ranks.run("strategies.offload_cases:compare", 2, tmp_path_factory.mktemp("offload"), runs=RUNS)
    assert len(first) == len(second) == len(RUNS)
    return first + second


def test_a_run_with_offloading_equals_one_without_bit_for_bit(compared: list[Any]) -> None:
    """And so does a checkpoint that is saved meanwhile."""
    for without, offloaded in compared:
        for name in ("losses", "weights", "states", "resident", "saved"):
            assert without[name] == offloaded[name], name


def test_all_of_weights_and_optimizer_is_moved_and_no_other_tensor_keeps_memory(compared: list[Any]) -> None:
    for _, offloaded in compared:
        for moved, resident in zip(offloaded["moved"], offloaded["resident"], strict=True):
            assert sum(moved.values()) == resident
        assert offloaded["moved"][-1]["weights"] > 80_000
        assert offloaded["moved"][-1]["optimizer"] > 80_000
        # The batch, generators' states and other things smaller than any weight matrix.
        assert max(offloaded["left"]) < 30_000
