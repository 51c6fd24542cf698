import inspect
import pickle
import re

import pytest
import torch

import rlhfkit.losses
from rlhfkit.losses.arguments import share_arguments

FUNCTIONS = {name: value for name, value in vars(rlhfkit.losses).items() if name in rlhfkit.losses.__all__}
LOSSES = {name: value for name, value in FUNCTIONS.items() if name.endswith("_loss")}


def described(function) -> list[str]:
    """Arguments that ``help()`` of a function describes, in their order."""
    arguments = re.split(r"\n(?:Returns|Raises):\n", inspect.getdoc(function).split("\nArgs:\n")[1])[0]
    return re.findall(r"^    \*{0,2}(\w+): ", arguments, re.MULTILINE)


@pytest.mark.parametrize("name", LOSSES)
def test_help_of_a_loss_describes_every_argument_in_the_order_of_its_signature(name):
    assert described(LOSSES[name]) == list(inspect.signature(LOSSES[name]).parameters)


@pytest.mark.parametrize("name", LOSSES)
def test_no_description_refers_to_another_function_only(name):
    assert not re.search(r": As (in )?:func:", inspect.getdoc(LOSSES[name]))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_shared_arguments_is_still_a_plain_function(name):
    assert inspect.isfunction(LOSSES[name])
    assert not hasattr(LOSSES[name], "__wrapped__")
    assert pickle.loads(pickle.dumps(LOSSES[name])) is LOSSES[name]


def test_own_descriptions_take_precedence_and_the_other_sections_stay():
    @share_arguments({"a": "Shared.", "b": "Shared."})
    def function(a, b):
        """Do it.

        Args:
            b: Its own,
                on two lines.

        Returns:
            Nothing.
        """

    assert inspect.getdoc(function) == (
        "Do it.\n\nArgs:\n    a: Shared.\n    b: Its own,\n        on two lines.\n\nReturns:\n    Nothing."
    )


def test_a_docstring_without_sections_gets_one():
    @share_arguments({"a": "Shared."})
    def function(a):
        """Do it."""

    assert inspect.getdoc(function) == "Do it.\n\nArgs:\n    a: Shared."


def test_a_shared_section_is_added_where_a_function_has_none():
    @share_arguments({"a": "Shared.", "Raises": "ValueError: Always."})
    def function(a):
        """Do it.

        Returns:
            Nothing.
        """

    @share_arguments({"a": "Shared.", "Raises": "ValueError: Always."})
    def own(a):
        """Do it.

        Raises:
            KeyError: Never.
        """

    text = "Do it.\n\nArgs:\n    a: Shared.\n\n"
    assert inspect.getdoc(function) == text + "Returns:\n    Nothing.\n\nRaises:\n    ValueError: Always."
    assert inspect.getdoc(own) == text + "Raises:\n    KeyError: Never."


def test_an_argument_without_description_is_refused():
    with pytest.raises(KeyError, match="forgotten"):

        @share_arguments({})
        def function(forgotten):
            """Do it."""


def test_stripped_docstrings_are_left_alone():
    def function(a):
        pass

    assert share_arguments({})(function) is function


def test_a_loss_with_shared_arguments_compiles_without_graph_breaks():
    logprobs, mask = -torch.rand(2, 3), torch.ones(2, 3)
    compiled = torch.compile(rlhfkit.losses.kl_loss, fullgraph=True, backend="eager")
    expected = rlhfkit.losses.kl_loss(logprobs, 2.0 * logprobs, mask)
    torch.testing.assert_close(compiled(logprobs, 2.0 * logprobs, mask).loss, expected.loss)
