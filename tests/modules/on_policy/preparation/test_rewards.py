"""Reward models as children of the module, and what becomes of rewards before advantages.

Covers ``modules/parts/reward_model.py``.
"""

import dataclasses
import statistics
from pathlib import Path

import pytest
import torch
from rl_runs import digits, setup_run
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

from modules.on_policy.ppo_cases import PlainPPO
from modules.on_policy.test_base import experience
from rlhfkit import GRPOModule, RolloutCallback, SamplingSpec
from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.losses import discounted_returns, whiten
from rlhfkit.models import ModelLoading
from rlhfkit.models.forward import forward_of, packs_batches
from rlhfkit.models.heads import load_scalar_model
from rlhfkit.modules.parts import RewardModel
from rlhfkit.parts import make_part
from rlhfkit.rewards import ModelReward, WeightedSum


def reward_model(folder: Path) -> str:
    """A reward model that normalizes its scores."""
    model = load_scalar_model(str(tiny_model(folder / "base", seed=3)), head_std=0.5)
    model.config.mean, model.config.std = 0.5, 2.0
    model.save_pretrained(folder / "reward")
    tiny_tokenizer().save_pretrained(folder / "reward")
    return str(folder / "reward")


def test_the_score_of_one_model_has_a_weight_too(monkeypatch: pytest.MonkeyPatch) -> None:
    part = make_part(RewardModel("somewhere", -0.5).plain())
    scores = torch.tensor([1.0, 2.0])
    monkeypatch.setattr(part, "_scores_by_name", lambda rows: {"": scores})
    assert part.parts_of(scores)["model"].tolist() == [-0.5, -1.0]


def test_a_reward_model_among_the_children_teaches_what_one_in_the_callback_does(tmp_path: Path) -> None:
    folder = reward_model(tmp_path)
    weights: list[dict[str, Tensor]] = []
    together = WeightedSum({"digits": digits, "model": ModelReward(folder)})
    for reward, arguments in [(together, {}), (digits, {"parts": [RewardModel(folder).plain()]})]:
        trainer, module, data, _ = setup_run(
            tmp_path,
            module=PlainPPO,
            module_arguments={"lr": 0.05, "critic_lr": 0.02, **arguments},
            rollouts=RolloutCallback(reward, sampling=SamplingSpec(group_size=4, max_new_tokens=8)),
        )
        trainer.fit(module, data)
        weights.append({name: p.detach().clone() for name, p in module.policy.named_parameters()})
        parts = trainer.callback_metrics
        assert float(parts["rollout/reward"]) == pytest.approx(
            float(parts["rollout/reward_model"]) + statistics.fmean(digits(trainer.callbacks[0].samples)), abs=1e-6
        )
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-6)
    assert not module.reward_model.training
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    state = torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"]
    assert {name.split(".")[0] for name in state} == {"policy", "critic"}  # loaded by name, not from checkpoints


def test_a_reward_model_is_reward_enough(tmp_path: Path) -> None:
    trainer, module, data, rollouts = setup_run(
        tmp_path,
        module_arguments={"parts": [RewardModel(reward_model(tmp_path)).plain()], "lr": 5e-3},
        rollouts=RolloutCallback(sampling=SamplingSpec(group_size=4, max_new_tokens=8)),
        max_epochs=1,
    )
    trainer.fit(module, data)
    scores = ModelReward(str(tmp_path / "reward"))(rollouts.samples)
    assert rollouts.experience is not None
    assert rollouts.experience.rewards.tolist() == pytest.approx(scores, abs=1e-5)
    assert float(trainer.callback_metrics["rollout/reward"]) == pytest.approx(statistics.fmean(scores), abs=1e-5)
    assert rollouts.experience.advantages is not None
    assert rollouts.experience.advantages.abs().sum() > 0


def test_a_reward_model_with_other_tokens_or_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = reward_model(tmp_path)
    with pytest.raises(ValueError, match=r"needed is a \.\.\.ForSequenceClassification"):
        GRPOModule(str(tmp_path / "base"), parts=[RewardModel(str(tmp_path / "base"))]).configure_model()
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="another tokenizer than the policy"):
        GRPOModule(str(tmp_path / "base"), parts=[RewardModel(folder)]).configure_model()


def test_reinforce_plus_plus_credits_tokens_with_what_they_earn_and_groups_compare_sums() -> None:
    batch = experience()
    batch.columns["ref_logprobs"] = batch.old_logprobs
    mask = batch.action_mask
    earned = torch.where(mask, 0.1 * torch.arange(36).view(6, 6), 0.0)
    spread = dataclasses.replace(batch, token_rewards=earned)
    module = GRPOModule("anywhere", preset="reinforce++")  # its TokenCredit is told so; others: parts/credit_cases.py
    by_token = earned.clone()
    for row in range(6):
        last = int(mask[row].nonzero()[-1])
        by_token[row, last] += batch.rewards[row] - earned[row].sum()
    expected = whiten(discounted_returns(by_token, mask), mask)
    torch.testing.assert_close(module.advantages(spread), expected)
    assert not torch.allclose(module.advantages(batch), expected)
    by_groups = GRPOModule("anywhere", preset="reinforce++-baseline")
    assert torch.equal(by_groups.advantages(spread), by_groups.advantages(batch))


@pytest.mark.parametrize("attention", [None, "sdpa"], ids=["packed", "padded"])
def test_forward_passes_over_an_iteration_are_within_their_limit_however_long_its_samples_are(
    tmp_path: Path, attention: str | None
) -> None:
    module = GRPOModule(str(tiny_model(tmp_path)), loading=ModelLoading(attention=attention, max_tokens_per_forward=40))
    module.configure_model()
    samples = [
        Sample(Prompt(prompt, [1] * 6), index, [2] * count, [-1.0] * count, [0] * count, "stop", reward=1.0)
        for prompt in range(3)
        for index, count in enumerate([3, 50, 20, 9])
    ]
    rows = Experience.from_samples(samples)
    batches = module.passes._forward_batches(rows, None, 40, packed=packs_batches(module.policy))[0]
    assert sorted(torch.cat(batches).tolist()) == list(range(12))
    for batch in batches:
        inputs = forward_of(module.policy).inputs(rows.select(batch)).arguments
        assert inputs["input_ids"].numel() <= 40 or len(batch) == 1
