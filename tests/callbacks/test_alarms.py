"""Alarms are triggered once, for metrics out of bounds, and give advice."""

import math
from pathlib import Path

import pytest
from rl_runs import digits, fit_run

from rlhfkit import RolloutCallback, SamplingSpec
from rlhfkit.callbacks.rollout.parts.alarms import ROLLOUT_ALARMS, Alarm, Alarms


@pytest.mark.parametrize(
    ("value", "rings"), [(0.2, False), (0.1, False), (0.3, False), (0.05, True), (0.31, True), (math.nan, True)]
)
def test_an_alarm_rings_outside_its_bounds(value: float, rings: bool) -> None:
    alarm = Alarm(metric="a", low=0.1, high=0.3, advice="do")
    assert alarm.is_triggered({"a": value}) is rings
    assert not alarm.is_triggered({"b": value})


def test_each_rings_once(caplog: pytest.LogCaptureFixture) -> None:
    alarms = Alarms([Alarm(metric="a", high=1.0, advice="lower it"), Alarm(metric="b", low=0.0, advice="raise it")])
    assert [alarm.metric for alarm in alarms.check_metrics({"a": 2.0, "b": 1.0}, 3)] == ["a"]
    assert alarms.check_metrics({"a": 2.0, "b": 1.0}, 4) == []
    assert [alarm.metric for alarm in alarms.check_metrics({"a": 2.0, "b": -1.0}, 5)] == ["b"]
    assert caplog.messages == ["iteration 3: a is 2: lower it", "iteration 5: b is -1: raise it"]


def test_a_metric_of_nothing_is_no_disagreement_of_engine_and_trainer(caplog: pytest.LogCaptureFixture) -> None:
    Alarms().check_metrics({"rollout_corr/logprob_abs_diff_mean": math.nan}, 3)
    assert "nan: there is nothing to compute it of: no token was trained on" in caplog.text
    assert "disagree" not in caplog.text


def test_an_alarm_on_a_metric_that_is_not_logged_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    typed_wrong = Alarm(metric="rollout/truncated_fractions", high=0.5, advice="raise max_new_tokens")
    alarms = Alarms([*ROLLOUT_ALARMS, typed_wrong, Alarm(metric="loss", high=5.0, advice="lower the learning rate")])
    logged = {"rollout/truncated_fraction": 0.1, "rollout/reward": 0.2, "loss": 1.0}
    for iteration in range(3):
        assert alarms.check_metrics(logged, iteration) == []
    assert caplog.messages == [
        "an alarm on rollout/truncated_fractions has nothing to check: iteration 0 logged no such metric; near it are "
        "rollout/truncated_fraction"
    ]


def test_a_run_that_ends_inside_an_iteration_names_that_one(tmp_path: Path) -> None:
    alarms = Alarms([Alarm(metric="rollout/length", low=100.0, advice="longer")])
    sampling = SamplingSpec(group_size=4, max_new_tokens=8)
    fit_run(tmp_path, rollouts=RolloutCallback(digits, sampling=sampling, parts=[alarms]), max_steps=1)
    assert [iteration for iteration, _, _ in alarms.triggered] == [0]
