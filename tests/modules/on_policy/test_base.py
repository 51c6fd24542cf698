"""Arguments of modules that learn from their own samples, against the loss functions called by hand.

Covers base.py, grpo.py and presets.py.
"""

import functools
import json
from typing import Any

import jsonargparse
import pytest
import torch
from torch import Tensor

import rlhfkit.losses
from rlhfkit import GRPOModule, PPOModule
from rlhfkit.callbacks.rollout.micro_batching import MicroBatches
from rlhfkit.data import Experience
from rlhfkit.data.packing import MicroBatch
from rlhfkit.losses import (
    LossOutput,
    decoupled_ppo_loss,
    discounted_returns,
    dppo_loss,
    dr_grpo_loss,
    entropy_bonus,
    gpg_advantages,
    gpg_loss,
    group_advantages,
    grpo_loss,
    gspo_loss,
    kl_estimate,
    kl_loss,
    opo_advantages,
    pass_at_k_advantages,
    ppo_loss,
    rloo_advantages,
    rloo_loss,
    sum_losses,
    whiten,
)
from rlhfkit.losses import cispo_loss as lifted_cispo_loss
from rlhfkit.losses.advantages.rewards import token_rewards
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.on_policy.presets import PRESETS
from rlhfkit.modules.parts import EntropyBonus, NoCorrection
from rlhfkit.modules.parts.advantages import AdvantagesBy
from rlhfkit.modules.parts.correction import Correction
from rlhfkit.modules.parts.critic import Returns
from rlhfkit.modules.parts.kl_penalty import KLInReward, KLPenalty
from rlhfkit.modules.parts.rewards import MaskTruncated
from rlhfkit.parts import Stage


def my_estimator(rewards: Tensor, group: Tensor) -> Tensor:
    return 2.0 * rewards


def experience(seed: int = 0) -> Experience:
    """Two groups of three samples of up to six tokens, as a module prepares them for a later update."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(6, 6, generator=generator)

    lengths = torch.tensor([7, 5, 6, 4, 7, 7])
    attention_mask = torch.arange(7) < lengths[:, None]
    action_mask = attention_mask[:, 1:].clone()
    action_mask[:, 0] = False
    old = torch.where(action_mask, -1.5 + noise(0.3), 0.0)
    return Experience(
        input_ids=torch.zeros(6, 7, dtype=torch.int64),
        attention_mask=attention_mask,
        action_mask=action_mask,
        rollout_logprobs=old + torch.where(action_mask, noise(0.2), 0.0),
        versions=torch.zeros(6, 6, dtype=torch.int64),
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.2, 0.9, 0.1]),
        group=torch.tensor([3, 3, 3, 8, 8, 8]),
        sample_index=torch.tensor([0, 1, 2, 0, 1, 2]),
        truncated=torch.zeros(6, dtype=torch.bool),
        update=torch.ones(6, dtype=torch.int64),
        old_logprobs=old,
        columns={"ref_logprobs": old + torch.where(action_mask, noise(0.2), 0.0)},
        step_tokens=40.0,
        step_sequences=9.0,
        step_rows=10.0,
        step_micro_batches=2,
    )


def loss_of(module: GRPOModule, batch: Experience, out: PolicyOutput) -> Tensor:
    """Loss from rewards, computed by the module."""
    return module.loss(credited(module, batch), out).loss


def credited(module: OnPolicyModule, batch: Experience) -> Experience:
    """Rows with penalties and advantages, computed by the module's parts."""
    for part in module.order:
        if part.stage in (Stage.PENALIZE, Stage.CREDIT):
            batch = part.prepare(batch)
    return batch


def penalizes(module: OnPolicyModule) -> bool:
    """Whether the module asks a reference."""
    return any("ref_logprobs" in part.reads for part in module.parts)


