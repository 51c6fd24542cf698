"""Training on episodes, some of which fail: GRPO and PPO, and their metrics."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import fit_run, weights

from rlhfkit import (
    Environment,
    Episodes,
    GRPOModule,
    Invariants,
    PPOModule,
    Prompt,
    RolloutCallback,
    RolloutDump,
    SamplingSpec,
    Step,
)  # fmt: skip
from rlhfkit.data.types import Experience
from rlhfkit.episodes import Action
from rlhfkit.rewards import EnvironmentReward
from rlhfkit.rollout.replay import load_samples, samples_files


class Digits(Environment):
    """Pays for digits, turn by turn; every fifth prompt cannot be played at all, every seventh breaks in the middle."""

    def reset(self, prompt: Prompt) -> None:
        self.number = prompt.index
        if prompt.index % 5 == 4:
            raise LookupError("no such game")

    async def step(self, action: Action) -> Step:
        if self.number % 7 == 6 and action.turn == 1:
            raise ConnectionError("the game has gone")
        return Step("+", reward=sum(character.isdigit() for character in action.text) / 4, done=action.turn == 1)


SAMPLING = SamplingSpec(group_size=4, max_new_tokens=4)


@pytest.mark.parametrize("module", [GRPOModule, PPOModule])
def test_episodes_that_fail_are_left_out_and_the_rest_is_learned(tmp_path: Path, module: Any) -> None:
    kept: list[Experience] = []

    class Kept(Invariants):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            kept.append(callback.experience)  # type: ignore[arg-type]

    group = Episodes(Digits, max_turns=2)
    callback = RolloutCallback(EnvironmentReward(), group=group, sampling=SAMPLING)
    checks, dump = Kept(compares_groups=module is GRPOModule), RolloutDump(tmp_path / "dump")
    trainer, made, _ = fit_run(tmp_path, module=module, rollouts=callback, callbacks=[checks, dump], max_epochs=1)
    assert checks.checked == 1
    experience = kept[0]
    failed = experience.rewards.isnan()
    assert 0 < failed.sum() < len(failed)
    assert (experience.action_mask.any(-1) == ~failed).all()
    assert experience.token_rewards is not None
    assert torch.allclose(experience.token_rewards.sum(-1)[~failed], experience.rewards[~failed])
    assert float(trainer.callback_metrics["rollout/failed"]) == pytest.approx(float(failed.float().mean()))
    assert float(trainer.callback_metrics["rollout/unscored_fraction"]) == pytest.approx(float(failed.float().mean()))
    assert 0 < float(trainer.callback_metrics["rollout/turns"]) < 2
    assert trainer.global_step == 2
    assert all(bool(tensor.isfinite().all()) for tensor in weights(made).values())
    assert experience.advantages is not None
    assert (experience.advantages[failed] == 0).all()
    assert (experience.advantages[~failed] != 0).any()
    recorded = load_samples(*samples_files(tmp_path / "dump", 0))
    assert [one.token_rewards.tolist() for one in recorded] == [one.token_rewards.tolist() for one in callback.samples]
    assert EnvironmentReward()(recorded) == [one.reward for one in callback.samples]
