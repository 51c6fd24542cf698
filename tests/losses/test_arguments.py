import inspect
import pickle
import re

import pytest
import torch

import rlhfkit.losses

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
def test_a_loss_is_a_plain_function(name):
    assert inspect.isfunction(LOSSES[name])
    assert not hasattr(LOSSES[name], "__wrapped__")
    assert pickle.loads(pickle.dumps(LOSSES[name])) is LOSSES[name]


def test_a_loss_compiles_without_graph_breaks():
    logprobs, mask = -torch.rand(2, 3), torch.ones(2, 3)
    compiled = torch.compile(rlhfkit.losses.kl_loss, fullgraph=True, backend="eager")
    expected = rlhfkit.losses.kl_loss(logprobs, 2.0 * logprobs, mask)
    torch.testing.assert_close(compiled(logprobs, 2.0 * logprobs, mask).loss, expected.loss)
