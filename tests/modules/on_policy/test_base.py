"""Arguments of modules that learn from their own samples, against the loss functions called by hand.

Covers base.py, grpo.py and presets.py.
"""

import functools
import json
from typing import Any

import jsonargparse
import pytest
import torch
from test_docs_parts import examples
from torch import Tensor

from rlhfkit import GRPOModule, OnlineDPOModule, PPOModule, losses
from rlhfkit.data import Experience
from rlhfkit.losses.advantages.rewards import token_rewards
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.on_policy.presets import PRESETS
from rlhfkit.modules.parts import NoCorrection
from rlhfkit.modules.parts.correction import Correction
from rlhfkit.modules.parts.critic import Returns
from rlhfkit.modules.parts.kl_penalty import KLInReward, KLPenalty
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
    """Loss from rewards, with the penalties and advantages of the module's parts."""
    for part in module.order:
        if part.stage in (Stage.PENALIZE, Stage.CREDIT):
            batch = part.prepare(batch)
    return module.loss(batch, out).loss


def by_hand(name: str, batch: Experience, logprobs: Tensor) -> Tensor:
    """The same loss from the loss functions, with the numbers of the papers."""
    old, mask, rewards, group = batch.old_logprobs, batch.action_mask, batch.rewards, batch.group
    reference, tokens, sequences = batch.columns["ref_logprobs"], 20.0, 4.5
    standard, centred = (losses.group_advantages(rewards, group, scale=scale) for scale in ("group", "none"))
    engine = {"rollout_logprobs": batch.rollout_logprobs, "denominator": tokens}
    k1 = losses.kl_estimate(old, reference, estimator="k1", mask=mask)
    match name:
        case "grpo":
            reduction: Any = {"aggregation": "sequence-mean-token-mean", "denominator": 4.5}
            penalty = losses.kl_loss(logprobs, reference, mask, coef=0.04, **reduction)
            return losses.sum_losses(losses.grpo_loss(logprobs, old, standard, mask, denominator=4.5), penalty).loss
        case "dr_grpo":
            return losses.dr_grpo_loss(logprobs, old, centred, mask, max_length=6, denominator=5.0).loss  # of all rows
        case "gpg":
            return losses.gpg_loss(logprobs, old, losses.gpg_advantages(rewards, group), mask, denominator=tokens).loss
        case "remax":
            advantages = rewards - batch.reward_parts["greedy"]
            return -((advantages[:, None] * logprobs)[mask]).sum() / sequences
        case "dapo":
            return losses.ppo_loss(logprobs, old, standard, mask, clip_high=0.28, denominator=tokens).loss
        case "rloo":
            penalised = rewards - 0.05 * (k1 * mask).sum(-1)
            others = [penalised[rows].sum() - penalised[rows] for rows in (slice(3), slice(3, 6))]
            return losses.rloo_loss(logprobs, old, penalised - torch.cat(others) / 2, mask, denominator=sequences).loss
        case "reinforce++":
            earned = token_rewards(rewards, mask, penalty=0.01 * k1, earned=batch.token_rewards)
            returns = losses.discounted_returns(earned, mask)
            return losses.ppo_loss(logprobs, old, losses.whiten(returns, mask), mask, denominator=tokens).loss
        case "reinforce++-baseline":
            returns = losses.discounted_returns(token_rewards(centred, mask), mask)
            penalty = 0.01 * (losses.kl_estimate(logprobs, reference, estimator="k2", mask=mask) * mask).sum() / tokens
            return losses.ppo_loss(logprobs, old, losses.whiten(returns, mask), mask, denominator=tokens).loss + penalty
        case "cispo":
            return losses.cispo_loss(logprobs, old, standard, mask, ratio_max=5.0, denominator=tokens).loss
        case "gspo" | "sapo" | "luspo" | "gmpo":
            return getattr(losses, f"{name}_loss")(logprobs, old, standard, mask, denominator=sequences).loss
        case "vespo" | "clip_cov" | "kl_cov":
            return getattr(losses, f"{name}_loss")(logprobs, old, standard, mask, denominator=tokens).loss
        case "dppo":
            return losses.dppo_loss(logprobs, old, centred, mask, **engine).loss
        case "decoupled_ppo":
            whitened = losses.whiten(rewards[:, None].expand_as(mask), mask)
            return losses.decoupled_ppo_loss(logprobs, old, whitened, mask, **engine).loss
    raise AssertionError(name)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_published_loss_value_and_gradient(name: str) -> None:
    extra = {"policy_loss_arguments": {"max_length": 6}} if name == "dr_grpo" else {}
    module = GRPOModule("anywhere", preset=name, **extra)
    batch = experience()
    batch.reward_parts = {"greedy": torch.tensor([0.5, 0.5, 0.5, 0.1, 0.1, 0.1])}
    batch.token_rewards = torch.where(batch.action_mask, 0.01 * torch.arange(36).view(6, 6), 0.0)
    reference = batch.columns["ref_logprobs"]
    if not any("ref_logprobs" in part.reads for part in module.parts):
        batch.columns.pop("ref_logprobs")
    logprobs = (batch.old_logprobs + 0.3 * torch.randn(6, 6, generator=torch.Generator().manual_seed(5))).double()
    logprobs.requires_grad_()
    torch.manual_seed(0)  # Clip-Cov draws
    made = loss_of(module, batch, PolicyOutput(logprobs, None))
    gradient = torch.autograd.grad(made, logprobs)[0]
    torch.manual_seed(0)
    expected = by_hand(name, batch.with_columns(ref_logprobs=reference), logprobs)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logprobs)[0], rtol=1e-5, atol=1e-8)
    assert gradient.abs().sum() > 0


