"""Signatures that are read from source files are those of the imported classes."""

import importlib
import inspect
from pathlib import Path

import pytest
from jsonargparse._parameter_resolvers import get_signature_parameters

from rlhfkit.cli.signatures import UNKNOWN, Definition, find, is_installed, names_of, signature

PACKAGES = {
    "rlhfkit": 0.9,
    "rlhfkit.rewards": 0.9,
    "rlhfkit.rollout": 0.8,
    "rlhfkit.modules": 1.0,
    "lightning.pytorch": 0.5,
    "lightning.pytorch.callbacks": 0.75,
    "lightning.pytorch.loggers": 0.5,
}
"""Packages, and the share of their classes whose arguments are known completely, at least."""


@pytest.mark.parametrize("package", PACKAGES)
def test_arguments_are_those_that_the_parser_of_lightning_cli_finds(package: str) -> None:
    module = importlib.import_module(package)
    complete = 0
    for name in module.__all__:
        kind = getattr(module, name)
        found = signature(find(f"{package}.{name}"))
        if inspect.isclass(kind) and found.complete:
            assert set(found.arguments) == {one.name for one in get_signature_parameters(kind)}, name
            complete += 1
    classes = sum(inspect.isclass(getattr(module, name)) for name in module.__all__)
    assert complete >= PACKAGES[package] * classes
    assert set(names_of(package)) == set(module.__all__)


def test_a_name_that_a_module_does_not_have_is_told_from_one_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plain_names.py").write_text("def reward(samples, scale=1.0): ...\n")
    (tmp_path / "starred_names.py").write_text("from os.path import *\n")
    assert isinstance(find("plain_names.reward"), Definition)
    assert {*signature(find("plain_names.reward")).arguments} == {"samples", "scale"}
    assert find("plain_names.rewards") is None
    assert find("starred_names.rewards") is UNKNOWN
    assert find("math.sin") is UNKNOWN  # compiled
    assert is_installed("math")
    assert not is_installed("no_such_module_anywhere")
    assert find("no_such_module_anywhere.reward") is None


def test_arguments_of_a_subclass_with_kwargs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "focal_modules.py").write_text(
        "from rlhfkit import SFTModule\n"
        "class Focal(SFTModule):\n"
        "    def __init__(self, model, *, gamma: float = 2.0, **kwargs):\n"
        "        super().__init__(model, lr=1e-3, **kwargs)\n"
        "class Open(SFTModule):\n"
        "    def __init__(self, **kwargs):\n"
        "        self.kwargs = kwargs\n"
    )
    focal = signature(find("focal_modules.Focal"))
    assert focal.complete
    assert {"model", "gamma", "optimization", "loading"} <= set(focal.arguments)
    assert "lr" not in focal.arguments  # the constructor gives it itself
    assert not signature(find("focal_modules.Open")).complete