def by_hand(name: str, batch: Experience, logprobs: Tensor) -> Tensor:
    """The same loss from the loss functions, with the numbers of the papers."""
    old, mask, rewards, group = batch.old_logprobs, batch.action_mask, batch.rewards, batch.group
    reference, tokens, sequences = batch.columns["ref_logprobs"], 20.0, 4.5
    standard = group_advantages(rewards, group)
    k1 = kl_estimate(old, reference, estimator="k1", mask=mask)
    match name:
        case "grpo":
            reduction: Any = {"aggregation": "sequence-mean-token-mean", "denominator": 4.5}
            penalty = kl_loss(logprobs, reference, mask, coef=0.04, **reduction)
            return sum_losses(grpo_loss(logprobs, old, standard, mask, denominator=4.5), penalty).loss
        case "dr_grpo":
            centred = group_advantages(rewards, group, scale="none")
            return dr_grpo_loss(logprobs, old, centred, mask, max_length=6, denominator=5.0).loss  # of all rows
        case "gpg":
            return gpg_loss(logprobs, old, gpg_advantages(rewards, group), mask, denominator=tokens).loss
        case "remax":
            advantages = rewards - batch.reward_parts["greedy"]
            return -((advantages[:, None] * logprobs)[mask]).sum() / sequences
        case "dapo":
            return ppo_loss(logprobs, old, standard, mask, clip_high=0.28, denominator=tokens).loss
        case "rloo":
            penalised = rewards - 0.05 * (k1 * mask).sum(-1)
            others = [penalised[rows].sum() - penalised[rows] for rows in (slice(3), slice(3, 6))]
            return rloo_loss(logprobs, old, penalised - torch.cat(others) / 2, mask, denominator=sequences).loss
        case "reinforce++":
            earned = token_rewards(rewards, mask, penalty=0.01 * k1, earned=batch.token_rewards)
            returns = discounted_returns(earned, mask)
            return ppo_loss(logprobs, old, whiten(returns, mask), mask, denominator=tokens).loss
        case "reinforce++-baseline":
            centred = discounted_returns(token_rewards(group_advantages(rewards, group, scale="none"), mask), mask)
            penalty = 0.01 * (kl_estimate(logprobs, reference, estimator="k2", mask=mask) * mask).sum() / tokens
            return ppo_loss(logprobs, old, whiten(centred, mask), mask, denominator=tokens).loss + penalty
        case "gspo":
            return gspo_loss(logprobs, old, standard, mask, denominator=sequences).loss
        case "cispo":
            return lifted_cispo_loss(logprobs, old, standard, mask, ratio_max=5.0, denominator=tokens).loss
        case "sapo" | "luspo" | "gmpo":
            return getattr(rlhfkit.losses, f"{name}_loss")(logprobs, old, standard, mask, denominator=sequences).loss
        case "vespo" | "clip_cov" | "kl_cov":
            return getattr(rlhfkit.losses, f"{name}_loss")(logprobs, old, standard, mask, denominator=tokens).loss
        case "dppo":
            knobs = {"rollout_logprobs": batch.rollout_logprobs, "denominator": tokens}
            return dppo_loss(logprobs, old, group_advantages(rewards, group, scale="none"), mask, **knobs).loss
        case "decoupled_ppo":
            knobs = {"rollout_logprobs": batch.rollout_logprobs, "denominator": tokens}
            whitened = whiten(rewards[:, None].expand_as(mask), mask)
            return decoupled_ppo_loss(logprobs, old, whitened, mask, **knobs).loss
    raise AssertionError(name)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_published_loss_value_and_gradient(name: str) -> None:
    extra = {"policy_loss_arguments": {"max_length": 6}} if name == "dr_grpo" else {}
    module = GRPOModule("anywhere", preset=name, **extra)
    batch = experience()
    batch.reward_parts = {"greedy": torch.tensor([0.5, 0.5, 0.5, 0.1, 0.1, 0.1])}
    batch.token_rewards = torch.where(batch.action_mask, 0.01 * torch.arange(36).view(6, 6), 0.0)
    if not penalizes(module):
        reference = batch.columns.pop("ref_logprobs")
    logprobs = (batch.old_logprobs + 0.3 * torch.randn(6, 6, generator=torch.Generator().manual_seed(5))).double()
    logprobs.requires_grad_()
    torch.manual_seed(0)  # Clip-Cov draws
    made = loss_of(module, batch, PolicyOutput(logprobs, None))
    gradient = torch.autograd.grad(made, logprobs)[0]
    torch.manual_seed(0)
    if "ref_logprobs" not in batch.columns:
        batch.columns["ref_logprobs"] = reference
    expected = by_hand(name, batch, logprobs)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logprobs)[0], rtol=1e-5, atol=1e-8)
    assert gradient.abs().sum() > 0
    assert module.hparams["preset"] == name
    named = f"{name}_loss" if hasattr(rlhfkit.losses, f"{name}_loss") else "ppo_loss"
    named = "reinforce_loss" if name == "remax" else named
    assert module.hparams["policy_loss"].endswith(f".{named}")  # a preset calls the loss of its name


