"""Every function of ``rlhfkit.losses``: compiled whole, in half precision, and with knobs that cannot be."""

import inspect
import math
import re
from typing import Any

import pytest
import torch
from simulated_device.loss_cases import FUNCTIONS, called, examples, other_shapes
from torch import Tensor

from .whole_graph import WHOLE_GRAPH

ON_HOST = {"best_and_worst", "density_ratio_weights", "turn_advantages"}  # of an iteration, before its first update
NAMES = sorted(FUNCTIONS)
LOSSES = [name for name in NAMES if name.endswith("_loss")]
KNOBS: dict[str, list[dict[str, Any]]] = {
    "distillation_loss": [{"divergence": "jsd"}, {"top_k": 3}],
    "dpo_loss": [
        {"loss_type": "ipo", **{name: examples()[name] for name in ("chosen_lengths", "rejected_lengths")}},
        {"loss_type": {"robust": 1.0, "sigmoid": 0.1}, "label_smoothing": 0.1},
    ],
}
"""Further branches of a function."""
CASES = [(name, knobs) for name in NAMES if name not in ON_HOST for knobs in [{}, *KNOBS.get(name, [])]]


def arguments_of(name: str) -> dict[str, Any]:
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    shared = examples()
    required = [one for one in parameters if parameters[one].default is inspect.Parameter.empty and one in shared]
    return {one: shared[one] for one in required} | other_shapes().get(name, {})


@pytest.mark.long
@WHOLE_GRAPH
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CASES)])
def test_compiles_without_graph_breaks(name: str, knobs: dict[str, Any]) -> None:
    # Losses that one decorator makes share a code object, and torch.compile counts its 8 recompilations by code object,
    # over everything that was compiled in this process.
    torch.compiler.reset()
    function, given = FUNCTIONS[name], arguments_of(name) | knobs
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(called(compiled, given), called(function, given))


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_computed_in_float32(name: str) -> None:
    given = {
        key: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in arguments_of(name).items()
    }
    widened = {
        key: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in given.items()
    }
    halves, floats = FUNCTIONS[name](**given), FUNCTIONS[name](**widened)
    assert halves.loss.dtype == torch.float32
    torch.testing.assert_close(halves.loss, floats.loss, rtol=1e-5, atol=1e-6)


OF_DATA = {"margin", "mean_chosen_length", "empty", "weights", "denominator"}
SEEN_IN_THE_LOSS = {"nll_coef", "alpha", "coef"}
"""Factors of terms, with which the loss is NaN."""
UNCHECKED = {"clipped_surrogate", "whiten", "normalize_rewards", "off_policy_sequence_mask", "top_entropy_mask"}
"""Their callers check what they give."""
FLOATS = [
    (name, one.name)
    for name in NAMES
    if name not in UNCHECKED | ON_HOST
    for one in inspect.signature(FUNCTIONS[name]).parameters.values()
    if one.kind is one.KEYWORD_ONLY and "float" in str(one.annotation) and one.name not in OF_DATA | SEEN_IN_THE_LOSS
]


@pytest.mark.parametrize(("name", "knob"), FLOATS)
def test_a_knob_that_is_nan_is_refused(name: str, knob: str) -> None:
    """NaN passes checks of the form ``x <= 0`` and makes every gradient NaN."""
    with pytest.raises(ValueError, match="nan"):
        FUNCTIONS[name](**arguments_of(name) | {knob: math.nan})


CHOICES = [
    (name, one.name)
    for name in NAMES
    if name not in ON_HOST
    for one in inspect.signature(FUNCTIONS[name]).parameters.values()
    if one.kind is one.KEYWORD_ONLY and "Literal" in str(one.annotation)
]


@pytest.mark.parametrize(("name", "knob"), CHOICES)
def test_a_choice_that_is_none_is_refused_with_what_there_is(name: str, knob: str) -> None:
    function = FUNCTIONS[name]
    choices = re.findall("'([a-z_0-9-]+)'", str(inspect.signature(function).parameters[knob].annotation))
    with pytest.raises(ValueError, match="no such") as caught:
        function(**arguments_of(name) | {knob: "no such"})
    assert [one for one in choices if one not in str(caught.value)] == []
