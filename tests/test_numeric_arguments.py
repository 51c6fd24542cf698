"""Every argument of a public constructor that is a number or a choice refuses what it cannot be, by name and value.

The arguments are found by their annotations, through ``**kwargs`` up the classes, so a new one is covered as it is
written. What is allowed beyond the rule stands below with its reason.
"""

import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rlhfkit
from rlhfkit.rewards import WeightedSum
from rlhfkit.rewards.sandbox.process import WorkerSpec
from rlhfkit.rollout import LocalEngine
from rlhfkit.validation import check_integer, check_number

ROOMS = [
    "callbacks",
    "data",
    "datamodules",
    "datamodules.prompts.curriculum",
    "episodes",
    "models",
    "modules",
    "modules.parts",
    "rewards",
    "rewards.remote.server",
    "rewards.sandbox.pool",
    "rewards.sandbox.process",
    "rollout",
    "serving.middleware",
    "serving.server",
    "strategies",
]

RECORDS = {
    "Action", "DistilledBatch", "DistilledExample", "Experience", "IterationShape", "LossOutput",
    "MicroBatch", "PaddedBatch", "PreferenceBatch", "PreferenceExample", "Prompt", "Sample", "Step", "StepwiseBatch",
    "StepwiseExample", "TokenBatch", "TokenExample", "UnpairedBatch", "UnpairedExample", "WeightInfo",
    "ExampleTable", "Mismatched", "ModuleWeights", "ValuesOfTargets",
    "GroupSampler", "PromptBody", "PromptPass", "SampleBody", "CallResult", "SandboxProcess", "WorkerSpec",
}  # fmt: skip
"""What the library makes itself, some of it once a token: their numbers are checked where they come from."""

BY_TYPE = {int: 1, float: 0.1, str: "none"}
BY_NAME: dict[str, Any] = {
    **dict.fromkeys(("url", "urls", "server"), "http://127.0.0.1:1"),
    **dict.fromkeys(("correct", "judge", "collate", "agent", "parse_action"), len),
    **dict.fromkeys(("max_length", "max_context_tokens"), 8),
    "data": "none.jsonl",
    "divergence": "jsd",
    "engine": LocalEngine(),
    "environment": SimpleNamespace(reset=print, step=print),
    "examples": SimpleNamespace(lengths=[1, 1], targets=[1, 1]),
    "reward": "math.fsum",
    "sequence_parallel_size": 2,
    "spec": WorkerSpec(name="none", program=Path("none.py"), factory="none"),
    "tools": [print],
}
"""Values of arguments that have no default."""
BY_CLASS: dict[str, dict[str, Any]] = {
    "Episodes": {"environment": lambda prompt: None},
    "ExperienceLoader": {"collect": list},
    "OnPolicyDistillationModule": {"teacher": "none"},
    "Rejection": {"divergence": "k1", "high": 2.0},
    "ScalarModule": {"lr": 1e-6},
    "StepLoader": {"micro_batch_size": 1},
    "UnpairedLoader": {"micro_batch_size": 1},
    "WeightedSum": {"parts": {"one": len}},
}
"""What else a class needs."""

NEGATIVE, REWARDS = (-1.0,), "rewards may be negative"
ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "*.seed": ((-1,), "any integer seeds"),
    "*.tiled_mlp": ((True,), "tiles of the default size"),
    "*.on_failure": (NEGATIVE, REWARDS),
    "Probe.tolerance": ((math.inf,), "switches the probe off"),
    "Rejection.high": ((math.inf,), "no upper bound"),
    **{
        f"CosineLength.{name}": (NEGATIVE, REWARDS)
        for name in ("success_threshold", "correct_short", "correct_long", "wrong_short", "wrong_long", "at_limit")
    },
    **{f"Alarm.{name}": (NEGATIVE, "metrics may be negative") for name in ("low", "high")},
    "Validation.success_threshold": (NEGATIVE, REWARDS),
    "ReplayBuffer.min_reward": (NEGATIVE, REWARDS),
    "BySuccess.low": (NEGATIVE, REWARDS),
    "GymEnvironment.invalid_reward": (NEGATIVE, REWARDS),
    "StopProperly.coef": (NEGATIVE, "the reward of answers that were cut off"),
    "RewardModel.weights": (NEGATIVE, "the score of what is not wanted"),
    "EntropyBonus.coef": (NEGATIVE, "a penalty for entropy"),
    "SimPOModule.alpha": (NEGATIVE, "AlphaPO's exponent has either sign"),
    **{f"SamplingSpec.{name}_penalty": (NEGATIVE, "a bonus for what was said") for name in ("presence", "frequency")},
}
"""By class (``*``: any) and argument: values that are taken, and why."""


