"""Rewards in child processes: values are the reward's own, and every failure is handled as ``on_failure`` says.

Covers ``reward_worker.py`` and ``rewards/subprocesses.py`` too.
"""

import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rewards import worker_rewards
from rewards.samples import sampled, scored
from rewards.sandbox import misbehaving
from rlhfkit.data import Sample
from rlhfkit.rewards import LastTurnReward, SandboxedReward, WeightedSum, exact_match
from rlhfkit.rewards.base import RewardError, answer_reader, reward_metrics, score_samples, tell_progress

NAME = "rewards.sandbox.misbehaving.reward"


def samples(*texts: str, answer: object = None) -> list[Sample]:
    return [sampled(text, answer, prompt=index + 10) for index, text in enumerate(texts)]


@pytest.fixture(scope="module")
def reward() -> Iterator[SandboxedReward]:
    made = SandboxedReward(NAME, timeout=4.0, workers=2)
    yield made
    made.close()


def test_values_are_the_rewards_own(reward: SandboxedReward) -> None:
    texts = ["0.5", "none", "-3", "1e9"]
    assert reward(samples(*texts)) == misbehaving.reward(samples(*texts)) == [0.5, None, -3.0, 1e9]
    assert reward.name == "reward"
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(reward, [samples("1", "2"), samples("3"), []])) == [[1.0, 2.0], [3.0], []]


@pytest.mark.long
def test_a_reward_of_the_library_that_calls_others_has_its_parts_and_answers_there() -> None:
    """Parts, totals and metrics of all kinds are in ``test_workers.py``; those of a call that failed are NaN."""
    inner = WeightedSum(right=exact_match, last=LastTurnReward(exact_match), said=worker_rewards.obedient)
    there = SandboxedReward(inner, workers=1, batch_size=2)
    batch = samples("4", "5", "44", answer="4")
    batch[1].info["last_text"] = "4"
    score_samples(there, batch)
    assert [sample.reward_parts["right"] for sample in batch] == [1.0, 0.0, 0.0]
    assert batch[1].reward_parts["last"] == 1.0
    assert answer_reader(there)(batch[2]) == answer_reader(inner)(batch[2]) == "44"
    lost = samples("raise it", answer="4")
    assert scored(there, lost) == [None]
    assert all(math.isnan(value) for value in lost[0].reward_parts.values())
    there.close()


def test_a_plain_reward_has_metrics_and_progress_too() -> None:
    told = SandboxedReward(misbehaving.Patient(), workers=1)
    assert told(samples("1")) == [0.0]
    tell_progress(told, step=3, epoch=1)
    assert told(samples("1", "2")) == [3.0, 3.0]
    assert told.metrics()["patient/steps"] == 2.0  # the mean of three calls
    assert SandboxedReward(NAME).answer_reader() is None
    told.close()


def test_every_failure_masks_its_sample_and_is_reported(
    reward: SandboxedReward, caplog: pytest.LogCaptureFixture
) -> None:
    reward.metrics()
    batch = samples("1", "hang", "nan", "die", "raise", "leave", "text", "2")
    assert scored(WeightedSum(odd=reward), batch) == [1.0, *[None] * 6, 2.0]
    assert math.isnan(batch[1].reward_parts["odd"])
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("6 of 8 samples are not trained on: reward 'reward' failed for samples of prompts 11, 12")
    assert "prompts 11, 12, 13, 14, 15, 16\n" in message
    assert "prompt 11, sample 0: timeout: did not answer within 4 s and was killed" in message
    assert "prompt 12, sample 0: error: returned [nan] for 1 samples" in message
    assert "prompt 13, sample 0: died: the process ended with exit code 7" in message
    assert "CannotBePickled: no answer in this text" in message
    assert "prompt 15, sample 0: error: Traceback" in message  # and no death
    assert "SystemExit: 0" in message
    metrics = reward_metrics(WeightedSum(odd=reward))
    assert metrics["reward/timeout_fraction"] == 1 / 8
    assert metrics["reward/failed_fraction"] == 6 / 8
    assert 3.6 < metrics["reward/seconds_p99"] < 200  # it hangs for 300
    assert metrics["reward/seconds_p50"] < metrics["reward/seconds_p99"]
    assert reward_metrics(reward) == {}


def test_a_failure_gets_the_fallback_or_stops_as_told() -> None:
    fallback = SandboxedReward(misbehaving.reward, workers=1, on_failure=-1, batch_size=2)
    assert fallback(samples("1", "2", "3", "nan", "4")) == [1.0, 2.0, -1.0, -1.0, 4.0]
    assert fallback(samples("1", answer="twice")) == [-1.0]
    fallback.close()
    strict = SandboxedReward("rewards.sandbox.misbehaving:reward_later", workers=1, on_failure="stop", name="judge")
    assert strict(samples("1", "2")) == [1.0, 2.0]
    with pytest.raises(
        RewardError, match=r"(?s)reward 'judge' failed for samples of prompts 11\nprompt 11, sample 0: err"
    ):
        strict(samples("1", "text"))
    strict.close()


def test_a_module_that_breaks_when_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rewards.py").write_text("raise LookupError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken = SandboxedReward("broken_rewards.any", workers=1)
    with pytest.raises(RuntimeError, match=r"(?s)no process could be started to run reward 'any'.*no licence"):
        broken(samples("1"))
    assert "broken_rewards" not in sys.modules  # it never ran here


class Local:
    def __call__(self, batch: list[Sample]) -> list[float]:
        return [0.0] * len(batch)


def test_what_the_running_script_defines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    monkeypatch.setattr(Local, "__module__", "__main__")
    monkeypatch.setattr(__main__, "Local", Local, raising=False)
    with pytest.raises(ValueError, match=r"defined in the script that is running: define it .* \(my_rewards\.py\)"):
        SandboxedReward(Local())
