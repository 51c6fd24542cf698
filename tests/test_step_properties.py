"""A step of any module is the same step however its rows are split, packed and ordered."""

import functools
from pathlib import Path

import pytest
import torch
from arguments import learning
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from step_cases import KINDS, STEP, train
from torch import Tensor

CASES = [(kind, setting) for kind, (_, _, chosen) in KINDS.items() for setting in range(len(chosen))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("steps")
    learning.prepare(place)
    return place


@functools.cache
def whole(folder: Path, kind: str, setting: int) -> tuple[list[float], dict[str, Tensor]]:
    """All rows of a step at once, padded, in the order of the data."""
    return train(folder, kind, setting, size=STEP, attention="sdpa", order=None)


def same(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    """Losses and weights agree to the rounding of float32 sums."""
    assert found[0] == pytest.approx(expected[0], rel=2e-4, abs=2e-5)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


@settings(
    max_examples=24,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    case=st.sampled_from(CASES),
    size=st.sampled_from([1, 2, 4, 8]),
    attention=st.sampled_from([None, "sdpa"]),
    order=st.none() | st.integers(0, 99),
)
def test_a_step_does_not_depend_on_micro_batches_packing_and_order(
    folder: Path, case: tuple[str, int], size: int, attention: str | None, order: int | None
) -> None:
    found = train(folder, *case, size=size, attention=attention, order=order)
    same(found, whole(folder, *case))
