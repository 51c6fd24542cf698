"""An argument that a class does not take is answered with the nearest one, and with ours of other libraries' names.

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

PARTS = [f"rlhfkit.modules.parts.{one.name}" for one in pkgutil.iter_modules(parts.__path__)]
ROOMS = ("rlhfkit", "rlhfkit.rewards", "rlhfkit.losses.preference.dpo", *PARTS)


@functools.cache
def arguments(name: str) -> frozenset[str]:
    """All keyword arguments of a class of ours, or of Lightning's Trainer, with those it passes to its bases."""
    if name == "Trainer":
        found = importlib.import_module("lightning").Trainer
    else:
        found = next(getattr(room, name) for room in map(importlib.import_module, ROOMS) if hasattr(room, name))
    return frozenset(constructor_arguments(found))


def test_counterparts_exist_and_no_name_of_ours_is_one_of_others() -> None:
    """Otherwise the hint would lead away from an argument that means something else here."""
    page = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text()
    for name, others in {"": [page], **OTHER_NAMES}.items():
        for kind, argument in re.findall(r"(\w+)\((\w+)=\)", " ".join(others)):
            assert argument in arguments(kind), (kind, argument)
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
        ("PreferenceDataModule", {"train_dataset": 1}, "PreferenceDataModule .* train_dataset is data here"),
        ("SFTDataModule", {"eval_dataset": 1}, "is validation_data here"),
        ("PromptDataModule", {"num_iterations": 2}, "num_iterations is epochs_per_iteration here"),
        ("RolloutCallback", {"reward_funcs": []}, "RolloutCallback .* reward_funcs is reward here"),
        ("VLLMPool", {"vllm_gpu_memory_utilization": 0.3}, "VLLMPool .* is gpu_memory_utilization here"),
        ("SamplingSpec", {"num_generations": 8}, "SamplingSpec takes no argument .* is group_size here"),
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
