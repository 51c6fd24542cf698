"""Weighted sums whose parts are normalised, metrics of rewards, and rewards of episodes."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rewards.samples import sampled, scored
from rlhfkit.data import Prompt, Sample
from rlhfkit.losses import gdpo_advantages, group_advantages
from rlhfkit.rewards import EnvironmentReward, LastTurnReward, WeightedSum, exact_match
from rlhfkit.rewards.base import mean_metrics, reward_metrics, tell_progress

VALUES = {
    "correct": [0.0, 1.0, 1.0, 0.0, 1.0, 0.0],
    "length": [900.0, 30.0, 410.0, 20.0, 700.0, 100.0],
    "flat": [0.1] * 6,
}


def samples(prompts: tuple[int, ...] = (4, 9, 4, 9, 4, 9)) -> list[Sample]:
    return [sampled(prompt=prompt, place=row) for row, prompt in enumerate(prompts)]


def part(name: str) -> object:
    return lambda batch: [VALUES[name][sample.sample_index] for sample in batch]


def test_parts_normalised_by_group_then_scaled_by_the_batch_are_gdpo() -> None:
    weights = {"correct": 1.0, "length": -0.5, "flat": 2.0}
    batch = samples()
    reward = WeightedSum({name: (part(name), weights[name]) for name in VALUES}, normalize=group_advantages)
    totals = torch.tensor(scored(reward, batch), dtype=torch.float64)
    group = torch.tensor([sample.prompt.index for sample in batch])
    columns = torch.tensor([VALUES[name] for name in VALUES], dtype=torch.float64).T
    expected = gdpo_advantages(columns, group, weights=list(weights.values()))
    torch.testing.assert_close(group_advantages(totals, group, scale="batch"), expected)
    assert [sample.reward_parts["length"] for sample in batch] == VALUES["length"]  # logged as they were


def test_a_missing_value_stays_missing_and_a_lone_sample_keeps_its_value() -> None:
    """A group of 1 and 3 has mean 2 and deviation √2."""
    reward = WeightedSum(only=lambda _: [1.0, None, 3.0, 7.0], normalize=group_advantages)
    side = 1 / (math.sqrt(2) + 1e-4)
    assert scored(reward, samples((1, 1, 1, 2))) == [pytest.approx(-side), None, pytest.approx(side), 7.0]


def test_what_normalises_returns_is_checked() -> None:
    with pytest.raises(ValueError, match=r"returned shape \(\) for the 6 values of 'a'"):
        scored(WeightedSum(a=part("flat"), normalize=lambda values, group: values.sum()), samples())


def test_ranks_that_scored_nothing_do_not_count_in_a_mean() -> None:
    assert mean_metrics([{"a": 1.0}, {}, {"a": 2.0, "b": 5.0}]) == {"a": 1.5, "b": 5.0}


def test_metrics_of_parts_with_one_name_are_all_kept() -> None:
    class Judge:
        def __init__(self, latency: float, name: str, metric: str = "latency") -> None:
            self.latency, self.name, self.metric = latency, name, metric

        def __call__(self, batch: list[Sample]) -> list[float]:
            return [0.0] * len(batch)

        def metrics(self) -> dict[str, float]:
            return {self.metric: self.latency} if self.latency else {}

    reward = WeightedSum(a=Judge(1.0, "judge"), b=Judge(0.0, "judge"), c=Judge(3.0, "other", "seconds"))
    assert reward_metrics(reward) == {"a/latency": 1.0, "seconds": 3.0}  # also where b has nothing to report
    reward.rewards["b"].latency = 2.0
    assert reward_metrics(reward) == {"a/latency": 1.0, "b/latency": 2.0, "seconds": 3.0}
    distinct = WeightedSum(a=Judge(1.0, "one"), b=Judge(2.0, "two"))
    assert reward_metrics(distinct) == {"a/latency": 1.0, "b/latency": 2.0}


def test_the_example_of_weights_that_change_over_training() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Fading" in block]
    names: dict[str, Any] = {"WeightedSum": WeightedSum}
    exec(example[: example.index("RolloutCallback(")], names)
    reward = names["Fading"](correct=lambda samples: [0.25], format=lambda samples: [1.0])
    totals: list[float | None] = []
    for step in (0, 50, 200):
        tell_progress(reward, step=step, epoch=0)
        totals += scored(reward, samples((0,)))
    assert totals == [1.25, 0.75, 0.25]


# ---------------------------------------------------------------------- of episodes


def episode(reward: float | None, last: str = "4", finish: Any = "stop", failed: bool = False) -> Sample:
    """Said "1", was told "4", said ``last``."""
    info = {"reward": reward, "failed": failed, "last_text": last}
    prompt = Prompt(0, [9], answer="4")
    return Sample(
        prompt, 0, [1, 4, 2], [-1.0, 0.0, -1.0], [0] * 3, finish, action_mask=[True, False, True], text="14" + last,
        token_rewards=[0.25, 0.0, 0.5], info=info,
    )  # fmt: skip


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


def test_samples_of_no_environment_are_named() -> None:
    with pytest.raises(ValueError, match="give RolloutCallback"):
        EnvironmentReward()([sampled()])
