"""Every function of ``rlhfkit.losses``: compiled whole, in half precision, and given what cannot be."""

import importlib
import inspect
import math
import re
from typing import Any

import pytest
import torch
from packaging.version import Version
from simulated_device.loss_cases import FUNCTIONS, arguments_of, called, examples
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

ON_HOST = {"best_and_worst", "density_ratio_weights", "turn_advantages"}  # of an iteration, before its first update
NAMES = sorted(FUNCTIONS)
WHOLE_GRAPH = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 13),
    reason="torch 2.7 breaks the graph at properties of tuples and compiles the parts; 2.13 is tested",
)
KNOBS: dict[str, list[dict[str, Any]]] = {
    "distillation_loss": [{"divergence": "jsd"}, {"top_k": 3}],
    "dpo_loss": [
        {"loss_type": "ipo", **{name: examples()[name] for name in ("chosen_lengths", "rejected_lengths")}},
        {"loss_type": {"robust": 1.0, "sigmoid": 0.1}, "label_smoothing": 0.1},
    ],
}
"""Further branches of a function."""
CASES = [(name, knobs) for name in NAMES if name not in ON_HOST for knobs in [{}, *KNOBS.get(name, [])]]


@pytest.mark.long
@WHOLE_GRAPH
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CASES)])
def test_compiles_without_graph_breaks(name: str, knobs: dict[str, Any]) -> None:
    # Losses that one decorator makes share a code object, and torch.compile counts its 8 recompilations by code object,
    # over everything that was compiled in this process.
    torch.compiler.reset()
    function, given = FUNCTIONS[name], arguments_of(name) | knobs
    # Of the traced graph "aot_eager" would also look, for long, for what is best computed again in the backward pass.
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager_default_partitioner")
    torch.testing.assert_close(called(compiled, given), called(function, given))


def outputs(name: str, given: dict[str, Any]) -> list[Tensor]:
    found = [one.detach() for one in tree_leaves(FUNCTIONS[name](**given)) if isinstance(one, Tensor)]
    return [one.as_subclass(Tensor) for one in found if one.is_floating_point()]


