"""Devices, figures with bounds, and what happens to a process whose GPU gives errors only."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu.comparing import Figures

DEVICES = [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.cuda)]
CRASHED = 3
"""Exit status of a process whose GPU has become unusable."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """``cpu`` and ``cuda``; no TF32, and nothing of earlier tests on the device."""
    kind: str = request.param
    gc.collect()
    torch.manual_seed(0)
    if kind == "cuda":
        torch.set_float32_matmul_precision("highest")
        torch.cuda.empty_cache()
    yield kind
    if kind == "cuda" and "PYTEST_XDIST_WORKER" in os.environ and not usable():
        os._exit(CRASHED)  # pytest-xdist starts another process for the tests that are left


def usable() -> bool:
    """Whether the GPU still computes: after an illegal access every call fails."""
    try:
        return float(torch.ones(2, device="cuda").sum()) == 2
    except Exception:
        return False


@pytest.fixture
def figures() -> Figures:
    """Call it with each figure of a test; those beyond their bounds fail the test when it has ended."""
    return Figures()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Look at the figures after the test's function, and keep them for the line of the test."""
    try:
        result = yield
    finally:
        figures = pyfuncitem.funcargs.get("figures")
        if isinstance(figures, Figures):
            pyfuncitem.user_properties.append(("figures", figures.worst()))
    if isinstance(figures, Figures):
        figures.check()
    return result


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """The line of a test ends with its figure that is nearest to its bound."""
    figures = dict(report.user_properties).get("figures")
    if report.when == "call" and report.outcome in ("passed", "failed") and figures:
        return report.outcome, "." if report.passed else "F", f"{report.outcome.upper()} {figures}"
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines start last: each takes a minute, and all of them more than the time that ``make gpu-check`` has."""
    items.sort(
        key=lambda item: (
            item.get_closest_marker("cuda") is not None and item.nodeid.startswith("tests/gpu/test_engines")
        )
    )
