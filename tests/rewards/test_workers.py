"""Rewards in worker processes are those of the training process, and failures are named or survived."""

import logging
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rewards import worker_rewards
from rewards.samples import sampled
from rlhfkit.data import Sample
from rlhfkit.rewards import SubprocessReward, WeightedSum
from rlhfkit.rewards.base import CompositeReward, RewardError, part_names, reward_metrics, score_samples, tell_progress


def samples(*texts: str, prompts: int = 100) -> list[Sample]:
    return [
        sampled(text, prompt=place % prompts + 10, place=place, tokens=(3, place)) for place, text in enumerate(texts)
    ]


def test_parts_totals_and_metrics_are_those_of_the_reward_itself() -> None:
    texts = ["a", "bb", "ccc", "dddd", "none", "ff", "", "h"]
    here, there = samples(*texts, prompts=3), samples(*texts, prompts=3)
    score_samples(worker_rewards.several, here)
    reward = SubprocessReward(worker_rewards.several, workers=2)
    score_samples(reward, there)
    assert repr(there) == repr(here)  # a missing part is NaN
    assert here[0].reward_parts["one"] == 1.0
    for told, batch in ((worker_rewards.several, here), (reward, there)):
        tell_progress(told, step=7, epoch=2)
        score_samples(told, batch)
    assert repr(there) == repr(here)
    assert here[0].reward_parts["one"] == 208.0
    assert isinstance(reward, CompositeReward)
    assert part_names(reward) == ["length", "last", "one"]
    calls = {f"weighted_sum/worker/{name}" for name in ("timeout_fraction", "failed_fraction", "seconds_p50")}
    metrics = reward_metrics(reward)
    assert set(metrics) == {"counting/calls", "weighted_sum/worker/seconds_p99", *calls}
    assert metrics["counting/calls"] == 2.0
    assert reward_metrics(reward) == {}
    assert reward([]) == []
    reward.close()


@pytest.mark.long
def test_samples_of_a_prompt_go_to_one_process_and_prompts_to_all() -> None:
    reward = SubprocessReward(WeightedSum(process=worker_rewards.process, group=worker_rewards.of_group), workers=2)
    batch = samples(*["text"] * 12, prompts=4)
    score_samples(reward, batch)
    assert all(sample.reward_parts["group"] == 3 for sample in batch)
    where = {sample.prompt.index: sample.reward_parts["process"] for sample in batch}
    assert all(sample.reward_parts["process"] == where[sample.prompt.index] for sample in batch)
    assert len(set(where.values())) == 2
    assert os.getpid() not in where.values()
    with ThreadPoolExecutor(3) as threads:  # validation may score while a thread does
        found = list(threads.map(reward, [batch] * 6))
    assert [len(values) for values in found] == [12] * 6
    assert {value for values in found for value in values} <= {pid + 3 for pid in where.values()}
    reward.close()


@pytest.mark.long
def test_a_process_that_ends_is_replaced_and_failures_name_their_prompts_or_do_what_was_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reward = SubprocessReward("rewards.obedient_reward.obedient", timeout=60)
    assert not isinstance(reward, CompositeReward)
    assert reward.name == "obedient"
    once = f"once {tmp_path / 'seen'}"
    assert reward(samples("abc", once)) == [3.0, float(len(once))]
    assert "ended with exit code 4; its samples were scored once more" in caplog.text
    reward.metrics()
    with pytest.raises(RewardError, match=r"(?s)'obedient' failed for samples of prompts 10, 11.*LookupError: no luck"):
        reward(samples("abc", "raise luck"))
    assert reward(samples("ab")) == [2.0]  # by the same process
    reward.on_failure = "mask"
    with caplog.at_level(logging.WARNING):
        assert reward(samples("die")) == [None]
    assert "1 of 1 samples are not trained on" in caplog.text
    assert "ended with exit code 3" in caplog.text
    assert reward.metrics()["obedient/worker/failed_fraction"] == pytest.approx(2 / 3)
    copy = pickle.loads(pickle.dumps(reward))
    assert (copy.sandbox.timeout, copy.on_failure, copy.sandbox.workers, copy.name) == (60, "mask", 1, "obedient")
    assert copy.sandbox.processes[0].pid is None  # it starts its own
    reward.close()
