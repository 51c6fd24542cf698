"""Parts of the rollout side: their plain values, and the states of those that are there or not.

A part of a user's own that wraps the source is in ``tests/test_docs_parts.py``.
"""

import json
from typing import Any

import pytest
from rl_runs import digits

from rlhfkit import (
    Ahead,
    DynamicSampling,
    Oversampling,
    ReplayBuffer,
    RolloutCallback,
    Sample,
    SamplingSpec,
    Validation,
    callbacks,
)
from rlhfkit.callbacks import Alarm, Alarms, Probe, SharedDevices
from rlhfkit.callbacks.rollout.part import RolloutPart, make_rollout_part

SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)
"""What every run has: bounds on metrics, and a comparison after each sync."""


def by_digits(sample: Sample) -> float:
    """What is compared."""
    return digits([sample])[0]


GIVEN: dict[type[RolloutPart], list[dict[str, Any]]] = {
    Ahead: [{"max_staleness": 2, "in_flight": True}],
    Alarms: [{}, {"alarms": [Alarm(metric="loss", high=5.0, advice="lower the learning rate")]}],
    DynamicSampling: [{"by": "right", "max_rounds": 2}, {"by": by_digits}],
    Oversampling: [{"share": 0.5, "continued": True}],
    Probe: [{"tolerance": 0.1}],
    ReplayBuffer: [{"capacity": 3, "fraction": 0.25, "max_age": 7, "min_reward": 0.5, "by": "right"}],
    SharedDevices: [{"offload_training": False}],
    Validation: [{"sampling": {"one": SamplingSpec(max_new_tokens=7)}, "success_threshold": 0.5}],
}


def test_every_part_that_is_passed_is_made_again_of_plain_values() -> None:
    """As in YAML and in checkpoints: JSON is enough."""
    for kind, several in GIVEN.items():
        assert kind.__name__ in callbacks.__all__
        for arguments in several:
            part = kind(**arguments)
            plain = part.plain()
            again = make_rollout_part(json.loads(json.dumps(plain)))
            assert type(again) is kind
            assert again.plain() == plain
            assert all(getattr(again, name) == getattr(part, name) for name in arguments)
    assert repr(DynamicSampling(by="right")) == "DynamicSampling(by='right')"
    rollouts = RolloutCallback(digits, parts=["rlhfkit.Ahead", DynamicSampling().plain()])
    assert [type(part) for part in rollouts.parts] == [Ahead, DynamicSampling, Validation, Probe, Alarms]


def test_a_part_that_is_given_takes_the_place_of_the_default_one_and_two_of_a_class_keep_two_states() -> None:
    given = [Alarms([]), ReplayBuffer(), ReplayBuffer(by="right"), Probe(1.0)]
    rollouts = RolloutCallback(digits, parts=given)
    assert [type(part) for part in rollouts.parts] == [*map(type, given), Validation]
    assert list(rollouts.state_dict()["parts"]) == ["ReplayBuffer[0]", "ReplayBuffer[1]"]


def test_states_of_parts_that_are_not_there_are_named(caplog: pytest.LogCaptureFixture) -> None:
    state = RolloutCallback(digits).state_dict() | {"parts": {"ReplayBuffer[0]": [1], "Ahead[0]": []}}
    RolloutCallback(digits).load_state_dict(state)
    assert caplog.messages == ["the checkpoint has states of parts that this run has not: ReplayBuffer[0]"]
