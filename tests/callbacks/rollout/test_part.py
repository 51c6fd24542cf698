"""Parts of the rollout side: what wraps what, their plain values, and what a resumed run has of them."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from rl_runs import digits, fit_run, setup_run, weights

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
from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.callbacks.rollout.source import Ask, Source
from rlhfkit.rollout.collector import CollectedGroups

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


class Backwards(RolloutPart):
    """Turns the order of each iteration around, and counts its iterations over stops."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[list[int]] = []
        self.calls: list[str] = []

    def attach(self, rollouts: RolloutCallback) -> None:
        self.rollouts = rollouts

    def wrap(self, source: Source) -> Source:
        self.source = source
        return self

    def collect(self, ask: Ask) -> CollectedGroups:
        collected = self.source.collect(ask)
        self.calls.append("collect")
        return dataclasses.replace(collected, prompts=collected.prompts[::-1], groups=collected.groups[::-1])

    def metrics(self, shared: SharedIteration, version: int) -> dict[str, float]:
        self.seen.append(list(dict.fromkeys(shared.summary.group.tolist())))
        return {"rollout/backwards": float(self.count)}

    def end_iteration(self, next_iteration: int) -> None:
        self.count += 1
        self.calls.append("end")

    def logged(self, trainer: L.Trainer, iteration: int) -> None:
        self.calls.append("logged")

    def state_dict(self, next_iteration: int) -> list[int]:
        return [self.count]

    def load_state_dict(self, own: Iterable[int], states: Iterable[int], *, rank: int, world_size: int) -> None:
        (self.count,) = own


def test_a_part_of_ones_own_wraps_the_source_measures_and_is_resumed(tmp_path: Path) -> None:
    def run(part: Backwards | None, **more: Any) -> Any:
        rollouts = RolloutCallback(digits, sampling=SAMPLING, parts=[] if part is None else [part])
        trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts, max_epochs=3)
        trainer.fit(module, data, **more)
        trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")
        return trainer, weights(module)

    part = Backwards()
    trainer, _ = run(part)
    assert part.rollouts is trainer.callbacks[0]
    assert part.calls == ["collect", "end", "logged"] * 3
    assert float(trainer.callback_metrics["rollout/backwards"]) == 2.0
    plain = RolloutCallback(digits, sampling=SAMPLING)
    fit_run(tmp_path, rollouts=plain, max_epochs=1)
    assert part.seen[0] == list(dict.fromkeys(sample.prompt.index for sample in plain.samples))[::-1]
    again = Backwards()
    run(again, ckpt_path=str(tmp_path / "3.ckpt"))
    assert again.count == 3
