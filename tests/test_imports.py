"""What may import what, and what importing loads."""

import ast
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rlhfkit

PACKAGE = Path(rlhfkit.__file__).parent
# An import runs to the same floor or a lower one. "strategies" has a rule of its own.
FLOORS = {
    "validation": 0,
    "argument_names": 0,
    "_version": 0,
    "losses": 1,
    "data": 1,
    "protocols": 1,
    "trainer_parts": 1,
    "checkpoints": 1,
    "distributed": 1,
    "flat_parameters": 1,
    "first_lines": 1,
    "mesh": 1,
    "rank_store": 1,
    "training_states": 1,
    "ray_session": 1,
    "ray_calls": 1,
    "ray_placement": 1,
    "gpus": 1,
    "hub": 1,
    "serving": 1,
    "models": 2,
    "parts": 2,
    "roles": 2,
    "rollout": 2,
    "episodes": 2,
    "datamodules": 2,
    "modules": 3,
    "rewards": 3,
    "callbacks": 4,
    "strategies": 4,
    "cli": 5,
    "__main__": 5,
    "costs": 5,
}
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


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Top-level packages in memory after each import, one after the other as torch takes long; names of strategies."""
    command = [sys.executable, "-c", PROGRAM, "rlhfkit", *(f"rlhfkit.{name}" for name in LIGHT)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: set(found) for name, *found in map(str.split, lines)}


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
    assert imports_where(lambda own, other: FLOORS[other] > FLOORS[own]) == []


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


def test_importing_the_package_loads_nothing_heavy(loaded: dict[str, set[str]]) -> None:
    assert not loaded["rlhfkit"] & ({"torch", "numpy"} | HEAVY)


@pytest.mark.parametrize("name", LIGHT)
def test_what_needs_no_models_loads_torch_only(loaded: dict[str, set[str]], name: str) -> None:
    assert "torch" in loaded[f"rlhfkit.{name}"]
    assert not loaded[f"rlhfkit.{name}"] & HEAVY


def test_a_pool_is_made_without_ray_and_vllm(loaded: dict[str, set[str]]) -> None:
    assert not loaded["VLLMPool"] & HEAVY


def test_every_public_name_is_there() -> None:
    for name in rlhfkit.__all__:
        assert getattr(rlhfkit, name) is not None
    assert set(rlhfkit.__all__) <= set(dir(rlhfkit))
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrainer'"):
        _ = rlhfkit.GRPOTrainer


def test_strategies_are_known_by_name_once_a_module_is_imported(loaded: dict[str, set[str]]) -> None:
    plain = {f"rlhf_zero{stage}" for stage in range(4)}
    offloading = {f"rlhf_zero{stage}_offload" for stage in (1, 2, 3)}
    assert {name for name in loaded["strategies"] if name.startswith("rlhf_zero")} == plain | offloading
    assert "deepspeed" not in loaded["GRPOModule"]


# ---------------------------------------------------------------------- parts

PARTS = {path for path in PACKAGE.rglob("parts/*.py") if path.name != "__init__.py"}


def imports_at_the_top(path: Path) -> set[str]:
    """Dotted names that are imported when a file is, those for type checkers included; not those in functions.

    Nor those of the names that a package offers, for type checkers.
    """
    found: set[str] = set()
    open_nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if path.name == "__init__.py" and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue  # the types of names that are imported when they are used
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        open_nodes += ast.iter_child_nodes(node)
    return found


def test_no_file_but_what_offers_it_and_other_parts_imports_a_part_at_its_top() -> None:
    """A part's file is loaded when it is used."""
    names = {".".join(("rlhfkit", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in PARTS}
    assert len(names) > 20
    found = {path: imports_at_the_top(path) & names for path in modules().values() if path not in PARTS}
    assert {str(path): others for path, others in found.items() if others} == {}


def test_ranks_meet_through_the_module_only() -> None:
    assert [path.name for path in PARTS if "torch.distributed" in path.read_text(encoding="utf-8")] == []


def test_the_loop_of_rollouts_names_no_part() -> None:
    """Docstrings may, for readers; code asks hooks."""
    kinds = {
        node.name
        for part in PARTS
        for node in ast.parse(part.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    for path in PACKAGE.glob("callbacks/rollout/*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
        assert not names & kinds, path.name