@pytest.mark.parametrize("name", PRESETS)
def test_rows_without_a_trained_token_are_counted_as_the_pure_function_counts_them(name: str) -> None:
    """One reward is missing and two answers are cut off, one of them alone in its micro-batch."""
    compares_tokens_of_a_batch = name in ("clip_cov", "kl_cov")
    split = [[0, 1, 2, 3, 4, 5]] if compares_tokens_of_a_batch else [[0], [1, 2], [3, 5], [4]]
    preset, longest = PRESETS[name], {"max_length": 6} if name == "dr_grpo" else {}
    module = GRPOModule(
        "anywhere", preset=name, policy_loss_arguments=longest, parts=[MaskTruncated(), EntropyBonus(0.01)]
    )
    batch = experience()
    batch.reward_parts = {"greedy": torch.full((6,), 0.3)}
    batch.rewards[1], batch.action_mask[1] = torch.nan, False
    batch.truncated[3:5] = True
    batch = MaskTruncated().prepare(credited(module, batch))
    assert batch.action_mask.any(-1).tolist() == [True, False, True, False, False, True]
    logprobs = (batch.old_logprobs + 0.3 * torch.randn(6, 6, generator=torch.Generator().manual_seed(5))).double()
    logprobs.requires_grad_()
    entropy = torch.rand(6, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    if not penalizes(module):
        batch.columns.pop("ref_logprobs", None)
    planned = [MicroBatch(rows, update=1) for rows in split]  # the first update has no old log-probs
    made: Any = 0.0
    torch.manual_seed(0)  # Clip-Cov draws
    for rows, part in zip(split, MicroBatches(batch, planned, len(split), group=None), strict=True):
        width = part.action_mask.shape[1]
        made = made + module.loss(part, PolicyOutput(logprobs[rows, :width], entropy[rows, :width])).loss / len(split)
    torch.manual_seed(0)
    pure: Any = getattr(rlhfkit.losses, preset["policy_loss"])
    engine = {"rollout_logprobs": batch.rollout_logprobs} if name in ("dppo", "decoupled_ppo") else {}
    mask, reduction = batch.action_mask, {"aggregation": module.policy_loss.aggregation} | longest
    expected = pure(logprobs, batch.old_logprobs, batch.advantages, mask, **longest, **engine).loss
    expected = expected + entropy_bonus(entropy, mask, coef=0.01, **reduction).loss
    if name == "grpo":
        expected = expected + kl_loss(logprobs, batch.columns["ref_logprobs"], mask, coef=0.04, **reduction).loss
    if name == "reinforce++-baseline":
        expected = expected + kl_loss(logprobs, batch.columns["ref_logprobs"], mask, coef=0.01, estimator="k2").loss
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-9)
    gradients = [torch.autograd.grad(one, logprobs)[0] for one in (made, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)
    assert gradients[0].abs().sum() > 0


def test_the_optimal_token_baseline_is_reached_by_name_and_reads_the_engines_log_probs() -> None:
    batch = experience()
    module = GRPOModule("anywhere", advantages="rlhfkit.modules.on_policy.presets.optimal_token_baseline")
    prepared = module.credit[0].prepare(batch)
    arguments = batch.rewards, batch.group, batch.action_mask, batch.rollout_logprobs
    assert torch.equal(prepared.advantages, rlhfkit.losses.optimal_token_advantages(*arguments))
    assert len(prepared.advantages[0][batch.action_mask[0]].unique()) > 1


@pytest.mark.parametrize(
    ("module", "set_by_default", "correction"),
    [
        (lambda: GRPOModule("anywhere"), True, "tis"),
        (lambda: PPOModule("anywhere"), True, "tis"),
        (lambda: GRPOModule("anywhere", parts=[Correction("icepop")]), False, "icepop"),
        (lambda: GRPOModule("anywhere", parts=[NoCorrection()]), False, None),
        (lambda: GRPOModule("anywhere", policy_loss="decoupled_ppo_loss"), False, None),  # has its own
    ],
    ids=["GRPO", "PPO", "chosen", "none", "decoupled"],
)
def test_samples_of_quantized_engines_are_corrected_unless_it_was_chosen_otherwise(
    module: Any, set_by_default: bool, correction: str | None
) -> None:
    made = module()
    assert made.correct_off_policy() == set_by_default
    assert [part.kind for part in made.parts if isinstance(part, Correction)] == ([correction] if correction else [])
    assert not made.correct_off_policy()  # once


class CuriousGRPO(GRPOModule):
    """The README's subclass, which names its hyperparameter as the base class does."""

    def __init__(self, *args: Any, entropy_coef: float = 1e-3, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        base = super().loss(batch, out)
        entropy = self.token_mean(out.entropy, batch)
        return LossOutput(base.loss - self.hparams["entropy_coef"] * entropy, base.metrics)


def test_a_subclass_with_a_bonus_of_its_own_counts_it_once() -> None:
    batch, entropy = experience(), torch.rand(6, 6, generator=torch.Generator().manual_seed(1))
    batch.columns.pop("ref_logprobs", None)
    out = PolicyOutput(batch.old_logprobs, entropy)
    plain, curious = (loss_of(each, batch, out) for each in (GRPOModule("anywhere"), CuriousGRPO("anywhere")))
    mean = (entropy * batch.action_mask).sum() / 20.0
    torch.testing.assert_close(curious, plain - 1e-3 * mean)


class Powers:
    """An estimator of a user's own with an argument."""

    def __init__(self, power: float = 2.0) -> None:
        self.power = power

    def __call__(self, rewards: Tensor, group: Tensor) -> Tensor:
        return rewards**self.power


PASS = {"class_path": "rlhfkit.losses.advantages.group.pass_at_k_advantages", "init_args": {"k": 2}}
PASS_AT_2 = functools.partial(pass_at_k_advantages, k=2)


@pytest.mark.parametrize(
    ("given", "plain", "function"),
    [
        (my_estimator, f"{__name__}.my_estimator", my_estimator),
        (PASS_AT_2, PASS, PASS_AT_2),
        (PASS | {"class_path": "pass_at_k_advantages"}, PASS, PASS_AT_2),
        (Powers(3.0), {"class_path": f"{__name__}.Powers", "init_args": {"power": 3.0}}, Powers(3.0)),
    ],
)
def test_a_function_or_class_with_arguments_is_given_remembered_and_read(given: Any, plain: Any, function: Any) -> None:
    module = GRPOModule("anywhere", advantages=given)
    assert module.hparams["advantages"] == plain
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(GRPOModule, "model")
    ways: list[dict[str, Any]] = [{"advantages": plain}]
    if plain == PASS:
        named = {"function": "pass_at_k_advantages", "arguments": {"k": 2}}
        ways.append({"parts": [{"class_path": "rlhfkit.modules.parts.AdvantagesBy", "init_args": named}]})
    texts = [json.dumps({"model": {"model": "anywhere"} | way}) for way in ways]
    read = [parser.instantiate_classes(parser.parse_string(text)).model for text in texts]
    rewards, group = torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.zeros(4, dtype=torch.int64)
    for one in (module, GRPOModule(**module.hparams), *read):
        found = one.order[-1].estimator.estimate(rewards, group, torch.ones(4))
        torch.testing.assert_close(found, function(rewards, group))


def test_a_local_function_is_asked_for_again() -> None:
    for local in (lambda rewards, group: rewards, functools.partial(lambda rewards, group, k: rewards, k=2)):
        nameless = GRPOModule("anywhere", advantages=local)
        with pytest.raises(ValueError, match=r"advantages was the function .* pass it again"):
            GRPOModule(**nameless.hparams)


def test_a_function_of_rewards_is_given_what_it_names_in_any_order() -> None:
    rewards, group, lengths = torch.tensor([1.0, 3.0]), torch.tensor([7, 7]), torch.tensor([2, 5])
    functions: list[tuple[Any, list[float]]] = [
        (lambda group, rewards: rewards + group, [8.0, 10.0]),
        (lambda lengths, *, rewards: rewards * lengths, [2.0, 15.0]),
        (lambda rewards: 2 * rewards, [2.0, 6.0]),
        (lambda rewards, group=None: rewards + group, [8.0, 10.0]),
        (functools.partial(lambda rewards, group: rewards + group, group=0), [1.0, 3.0]),
    ]
    for function, expected in functions:
        made = GRPOModule("anywhere", advantages=function).advantage_function
        assert made.takes_rewards
        assert made.estimate(rewards, group, lengths).tolist() == expected
    module = GRPOModule("anywhere", advantages=lambda greedy_rewards, rewards: rewards - 10 * greedy_rewards)
    batch = experience()
    batch.reward_parts = {"greedy": torch.arange(6.0)}
    assert torch.equal(module.advantages(batch), batch.rewards - 10 * torch.arange(6.0))


@pytest.mark.parametrize("kind", [GRPOModule, PPOModule, OnPolicyModule])
@pytest.mark.parametrize("name", ["rloo_advantages", "rlhfkit.losses.opo_advantages"])
def test_advantages_may_be_a_function_of_rewards_and_groups_for_every_module(kind: Any, name: str) -> None:
    batch = experience()
    module = kind("anywhere", advantages=name, **({} if kind is OnPolicyModule else {"kl_coef": 0.0}))
    batch.columns = {"values": torch.zeros(6, 6)}
    filled = module.credit[0].prepare(batch)
    if name == "rloo_advantages":
        expected = rloo_advantages(batch.rewards, batch.group)
    else:
        expected = opo_advantages(batch.rewards, batch.group, batch.action_mask.sum(-1))
    torch.testing.assert_close(filled.advantages, expected[:, None].expand(6, 6))
    assert any(type(part) is Returns for part in module.parts) == (kind is PPOModule)  # for its critic all the same


def test_a_function_of_the_experience_sees_the_reward_without_the_kl_penalty_of_the_answer() -> None:
    batch, seen = experience(), []

    def look(given: Experience) -> Tensor:
        seen.append(given.rewards)
        return given.rewards

    for place in ("sequence", "token"):
        given = [KLInReward(0.1, place=place)]  # type: ignore[arg-type]
        module = GRPOModule("anywhere", advantages=look, parts=given)
        chosen = [part for part in module.order if part.stage == Stage.PENALIZE or type(part) is AdvantagesBy]
        filled = batch
        for part in chosen:
            filled = part.prepare(filled)
    penalty = 0.1 * ((batch.old_logprobs - batch.columns["ref_logprobs"]) * batch.action_mask).sum(-1)
    for rewards in seen:
        torch.testing.assert_close(rewards, batch.rewards - penalty)
    assert torch.equal(filled.rewards, batch.rewards)  # of the tokens' penalty, the last


def test_ppo_has_a_penalty_in_the_reward_of_each_token_unless_another_is_given() -> None:
    def penalties(module: Any) -> list[Any]:
        return [part.plain()["init_args"] for part in module.parts if isinstance(part, KLInReward | KLPenalty)]

    assert penalties(PPOModule("anywhere")) == [{"coef": 0.01, "place": "token", "estimator": "k1"}]
    assert penalties(PPOModule("anywhere", kl_coef=0.0)) == []
    given = KLPenalty(0.2)
    assert penalties(PPOModule("anywhere", parts=[given])) == [given.plain()["init_args"]]


def test_groups_in_which_no_answer_can_have_an_advantage_are_refused() -> None:
    best_of_eight = GRPOModule("anywhere", advantages=functools.partial(pass_at_k_advantages, k=8))
    with pytest.raises(ValueError, match="with group_size=8 every advantage is 0, however many answers are right"):
        best_of_eight.check_group_size(8)
    best_of_eight.check_group_size(9)
    GRPOModule("anywhere", advantages=lambda rewards, group: (rewards > 5).float()).check_group_size(8)
    GRPOModule("anywhere", advantages="opo_advantages").check_group_size(2)
