"""PPO at the length limit and with lambda by length, against recursions of one sequence at a time."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import digits, setup_run
from torch import Tensor

from rlhfkit import PPOModule, RolloutCallback, Sample, SamplingSpec
from rlhfkit.losses import length_adaptive_lambda
from rlhfkit.modules.parts import GAE, Critic, Returns


def states_of(module: Any, sample: Sample) -> Tensor:
    """(n + 1,) values of the states in which the sample's tokens were chosen, and of that after the last one."""
    ids = torch.tensor([sample.all_token_ids.tolist()])
    if module.critic_part.shared:
        trunk, head = module.policy.base_model, module.policy.get_submodule("value_head")
    else:
        trunk, head = module.critic.model.base_model, module.critic.model.score
    with torch.no_grad():
        values = head(trunk(input_ids=ids, use_cache=False).last_hidden_state)[0, :, 0]
    return values[-len(sample.token_ids) - 1 :]


def recursion(rewards: Tensor, states: Tensor, lam: float, *, cut_off: bool) -> tuple[Tensor, Tensor]:
    """Advantages and returns, from the last token to the first."""
    advantages, ahead = torch.zeros(len(rewards)), 0.0
    for token in reversed(range(len(rewards))):
        last = token == len(rewards) - 1
        following = states[token + 1] if not last or cut_off else 0.0
        ahead = float(rewards[token] + following - states[token]) + lam * ahead
        advantages[token] = ahead
    return advantages, advantages + states[:-1]


class ByHand(L.Callback):
    """Compares the advantages and returns of an iteration."""

    def __init__(self, lam: Any, *, bootstrap: bool) -> None:
        self.lam, self.bootstrap = lam, bootstrap
        self.cut_off: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rollouts = RolloutCallback.of(trainer)
        experience = rollouts.experience
        if batch_idx or experience is None:
            return
        module = copy.deepcopy(pl_module).eval()
        for row, sample in enumerate(rollouts.samples):
            rewards = torch.zeros(sample.num_tokens)
            rewards[-1] = sample.reward
            cut_off = sample.finish_reason == "length"
            self.cut_off.append(cut_off)
            lam = self.lam(sample.num_tokens)
            states = states_of(module, sample)
            advantages, _ = recursion(rewards, states, lam, cut_off=cut_off and self.bootstrap)
            _, returns = recursion(rewards, states, 0.9, cut_off=cut_off and self.bootstrap)
            known = experience.action_mask[row]
            torch.testing.assert_close(experience.advantages[row, known], advantages, rtol=0, atol=2e-5)  # type: ignore[index]
            torch.testing.assert_close(experience.columns["returns"][row, known], returns, rtol=0, atol=2e-5)  # type: ignore[index]


@pytest.mark.parametrize("shared", [False, True], ids=["two models", "shared backbone"])
def test_advantages_and_returns_are_those_of_the_recursion(tmp_path: Path, shared: bool) -> None:
    hand = ByHand(lambda length: max(0.0, 1 - 1 / (0.4 * length)), bootstrap=True)
    trainer, module, data, _ = setup_run(
        tmp_path,
        module=PPOModule,
        module_arguments={
            "kl_coef": 0.0, "whiten_advantages": False,
            "parts": [
                Critic(shared=shared, bootstrap_truncated=True),
                GAE(lam=partial(length_adaptive_lambda, alpha=0.4)),
                Returns(lam=0.9),
            ],
        },
        rollouts=RolloutCallback(digits, sampling=SamplingSpec(group_size=4, max_new_tokens=8)),
        callbacks=[hand],
    )  # fmt: skip
    trainer.fit(module, data)
    assert len(hand.cut_off) == 64
    assert 0 < sum(hand.cut_off) < 64
