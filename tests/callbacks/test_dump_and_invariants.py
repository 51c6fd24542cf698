"""Runs that are written down, replayed, and watched."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import digits, setup_run, weights
from torch import Tensor

from rlhfkit import GRPOModule, Invariants, ReplayEngine, RolloutCallback, RolloutDump, SamplingSpec
from rlhfkit.callbacks import InvariantError
from rlhfkit.data import Experience

SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)


def test_a_replayed_run_is_the_recorded_one_bitwise(tmp_path: Path) -> None:
    dump = RolloutDump(tmp_path / "dump")
    trainer, module, data, _ = setup_run(tmp_path, callbacks=[dump], max_epochs=3)
    trainer.fit(module, data)
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == [f"iteration_{n:06d}.jsonl" for n in range(3)]
    first = json.loads((tmp_path / "dump" / "iteration_000000.jsonl").read_text().splitlines()[0])
    assert {"token_ids", "logprobs", "versions", "reward", "text", "prompt"} <= set(first)
    engine = ReplayEngine(tmp_path / "dump")
    rollouts = RolloutCallback(digits, engine=engine, sampling=SAMPLING)
    trainer, again, data, _ = setup_run(tmp_path, rollouts=rollouts, max_epochs=3)
    trainer.fit(again, data)
    for name, tensor in weights(module).items():
        assert torch.equal(tensor, weights(again)[name])


def test_a_replay_of_something_else_is_refused(tmp_path: Path) -> None:
    trainer, module, data, _ = setup_run(tmp_path, callbacks=[RolloutDump(tmp_path / "dump", keep=1)], max_epochs=2)
    trainer.fit(module, data)
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["iteration_000001.jsonl"]
    engine = ReplayEngine(tmp_path / "dump")
    with pytest.raises(KeyError, match="replay with the data, seed and sizes"):
        engine.generate(data.next_prompts(8), SAMPLING, iteration=1)
    with pytest.raises(FileNotFoundError, match="record a run with RolloutDump"):
        ReplayEngine(tmp_path / "nowhere")


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_must_hold_holds(tmp_path: Path, staleness: int) -> None:
    watch = Invariants()
    rollouts = RolloutCallback(digits, sampling=SAMPLING, max_staleness=staleness)
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts, callbacks=[watch], max_epochs=3)
    trainer.fit(module, data)
    assert watch.checked == 3


class Tampered(GRPOModule):
    """Prepares an iteration in which something is wrong."""

    change: Any = None

    def prepare(self, experience: Experience) -> Experience:
        return type(self).change(super().prepare(experience))


def wrong_advantage(experience: Experience) -> Experience:
    rewards = torch.where(experience.group == experience.group[0], 1.0, experience.rewards)
    return dataclasses.replace(experience, rewards=rewards, advantages=torch.ones_like(experience.rollout_logprobs))


def changed(field: str, value: float, where: str = "action_mask") -> Any:
    def change(experience: Experience) -> Experience:
        tensor: Tensor = getattr(experience, field)
        mask = getattr(experience, where)
        return dataclasses.replace(experience, **{field: tensor.masked_fill(mask, value)})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("rollout_logprobs", 0.5), "above 0"),
        (changed("advantages", float("nan")), "advantages are not all finite"),
        (changed("versions", 7), "from version 7, and the policy is at 0"),
        (changed("versions", -3), "older than max_staleness allows"),
        (lambda experience: dataclasses.replace(experience, sample_index=experience.sample_index * 0), "twice"),
        (wrong_advantage, "are all equal, and its advantages are not 0"),
    ],
    ids=["log-probs", "nan", "future", "past", "twice", "advantage"],
)
def test_what_does_not_hold_stops_the_run_and_is_named(tmp_path: Path, change: Any, message: str) -> None:
    Tampered.change = staticmethod(change)
    trainer, module, data, _ = setup_run(tmp_path, module=Tampered, callbacks=[Invariants()], max_epochs=1)
    with pytest.raises(InvariantError, match=message):
        trainer.fit(module, data)