def cast(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return tree_map(lambda one: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one, given)


UNCHECKED = {"clipped_surrogate", "masked_mean", "masked_sum", "rejected_values", "select"}
"""Steps of others, which check and widen what they give them."""
# Choices of rows, and a product in the precision of the head: ``fused_head/test_logprobs.py``.
AS_GIVEN = UNCHECKED | {"best_and_worst", "kto_kl_estimate", "linear_logprobs", "turn_advantages"}


@pytest.mark.parametrize("name", sorted({*NAMES} - AS_GIVEN))
def test_half_precision_is_computed_in_float32_and_double_stays_double(name: str) -> None:
    halves = cast(arguments_of(name), torch.bfloat16)
    found = outputs(name, halves)
    assert {one.dtype for one in found} <= {torch.float32, torch.float64}
    torch.testing.assert_close(found, outputs(name, cast(halves, torch.float32)), rtol=1e-5, atol=1e-6)
    if found and name not in ON_HOST | {"length_adaptive_lambda"}:
        assert outputs(name, cast(halves, torch.float64))[0].dtype == torch.float64


OF_ANY_WIDTH = {("density_ratio_weights", "embeddings"), ("gdpo_advantages", "rewards"), ("token_rewards", "mask")}
SHAPES = [
    (name, key)
    for name in NAMES
    if name not in UNCHECKED | {"turn_advantages"} and not name.endswith("_metric")
    for key, value in arguments_of(name).items()
    if isinstance(value, Tensor)
    and value.dim()
    and sum(isinstance(one, Tensor) for one in arguments_of(name).values()) > 1
]


@pytest.mark.parametrize(("name", "key"), SHAPES)
def test_a_tensor_that_does_not_fit_the_others_is_refused(name: str, key: str) -> None:
    given = arguments_of(name)
    for dim in {0, given[key].dim() - 1} if (name, key) not in OF_ANY_WIDTH else {0}:
        with pytest.raises(ValueError, match=r"shape|one value|share|same|gathered|lie in|must be"):
            FUNCTIONS[name](**given | {key: given[key].narrow(dim, 0, given[key].shape[dim] - 1)})


OF_DATA = {"margin", "mean_chosen_length", "empty", "weights", "denominator"}
SEEN_IN_THE_LOSS = {"nll_coef", "alpha", "coef"}
"""Factors of terms, with which the loss is NaN."""
OF_CALLERS = {"clipped_surrogate", "whiten", "normalize_rewards", "off_policy_sequence_mask", "top_entropy_mask"}
"""Numbers that their callers check."""
FLOATS = [
    (name, one.name)
    for name in NAMES
    if name not in OF_CALLERS | ON_HOST
    for one in inspect.signature(FUNCTIONS[name]).parameters.values()
    if one.kind is one.KEYWORD_ONLY and "float" in str(one.annotation) and one.name not in OF_DATA | SEEN_IN_THE_LOSS
]


@pytest.mark.parametrize(("name", "knob"), FLOATS)
def test_a_knob_that_is_nan_or_negative_is_refused(name: str, knob: str) -> None:
    """NaN passes checks of the form ``x <= 0`` and makes every gradient NaN."""
    for number in (math.nan, -1.0) if knob != "covariance_low" else (math.nan,):
        with pytest.raises(ValueError, match=str(number)):
            FUNCTIONS[name](**arguments_of(name) | {knob: ("token", number, 2.0) if knob == "reject" else number})


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
        function(**arguments_of(name) | {knob: ("no such", None, 2.0) if knob == "reject" else "no such"})
    assert [one for one in choices if one not in str(caught.value)] == []


ZEROS = torch.zeros
OPTIONAL = ("importance_weight", "margin", "mask", "penalty", "priority", "weights")
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gae", {"gamma": 1.5}, "gamma"),
    ("gae", {"lam": ZEROS(3)}, r"lam must be a number or \(4,\)"),
    ("gae", {"last_values": ZEROS(4, 1)}, r"last_values must be \(4,\)"),
    ("token_rewards", {"rewards": ZEROS(4, 1)}, r"rewards must be \(4,\)"),
    *(
        (name, {"group": ZEROS(4)}, "integer")
        for name in NAMES
        if name.endswith("_advantages") and "group" in arguments_of(name)
    ),
    ("group_advantages", {"rewards": ZEROS(4, 1), "group": ZEROS(4, 1).long()}, r"\(B"),
    ("pass_at_k_advantages", {"k": 0}, "k must be at least 1"),
    ("gdpo_advantages", {"weights": [1.0]}, "weights must be 2 numbers"),
    *(
        (name, {key: ZEROS(3)}, "one value per sequence|same shape|must be")
        for name in NAMES
        for key in OPTIONAL
        if (given := inspect.signature(FUNCTIONS[name]).parameters.get(key)) and given.default is None
    ),
    # KL and importance weights
    ("kl_loss", {"coef": -0.1}, "coef"),
    ("importance_weights", {"mode": "truncate", "low": 0.5}, "needs high and no low"),
    ("importance_weights", {"mode": "mask", "high": None}, "needs low, high or both"),
    ("importance_weights", {"mode": "clip", "low": 3.0, "high": 2.0}, "0 <= low < high"),
    ("importance_weights", {"reject": ("geometric", None, None)}, "reject needs low, high or both"),
    ("rejection_mask", {"level": "token", "low": 0.5, "high": 1.0}, "low belongs to divergence 'k1'"),
    ("rejection_mask", {"level": "token", "divergence": "k1", "low": 2.0, "high": 1.0}, "low <= high"),
    ("log_linear_proximal_logprobs", {"version": 3, "proximal_version": 4}, "ahead"),
    # policy losses
    ("ppo_loss", {"clip_low": 1.1}, r"clip_low must lie in \[0, 1\]"),
    ("ppo_loss", {"dual_clip": 1.0}, "dual_clip must be larger than 1"),
    ("ppo_loss", {"delta": 1.1}, "delta must be at least"),
    ("cispo_loss", {"ratio_min": 2.0, "ratio_max": 1.0}, "ratio_min < ratio_max"),
    ("gmpo_loss", {"clip_low": -0.4}, "nats"),
    ("dppo_loss", {"mask_low": 1.5}, "probabilities"),
    ("clip_cov_loss", {"covariance_low": 5.0}, "covariance_low < covariance_high"),
    ("top_entropy_mask", {"fraction": 0.0}, "fraction"),
    ("aggregate", {"max_length": 3}, r"'constant-length' .* got mode 'token-mean' and max_length 3"),
    ("aggregate", {"mode": "constant-length", "max_length": 0}, "max_length must be positive"),
    ("aggregate", {"denominator": 0}, "denominator must be positive"),
    # pairs, unpaired answers and scores
    ("dpo_loss", {"loss_type": {}}, "at least one loss"),
    ("dpo_loss", {"label_smoothing": 0.1, "loss_type": "hinge"}, "no effect"),
    ("dpo_loss", {"loss_type": "exo_pair"}, "label_smoothing > 0"),
    ("dpo_loss", {"loss_type": "ipo"}, "chosen_lengths and rejected_lengths"),
    ("dpo_loss", {"loss_type": "sft"}, "mean_chosen_length"),
    ("dpo_loss", {"loss_type": "sft", "denominator": 4, "chosen_lengths": torch.ones(4)}, "mean_chosen_length"),
    ("dpo_loss", {"nll_coef": 1.0}, "give chosen_lengths"),
    ("dpo_loss", {"divergence": "js", "loss_type": "apo_zero"}, "'reverse_kl' only"),
    ("dpo_loss", {"weights": ZEROS(4), "loss_type": "aot"}, "sort the batch"),
    ("dpo_loss", {"reference_free": True}, "ref_chosen and ref_rejected"),
    ("dpo_loss", {"ref_chosen": None, "ref_rejected": None}, "reference_free=True"),
    ("dpo_loss", dict.fromkeys(("chosen", "rejected", "ref_chosen", "ref_rejected"), ZEROS(4, 5)), "sequence_logprobs"),
    ("cpo_loss", {"loss_type": "ipo", "label_smoothing": 0.1}, "no effect"),
    ("cpo_loss", {"denominator": 8}, "mean_chosen_length"),
    ("kto_loss", {"kl": None}, "kl is needed"),
    ("kto_loss", {"loss_type": "apo_zero_unpaired"}, "has no meaning"),
    ("kto_loss", {"kl": ZEROS(4)}, r"kl must be one number for all answers, got \(4,\)"),
    ("bco_loss", {"shift": ZEROS(4)}, "shift must be one number for all answers"),
    ("kto_kl_estimate", {"sums": ZEROS(3)}, r"sums must be \(2,\)"),
    ("density_ratio_weights", {"desirable": torch.ones(4)}, "one class only"),
    ("bradley_terry_loss", {"chosen": ZEROS(4, 1), "rejected": ZEROS(4, 1)}, "squeeze"),
    ("process_reward_loss", {"logits": ZEROS(4, 5, 5), "labels": ZEROS(4, 5)}, "class 0 of 2"),
    # what is of another type
    ("grpo_loss", {"beta": 0.1}, "^grpo_loss has no beta; it has logprobs, .* clip_low"),
    ("group_advantages", {"rewards": [1.0, 0.0]}, "rewards must be a tensor, got list"),
    ("dpo_loss", {"loss_type": ["sigmoid", "sft"]}, "a mapping to their weights"),
    # -1 would count as desirable
    ("kto_loss", {"desirable": torch.tensor([1, -1, 1, 1])}, "desirable must be a bool tensor, got torch.int64"),
    # teachers and the output layer
    ("distillation_loss", {"top_k": 0}, "top_k must lie"),
    ("distillation_loss", {"teacher_ids": ZEROS(4, 5, 3).long()}, "same shape"),
    (
        "distillation_loss",
        {"teacher": ZEROS(4, 5, 3), "teacher_ids": ZEROS(4, 5, 3).long(), "temperature": 2.0},
        "normaliser is unknown",
    ),
    ("linear_logprobs", {"weight": ZEROS(0)}, "was not gathered"),
    ("linear_logprobs", {"targets": ZEROS(20, dtype=torch.int32)}, "int64 token ids, got torch.int32"),
    ("linear_logprobs", {"targets": torch.full((20,), 7)}, r"lie in \[0, 7\), got values from 7 to 7"),
    ("linear_logprobs", {"targets": torch.full((20,), -100)}, "from -100 to -100; give ignored positions"),
    ("linear_logprobs", {"bias": ZEROS(5)}, r"bias must have shape \(7,\), got \(5,\)"),
    ("linear_logprobs", {"weight": ZEROS(7, 3).long()}, "floating point"),
    ("linear_logprobs", {"chunk": 0}, "chunk is a number of vocabulary entries"),
    ("logits_logprobs", {"targets": torch.full((20,), 7)}, r"lie in \[0, 7\)"),
    ("logits_logprobs", {"logits": ZEROS(20, 7).long()}, "floating point"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        FUNCTIONS[name](**arguments_of(name) | change)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_loss")])
def test_what_a_loss_refers_to_describes_the_argument(name: str) -> None:
    for names, role, target in re.findall(
        r"^    (\w+(?:,\s+\w+)*): See\s+:(\w+):`([\w.]+)`", inspect.getdoc(FUNCTIONS[name]) or "", re.MULTILINE
    ):
        text = inspect.getdoc(importlib.import_module(target) if role == "mod" else FUNCTIONS[target]) or ""
        entry = r"^- [^:]*``{}``" if role == "mod" else r"^    {}: "
        assert [one for one in re.split(r",\s+", names) if not re.search(entry.format(one), text, re.MULTILINE)] == []
