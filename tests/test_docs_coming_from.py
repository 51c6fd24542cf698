"""docs/coming_from.md and the table that answers other libraries' names say the same, and name arguments that exist.

Covers argument_names.py.
"""

import functools
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import rlhfkit
from rlhfkit.argument_names import OTHER_NAMES, constructor_arguments
from rlhfkit.modules import parts

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"
PARTS = [f"rlhfkit.modules.parts.{one.name}" for one in pkgutil.iter_modules(parts.__path__)]
ROOMS = ("rlhfkit", "rlhfkit.rewards", "rlhfkit.losses.preference.dpo", *PARTS)
CALL = re.compile(r"(\w+)\((\w+)=\)")


def rows() -> dict[str, list[tuple[str, str]]]:
    """For each name elsewhere the class and argument that the page gives."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [line.strip("|").split(" | ") for line in lines]
    return {name: CALL.findall(ours) for names, ours, *_ in cells for name in re.findall(r"`([^`]+)`", names)}


def test_the_page_and_the_table_have_the_same_names() -> None:
    given = {name: {argument for _, argument in ours} for name, ours in rows().items()}
    assert set(given) == set(OTHER_NAMES)
    for name, others in OTHER_NAMES.items():
        assert {
            argument for one in others for _, argument in CALL.findall(one) or ([] if "(" in one else [("", one)])
        } <= given[name], name


@functools.cache
def arguments(name: str) -> frozenset[str]:
    """All keyword arguments of a class of ours, or of Lightning's Trainer, with those it passes to its bases."""
    if name == "Trainer":
        found = importlib.import_module("lightning").Trainer
    else:
        found = next(getattr(room, name) for room in map(importlib.import_module, ROOMS) if hasattr(room, name))
    return frozenset(constructor_arguments(found))


def test_counterparts_are_arguments_that_exist() -> None:
    calls = {call for ours in rows().values() for call in ours}
    calls |= {call for others in OTHER_NAMES.values() for one in others for call in CALL.findall(one)}
    assert [f"{name}({argument}=)" for name, argument in sorted(calls) if argument not in arguments(name)] == []


def test_a_name_of_ours_is_no_name_of_others() -> None:
    """Otherwise the hint would lead away from an argument that means something else here."""
    for name, others in OTHER_NAMES.items():
        for kind, argument in (call for one in others for call in CALL.findall(one)):
            assert name == argument or name not in arguments(kind), (name, kind)


@pytest.mark.parametrize(
    ("called", "given", "answer"),
    [
        ("GRPOModule", {"beta": 0.1}, "GRPOModule takes no argument beta: .* beta is kl_coef here"),
        ("SFTModule", {"learning_rate": 1.0}, "SFTModule takes no argument learning_rate: .* is lr here"),
        ("DPOModule", {"learning_rat": 1.0}, "DPOModule takes no argument learning_rat"),
        ("DPOModule", {"f_alpha_divergence_coef": 0.3}, r"DPOModule .* divergence=AlphaDivergence\(alpha=\)"),
        ("PPOModule", {"cliprange_value": 0.2}, r"PPOModule .* parts=\[ValueLoss\(clip=\)\]"),
        ("SFTModule", {"neftune_noise_alpha": 5.0}, r"NEFTune\(alpha=\)"),
        ("GRPOModule", {"num_generations": 8}, r"did you mean SamplingSpec\(group_size=\)\?"),
        ("KTOModule", {"xyz": 8}, "KTOModule takes no argument xyz$"),
        (
            "PreferenceDataModule",
            {"train_dataset": 1},
            "PreferenceDataModule .* train_dataset is data here",
        ),
        ("SFTDataModule", {"eval_dataset": 1}, "is validation_data here"),
        ("PromptDataModule", {"num_iterations": 2}, "num_iterations is epochs_per_iteration here"),
        ("RolloutCallback", {"reward_funcs": []}, "RolloutCallback .* reward_funcs is reward here"),
        ("VLLMPool", {"vllm_gpu_memory_utilization": 0.3}, "VLLMPool .* is gpu_memory_utilization here"),
        (
            "SamplingSpec",
            {"num_generations": 8},
            "SamplingSpec takes no argument num_generations: .* is group_size here",
        ),
        ("LoRA", {"lora_alpha": 8}, "LoRA .* lora_alpha is alpha here"),
        ("RolloutCallback", {"group_size": 8}, r"did you mean SamplingSpec\(group_size=\)\?"),
    ],
)
def test_a_name_from_elsewhere_is_answered(called: str, given: dict[str, Any], answer: str) -> None:
    """The error names the class that was called, not the base whose constructor found the argument."""
    first = () if called in ("RolloutCallback", "VLLMPool", "SamplingSpec", "LoRA") else ("somewhere",)
    more = {"rollout_batch_size": 4, "micro_batch_size": 4} if called == "PromptDataModule" else {}
    with pytest.raises(TypeError, match=answer):
        getattr(rlhfkit, called)(*first, **more, **given)
