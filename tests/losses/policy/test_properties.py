"""Properties of every policy loss, whatever its formula. Covers base.py."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlhfkit.losses
from rlhfkit.losses import (
    LossOutput,
    aggregate,
    clip_cov_loss,
    decoupled_ppo_loss,
    dppo_loss,
    dr_grpo_loss,
    grpo_loss,
    kl_cov_loss,
    kl_loss,
    sum_losses,
)

from ..policy_cases import Batch, gradient, policy_batch

GRPO_MEAN = "sequence-mean-token-mean"


def other_policy(logprobs, shift):
    """Log-probs of yet another policy, without rounding them to half precision."""
    return (logprobs.float() if logprobs.dtype.itemsize < 4 else logprobs) - shift


def decoupled(logprobs, old_logprobs, advantages, mask, **knobs):
    rollout = other_policy(old_logprobs, 0.05)
    return decoupled_ppo_loss(logprobs, old_logprobs, advantages, mask, rollout_logprobs=rollout, **knobs)


def dppo(logprobs, old_logprobs, advantages, mask, **knobs):
    # Its ratio is to the policy that sampled, which the properties move as the old one.
    before = other_policy(old_logprobs, 0.05)
    return dppo_loss(logprobs, before, advantages, mask, rollout_logprobs=old_logprobs, **knobs)


def two_sided_dppo(logprobs, old_logprobs, advantages, mask, **knobs):
    before = other_policy(old_logprobs, 0.05)
    rollout = {"rollout_logprobs": old_logprobs, "two_sided": True}
    return dppo_loss(logprobs, before, advantages, mask, **rollout, **knobs)


def grpo_with_kl(logprobs, old_logprobs, advantages, mask, **knobs):
    ref = other_policy(old_logprobs, 0.1)
    surrogate = grpo_loss(logprobs, old_logprobs, advantages, mask, **knobs)
    shared = {name: value for name, value in knobs.items() if name in ("aggregation", "denominator", "max_length")}
    return sum_losses(surrogate, kl_loss(logprobs, ref, mask, coef=0.1, **{"aggregation": GRPO_MEAN, **shared}))


def dr_grpo(logprobs, old_logprobs, advantages, mask, **knobs):
    return dr_grpo_loss(logprobs, old_logprobs, advantages, mask, max_length=16, **knobs)


def clip_cov(logprobs, old_logprobs, advantages, mask, **knobs):
    # A priority that belongs to the token makes the draw the same in any order and padding.
    priority = (logprobs.detach() * 1e3).frac().abs()
    return clip_cov_loss(
        logprobs, old_logprobs, advantages, mask, priority=priority, fraction=0.2, covariance_low=0.0, **knobs
    )


def kl_cov(logprobs, old_logprobs, advantages, mask, **knobs):
    return kl_cov_loss(logprobs, old_logprobs, advantages, mask, fraction=0.2, **knobs)


def public_losses():
    """Every policy loss of the package, so that a new one is tested without a line here."""
    found = {name: getattr(rlhfkit.losses, name) for name in rlhfkit.losses.__all__ if name.endswith("_loss")}
    return {
        name.removesuffix("_loss"): loss
        for name, loss in found.items()
        if "old_logprobs" in inspect.signature(loss).parameters
    }


def default_aggregation(name):
    return inspect.signature(public_losses()[name.removesuffix("_two_sided")]).parameters["aggregation"].default


# Some need more arguments.
LOSSES = public_losses() | {
    "grpo": grpo_with_kl,
    "dr_grpo": dr_grpo,
    "decoupled_ppo": decoupled,
    "dppo": dppo,
    "dppo_two_sided": two_sided_dppo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
DEPENDS_ON_THE_SPLIT = {"bnpo", "clip_cov", "kl_cov"}  # by definition, and said so
COUNTS_TOKENS = {name for name in LOSSES if default_aggregation(name) == "token-mean"} - DEPENDS_ON_THE_SPLIT
COUNTS_SEQUENCES = set(LOSSES) - COUNTS_TOKENS - DEPENDS_ON_THE_SPLIT
CONSTANT_RATIO = {"cispo", "vespo", "gspo_token"}  # part of the ratio is detached, so numbers cannot find the gradient
every_loss = pytest.mark.parametrize("name", LOSSES)
seeds = st.integers(0, 10_000)


def run(name: str, batch: Batch, **knobs) -> tuple[LossOutput, torch.Tensor]:
    batch = batch.leaf()
    output = LOSSES[name](*batch, **knobs)
    return output, gradient(output.loss, batch.logprobs)


@every_loss
def test_masked_entries_may_be_nan_or_infinite(name):
    batch = policy_batch(1)
    expected, expected_gradient = run(name, batch)
    for hole in (torch.nan, torch.inf, -torch.inf):
        holed = Batch(*(torch.where(batch.mask, tensor, hole) for tensor in batch[:3]), batch.mask)
        got, got_gradient = run(name, holed)
        torch.testing.assert_close(got.loss, expected.loss)
        torch.testing.assert_close(got_gradient, expected_gradient)
        for metric, value in expected.metrics.items():
            torch.testing.assert_close(got.metrics[metric], value)
        torch.testing.assert_close(got.tokens, expected.tokens)


@pytest.mark.parametrize("name", sorted({*LOSSES} - {"grpo"}))  # of which a KL penalty is added here
def test_the_loss_is_the_aggregate_of_the_losses_of_its_tokens(name):
    batch, weights = policy_batch(2), torch.rand(policy_batch(2).mask.shape)
    output = LOSSES[name](*batch, weights=weights)
    assert not any(values.requires_grad for values in output.tokens.values())
    length = {"max_length": 16} if name == "dr_grpo" else {}
    whole = aggregate(output.tokens["loss"], batch.mask, default_aggregation(name), **length)
    torch.testing.assert_close(whole, output.loss)
    assert not output.tokens["loss"][~batch.mask].any()
    old = batch.old_logprobs - (0.05 if name.startswith("dppo") else 0.0)
    expected = (batch.logprobs - old).exp().where(batch.mask, 1.0)
    torch.testing.assert_close(output.tokens["ratio"], expected)


@every_loss
@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_order_of_the_rows_does_not_matter(name, seed):
    batch = policy_batch(seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    expected, expected_gradient = run(name, batch)
    got, got_gradient = run(name, batch.on(order))
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got_gradient, expected_gradient[order])


@every_loss
@settings(max_examples=8, deadline=None)
@given(seed=seeds, extra=st.integers(1, 5), left=st.booleans())
def test_padding_does_not_matter(name, seed, extra, left):
    batch = policy_batch(seed)
    sides = (extra, 0) if left else (0, extra)
    padded = Batch(*(torch.nn.functional.pad(tensor, sides) for tensor in batch))
    expected, expected_gradient = run(name, batch)
    got, got_gradient = run(name, padded)
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got_gradient, torch.nn.functional.pad(expected_gradient, sides))


@pytest.mark.parametrize("name", sorted(COUNTS_TOKENS | COUNTS_SEQUENCES))
@settings(max_examples=8, deadline=None)
@given(seed=seeds, cut=st.integers(1, 4))
def test_any_split_over_micro_batches_gives_the_same_gradient(name, seed, cut):
    batch = policy_batch(seed)
    count = batch.mask.sum() if name in COUNTS_TOKENS else torch.tensor(len(batch.mask))
    whole, expected = run(name, batch, denominator=count)
    parts = [run(name, batch.on(rows), denominator=count / 2) for rows in (slice(cut), slice(cut, None))]
    # Accumulation and ranks average: hence the denominator over the number of micro-batches.
    torch.testing.assert_close(sum(part.loss for part, _ in parts) / 2, whole.loss)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]) / 2, expected)


@every_loss
def test_a_default_denominator_is_the_count_of_the_batch(name):
    batch = policy_batch(2)
    if name in COUNTS_TOKENS | COUNTS_SEQUENCES:
        count = batch.mask.sum() if name in COUNTS_TOKENS else len(batch.mask)
        torch.testing.assert_close(run(name, batch)[0].loss, run(name, batch, denominator=count)[0].loss)
    else:
        assert name in DEPENDS_ON_THE_SPLIT


@pytest.mark.parametrize("name", sorted(set(LOSSES) - CONSTANT_RATIO))
def test_gradcheck_in_float64(name):
    batch = policy_batch(3, batch=3, steps=4)
    assert torch.autograd.gradcheck(lambda logprobs: run_loss(name, logprobs, batch), batch.leaf().logprobs)


def run_loss(name, logprobs, batch):
    if name == "clip_cov":  # the draw must not move with the log-probs
        priority = (batch.logprobs * 1e3).frac().abs()
        return clip_cov_loss(logprobs, *batch[1:], priority=priority, fraction=0.2, covariance_low=0.0).loss
    return LOSSES[name](logprobs, *batch[1:]).loss


# The others have a second term, or another policy in them, on-policy too.
@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"grpo", "decoupled_ppo", "clip_cov", "kl_cov"}))
def test_on_policy_every_gradient_is_reinforce_up_to_its_scale(name):
    batch = policy_batch(4)
    batch = batch._replace(old_logprobs=batch.logprobs.clone(), advantages=batch.advantages[:, :1].expand(5, 7))
    _, got = run(name, batch)
    count = batch.mask.sum(-1, keepdim=True)
    plain = -batch.advantages * batch.mask
    scale = {
        "token-mean": 1.0 / batch.mask.sum(),
        "sequence-mean-token-mean": 1.0 / count / 5,
        "sequence-mean-token-sum": torch.tensor(1.0 / 5),
        "constant-length": torch.tensor(1.0 / (5 * 16)),
    }
    # The ratio of a whole answer is a product over its tokens, so its gradient is a sum over them.
    kind = {"luspo": "sequence-mean-token-sum", "rloo": "sequence-mean-token-sum"}.get(name, default_aggregation(name))
    torch.testing.assert_close(got, plain * scale[kind])


@every_loss
def test_nothing_selected_gives_a_loss_of_zero_with_a_gradient_of_zero(name):
    batch = policy_batch(6)
    output, got = run(name, batch._replace(mask=torch.zeros_like(batch.mask)))
    assert output.loss.item() == 0.0
    assert (got == 0.0).all()
    assert all(value.isfinite() for value in output.metrics.values())


@every_loss
def test_metrics_are_detached_scalars_under_published_names(name):
    output, _ = run(name, policy_batch(7))
    assert {"policy/approx_kl", "policy/ppo_kl", "policy/ratio_mean", "policy/ratio_max"} <= set(output.metrics)
    for value in output.metrics.values():
        assert value.shape == ()
        assert not value.requires_grad


@every_loss
def test_extreme_ratios_stay_finite(name):
    batch = policy_batch(8)
    batch = batch._replace(old_logprobs=batch.old_logprobs - 1e3, advantages=batch.advantages * 1e-3)
    output, got = run(name, batch)
    assert output.loss.isfinite()
    assert got.isfinite().all()


@every_loss
def test_one_advantage_per_sequence_is_that_of_all_its_tokens(name):
    batch = policy_batch(11)
    advantages = batch.advantages[:, 0]
    outputs = [
        run(name, batch._replace(advantages=given))[0].loss
        for given in (advantages, advantages[:, None], advantages[:, None].expand(5, 7))
    ]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"grpo", "decoupled_ppo", "vespo", "bnpo"}))
def test_weights_multiply_the_loss_of_each_token(name):
    batch = policy_batch(12)
    plain, plain_gradient = run(name, batch)
    doubled, doubled_gradient = run(name, batch, weights=torch.full((5, 7), 2.0))
    torch.testing.assert_close(doubled.loss, 2 * plain.loss)
    torch.testing.assert_close(doubled_gradient, 2 * plain_gradient)
    by_row = torch.rand(5, dtype=torch.float64)
    spread = run(name, batch, weights=by_row[:, None].expand(5, 7))[0].loss
    torch.testing.assert_close(run(name, batch, weights=by_row)[0].loss, spread)
