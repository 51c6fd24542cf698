import math

import pytest
import torch

from rlhfkit.losses import aggregate, bnpo_loss, dapo_loss, dr_grpo_loss, grpo_loss, kl_estimate, ppo_loss

from ..policy_cases import gradient, policy_batch

RATIOS = torch.tensor([[0.5, 0.9, 1.0, 1.1, 2.0, 5.0]], dtype=torch.float64)


def at_ratios(advantage, **knobs):
    """Loss and gradient of each of six tokens, one by one, at log-prob 0 under the policy."""
    logprobs = torch.zeros_like(RATIOS).requires_grad_()
    old = -RATIOS.log()
    losses, gradients = [], []
    for token in range(6):
        mask = torch.arange(6)[None] == token
        loss = ppo_loss(logprobs, old, torch.tensor([advantage], dtype=torch.float64), mask, **knobs).loss
        losses.append(loss.item())
        gradients.append(gradient(loss, logprobs)[0, token].item())
    return losses, gradients


def test_clip_by_hand():
    losses, gradients = at_ratios(1.0, clip_high=0.3)
    assert losses == pytest.approx([-0.5, -0.9, -1.0, -1.1, -1.3, -1.3])
    assert gradients == pytest.approx([-0.5, -0.9, -1.0, -1.1, 0.0, 0.0])
    losses, gradients = at_ratios(-2.0, clip_low=0.3)
    assert losses == pytest.approx([1.4, 1.8, 2.0, 2.2, 4.0, 10.0])
    assert gradients == pytest.approx([0.0, 1.8, 2.0, 2.2, 4.0, 10.0])


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone():
    assert at_ratios(-2.0, dual_clip=3.0)[0] == pytest.approx([1.6, 1.8, 2.0, 2.2, 4.0, 6.0])
    assert at_ratios(-2.0, dual_clip=3.0)[1][-1] == 0.0
    assert at_ratios(1.0, dual_clip=3.0) == at_ratios(1.0)


def test_delta_bounds_the_unclipped_ratio():
    losses, gradients = at_ratios(-1.0, delta=1.5)
    assert losses == pytest.approx([0.8, 0.9, 1.0, 1.1, 1.5, 1.5])
    assert gradients[-2:] == [0.0, 0.0]


def test_log_ratio_clamp_takes_effect_and_can_be_off():
    logprobs, old = torch.tensor([[-30.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    inputs = -logprobs, old, -torch.ones(1), torch.ones(1, 1)
    assert ppo_loss(*inputs).loss.item() == pytest.approx(math.exp(20))
    assert ppo_loss(*inputs, log_ratio_clamp=2.0).loss.item() == pytest.approx(math.exp(2))
    assert ppo_loss(*inputs, log_ratio_clamp=None).loss.item() == pytest.approx(math.exp(30))


def test_the_first_update_of_an_iteration_has_ratio_exactly_one():
    batch = policy_batch(dtype=torch.float32)
    metrics = ppo_loss(batch.logprobs, batch.logprobs.detach(), *batch[2:]).metrics
    assert metrics["policy/ratio_mean"].item() == metrics["policy/ratio_max"].item() == 1.0
    assert metrics["policy/approx_kl"].item() == metrics["policy/clip_fraction"].item() == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean"])
def test_grpo_is_ppo_plus_aggregated_kl(estimator, aggregation):
    batch = policy_batch()
    ref = batch.old_logprobs - 0.1
    got = grpo_loss(*batch, ref_logprobs=ref, kl_coef=0.3, kl_estimator=estimator, aggregation=aggregation)
    kl = kl_estimate(batch.logprobs, ref, estimator=estimator)
    expected = ppo_loss(*batch, aggregation=aggregation).loss + 0.3 * aggregate(kl, batch.mask, aggregation)
    torch.testing.assert_close(got.loss, expected)
    torch.testing.assert_close(got.metrics["policy/ref_kl"], kl[batch.mask].mean())


def test_the_gradient_of_grpo_in_bfloat16_is_rounded_once():
    batch = policy_batch(batch=16, steps=64, dtype=torch.bfloat16)
    reference = batch.old_logprobs.float() + 0.3

    def gradient_in(dtype):
        logprobs = batch.logprobs.to(dtype).requires_grad_()
        knobs = {"ref_logprobs": reference, "kl_coef": 0.5, "kl_importance_weight": True}
        return gradient(grpo_loss(logprobs, *batch[1:], **knobs).loss, logprobs)

    exact = gradient_in(torch.float32)
    assert torch.equal(gradient_in(torch.bfloat16), exact.bfloat16())


def test_reference_logprobs_without_a_coefficient_are_measured_and_do_not_train():
    batch = policy_batch().leaf()
    # An infinite reference shows in the metric; 0 * inf in the loss would be nan.
    got = grpo_loss(*batch, ref_logprobs=torch.full_like(batch.old_logprobs, 1e4), kl_coef=0.0, kl_estimator="k2")
    plain = grpo_loss(*batch)
    assert got.loss.item() == plain.loss.item()
    assert got.metrics["policy/ref_kl"].item() > 1e7
    assert torch.equal(gradient(got.loss, batch.logprobs), gradient(plain.loss, batch.logprobs))


def test_special_cases_differ_from_grpo_as_published():
    batch = policy_batch()
    assert torch.equal(dapo_loss(*batch).loss, ppo_loss(*batch, clip_high=0.28).loss)
    assert torch.equal(bnpo_loss(*batch).loss, ppo_loss(*batch).loss)
    total = ppo_loss(*batch, denominator=1.0).loss
    torch.testing.assert_close(dr_grpo_loss(*batch, max_length=100).loss, total / 500)


def test_length_of_an_answer_does_not_scale_its_gradient_in_dr_grpo_and_does_in_grpo():
    logprobs = torch.zeros(1, 8, dtype=torch.float64, requires_grad=True)
    for length in (2, 8):
        inputs = logprobs, logprobs.detach(), torch.ones(1), torch.arange(8)[None] < length
        constant = gradient(dr_grpo_loss(*inputs, max_length=8).loss, logprobs)[0, 0]
        assert constant.item() == pytest.approx(-1 / 8)
        assert gradient(grpo_loss(*inputs).loss, logprobs)[0, 0].item() == pytest.approx(-1 / length)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_low": 1.1}, r"clip_low must lie in \[0, 1\]"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip must be larger than 1"),
        ({"delta": 1.1}, "delta must be at least"),
        ({"log_ratio_clamp": 0.0}, "log_ratio_clamp"),
        ({"aggregation": "sum"}, "token-mean, sequence-mean-token-mean"),
        ({"ratio_level": "word"}, "token, sequence, sequence-sum"),
        ({"weights": torch.ones(4)}, "weights must be one value per sequence"),
        ({"max_length": 5}, "constant-length"),
        ({"aggregation": "constant-length"}, "constant-length"),
    ],
)
def test_bad_arguments_of_ppo_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        ppo_loss(*policy_batch(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kl_coef": 0.1}, "needs ref_logprobs"),
        ({"kl_coef": -0.1}, "kl_coef must be 0"),
        ({"kl_coef": 0.1, "ref_logprobs": torch.zeros(5, 7), "kl_estimator": "k9"}, "k1, k2, k3"),
        ({"kl_coef": 0.1, "ref_logprobs": torch.zeros(5, 6)}, "same shape"),
    ],
)
def test_bad_arguments_of_grpo_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        grpo_loss(*policy_batch(), **arguments)
