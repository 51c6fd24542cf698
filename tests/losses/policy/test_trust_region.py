import pytest
import torch

from rlhfkit import losses

from ..policy_cases import gradient, policy_batch


def test_decoupled_ppo_is_ppo_around_the_proximal_policy_weighted_to_the_behaviour_policy():
    batch = policy_batch().leaf()
    noise = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rollout = batch.old_logprobs + 0.5 * noise
    got = losses.decoupled_ppo_loss(*batch, rollout_logprobs=rollout, high=1.5, clip_high=0.28, dual_clip=1.2)
    weight = torch.exp(batch.old_logprobs - rollout)
    weight = torch.where(weight > 1.5, 0.0, weight)
    expected = losses.ppo_loss(*batch, clip_high=0.28, dual_clip=1.2, weights=weight)
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(gradient(got.loss, batch.logprobs), gradient(expected.loss, batch.logprobs))
    correction = losses.importance_weights(batch.old_logprobs, rollout, batch.mask, mode="mask", high=1.5)
    assert correction.metrics.items() <= got.metrics.items()
    assert got.metrics["rollout_corr/masked_fraction"].item() > 0


def test_dppo_drops_by_the_difference_of_probabilities_and_only_in_the_direction_of_the_advantage():
    policy = torch.tensor([[0.9, 0.02, 0.3, 0.3]], dtype=torch.float64)
    behaviour = torch.tensor([[0.6, 0.001, 0.6, 0.6]], dtype=torch.float64)
    logprobs = policy.log().requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
    inputs = logprobs, logprobs.detach(), advantages, torch.ones(1, 4)
    knobs = {"rollout_logprobs": behaviour.log(), "denominator": 1.0}
    output = losses.dppo_loss(*inputs, log_ratio_coef=0.0, **knobs)
    # The rare token's ratio is 20 and its difference 0.019: PPO would clip it, this does not.
    expected = torch.tensor([[0.0, -20.0, 0.0, -0.5]], dtype=torch.float64)
    torch.testing.assert_close(gradient(output.loss, logprobs), expected)
    assert [output.metrics[f"policy/clip_fraction_{side}"].item() for side in ("low", "high")] == [0.25, 0.25]
    # IPO drops these and tokens that return to the policy that sampled.
    output = losses.dppo_loss(*inputs, two_sided=True, **knobs)
    log_ratio = policy.log() - behaviour.log()
    assert output.loss.item() == pytest.approx(float(-20.0 + 1e-3 * log_ratio.square().sum()))
    expected = 2e-3 * log_ratio - torch.tensor([[0.0, 20.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient(output.loss, logprobs), expected)
    assert [output.metrics[f"policy/clip_fraction_{side}"].item() for side in ("low", "high")] == [0.5, 0.25]
    wide = losses.dppo_loss(*inputs, log_ratio_coef=0.0, mask_low=0.4, mask_high=0.4, two_sided=True, **knobs)
    assert wide.loss.item() == pytest.approx(-(1.5 + 20.0 - 0.5 + 0.5))


def test_covariance_losses_of_few_candidates_and_clip_cov_draws_from_torchs_generator():
    batch = policy_batch(3)
    one = losses.kl_cov_loss(*batch, fraction=1e-6).metrics["policy/covariance_fraction"]  # at least one is penalised
    assert one.item() == pytest.approx(1 / batch.mask.sum().item())
    none = losses.clip_cov_loss(*batch, covariance_low=1e8, covariance_high=1e9)
    assert torch.equal(none.loss, losses.ppo_loss(*batch).loss)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(losses.clip_cov_loss(*batch, fraction=0.2, covariance_low=-1e9).loss.item())
    assert drawn[0] == drawn[1] != drawn[2]


def test_log_linear_proximal_lies_on_the_line_between_the_two_policies():
    current, rollout = torch.full((1, 4), -1.0, requires_grad=True), torch.full((1, 4), -3.0)
    versions = torch.tensor([[4, 6, 7, 8]])  # the policy is at version 8, the proximal one at 7
    for proximal, expected in ((None, [-1.5, -2, -3, -3]), (6, [-2, -3, -3, -3]), (8, [-1, -1, -1, -3])):
        got = losses.log_linear_proximal_logprobs(current, rollout, versions, version=8, proximal_version=proximal)
        assert got[0].tolist() == pytest.approx(expected)
        assert not got.requires_grad
