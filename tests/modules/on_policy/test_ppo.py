"""PPOModule against a loop written by hand in plain Transformers, and learning."""

import copy
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import digits, fit_run
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfkit import Experience, PPOModule, Prompt, RolloutCallback, Sample, SamplingSpec
from rlhfkit.models import ModelLoading
from rlhfkit.models.heads import load_scalar_model, scalar_output
from rlhfkit.modules.parts.kl_control import KLTarget
from rlhfkit.modules.parts.kl_penalty import KLInReward, Reference
from rlhfkit.modules.parts.old_policy import OldLogprobs
from rlhfkit.modules.parts.rewards import ClipRewards, MissingEndPenalty, NormalizeRewards
from rlhfkit.rewards import ModelReward

from .ppo_cases import ARGUMENTS, BOOTSTRAPPED, CLIPPED, ByHand, Keep, PlainPPO, bootstrapped, check_moved_alike
from .test_base import experience


def digits_as_they_come(samples: Sequence[Sample]) -> list[float]:
    """An eighth for each digit, as rewards of tokens; the rest of the reward is for the length."""
    for sample in samples:
        tokens = [chr(token + 29) for token in sample.token_ids.tolist()]  # of the tiny tokenizer
        sample.token_rewards = [character.isdigit() / 8 for character in tokens]
    return [score + len(sample.token_ids) / 10 for sample, score in zip(samples, digits(samples), strict=True)]


class Shaped:
    """By hand: a penalty for answers that were cut off, running moments, a clip, and rewards of tokens."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, samples: Sequence[Sample]) -> list[Tensor]:
        totals = [(sample.reward or 0.0) - 0.3 * (sample.finish_reason == "length") for sample in samples]
        self.seen += totals
        mean, std = statistics.fmean(self.seen), statistics.stdev(self.seen)
        rewards = []
        for sample, total in zip(samples, totals, strict=True):
            earned = torch.tensor(sample.token_rewards.tolist(), dtype=torch.float64) / std
            earned[-1] += min(max((total - mean) / std, -1.5), 1.5) - float(earned.sum())
            rewards.append(earned)
        return rewards


SHAPING = [CLIPPED, *bootstrapped(normalize=True), MissingEndPenalty(0.3), NormalizeRewards(), ClipRewards(1.5)]
SHAPED: dict[str, Any] = BOOTSTRAPPED | {"parts": SHAPING}


@pytest.mark.parametrize("shaped", [False, True], ids=["plain", "shaped, normalised, bootstrapped"])
def test_three_iterations_are_the_loop_by_hand(tmp_path: Path, shaped: bool) -> None:
    keep = Keep()
    reward = digits_as_they_come if shaped else digits
    trainer, module, _ = fit_run(
        tmp_path,
        module=PlainPPO,
        module_arguments=SHAPED if shaped else ARGUMENTS,
        data_arguments={"rollout_batch_size": 4, "micro_batch_size": 4},
        rollouts=RolloutCallback(reward, sampling=SamplingSpec(group_size=4, max_new_tokens=8)),
        callbacks=[keep],
        max_epochs=3,
    )
    assert trainer.global_step == 6
    folder = str(tmp_path / "model")
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    reference: Any = copy.deepcopy(policy)
    critic: Any = load_scalar_model(folder, dtype=torch.float64, loading=ModelLoading(attention="eager"))
    started = copy.deepcopy(critic)
    hand = ByHand(policy, reference, critic.model.base_model, critic.model.score, normalize_values=shaped)
    hand.bootstrapped = shaped
    if shaped:
        hand.rewards = Shaped()
    for samples, update in zip(keep.iterations, keep.updates, strict=True):
        hand.iteration(samples, update)
    assert 0 < hand.cut_off < 48 or not shaped
    check_moved_alike(module.policy, policy, reference)
    check_moved_alike(module.critic, critic, started)


def test_the_critic_learns_the_returns_of_the_kl_coefficient_that_the_advantages_have() -> None:
    rows = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    batch = experience()
    module: Any = PPOModule(
        "anywhere", kl_coef=0.5, parts=[KLTarget(1e-3, horizon=6)], whiten_advantages=False, lam=1.0
    )
    module.critic = torch.nn.Identity()
    for part in module.parts:
        if isinstance(part, OldLogprobs | Reference):
            part.prepare = lambda rows: rows  # type: ignore[method-assign]
    module.passes.forward = lambda *arguments: rows.where(batch.action_mask, 0.0)
    prepared = module.prepare(batch)
    torch.testing.assert_close(
        prepared.columns["returns"], (prepared.advantages + prepared.columns["values"]).where(batch.action_mask, 0.0)
    )
    penalty = next(part for part in module.parts if isinstance(part, KLInReward))
    assert penalty.coef == pytest.approx(0.5 * 1.2)  # of the next iteration


def test_a_critic_from_a_calibrated_reward_model_starts_in_units_of_the_calibrated_reward(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    reward_model = load_scalar_model(str(model), head_std=0.5)
    reward_model.config.mean, reward_model.config.std = 3.0, 4.0
    reward_model.save_pretrained(tmp_path / "reward")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "reward")
    module = PPOModule(str(model), critic=str(tmp_path / "reward"))
    module.configure_model()
    sample = Sample(Prompt(0, [5, 6, 7]), 0, [8, 9, 10], [-1.0] * 3, [0] * 3, "stop", reward=0.0)
    batch = Experience.from_samples([sample, dataclasses.replace(sample, token_ids=[8, 9, 11])])
    values = module.critic_part.values_of(batch)
    # What the reward of the answer would be, had it ended where its last token is chosen.
    text = AutoTokenizer.from_pretrained(model).decode([8, 9])
    shorter = [dataclasses.replace(sample, token_ids=[8, 9], logprobs=[-1.0] * 2, versions=[0] * 2, text=text)]
    rewards = ModelReward(str(tmp_path / "reward"))(shorter)
    assert values[:, 4].tolist() == pytest.approx(rewards * 2, abs=1e-5)
    raw = scalar_output(reward_model.eval(), batch)
    torch.testing.assert_close(values, ((raw[:, :-1] - 3.0) / 4.0).where(batch.action_mask, 0.0))
    assert (values[:, :2] == 0.0).all()  # the prompt's
