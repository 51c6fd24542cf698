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

import pytest

import rlhfkit
from rlhfkit.rewards import WeightedSum
from rlhfkit.rewards.sandbox.process import WorkerSpec
from rlhfkit.rollout import LocalEngine

ROOMS = (
    "rlhfkit",
    "rlhfkit.callbacks",
    "rlhfkit.data",
    "rlhfkit.datamodules",
    "rlhfkit.datamodules.prompts.curriculum",
    "rlhfkit.episodes",
    "rlhfkit.models",
    "rlhfkit.modules",
    "rlhfkit.modules.parts",
    "rlhfkit.rewards",
    "rlhfkit.rewards.remote.server",
    "rlhfkit.rewards.sandbox.pool",
    "rlhfkit.rewards.sandbox.process",
    "rlhfkit.rollout",
    "rlhfkit.serving.middleware",
    "rlhfkit.serving.server",
    "rlhfkit.strategies",
)

RECORDS = {
    "Action", "DistilledBatch", "DistilledExample", "Experience", "IterationShape", "LossOutput",
    "MicroBatch", "PaddedBatch", "PreferenceBatch", "PreferenceExample", "Prompt", "Sample", "Step", "StepwiseBatch",
    "StepwiseExample", "TokenBatch", "TokenExample", "UnpairedBatch", "UnpairedExample", "WeightInfo",
    "ExampleTable", "Mismatched", "ModuleWeights", "ValuesOfTargets",
    "GroupSampler", "PromptBody", "PromptPass", "SampleBody", "CallResult", "SandboxProcess", "WorkerSpec",
}  # fmt: skip
"""What the library makes itself, some of it once a token: their numbers are checked where they come from."""

ENGINE = LocalEngine()
TABLE = SimpleNamespace(lengths=[1, 1], targets=[1, 1])
WORKER = WorkerSpec(name="none", program=Path("none.py"), factory="none")

REQUIRED: dict[str, dict[str, Any]] = {
    "SequenceParallelDDPStrategy": {"sequence_parallel_size": 2},
    "RewardModel": {"models": "reward-model"},
    "Alarm": {"metric": "loss", "advice": "lower it"},
    "Oversampling": {"share": 0.5},
    "AgentEpisodes": {"agent": lambda connection, prompt: 0.0},
    "CosineLength": {"correct": len, "max_length": 8},
    "ByColumn": {"name": "difficulty"},
    "RequestParser": {"max_samples": 4, "max_tokens": 4},
    "Episodes": {"environment": lambda prompt: None},
    "ExperienceLoader": {"collect": list, "length": 1},
    "AccessControlMiddleware": {"app": None},
    "HFExport": {"folder": "exported"},
    "JSONBodyReader": {"max_objects": 4, "max_numbers": 4},
    "LengthPenalty": {"max_length": 8, "soft_zone": 4},
    "ChatJudge": {"url": "http://127.0.0.1:1", "model": "none"},
    "ModelReward": {"model": "none"},
    "PairwiseReward": {"judge": len},
    "Placement": {},
    "RoleResources": {"processes": 1},
    "OpenAIEndpoint": {"engine": ENGINE, "tokenizer": None, "max_context_tokens": 8},
    "ProcessModelReward": {"model": "none"},
    "RemoteReward": {"urls": "http://127.0.0.1:1"},
    "RolloutDump": {"folder": "dumped"},
    "SampleTable": {},
    "SandboxPool": {"spec": WORKER, "workers": 1, "timeout": 1.0},
    "SandboxedReward": {"reward": "math.fsum"},
    **{name: {"limit": 1.0} for name in ("ClipRewards", "StopEarly")},
    **{name: {"coef": 0.1} for name in ("EntropyBonus", "KLInReward", "KLPenalty", "PretrainingLoss", "StopProperly")},
    **{name: {"target": 0.1} for name in ("EntropyTarget", "KLTarget")},
    "CriticWarmup": {"steps": 1},
    "DivergenceLoss": {"divergence": "jsd"},
    "MissingEndPenalty": {"penalty": 1.0},
    "OffPolicyMask": {"threshold": 0.1},
    "Rejection": {"level": "token", "divergence": "k1", "high": 2.0},
    "TopEntropy": {"fraction": 0.2},
    "SubprocessReward": {"reward": "math.fsum"},
    "Server": {"app": None},
    "ScalarModule": {"model": "none", "lr": 1e-6},
    "StepLoader": {
        "examples": TABLE, "collate": list, "micro_batch_size": 1,
    },
    "GymEnvironment": {"environment": SimpleNamespace(reset=print, step=print), "parse_action": str},
    "ToolEnvironment": {"tools": [print]},
    "MCPTools": {"server": "http://127.0.0.1:1/mcp"},
    "ServedModel": {"model": "none", "urls": "http://127.0.0.1:1"},
    "VLLMServer": {"urls": "http://127.0.0.1:1"},
    "WeightedSum": {"parts": {"one": len}},
    "UnpairedLoader": {
        "examples": TABLE, "collate": list, "micro_batch_size": 1,
    },
}  # fmt: skip
"""Arguments without a default, by class. Modules, DataModules and the rest need what is in :func:`required`."""

