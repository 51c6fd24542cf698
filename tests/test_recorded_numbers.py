"""A comparison of recorded numbers names each one that differs. Covers ``benchmarks/recorded_numbers.py``."""

import copy
import runpy
from pathlib import Path
from typing import Any

import pytest

differences = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "recorded_numbers.py"))["differences"]


@pytest.fixture
def before() -> dict[str, Any]:
    metrics = [{"loss": (0.5).hex(), "policy/kl": float("nan").hex()}, {"loss": (0.25).hex(), "policy/kl": "0x0.0p+0"}]
    return {"plain": {"weights": "a", "norms": {"policy.w": (3.0).hex()}, "metrics": metrics}}


def test_equal_recordings_have_no_differences(before: dict[str, Any]) -> None:
    assert differences(before, copy.deepcopy(before) | {"another": before["plain"]}) == []


def test_each_difference_is_named(before: dict[str, Any]) -> None:
    after = copy.deepcopy(before)
    after["plain"]["weights"] = "b"
    after["plain"]["norms"]["policy.w"] = (3.5).hex()
    after["plain"]["metrics"][1] = {"loss": (0.25).hex(), "policy/entropy": (1.0).hex()}
    assert differences(before, after) == [
        "plain, iteration 1: policy/entropy is new",
        "plain, iteration 1: policy/kl is gone",
        "plain, norms: policy.w 3 before, 3.5 after",
        "plain: other weights",
    ]


def test_a_tolerance_is_relative_and_leaves_hashes_out(before: dict[str, Any]) -> None:
    after = copy.deepcopy(before)
    after["plain"]["weights"] = "b"
    after["plain"]["metrics"][0]["loss"] = (0.500001).hex()
    assert differences(before, after, 1e-5) == []
    assert len(differences(before, after, 1e-7)) == 1
