"""The page of one iteration names the files that one iteration enters.

Covers ``benchmarks/trace.py``.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "trace.py"
SPECIFICATION = importlib.util.spec_from_file_location("trace_of_one_iteration", SCRIPT)
assert SPECIFICATION is not None
assert SPECIFICATION.loader is not None
trace = importlib.util.module_from_spec(SPECIFICATION)
sys.modules[SPECIFICATION.name] = trace  # dataclasses look their module up
SPECIFICATION.loader.exec_module(trace)


def listed(name: str) -> list[str]:
    """Files in the section of a run."""
    section = trace.PAGE.read_text(encoding="utf-8").split(f"\n## {name}\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. \*\*`(.+?)`\*\*", section, re.MULTILINE)


@pytest.mark.parametrize("name", list(trace.RUNS))
def test_page_lists_the_files_that_an_iteration_enters(name: str, tmp_path: Path) -> None:
    files = trace.RUNS[name](tmp_path).files
    assert set(files) == set(listed(name)), "docs/one_iteration.md is stale: run python benchmarks/trace.py --write"
    assert len(files) <= trace.LIMITS[name]