def test_the_optimal_token_baseline_is_reached_by_name_and_reads_the_engines_log_probs() -> None:
    batch = experience()
    module = GRPOModule("anywhere", advantages="rlhfkit.modules.on_policy.presets.optimal_token_baseline")
    prepared = module.credit[0].prepare(batch)
    arguments = batch.rewards, batch.group, batch.action_mask, batch.rollout_logprobs
    assert torch.equal(prepared.advantages, losses.optimal_token_advantages(*arguments))
    assert len(prepared.advantages[0][batch.action_mask[0]].unique()) > 1


@pytest.mark.parametrize(
    ("module", "set_by_default", "correction"),
    [
        (lambda: GRPOModule("anywhere"), True, "tis"),
        (lambda: PPOModule("anywhere"), True, "tis"),
        (lambda: GRPOModule("anywhere", parts=[Correction("icepop")]), False, "icepop"),
        (lambda: GRPOModule("anywhere", parts=[NoCorrection()]), False, None),
        (lambda: GRPOModule("anywhere", policy_loss="decoupled_ppo_loss"), False, None),  # has its own
        (lambda: OnlineDPOModule("anywhere"), False, None),  # whose loss has no weights of tokens
    ],
    ids=["GRPO", "PPO", "chosen", "none", "decoupled", "online DPO"],
)
def test_samples_of_quantized_engines_are_corrected_unless_it_was_chosen_otherwise(
    module: Any, set_by_default: bool, correction: str | None
) -> None:
    made = module()
    assert made.correct_off_policy() == set_by_default
    assert [part.kind for part in made.parts if isinstance(part, Correction)] == ([correction] if correction else [])
    assert not made.correct_off_policy()  # once


def test_a_subclass_with_a_bonus_of_its_own_counts_it_once() -> None:
    batch, entropy = experience(), torch.rand(6, 6, generator=torch.Generator().manual_seed(1))
    batch.columns.pop("ref_logprobs", None)
    out = PolicyOutput(batch.old_logprobs, entropy)
    curious, plain = (loss_of(kind("anywhere"), batch, out) for kind in (examples()["CuriousGRPO"], GRPOModule))
    mean = (entropy * batch.action_mask).sum() / 20.0
    torch.testing.assert_close(curious, plain - 1e-3 * mean)


class Powers:
    """An estimator of a user's own with an argument."""

    def __init__(self, power: float = 2.0) -> None:
        self.power = power

    def __call__(self, rewards: Tensor, group: Tensor) -> Tensor:
        return rewards**self.power


PASS = {"class_path": "rlhfkit.losses.advantages.group.pass_at_k_advantages", "init_args": {"k": 2}}
PASS_AT_2 = functools.partial(losses.pass_at_k_advantages, k=2)


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
def test_advantages_may_be_a_function_of_rewards_groups_and_lengths_for_every_module(kind: Any) -> None:
    batch = experience()
    module = kind("anywhere", advantages="opo_advantages", **({} if kind is OnPolicyModule else {"kl_coef": 0.0}))
    batch.columns = {"values": torch.zeros(6, 6)}
    filled = module.credit[0].prepare(batch)
    expected = losses.opo_advantages(batch.rewards, batch.group, batch.action_mask.sum(-1))
    torch.testing.assert_close(filled.advantages, expected[:, None].expand(6, 6))
    assert any(type(part) is Returns for part in module.parts) == (kind is PPOModule)  # for its critic all the same


def test_a_function_of_the_experience_sees_the_reward_without_the_kl_penalty_of_the_answer() -> None:
    batch, seen = experience(), []

    def look(given: Experience) -> Tensor:
        seen.append(given.rewards)
        return given.rewards

    places: tuple[Any, ...] = ("sequence", "token")
    for place in places:
        module = GRPOModule("anywhere", advantages=look, parts=[KLInReward(0.1, place=place)])
        loss_of(module, batch, PolicyOutput(batch.old_logprobs, None))
    penalty = 0.1 * ((batch.old_logprobs - batch.columns["ref_logprobs"]) * batch.action_mask).sum(-1)
    assert len(seen) == 2
    for rewards in seen:
        torch.testing.assert_close(rewards, batch.rewards - penalty)


def test_ppo_has_a_penalty_in_the_reward_of_each_token_unless_another_is_given() -> None:
    def penalties(module: Any) -> list[Any]:
        return [part.plain()["init_args"] for part in module.parts if isinstance(part, KLInReward | KLPenalty)]

    assert penalties(PPOModule("anywhere")) == [{"coef": 0.01, "place": "token", "estimator": "k1"}]
    assert penalties(PPOModule("anywhere", kl_coef=0.0)) == []
    given = KLPenalty(0.2)
    assert penalties(PPOModule("anywhere", parts=[given])) == [given.plain()["init_args"]]


def test_groups_in_which_no_answer_can_have_an_advantage_are_refused() -> None:
    best_of_eight = GRPOModule("anywhere", advantages=functools.partial(losses.pass_at_k_advantages, k=8))
    with pytest.raises(ValueError, match="with group_size=8 every advantage is 0, however many answers are right"):
        best_of_eight.check_group_size(8)
    best_of_eight.check_group_size(9)
    GRPOModule("anywhere", advantages=lambda rewards, group: (rewards > 5).float()).check_group_size(8)
    GRPOModule("anywhere", advantages="opo_advantages").check_group_size(2)
