"""docs/coming_from.md has every option of the other libraries, and names arguments that exist.

The lists in tests/coming_from are the fields of TRL 1.16.0's configurations, the arguments of OpenRLHF's scripts
(3c3be62) and the leaves of verl's configurations of PPO and SFT (b178a3c); each line begins with where the option is.
"""

import fnmatch
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"
LISTS = Path(__file__).parent / "coming_from"
PEERS = {"TRL": "trl.txt", "OpenRLHF": "openrlhf.txt", "verl": "verl.txt"}
ROOMS = ("rlhfkit", "rlhfkit.rewards", "rlhfkit.rewards.remote", "rlhfkit.rewards.sandbox", "rlhfkit.roles")


def rows(peer: str) -> Iterator[tuple[list[str], str, str]]:
    """Options, counterparts and remark of each row of a library's tables."""
    section = PAGE.read_text().split(f"\n## {peer}\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != peer:
            remark = cells[2].rstrip(" |") if len(cells) > 2 else ""
            yield re.findall(r"`([^`]+)`", cells[0].split(" of SFT:")[0]), cells[1], remark


def options(peer: str) -> list[str]:
    return (LISTS / PEERS[peer]).read_text().split()


@pytest.mark.parametrize("peer", PEERS)
def test_every_option_has_a_row(peer: str) -> None:
    patterns = [pattern for names, _, _ in rows(peer) for pattern in names]
    missing = [
        option
        for option in options(peer)
        if not any(fnmatch.fnmatchcase(option.split(".", 1)[1], pattern) for pattern in patterns)
    ]
    assert missing == []


@pytest.mark.parametrize("peer", PEERS)
def test_every_row_is_about_options_that_exist(peer: str) -> None:
    known = {option.split(".", 1)[1] for option in options(peer)}
    unknown = [name for names, _, _ in rows(peer) for name in names if not fnmatch.filter(known, name)]
    assert unknown == []


@pytest.mark.parametrize("peer", PEERS)
def test_what_has_no_counterpart_says_why(peer: str) -> None:
    assert [names for names, ours, remark in rows(peer) if ours == "–" and not remark] == []


@functools.cache
def arguments(name: str) -> frozenset[str]:
    """All keyword arguments of a class of ours, or of Lightning's Trainer, with those it passes to its bases."""
    if name == "Trainer":
        found = importlib.import_module("lightning").Trainer
    else:
        found = next(getattr(room, name) for room in map(importlib.import_module, ROOMS) if hasattr(room, name))
    names: set[str] = set()
    for kind in found.__mro__:
        parameters = inspect.signature(kind.__init__).parameters if "__init__" in vars(kind) else {}
        names |= set(parameters)
        if parameters and not any(one.kind == inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            break
    return frozenset(names)


@pytest.mark.parametrize("peer", PEERS)
def test_counterparts_are_arguments_that_exist(peer: str) -> None:
    wrong = []
    for _, ours, _ in rows(peer):
        assert ours == "–" or "`" in ours
        for name, argument in re.findall(r"`(\w+)\((\w+)=\)`", ours):
            if argument not in arguments(name):
                wrong.append(f"{name}({argument}=)")
    assert wrong == []
