"""Every source file has its test file, or is named in the docstring of the test file that covers it.

``rlhfkit/losses/kl.py`` is covered by ``tests/losses/test_kl.py``, or by any test file whose docstring names it after
the word ``Covers``: by ``kl.py`` in the same folder, by ``losses/kl.py`` anywhere.
"""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "rlhfkit"
WITHOUT_TESTS = {"_version.py"}
SOURCES = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}


def mirrored(test: Path) -> set[str]:
    """The source files that a test file has its name from."""
    folder, name = test.parent.relative_to(TESTS), test.name.removeprefix("test_")
    if str(folder) == "strategies":  # test_ray_launcher.py for ray/launcher.py, or test_launcher.py
        inside = {source: source.split("/")[1:] for source in SOURCES if source.startswith("strategies/")}
        return {source for source, parts in inside.items() if name in ("_".join(parts), parts[-1])}
    return {str(folder / name)} & SOURCES


def covered(test: Path) -> set[str]:
    """What the docstring of a test file says that it covers: paths below ``rlhfkit``, and names of no file at all."""
    docstring = ast.get_docstring(ast.parse(test.read_text())) or ""
    folder, found = test.parent.relative_to(TESTS), set()
    for text in re.split(r"\bCovers\s", docstring)[1:]:
        for name in re.findall(r"[\w/]+\.py", text.partition("\n\n")[0]):
            near = [place / name for place in (folder, *folder.parents)]
            sources = [str(path) for path in near if str(path) in SOURCES]
            other = any((TESTS / path).exists() for path in near) or (TESTS.parent / name).exists()
            found |= set(sources[:1]) if sources or other else {name}
    return found


def test_every_source_file_has_its_tests() -> None:
    tests = list(TESTS.rglob("test_*.py"))
    named = set().union(*map(covered, tests))
    assert sorted(named - SOURCES) == [], "there are no such files"
    found = named.union(*map(mirrored, tests))
    assert sorted(SOURCES - WITHOUT_TESTS - found) == []
