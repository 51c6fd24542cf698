"""Source and wheel: built offline, installed into an empty environment, and used there."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from rlhfkit import __version__
from rlhfkit.cli.init import methods

ROOT = Path(__file__).parents[1]
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2]))
"""


def build(kind: str, source: Path, output: Path) -> Path:
    """Build the ``sdist`` or ``wheel`` of a folder; the file."""
    command = [sys.executable, "-c", BUILD, kind, str(output)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the source archive, so that nothing is missing there."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "rlhfkit", source / "rlhfkit", ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    archive = build("sdist", source, folder)
    shutil.unpack_archive(archive, folder / "unpacked")
    return build("wheel", folder / "unpacked" / f"rlhfkit-{__version__}", folder)


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "rlhfkit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package - {*zipfile.ZipFile(wheel).namelist()} == set()


def test_commands_work_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Nothing else is installed there: help, configurations, and the doctor, who says what is missing."""
    pytest.importorskip("pip")
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python), "install"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], check=True, timeout=120)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def rlhfkit(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "empty" / "bin" / "rlhfkit"), *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    assert rlhfkit("--version").stdout.strip() == __version__
    assert all(name in rlhfkit("init").stdout for name in methods())
    assert rlhfkit("init", "grpo").returncode == 0
    assert (tmp_path / "grpo.yaml").is_file()
    found = rlhfkit("doctor")
    assert found.returncode == 1
    assert "torch          not installed" in found.stdout
    assert "rlhfkit does not work without torch" in found.stderr


def test_the_citation_is_of_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
