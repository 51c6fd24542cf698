"""The tests that need a GPU, ``pytest -m cuda``, in the files that have such tests."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_check.check import Figure, Setting, SkippedError, check
from benchmarks.gpu_check.packages import missing

TESTS = Path(__file__).parents[3] / "tests"
MARK = "pytest.mark.cuda"


def missing_imports(path: Path) -> list[str]:
    """Packages that a file of tests imports and that are not installed."""
    names = set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
    own = {name for name in names if (TESTS / name).exists() or (TESTS / f"{name}.py").exists()}
    return missing(sorted(names - own))


@check("tests/cuda", seconds=120, packages=("pytest",), simulated=False)
def marked_tests(setting: Setting) -> Iterator[Figure]:
    """On a CPU those of the last file are collected only."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if MARK in path.read_text()]
    unusable = {path: absent for path in files if (absent := missing_imports(path))}
    for path, absent in unusable.items():
        yield Figure(str(path.relative_to(TESTS.parent)), f"left out: not installed: {', '.join(absent)}")
    files = [path for path in files if path not in unusable]
    files = files if setting.on_gpu else files[-1:]
    if not files:
        raise SkippedError("none of the files can be imported here")
    # Without the options of pyproject.toml: pytest-timeout may be missing.
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-rs", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += [] if setting.on_gpu else ["--collect-only"]
    done = subprocess.run(
        [*command, *map(str, files)], cwd=TESTS.parent, capture_output=True, text=True, timeout=110, check=False
    )
    absent = sorted(set(re.findall(r"No module named '(\w+)'", done.stdout + done.stderr)))
    if absent:  # what conftest.py needs
        raise SkippedError(f"not installed: {', '.join(absent)}, which the tests need")
    print(done.stdout + done.stderr)
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    yield Figure("exit status of pytest", done.returncode, 0)
    yield Figure("pytest says", summary)
