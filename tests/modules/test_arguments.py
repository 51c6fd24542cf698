"""Arguments that are functions or dataclasses, by name and by value."""

import functools
from dataclasses import dataclass

import pytest

from rlhfkit.losses import cispo_loss
from rlhfkit.validation import function_name, options, refuse_without_effect, resolve_function

HOME = "rlhfkit.losses"


def mine() -> None:
    """A function of a user."""


@dataclass(frozen=True)
class Choices:
    size: int = 1
    name: str = "one"


def test_a_function_is_found_again_by_its_name() -> None:
    assert resolve_function(function_name(mine), "loss") is mine
    assert resolve_function("cispo_loss", "loss", home=HOME) is cispo_loss
    assert resolve_function(mine, "loss") is mine


@pytest.mark.parametrize("function", [lambda: None, functools.partial(mine)])
def test_what_has_no_name_cannot_be_found_again(function: object) -> None:
    name = function_name(function)  # type: ignore[arg-type]
    assert name.startswith("<")
    with pytest.raises(ValueError, match=r"loss was the function <.*pass it again"):
        resolve_function(name, "loss")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cispo", "did you mean 'cispo_loss'"),
        ("no_such_package.loss", "cannot be imported"),
        ("rlhfkit.losses.__name__", "is a str, not a function"),
    ],
)
def test_a_wrong_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_function(name, "loss", home=HOME)


def test_options_are_taken_as_an_object_a_mapping_or_not_at_all() -> None:
    assert options(Choices, None) == Choices()
    assert options(Choices, {"size": 2}) == Choices(2)
    assert options(Choices, Choices(3)) == Choices(3)
    with pytest.raises(ValueError, match="Choices has no sise; it has size, name"):
        options(Choices, {"sise": 2})


def test_arguments_without_effect_are_named() -> None:
    refuse_without_effect({"gamma": False}, "lam=1")
    with pytest.raises(ValueError, match="gamma would have no effect beside lam=1"):
        refuse_without_effect({"gamma": True, "clip": False}, "lam=1")