def public_classes() -> dict[str, type]:
    found: dict[str, type] = {}
    for room in ("rlhfkit", *(f"rlhfkit.{name}" for name in ROOMS)):
        module = importlib.import_module(room)
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == room]
        for name in getattr(module, "__all__", own):
            value = getattr(module, name)
            plain = inspect.isclass(value) and not issubclass(value, BaseException) and not name.startswith("_")
            if plain and not getattr(value, "_is_protocol", False) and name not in RECORDS:
                found[name] = value
    return found


def members(annotation: Any) -> list[Any]:
    """The types of a union, one by one."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return [one for part in typing.get_args(annotation) for one in members(part)]
    return [annotation]


def arguments_of(kind: type) -> Iterator[tuple[str, list[Any]]]:
    """Arguments of the constructor and, where it takes ``**kwargs``, of those it passes them to."""
    seen: set[str] = set()
    for parent in kind.__mro__:
        init = vars(parent).get("__init__")
        if init is None or not parent.__module__.startswith("rlhfkit"):
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for one in parameters:
            if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and one.name not in seen:
                seen.add(one.name)
                yield one.name, members(one.annotation)
        if all(one.kind != one.VAR_KEYWORD for one in parameters):
            return


PAIR = tuple[float, float]
CLASSES = public_classes()
CASES = [
    (name, argument, kinds)
    for name, kind in sorted(CLASSES.items())
    for argument, kinds in arguments_of(kind)
    if {int, float, PAIR} & {one for one in kinds if not isinstance(one, str) and one.__hash__}
]


def required(kind: type) -> dict[str, Any]:
    """The least that an object can be made of."""
    given: dict[str, Any] = {}
    for one in list(inspect.signature(kind.__init__).parameters.values())[1:]:  # type: ignore[misc]
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            kinds = members(one.annotation)
            choices = [choice for each in kinds for choice in typing.get_args(each) if isinstance(choice, str)]
            likely = [BY_NAME.get(one.name), *choices, *(value for kind, value in BY_TYPE.items() if kind in kinds)]
            given[one.name] = next((value for value in likely if value is not None), None)
    return given | BY_CLASS.get(kind.__name__, {})


def wrong_values(name: str, argument: str, kinds: list[Any]) -> list[Any]:
    wrong: list[Any] = [math.nan, math.inf, -math.inf, "1", [1], True]
    if float not in kinds and PAIR not in kinds:
        wrong += [1.5, 2.0]
    if type(None) not in kinds:
        wrong += [None]
    wrong += [-1.0 if float in kinds or PAIR in kinds else -1]
    allowed = [value for key in ("*", name) for value in ALLOWED.get(f"{key}.{argument}", ((), ""))[0]]
    return [value for value in wrong if isinstance(value, list) or value not in allowed]


def beyond_the_bounds(message: str, kinds: list[Any]) -> list[Any]:
    """The values next to the bounds that a refusal names: what it says is allowed is all that is."""
    whole = float not in kinds and PAIR not in kinds
    step: float = 1 if whole else 1e-3
    found = []
    for words, number in re.findall(r"(at least|above|at most|below) (-?[0-9.]*[0-9])(?![0-9.]*e)", message):
        bound = int(number) if whole else float(number)
        found.append({"at least": bound - step, "above": bound, "at most": bound + step, "below": bound}[words])
    return found


@pytest.mark.parametrize(
    ("name", "argument", "kinds"), CASES, ids=[f"{name}-{argument}" for name, argument, _ in CASES]
)
def test_what_is_no_number_of_the_range_is_refused_by_name_and_value(
    name: str, argument: str, kinds: list[Any]
) -> None:
    kind = CLASSES[name]
    taken, unclear = [], []
    tried = wrong_values(name, argument, kinds)
    for value in tried:
        given = (value, 0.9) if PAIR in kinds else value
        try:
            kind(**(required(kind) | {argument: given}))
        except (ValueError, TypeError) as error:
            if argument not in str(error) or repr(value) not in str(error):
                unclear.append(f"{value!r}: {error}")
            tried += [more for more in beyond_the_bounds(str(error), kinds) if more not in tried]
        else:
            taken.append(value)
    assert not taken, f"{name}({argument}=...) takes {taken}"
    assert not unclear, f"{name}({argument}=...): " + "; ".join(unclear)


CHOICES = [
    (name, argument, [choice for one in kinds for choice in typing.get_args(one) if isinstance(choice, str)])
    for name, kind in sorted(CLASSES.items())
    for argument, kinds in arguments_of(kind)
    if any(typing.get_origin(one) is typing.Literal for one in kinds) and str not in kinds
]
BESIDE = {"remainder": {"top_k": 4}, "until": {"weights": {"a.jsonl": 1.0}}}
"""Arguments that others mean something beside."""


@pytest.mark.parametrize(
    ("name", "argument", "choices"), CHOICES, ids=[f"{name}-{argument}" for name, argument, _ in CHOICES]
)
def test_what_is_no_choice_is_refused_with_what_there_is(name: str, argument: str, choices: list[str]) -> None:
    kind = CLASSES[name]
    if argument == "quantization":
        return  # of which a model's loading knows
    with pytest.raises((ValueError, TypeError), match="no such") as caught:
        kind(**(required(kind) | BESIDE.get(argument, {}) | {argument: "no such"}))
    assert argument in str(caught.value)
    missing = {choice for choice in choices if choice not in str(caught.value)}
    assert missing <= {"split"}  # which texts alone can be


def test_exceptions_are_still_needed() -> None:
    assert {*ALLOWED} <= {f"{name}.{argument}" for kind, argument, _ in CASES for name in ("*", kind)}
    assert len(CASES) > 200


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", None, True])
def test_weights_in_mappings_are_checked_likewise(value: Any) -> None:
    for make in (
        lambda: rlhfkit.Mixture({"a.jsonl": value}),
        lambda: rlhfkit.SFTDataModule({"a.jsonl": 1.0, "b.jsonl": value}),
        lambda: WeightedSum(part=(len, value)),
        lambda: rlhfkit.DPOModule("none", loss_type={"sigmoid": value}),
    ):
        with pytest.raises((ValueError, TypeError), match=re.escape(f"got {value!r}")) as caught:
            make()
        assert "weight of" in str(caught.value)


# ---------------------------------------------------------------------- the checks themselves


def test_numbers_within_their_bounds_pass() -> None:
    """Bounds are inclusive or exclusive as said; ``None`` and infinity pass where they are allowed."""
    for value in (0, 0.0, 1, 0.5, np.float32(0.25), np.int64(1), 1.0):
        check_number("beta", value, minimum=0, maximum=1)
    for bounds in ({"above": 1.0}, {"below": 1.0}, {"minimum": 1.5}, {"maximum": 0.5}):
        with pytest.raises(ValueError, match="x must be a finite number"):
            check_number("x", 1.0, **bounds)
    check_number("clip", None, optional=True)
    check_integer("top_k", None, optional=True)
    check_number("tolerance", math.inf, minimum=0, infinite=True)
    check_integer("seed", 10**400, minimum=0)  # no float is as large


def test_the_message_says_value_rule_and_cure() -> None:
    with pytest.raises(TypeError) as caught:
        check_number("lr", "1e-6", above=0, below=1, optional=True, why="a usual rate is 1e-6")
    assert str(caught.value) == (
        "lr must be a finite number above 0 and below 1 or None, got '1e-6' (text; write the number without quotes): "
        "a usual rate is 1e-6"
    )
