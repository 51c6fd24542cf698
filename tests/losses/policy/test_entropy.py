import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.losses import entropy_bonus, sum_losses, top_entropy_mask

from ..policy_cases import gradient, policy_batch


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), fraction=st.sampled_from([0.01, 0.2, 0.25, 0.5, 0.8, 1.0]))
def test_as_many_tokens_of_largest_entropy_as_the_quantile_says(seed, fraction):
    generator = torch.Generator().manual_seed(seed)
    entropy = torch.rand(4, 8, generator=generator)
    mask = torch.rand(4, 8, generator=generator) < 0.7
    mask[0, 0] = True
    kept = top_entropy_mask(torch.where(mask, entropy, torch.nan), mask, fraction=fraction)
    assert not (kept & ~mask).any()
    assert kept.sum().item() == int(fraction * (mask.sum().item() - 1) + 1e-4) + 1
    assert entropy[kept].min() >= entropy[mask & ~kept].max() if (mask & ~kept).any() else True
    assert torch.equal(top_entropy_mask(entropy, mask, threshold=entropy[kept].min()), kept)
    assert not top_entropy_mask(entropy, torch.zeros_like(mask)).any()


def test_entropy_bonus_pushes_entropy_up_and_adds_to_a_loss():
    batch = policy_batch()
    entropy = batch.advantages.abs().requires_grad_()
    bonus = entropy_bonus(entropy, batch.mask, coef=0.1)
    torch.testing.assert_close(gradient(bonus.loss, entropy), -0.1 * batch.mask.double() / batch.mask.sum())
    torch.testing.assert_close(bonus.metrics["policy/entropy"], entropy.detach()[batch.mask].mean())
    measured = entropy_bonus(entropy, batch.mask, coef=0.0)
    assert measured.metrics["policy/entropy"] == bonus.metrics["policy/entropy"]
    assert not measured.loss.requires_grad
    torch.testing.assert_close(sum_losses(bonus, bonus, measured).loss, 2 * bonus.loss)
    with pytest.raises(ValueError, match="at least one"):
        sum_losses()
