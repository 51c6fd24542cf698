"""PPOModule, with a critic of its own or on one trunk with it, against a loop written by hand in plain Transformers."""

import copy
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import digits, fit_run
from tiny_models import tiny_model, token_logprobs
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhfkit import Experience, LoRA, PPOModule, Prompt, RolloutCallback, Sample, SamplingSpec, SFTDataModule
from rlhfkit.models import ModelLoading, load_causal_lm
from rlhfkit.models.heads import add_value_head, load_scalar_model, scalar_output
from rlhfkit.modules.parts import Critic
from rlhfkit.modules.parts.pretraining_loss import PretrainingLoss
from rlhfkit.modules.parts.rewards import ClipRewards, MissingEndPenalty, NormalizeRewards
from rlhfkit.rollout import ModuleWeights

from .ppo_cases import (
    ARGUMENTS,
    BOOTSTRAPPED,
    CLIPPED,
    ByHand,
    Keep,
    PlainPPO,
    bootstrapped,
    check_moved_alike,
    reward_at_the_end,
)
from .preparation.test_rewards import reward_model


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
SHARED = [CLIPPED, *bootstrapped(shared=True), PretrainingLoss(0.3)]
CASES: dict[str, tuple[dict[str, Any], float]] = {  # arguments of the module, and the temperature of sampling
    "plain": (ARGUMENTS, 1.0),
    "shaped, normalised, bootstrapped": (BOOTSTRAPPED | {"parts": SHAPING}, 1.0),
    "shared backbone, with text": (BOOTSTRAPPED | {"parts": SHARED}, 0.8),
}
TEXTS = ["ab " * (1 + number % 3) + str(number) for number in range(12)]
"""Of three updates, where an iteration has two."""


@pytest.mark.parametrize("case", CASES)
def test_three_iterations_are_the_loop_by_hand(tmp_path: Path, case: str) -> None:
    (arguments, temperature), keep = CASES[case], Keep()
    shaped, shared = case.startswith("shaped"), case.startswith("shared")
    text = SFTDataModule([{"text": text} for text in TEXTS], text="text", micro_batch_size=2, shuffle=False)
    sampling = SamplingSpec(group_size=4, max_new_tokens=8, temperature=temperature)
    trainer, module, _ = fit_run(
        tmp_path,
        module=PlainPPO,
        module_arguments=arguments,
        data_arguments={"rollout_batch_size": 4, "micro_batch_size": 4, "pretraining_data": text if shared else None},
        rollouts=RolloutCallback(digits_as_they_come if shaped else digits, sampling=sampling),
        callbacks=[keep],
        max_epochs=3,
    )
    assert trainer.global_step == 6
    folder = str(tmp_path / "model")
    policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    critic: Any = load_scalar_model(folder, dtype=torch.float64, loading=ModelLoading(attention="eager"))
    reference, started = copy.deepcopy(policy), copy.deepcopy(critic)
    backbone = policy.model if shared else critic.model.base_model
    losses: list[float] = []

    def of_text(update: int) -> Tensor:
        tokens = [[*module.tokenizer(text)["input_ids"], module.tokenizer.eos_token_id] for text in TEXTS]
        chosen = update % 3 * 4
        loss = -torch.cat([token_logprobs(policy, one) for one in tokens[chosen : chosen + 4]]).mean()
        losses.append(float(loss.detach()))
        return 0.3 * loss

    hand = ByHand(
        policy,
        reference,
        backbone,
        critic.model.score,
        rewards=Shaped() if shaped else reward_at_the_end,
        text=of_text if shared else None,
        temperature=temperature,
        normalize_values=shaped,
        bootstrapped=case != "plain",
    )
    for iteration in keep.iterations:
        hand.iteration(*iteration)
    assert 0 < hand.cut_off < 48 or case == "plain"
    check_moved_alike(module.policy, policy, reference)
    if shared:
        check_moved_alike(module.policy.value_head, critic.model.score, started.model.score)
        assert float(trainer.callback_metrics["ptx/loss"]) == pytest.approx(sum(losses[4:]) / 2, rel=1e-4)
    else:
        check_moved_alike(module.critic, critic, started)


def test_a_critic_from_a_calibrated_reward_model_starts_in_units_of_the_calibrated_reward(tmp_path: Path) -> None:
    folder = reward_model(tmp_path)
    module = PPOModule(str(tmp_path / "base"), critic=folder)
    module.configure_model()
    sample = Sample(Prompt(0, [5, 6, 7]), 0, [8, 9, 10], [-1.0] * 3, [0] * 3, "stop", reward=0.0)
    batch = Experience.from_samples([sample, dataclasses.replace(sample, token_ids=[8, 9, 11])])
    raw = scalar_output(load_scalar_model(folder, new_head=False).eval(), batch)[:, :-1]
    # What the reward would be, had the answer ended where its next token is chosen; 0 of the prompt's.
    expected = ((raw - 0.5) / 2.0).where(batch.action_mask, 0.0)
    torch.testing.assert_close(module.critic_part.values_of(batch), expected)


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
def test_nobody_outside_sees_the_value_head(tmp_path: Path, lora: LoRA | None) -> None:
    folder = str(tiny_model(tmp_path / "model"))
    module = PPOModule(folder, parts=[Critic(shared=True)], lora=lora)
    module.configure_model()
    with pytest.raises(ValueError, match="has a value head already"):
        add_value_head(module.policy)
    names = [name for name, _ in load_causal_lm(folder).named_parameters()]
    assert [info.name for info in ModuleWeights(module.policy).metadata()] == names
    saved = AutoModelForCausalLM.from_pretrained(module.save_pretrained(tmp_path / "saved"), output_loading_info=True)
    assert not saved[1]["unexpected_keys"]
    groups = {group["name"]: group for group in module.parameter_groups()}
    assert groups["value_head"]["lr"] == module.hparams["critic_lr"]
    assert [tuple(parameter.shape) for parameter in groups["value_head"]["params"]] == [(1, 64)]
    if lora is None:
        assert len(groups["policy"]["params"]) == len(names)
    else:
        module.save_pretrained(tmp_path / "adapter", adapter=True)
        assert len(groups["policy"]["params"]) == 2 * 2 * 7  # A and B of seven layers in two blocks
