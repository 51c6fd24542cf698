"""A comparison of recorded numbers names each one that differs. Covers ``benchmarks/recorded_numbers.py``."""

import copy
import runpy
from pathlib import Path
from typing import Any

differences = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "recorded_numbers.py"))["differences"]


def test_each_difference_is_named_and_a_tolerance_is_relative_and_leaves_hashes_out() -> None:
    metrics = [{"loss": (0.5).hex(), "policy/kl": float("nan").hex()}, {"loss": (0.25).hex(), "policy/kl": "0x0.0p+0"}]
    before = {"plain": {"weights": "a", "norms": {"policy.w": (3.0).hex()}, "metrics": metrics}}
    assert differences(before, copy.deepcopy(before) | {"another": before["plain"]}) == []

    after: dict[str, Any] = copy.deepcopy(before)
    after["plain"]["weights"] = "b"
    after["plain"]["metrics"][0]["loss"] = (0.500001).hex()
    assert differences(before, after, 1e-5) == []
    assert len(differences(before, after, 1e-7)) == 1

    after = copy.deepcopy(before)
    after["plain"] |= {"weights": "b", "norms": {"policy.w": (3.5).hex()}}
    after["plain"]["metrics"][1] = {"loss": (0.25).hex(), "policy/entropy": (1.0).hex()}
    assert differences(before, after) == [
        "plain, iteration 1: policy/entropy is new",
        "plain, iteration 1: policy/kl is gone",
        "plain, norms: policy.w 3 before, 3.5 after",
        "plain: other weights",
    ]
