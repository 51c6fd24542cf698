"""Samples on disk, replayed runs, and invariants.

Covers ``callbacks/dump.py``, ``callbacks/invariants.py`` and ``rollout/replay.py``. Invariants that hold: of replayed
groups in ``rollout/test_sharing.py``, of continued ones in ``rollout/test_oversampling.py``.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import SaveAt, digits, fit_run, setup_run
from torch import Tensor

from rlhfkit import (
    GRPOModule,
    Invariants,
    ReplayEngine,
    RolloutCallback,
    RolloutDump,
    Sample,
    SamplingSpec,
)
from rlhfkit.callbacks.invariants import InvariantError
from rlhfkit.data import Experience

SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)


def test_a_resume_inside_an_iteration_leaves_its_dump_and_other_samples_lie_beside_the_old(tmp_path: Path) -> None:
    folder, saved = tmp_path / "dump", tmp_path / "inside.ckpt"
    fit_run(tmp_path, callbacks=[RolloutDump(folder), SaveAt(saved)], max_epochs=3)
    contents = {path.name: path.read_text() for path in folder.iterdir()}
    assert all(len(text.splitlines()) == 32 for text in contents.values())
    (folder / "iteration_000002.jsonl").unlink()

    fit_run(tmp_path, callbacks=[RolloutDump(folder)], max_epochs=3, resume=str(saved))
    assert {path.name: path.read_text() for path in folder.iterdir()} == contents

    def other(samples: Sequence[Sample]) -> list[float]:
        return [1.0 - reward for reward in digits(samples)]

    rollouts = RolloutCallback(other, sampling=SAMPLING)
    fit_run(tmp_path, rollouts=rollouts, callbacks=[RolloutDump(folder)], max_epochs=1)
    name = "iteration_000000"
    assert (folder / f"{name}.replaced-1.jsonl").read_text() == contents[f"{name}.jsonl"]
    assert len((folder / f"{name}.jsonl").read_text().splitlines()) == 32
    assert (folder / f"{name}.jsonl").read_text() != contents[f"{name}.jsonl"]


def test_a_run_that_dies_has_dumped_the_iteration_it_died_in_and_keeps_as_many_as_asked(tmp_path: Path) -> None:
    class Dies(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 2:
                raise KeyboardInterrupt

    folder = tmp_path / "dump"
    trainer, module, data, _ = setup_run(tmp_path, callbacks=[RolloutDump(folder, keep=2), Dies()], max_epochs=3)
    with pytest.raises(SystemExit):
        trainer.fit(module, data)
    assert sorted(path.name for path in folder.iterdir()) == ["iteration_000001.jsonl", "iteration_000002.jsonl"]


def test_a_replay_of_something_else_is_refused(tmp_path: Path) -> None:
    trainer, module, data, _ = setup_run(tmp_path, callbacks=[RolloutDump(tmp_path / "dump", keep=1)], max_epochs=2)
    trainer.fit(module, data)
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["iteration_000001.jsonl"]
    engine = ReplayEngine(tmp_path / "dump")
    with pytest.raises(KeyError, match="replay with the data, seed and sizes"):
        engine.generate(data.prompt_queue().take(8), SAMPLING, iteration=1)
    with pytest.raises(FileNotFoundError, match="record a run with RolloutDump"):
        ReplayEngine(tmp_path / "nowhere")


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


@pytest.mark.parametrize(
    ("since", "error", "message"),
    [
        (0, RuntimeError, r"row \d+ of a batch of rank 0 differs by .* from what it is alone.*see one another"),
        (4, InvariantError, r"iteration 2: row \d+ of a batch of rank 0 differs by"),  # after two iterations
    ],
    ids=["in every run's first batch", "later, by the invariants"],
)
def test_rows_that_see_one_another_stop_the_run(
    tmp_path: Path, since: int, error: type[Exception], message: str
) -> None:
    """A policy whose tokens see the mean of all others where several sequences are packed, from an update on."""

    class Leaking(GRPOModule):
        def build_policy(self) -> torch.nn.Module:
            policy = super().build_policy()

            def mix(_: Any, args: Any, given: dict[str, Any]) -> Any:
                layout, hidden = given.get("packed_layout"), given["hidden_states"]
                leaks = layout is not None and len(layout.places) > 1 and self.global_step >= since
                return args, {**given, "hidden_states": hidden + 3 * hidden.mean(1, keepdim=True) if leaks else hidden}

            policy.model.layers[0].self_attn.register_forward_pre_hook(mix, with_kwargs=True)
            return policy

    checks = [Invariants()] if since else []
    trainer, module, data, _ = setup_run(tmp_path, module=Leaking, callbacks=checks, max_epochs=3)
    with pytest.raises(error, match=message):
        trainer.fit(module, data)
    assert trainer.global_step == since
