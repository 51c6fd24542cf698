"""Properties of every policy loss, whatever its formula; those of every loss: ``test_rows.py``. Covers base.py."""

import pytest
import torch

from rlhfkit.losses import LossOutput, aggregate

from ..policy_cases import AGGREGATION, LOSSES, Batch, gradient, policy_batch


def run(name: str, batch: Batch, **knobs) -> tuple[LossOutput, torch.Tensor]:
    batch = batch.leaf()
    output = LOSSES[name](*batch, **knobs)
    return output, gradient(output.loss, batch.logprobs)


@pytest.mark.parametrize("name", sorted({*LOSSES} - {"grpo"}))  # of which a KL penalty is added here
def test_the_loss_is_the_aggregate_of_the_losses_of_its_tokens(name):
    batch, weights = policy_batch(2), torch.rand(policy_batch(2).mask.shape)
    output = LOSSES[name](*batch, weights=weights)
    assert not any(values.requires_grad for values in output.tokens.values())
    length = {"max_length": 16} if name == "dr_grpo" else {}
    whole = aggregate(output.tokens["loss"], batch.mask, AGGREGATION[name], **length)
    torch.testing.assert_close(whole, output.loss)
    assert not output.tokens["loss"][~batch.mask].any()
    old = batch.old_logprobs - (0.05 if name.startswith("dppo") else 0.0)
    expected = (batch.logprobs - old).exp().where(batch.mask, 1.0)
    torch.testing.assert_close(output.tokens["ratio"], expected)


# The others have a second term, or another policy in them, on-policy too.
@pytest.mark.parametrize("name", sorted({*LOSSES} - {"grpo", "decoupled_ppo", "clip_cov", "kl_cov"}))
def test_on_policy_every_gradient_is_reinforce_up_to_its_scale(name):
    """With one advantage for each sequence, which is that of all its tokens."""
    batch = policy_batch(4)
    _, got = run(name, batch._replace(old_logprobs=batch.logprobs.clone(), advantages=batch.advantages[:, 0]))
    scale = {
        "token-mean": 1.0 / batch.mask.sum(),
        "sequence-mean-token-mean": 1.0 / batch.mask.sum(-1, keepdim=True) / 5,
        "sequence-mean-token-sum": 1.0 / 5,
        "constant-length": 1.0 / (5 * 16),
    }
    # The ratio of a whole answer is a product over its tokens, so its gradient is a sum over them.
    kind = {"luspo": "sequence-mean-token-sum", "rloo": "sequence-mean-token-sum"}.get(name, AGGREGATION[name])
    torch.testing.assert_close(got, -batch.advantages[:, :1] * batch.mask * scale[kind])


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name):
    batch = policy_batch(8)
    output, got = run(name, batch._replace(old_logprobs=batch.old_logprobs - 1e3, advantages=batch.advantages * 1e-3))
    assert output.loss.isfinite()
    assert got.isfinite().all()


@pytest.mark.parametrize("name", sorted({*LOSSES} - {"grpo", "decoupled_ppo", "vespo", "bnpo"}))
def test_weights_multiply_the_loss_of_each_token(name):
    batch = policy_batch(12)
    plain, plain_gradient = run(name, batch)
    doubled, doubled_gradient = run(name, batch, weights=torch.full((5, 7), 2.0))
    torch.testing.assert_close(doubled.loss, 2 * plain.loss)
    torch.testing.assert_close(doubled_gradient, 2 * plain_gradient)