ANY = "*"
ALLOWED: dict[tuple[str, str], tuple[tuple[Any, ...], str]] = {
    (ANY, "seed"): ((-1,), "any integer seeds"),
    (ANY, "tiled_mlp"): ((True,), "tiles of the default size"),
    ("Probe", "tolerance"): ((math.inf,), "switches the probe off"),
    ("CosineLength", "success_threshold"): ((-1.0,), "rewards may be negative"),
    **{
        ("CosineLength", name): ((-1.0,), "a reward may be negative")
        for name in (
            "correct_short",
            "correct_long",
            "wrong_short",
            "wrong_long",
            "at_limit",
        )
    },
    ("Validation", "success_threshold"): ((-1.0,), "rewards may be negative"),
    ("Alarm", "low"): ((-1.0,), "metrics may be negative"),
    ("Alarm", "high"): ((-1.0,), "metrics may be negative"),
    ("ReplayBuffer", "min_reward"): ((-1.0,), "rewards may be negative"),
    ("EntropyBonus", "coef"): ((-1.0,), "a penalty for entropy"),
    ("Rejection", "high"): ((math.inf,), "no upper bound"),
    ("StopProperly", "coef"): ((-1.0,), "the reward of answers that were cut off"),
    ("GymEnvironment", "invalid_reward"): ((-1.0,), "rewards may be negative"),
    ("BySuccess", "low"): ((-1.0,), "rewards may be negative"),
    ("SamplingSpec", "presence_penalty"): ((-1.0,), "a bonus for what was said before"),
    ("SamplingSpec", "frequency_penalty"): ((-1.0,), "a bonus for what was said before"),
    (ANY, "on_failure"): ((-1.0,), "a reward may be negative"),
    ("RewardModel", "weights"): ((-1.0,), "the score of what is not wanted"),
    ("SimPOModule", "alpha"): ((-1.0,), "AlphaPO's exponent has either sign"),
}
"""(class, argument): values that are taken, and why."""


def public_classes() -> dict[str, type]:
    found: dict[str, type] = {}
    for room in ROOMS:
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
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    given = {name: "none" for name in ("model", "teacher") if name in parameters}
    if "data" in parameters:
        given["data"] = "none.jsonl"
    return REQUIRED.get(kind.__name__, given)


def wrong_values(name: str, argument: str, kinds: list[Any]) -> list[Any]:
    wrong: list[Any] = [math.nan, math.inf, -math.inf, "1", [1], True]
    if float not in kinds and PAIR not in kinds:
        wrong += [1.5, 2.0]
    if type(None) not in kinds:
        wrong += [None]
    wrong += [-1.0 if float in kinds or PAIR in kinds else -1]
    allowed = [value for key in ((ANY, argument), (name, argument)) for value in ALLOWED.get(key, ((), ""))[0]]
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


@pytest.mark.parametrize("name", sorted({name for name, _, _ in CASES}))
def test_the_smallest_call_is_taken(name: str) -> None:
    CLASSES[name](**required(CLASSES[name]))


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
    for name, argument in ALLOWED:
        assert any(argument == other and name in (ANY, kind) for kind, other, _ in CASES), f"no {name}({argument}=...)"
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
