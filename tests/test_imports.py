"""What may import what, and what importing loads."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rlhfkit

PACKAGE = Path(rlhfkit.__file__).parent
FLOORS = (
    "validation argument_names _version",
    "losses data protocols trainer_parts checkpoints distributed flat_parameters first_lines mesh rank_store "
    "training_states ray_session ray_calls ray_placement gpus hub serving",
    "models parts roles rollout episodes datamodules",
    "modules rewards",
    "callbacks strategies",
    "cli __main__ costs",
)
"""Of rooms. An import runs to the same floor or a lower one; strategies have a rule of their own."""
# These meet in the Trainer only.
STRANGERS = {"callbacks", "modules", "strategies", "datamodules"}
FOR_STRATEGIES = {
    *("strategies", "checkpoints", "distributed", "flat_parameters", "gpus", "mesh", "trainer_parts"),
    *("protocols", "rank_store", "ray_calls", "ray_placement", "ray_session", "training_states", "validation"),
    "argument_names",
}
LIGHT = ("distributed", "losses", "data", "rewards", "roles.replica", "rollout.vllm.pool", "rollout.vllm.actor")
HEAVY = {"lightning", "transformers", "datasets", "deepspeed", "ray", "vllm", "math_verify"}


PROGRAM = """
import importlib, sys
import rlhfkit.gpus  # asked before torch is there
assert "torch" not in sys.modules
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *sorted({module.split(".")[0] for module in sys.modules}))
from rlhfkit import VLLMPool
VLLMPool(num_engines=2)
print("VLLMPool", *sorted({module.split(".")[0] for module in sys.modules}))
from rlhfkit import GRPOModule
from lightning.pytorch.strategies import StrategyRegistry
print("strategies", *StrategyRegistry.available_strategies())
print("GRPOModule", *sorted({module.split(".")[0] for module in sys.modules}))
"""


@cache
def modules() -> dict[str, Path]:
    """The file of each of our modules, by its name without ``rlhfkit.`` (that of the package itself is empty)."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(name: str) -> set[str]:
    """Dotted names that a module of ours imports, those for type checkers and inside functions included."""
    path = modules()[name]
    package = ["rlhfkit", *name.split(".")]
    if path.name != "__init__.py":
        package.pop()
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{source}.{alias.name}" for alias in node.names}
    return names


@cache
def graph() -> dict[str, set[str]]:
    """The modules of ours that each one imports. Importing a name from a package counts as importing the package."""
    edges = {}
    for name in modules():
        edges[name] = set()
        for full in imported_names(name):
            if full.split(".")[0] == "rlhfkit":
                target = full.removeprefix("rlhfkit").removeprefix(".")
                edges[name].add(target if target in modules() else target.rpartition(".")[0])
        edges[name].discard(name)
    return edges


def room(name: str) -> str:
    return name.split(".")[0]


def imports_where(wrong: Callable[[str, str], bool]) -> list[str]:
    """Those for which this is so of the rooms of a file and of what it imports."""
    pairs = [(name, other) for name, others in graph().items() for other in others if name]
    return [f"{name} imports {other}" for name, other in pairs if wrong(room(name), room(other))]


def test_no_import_runs_upward() -> None:
    floor_of = {name: number for number, floor in enumerate(FLOORS) for name in floor.split()}
    assert imports_where(lambda own, other: floor_of[other] > floor_of[own]) == []


def test_callbacks_modules_strategies_and_datamodules_do_not_import_one_another() -> None:
    assert imports_where(lambda own, other: own != other and {own, other} <= STRANGERS) == []


def test_strategies_stand_alone() -> None:
    assert imports_where(lambda own, other: own == "strategies" and other not in FOR_STRATEGIES) == []


def test_no_circle_of_files_or_rooms() -> None:
    rooms: dict[str, set[str]] = {room(name): set() for name in modules()}
    for name, others in graph().items():
        rooms[room(name)] |= {room(other) for other in others} - {room(name)}
    for edges in (graph(), rooms):
        TopologicalSorter(edges).prepare()  # which raises an error with the circle


def test_imports_load_no_more_than_they_need_and_a_module_makes_strategies_known() -> None:
    """One after the other, as torch takes long: top-level packages in memory after each; names of strategies."""
    command = [sys.executable, "-c", PROGRAM, "rlhfkit", *(f"rlhfkit.{name}" for name in LIGHT)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    loaded = {name: set(found) for name, *found in map(str.split, lines)}
    assert not loaded["rlhfkit"] & ({"torch", "numpy"} | HEAVY)
    for name in (*(f"rlhfkit.{name}" for name in LIGHT), "VLLMPool"):
        assert "torch" in loaded[name], name
        assert not loaded[name] & HEAVY, name
    plain = {f"rlhf_zero{stage}" for stage in range(4)}
    offloading = {f"rlhf_zero{stage}_offload" for stage in (1, 2, 3)}
    assert {name for name in loaded["strategies"] if name.startswith("rlhf_zero")} == plain | offloading
    assert "deepspeed" not in loaded["GRPOModule"]


def test_what_is_not_there_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrainer'"):
        _ = rlhfkit.GRPOTrainer


def test_the_loop_of_rollouts_names_no_part() -> None:
    """It asks hooks, so that a part of a user's own can do what ours do."""
    loop = [name for name, path in modules().items() if path.parent == PACKAGE / "callbacks" / "rollout"]
    assert len(loop) > 5
    part = re.compile(r"rlhfkit\.(modules|callbacks\.rollout)\.parts\.(\w+\.)?[A-Z]")
    assert [(name, other) for name in loop for other in imported_names(name) if part.match(other)] == []
