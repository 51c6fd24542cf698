"""Rewards of episodes, on samples written by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from rewards.samples import sampled, scored
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rewards import EnvironmentReward, LastTurnReward, WeightedSum, exact_match
from rlhfkit.rewards.base import reward_metrics


def episode(reward: float | None, last: str = "4", finish: Any = "stop", failed: bool = False) -> Sample:
    """Said "1", was told "4", said ``last``."""
    info = {"reward": reward, "failed": failed, "last_text": last}
    prompt = Prompt(0, [9], answer="4")
    return Sample(
        prompt, 0, [1, 4, 2], [-1.0, 0.0, -1.0], [0] * 3, finish, action_mask=[True, False, True], text="14" + last,
        token_rewards=[0.25, 0.0, 0.5], info=info,
    )  # fmt: skip


def test_the_environments_rewards_are_the_reward() -> None:
    samples = [episode(0.75), episode(None, finish="abort", failed=True), episode(-1.0, finish="length")]
    assert scored(EnvironmentReward(), samples) == [0.75, None, -1.0]
    assert samples[0].token_rewards.tolist() == [0.25, 0.0, 0.5]
    assert scored(EnvironmentReward(truncated="mask"), samples) == [0.75, None, None]


def test_what_the_environment_said_is_no_answer_of_the_policy() -> None:
    samples = [episode(0.0, last="4"), episode(0.0, last="5"), episode(None, last="4", failed=True)]
    assert scored(LastTurnReward(exact_match), samples) == [1.0, 0.0, None]
    assert samples[0].reward_parts == {"exact_match": 1.0}
    assert samples[0].text == "144"


def test_parts_and_metrics_of_a_reward_inside_are_kept() -> None:
    class Length:
        def __call__(self, samples: Sequence[Sample]) -> list[float]:
            return [float(len(sample.text)) for sample in samples]

        def metrics(self) -> dict[str, float]:
            return {"length/failed_fraction": 0.5}

    samples = [episode(0.5, last="44")]
    inside = LastTurnReward(WeightedSum(length=(Length(), 2.0)))
    reward = WeightedSum(episode=EnvironmentReward(), rest=inside)
    assert scored(reward, samples) == [0.5 + 2.0 * 2]
    assert samples[0].reward_parts == {"length": 2.0, "episode": 0.5, "rest": 4.0}
    assert reward_metrics(reward) == {"length/failed_fraction": 0.5}


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(TypeError, match="reward must be callable"):
        LastTurnReward(3.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give RolloutCallback"):
        EnvironmentReward()([sampled()])
