"""A part's file is loaded by what offers it and by nothing else: no other file imports it at its top."""

import ast
from pathlib import Path

import pytest

import rlhfkit

PACKAGE = Path(rlhfkit.__file__).parent
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


def dotted(path: Path) -> str:
    return ".".join(("rlhfkit", *path.relative_to(PACKAGE).with_suffix("").parts))


def test_there_are_parts() -> None:
    assert PARTS


@pytest.mark.parametrize("part", sorted(PARTS), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_imports_a_part_at_its_top(part: Path) -> None:
    name = dotted(part)
    others = [path for path in PACKAGE.rglob("*.py") if path != part and name in imports_at_the_top(path)]
    others = [path for path in others if path not in PARTS]  # a part may build on another
    assert [str(path.relative_to(PACKAGE)) for path in others] == []


@pytest.mark.parametrize("part", sorted(PARTS), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_ranks_meet_through_the_module_only(part: Path) -> None:
    assert not {name for name in imports_at_the_top(part) if name.startswith("torch.distributed")}
    assert "torch.distributed" not in part.read_text(encoding="utf-8")


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
