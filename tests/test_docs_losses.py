import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import rlhfkit.losses

GENERATOR = Path(__file__).parents[1] / "docs" / "generate_losses.py"
SPECIFICATION = importlib.util.spec_from_file_location("generate_losses", GENERATOR)
assert SPECIFICATION is not None
assert SPECIFICATION.loader is not None
generate_losses = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(generate_losses)

LOSSES = [name for name in rlhfkit.losses.__all__ if name.endswith("_loss")]


def test_page_is_what_the_docstrings_say():
    stale = "docs/reference/losses.md is stale: run python docs/generate_losses.py"
    assert generate_losses.PAGE.read_text(encoding="utf-8") == generate_losses.render(), stale


def test_page_names_everything_public():
    page = generate_losses.PAGE.read_text(encoding="utf-8")
    assert [name for name in rlhfkit.losses.__all__ if f"`{name}`" not in page] == []


def has_source(function) -> bool:
    return bool(generate_losses.papers(function) or generate_losses.citations(function))


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_a_formula_and_a_source(name):
    loss = getattr(rlhfkit.losses, name)
    docstring = inspect.getdoc(loss) or ""
    assert generate_losses.formula(loss), f"the second paragraph of {name}'s docstring must be its formula"
    named = re.findall(r":func:`(?:[\w.]+\.)?(\w+)`", docstring.split("Args:")[0])
    others = [getattr(rlhfkit.losses, other) for other in named if other in rlhfkit.losses.__all__]
    assert has_source(loss) or any(map(has_source, others)), f"{name} must name its paper, or a function that does"
    assert "Args:" in docstring
    assert "Returns:" in docstring
    assert "Raises:" in docstring


@pytest.mark.parametrize("name", LOSSES)
def test_knobs_of_losses_are_keywords(name):
    parameters = inspect.signature(getattr(rlhfkit.losses, name)).parameters.values()
    knobs = [knob for knob in parameters if "Tensor" not in str(knob.annotation)]
    assert [knob.name for knob in knobs if knob.kind not in (knob.KEYWORD_ONLY, knob.VAR_KEYWORD)] == []


@pytest.mark.parametrize("name", rlhfkit.losses.PAIR_LOSSES)
def test_every_pair_loss_has_a_formula_and_a_paper(name):
    loss = rlhfkit.losses.PAIR_LOSSES[name]
    assert generate_losses.pair_loss_formula(loss).startswith("`")
    assert generate_losses.papers(loss)
