"""Versions: the floors are what ``make test-versions`` installs, and the locks are what a resolver would accept."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
EXTRAS = ("deepspeed", "rollout", "qlora", "math", "agents")
UNREACHABLE = re.compile(
    r"dns error|error sending request|failed to (fetch|connect)|connection|timed out", re.IGNORECASE
)


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def required(section: str = "options", option: str = "install_requires") -> list[Requirement]:
    lines = setup()[section][option].splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith(("#", "--"))]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}


def test_the_oldest_versions_are_the_floors() -> None:
    oldest = locked("oldest.txt")
    floors = {canonicalize_name(one.name): next(iter(one.specifier)) for one in required()}
    assert set(oldest) == {*floors, "pytorch-lightning"}  # which lightning asks for without an upper bound
    assert oldest["pytorch-lightning"] == oldest["lightning"]
    for name, floor in floors.items():
        assert floor.operator == ">="
        assert oldest[name] == floor.version or oldest[name].startswith(f"{floor.version}.")


@pytest.mark.parametrize("lock", ["cpu.txt", "gpu.txt"])
def test_locks_are_within_the_ranges(lock: str) -> None:
    pins = locked(lock)
    wanted = required()
    for extra in ("deepspeed", "cpu") if lock == "cpu.txt" else EXTRAS:
        wanted += required("options.extras_require", extra)
    for one in wanted:
        assert one.specifier.contains(pins[canonicalize_name(one.name)], prereleases=True), str(one)


@pytest.mark.long
def test_a_resolver_accepts_the_lock_for_gpus() -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        pytest.skip("needs the resolver uv, which is in the lock")
    command = [uv, "pip", "compile", "setup.cfg", "--quiet", "--no-annotate", "--no-header", "--no-progress"]
    command += [f"--extra={extra}" for extra in EXTRAS]
    command += ["--python-version=3.12", "--python-platform=x86_64-manylinux_2_28"]
    try:
        found = subprocess.run(
            [*command, "--constraint=requirements/gpu.txt"], cwd=ROOT, capture_output=True, text=True, timeout=240
        )
    except subprocess.TimeoutExpired:
        pytest.skip("the package index did not answer within 240 s")
    if found.returncode and UNREACHABLE.search(found.stderr):
        pytest.skip("no package index is within reach")
    assert found.returncode == 0, found.stderr
    resolved = dict(line.split("==") for line in found.stdout.splitlines() if "==" in line)
    assert {canonicalize_name(name): version.split(" ")[0] for name, version in resolved.items()} == locked("gpu.txt")
