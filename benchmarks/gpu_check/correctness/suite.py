"""The tests that need a GPU, ``pytest -m cuda``, in the files that have such tests."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_check.check import Figure, Setting, SkippedError, check

TESTS = Path(__file__).parents[3] / "tests"


@check("tests/cuda", seconds=120, packages=("pytest",), simulated=False)
def marked_tests(setting: Setting) -> Iterator[Figure]:
    """On a CPU they are collected only."""
    files = sorted(path for path in TESTS.rglob("test_*.py") if "pytest.mark.cuda" in path.read_text())
    files = [path for path in files if path.name != "test_gpu_check.py"]
    # Without the options of pyproject.toml: pytest-timeout may be missing.
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-rs", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += [] if setting.on_gpu else ["--collect-only"]
    done = subprocess.run(
        [*command, *map(str, files)], cwd=TESTS.parent, capture_output=True, text=True, timeout=110, check=False
    )
    missing = re.findall(r"No module named '(\w+)'", done.stdout)
    if missing:
        raise SkippedError(f"not installed: {', '.join(sorted(set(missing)))}, which the tests need")
    print(done.stdout + done.stderr)
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    yield Figure("exit status of pytest", done.returncode, 0)
    yield Figure("pytest says", summary)
