"""The formulas of the parts that shape rewards, by hand."""

import dataclasses
import functools
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import digits, fit_run
from transformers import AutoModelForSequenceClassification

from modules.on_policy.preparation.test_rewards import reward_model
from modules.on_policy.test_base import experience
from rlhfkit import GRPOModule, RolloutCallback, SamplingSpec
from rlhfkit.modules.parts.reward_model import RewardModel
from rlhfkit.modules.parts.rewards import ClipRewards, MaskTruncated, MissingEndPenalty, NormalizeRewards, StopProperly
from rlhfkit.parts import Part

from .cases import ENDS, UNSCALED, attached, case

REWARDS = [1.0, -2.0, 0.5, 3.0, 0.0, math.nan]
CUT_OFF = [True, True, False, False, True, False]


def shaped(part: Part, rewards: list[float] = REWARDS) -> list[float]:
    """Rewards after a part, which belongs to a module that is not loaded."""
    if part.module is None:
        attached(part)
    rows = dataclasses.replace(experience(), rewards=torch.tensor(rewards), truncated=torch.tensor(CUT_OFF))
    found = part.prepare(rows).rewards.tolist()
    assert [math.isnan(value) for value in found] == [math.isnan(value) for value in rewards]  # missing ones stay so
    return found


case(NormalizeRewards, module=UNSCALED)("test_ppo.py")


@case(partial(StopProperly, 0.25), module=UNSCALED, sampling=ENDS)
def stop_properly_formula(folder: Path) -> None:
    """In [0, 1] a factor of what is positive, below 0 the reward itself."""
    assert shaped(StopProperly(0.25))[:5] == [0.25, -2.0, 0.5, 3.0, 0.0]
    assert shaped(StopProperly(0.0))[:5] == [0.0, -2.0, 0.5, 3.0, 0.0]
    assert shaped(StopProperly(-1.5))[:5] == [-1.5, -1.5, 0.5, 3.0, -1.5]


@case(partial(MissingEndPenalty, 0.5), module=UNSCALED, sampling=ENDS)
def missing_end_formula(folder: Path) -> None:
    """A difference."""
    assert shaped(MissingEndPenalty(0.75))[:5] == [0.25, -2.75, 0.5, 3.0, -0.75]


@case(partial(ClipRewards, 0.1), module=UNSCALED)
def clip_formula(folder: Path) -> None:
    """Limits on both sides."""
    assert shaped(ClipRewards(0.75))[:5] == [0.75, -0.75, 0.5, 0.75, 0.0]


@case(MaskTruncated, sampling=ENDS)
def mask_formula(folder: Path) -> None:
    """No token of an answer that was cut off; all others' stay."""
    rows = dataclasses.replace(experience(), truncated=torch.tensor(CUT_OFF))
    part = MaskTruncated()
    module = GRPOModule("no/model", parts=[part])
    assert module.order[-1] is part  # after the advantages, in whose baseline these answers are
    found = part.prepare(rows).action_mask
    for row, cut_off in enumerate(CUT_OFF):
        assert torch.equal(found[row], torch.zeros(6, dtype=torch.bool) if cut_off else rows.action_mask[row])


# ---------------------------------------------------------------------- scores of models


@functools.cache
def reward_folder() -> str:
    """A reward model that normalizes its scores, the same in every process."""
    torch.manual_seed(7)
    return reward_model(Path(tempfile.mkdtemp()))


def reward_models() -> RewardModel:
    return RewardModel({"one": reward_folder(), "two": reward_folder()}, {"two": -0.5})


@case(reward_models, "RewardModel", module=UNSCALED, metrics=("rollout/reward_model/one", "rollout/reward_model/two"))
def reward_model_formula(folder: Path) -> None:
    """The output at the last token of each sample, one sequence at a time, shifted and scaled as the model says."""
    plain = AutoModelForSequenceClassification.from_pretrained(reward_folder())

    def run(part: RewardModel, reward: Any) -> tuple[Any, list[float]]:
        rollouts = RolloutCallback(reward, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
        fit_run(folder, module_arguments={"parts": [part]}, rollouts=rollouts, max_epochs=1)
        scores = []
        for sample in rollouts.samples:
            with torch.no_grad():
                hidden = plain.base_model(torch.tensor([sample.all_token_ids.tolist()])).last_hidden_state[0, -1]
                scores.append((float(plain.score(hidden)) - 0.5) / 2.0)
        return rollouts, scores

    rollouts, scores = run(reward_models(), digits)
    for name in ("one", "two"):
        assert rollouts.experience.reward_parts[f"model/{name}"].tolist() == pytest.approx(scores, abs=1e-5)
    expected = [score + 0.5 * mine for score, mine in zip(digits(rollouts.samples), scores, strict=True)]
    assert rollouts.experience.rewards.tolist() == pytest.approx(expected, abs=1e-5)
    rollouts, scores = run(RewardModel(reward_folder(), -0.5), None)  # reward enough
    assert rollouts.experience.rewards.tolist() == pytest.approx([-0.5 * score for score in scores], abs=1e-5)
    assert rollouts.experience.advantages.abs().sum() > 0
