"""The floors of the house, and what importing loads."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import rlhfkit

PACKAGE = Path(rlhfkit.__file__).parent
FLOORS = {
    "validation": 0,
    "distributed": 0,
    "protocols": 0,
    "losses": 1,
    "data": 1,
    "serving": 1,
    "models": 2,
    "rollout": 2,
    "episodes": 2,
    "datamodules": 2,
    "modules": 3,
    "rewards": 3,
    "callbacks": 4,
    "checkpoints": 0,
    "strategies": 0,
    "cli": 5,
}
LIGHT = ("losses", "data", "rewards", "rollout.vllm.pool", "rollout.vllm.actor")
HEAVY = {"lightning", "transformers", "datasets", "deepspeed", "ray", "vllm", "math_verify"}
STRANGERS = {"callbacks", "modules", "strategies", "datamodules"}


PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *sorted({module.split(".")[0] for module in sys.modules}))
from rlhfkit import GRPOModule
from lightning.pytorch.strategies import StrategyRegistry
print("strategies", *StrategyRegistry.available_strategies())
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Top-level packages in memory after each import, one after the other as torch takes long; names of strategies."""
    command = [sys.executable, "-c", PROGRAM, "rlhfkit", *(f"rlhfkit.{name}" for name in LIGHT)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: set(found) for name, *found in map(str.split, lines)}


@cache
def rooms_imported(path: Path) -> set[str]:
    """Our own packages that a file imports when it runs (not for type checkers only)."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("rlhfkit.")}


FILES = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_runs_upward_and_strangers_do_not_meet(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for other in rooms_imported(path) - {room, "_version", "validation", "protocols"}:
        if room == "strategies" and other != "checkpoints":
            pytest.fail(f"strategies stands alone, {path.name} imports {other}")
        if room != "cli":
            assert not {room, other} <= STRANGERS, f"{room} imports {other}"
        assert FLOORS[other] <= FLOORS[room], f"{path.name} on floor {FLOORS[room]} imports {other} on {FLOORS[other]}"


def test_rooms_on_one_floor_do_not_import_each_other_in_a_circle() -> None:
    imports = {room: set() for room in FLOORS}
    for path in FILES:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        imports[room] |= rooms_imported(path) - {room, "_version"}
    done: set[str] = set()
    while len(done) < len(imports):
        free = {room for room, others in imports.items() if room not in done and others <= done}
        assert free, f"a circle among {sorted(set(imports) - done)}"
        done |= free


def test_importing_the_package_loads_nothing_heavy(loaded: dict[str, set[str]]) -> None:
    assert not loaded["rlhfkit"] & ({"torch", "numpy"} | HEAVY)


@pytest.mark.parametrize("name", LIGHT)
def test_what_needs_no_models_loads_torch_only(loaded: dict[str, set[str]], name: str) -> None:
    assert "torch" in loaded[f"rlhfkit.{name}"]
    assert not loaded[f"rlhfkit.{name}"] & HEAVY


def test_every_public_name_is_there() -> None:
    for name in rlhfkit.__all__:
        assert getattr(rlhfkit, name) is not None
    assert set(rlhfkit.__all__) <= set(dir(rlhfkit))
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrainer'"):
        _ = rlhfkit.GRPOTrainer


def test_strategies_are_known_by_name_once_a_module_is_imported(loaded: dict[str, set[str]]) -> None:
    assert {"rlhf_zero0", "rlhf_zero1", "rlhf_zero2", "rlhf_zero3"} <= loaded["strategies"]
