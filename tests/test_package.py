"""Source and wheel: built offline, installed into an empty environment, and used there."""

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import yaml

from rlhfkit import __version__
from rlhfkit.cli.init import methods

ROOT = Path(__file__).parents[1]
SOURCES = ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md")
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2]))
"""


def build(kind: str, source: Path, output: Path) -> Path:
    """Build the ``sdist`` or ``wheel`` of a folder; the file."""
    command = [sys.executable, "-c", BUILD, kind, str(output)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return output / done.stdout.splitlines()[-1]


def page(wheel: Path) -> Message:
    """What a package index shows of a wheel."""
    with zipfile.ZipFile(wheel) as files:
        return email.message_from_bytes(files.read(f"rlhfkit-{__version__}.dist-info/METADATA"))


def links(text: str) -> list[str]:
    """Targets of links and pictures of a page, those within it left out."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("#")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is packed of a checkout."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "rlhfkit", folder / "rlhfkit", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the source archive, so that nothing is missing there."""
    folder = tmp_path_factory.mktemp("package")
    archive = build("sdist", source, folder)
    shutil.unpack_archive(archive, folder / "unpacked")
    return build("wheel", folder / "unpacked" / f"rlhfkit-{__version__}", folder)


def test_no_link_of_the_package_page_is_dead(wheel: Path, source: Path, tmp_path: Path) -> None:
    """Without an address of the repository there are no links to its files; with one they lead there."""
    files = [target for target in links((ROOT / "README.md").read_text()) if "://" not in target]
    assert len(files) > 30
    text = page(wheel).get_payload()
    assert [target for target in links(text) if "://" not in target] == []
    assert "## GRPO on GSM8K" in text

    (shutil.copytree(source, tmp_path / "source") / "setup.cfg").write_text(
        (ROOT / "setup.cfg").read_text().replace("# project_urls", "project_urls").replace("#     Source", "    Source")
    )
    with_address = page(build("wheel", tmp_path / "source", tmp_path))
    assert with_address["Project-URL"] == "Source, https://github.com/OWNER/rlhfkit"
    found = [target for target in links(with_address.get_payload()) if "OWNER" in target]
    kinds = ["raw" if file.endswith(".png") else "blob" for file in files]
    assert found == [
        f"https://github.com/OWNER/rlhfkit/{kind}/v{__version__}/{file}"
        for kind, file in zip(kinds, files, strict=True)
    ]


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "rlhfkit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package - {*zipfile.ZipFile(wheel).namelist()} == set()


def python_of(version: str) -> str | None:
    """An interpreter of a version, in the path or pyenv's; ``None``: there is none."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    places = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    answers = (place for place in places if place and not subprocess.run([place, "-V"], check=False).returncode)
    return next(answers, None)  # a shim of pyenv is there without its version


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_commands_work_in_an_empty_environment(version: str, wheel: Path, tmp_path: Path) -> None:
    """Nothing else is installed there: help, configurations, and the doctor, who says what is missing."""
    pytest.importorskip("pip")
    interpreter = python_of(version)
    if interpreter is None:
        pytest.skip(f"there is no python{version} on this machine")
    subprocess.run([interpreter, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True, timeout=300)
    python = tmp_path / "empty" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python), "install"]
    # Not all files are compiled, as few are imported.
    subprocess.run([*pip, "--no-index", "--no-deps", "--no-compile", str(wheel)], check=True, timeout=300)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def rlhfkit(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "empty" / "bin" / "rlhfkit"), *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    assert rlhfkit("--version").stdout.strip() == __version__
    listed = rlhfkit("init").stdout
    assert [name for name in methods() if name not in listed] == []
    assert rlhfkit("init", "grpo").returncode == 0
    assert (tmp_path / "grpo.yaml").is_file()
    found = rlhfkit("doctor")
    assert found.returncode == 1
    assert "torch          not installed" in found.stdout
    assert "rlhfkit does not work without torch" in found.stderr


def test_the_citation_is_of_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
