import importlib
import inspect
import pickle
import re

import pytest

import rlhfkit.losses

FUNCTIONS = {name: value for name, value in vars(rlhfkit.losses).items() if name in rlhfkit.losses.__all__}
LOSSES = {name: value for name, value in FUNCTIONS.items() if name.endswith("_loss")}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_refers_to_describes_the_argument(name):
    for names, role, target in re.findall(
        r"^    (\w+(?:,\s+\w+)*): See\s+:(\w+):`([\w.]+)`", inspect.getdoc(LOSSES[name]), re.M
    ):
        text = inspect.getdoc(importlib.import_module(target) if role == "mod" else FUNCTIONS[target])
        entry = r"^- [^:]*``{}``" if role == "mod" else r"^    {}: "
        assert [one for one in re.split(r",\s+", names) if not re.search(entry.format(one), text, re.MULTILINE)] == []


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_a_plain_function(name):
    assert inspect.isfunction(LOSSES[name])
    assert not hasattr(LOSSES[name], "__wrapped__")
    assert pickle.loads(pickle.dumps(LOSSES[name])) is LOSSES[name]
