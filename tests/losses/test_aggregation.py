import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.losses import aggregate, masked_mean, masked_sum, whiten
from rlhfkit.losses.aggregation import masked_moments

from .policy_cases import policy_batch


def test_sums_and_means_by_hand():
    values = torch.tensor([[1.0, 2.0, torch.nan], [3.0, torch.inf, torch.nan]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert masked_sum(values, mask).item() == 6.0
    assert masked_sum(values, mask, -1).tolist() == [3.0, 3.0]
    assert masked_mean(values, mask).item() == 2.0
    assert masked_mean(values, mask, -1).tolist() == [1.5, 3.0]
    assert masked_mean(values, torch.zeros(2, 3), 0).tolist() == [0.0, 0.0, 0.0]


def test_aggregation_modes_by_hand():
    loss = torch.tensor([[1.0, 2.0, 3.0, torch.nan], [5.0, torch.nan, torch.nan, torch.nan], [torch.nan] * 4])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert aggregate(loss, mask, "token-mean").item() == 11 / 4
    assert aggregate(loss, mask, "sequence-mean-token-mean").item() == (2 + 5) / 2  # the empty row is no sequence
    assert aggregate(loss, mask, "sequence-mean-token-sum").item() == (6 + 5) / 2
    assert aggregate(loss, mask, "constant-length", max_length=10).item() == pytest.approx(11 / (3 * 10))
    assert aggregate(loss, mask, "token-mean", 8).item() == 11 / 8


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 4), unbiased=st.booleans())
def test_whitening_over_ranks_is_whitening_of_the_whole(seed, cut, unbiased):
    batch = policy_batch(seed)
    values = torch.where(batch.mask, batch.logprobs, torch.nan)
    ranks = [(values[rows], batch.mask[rows]) for rows in (slice(cut), slice(cut, None))]
    moments = sum(masked_moments(*rank) for rank in ranks)  # what an all-reduce would give
    got = torch.cat([whiten(*rank, moments=moments, unbiased=unbiased) for rank in ranks])
    torch.testing.assert_close(got, whiten(batch.logprobs, batch.mask, unbiased=unbiased))


def test_moments_keep_a_small_spread_around_a_large_mean():
    values = 1000.0 + torch.tensor([[0.0, 0.01, 0.02, 0.03]])
    mask = torch.ones(1, 4)
    got = whiten(values, mask, moments=masked_moments(values, mask))
    # Sums of squares in float32 would leave nothing of a variance of 1e-4 beside 1e6.
    torch.testing.assert_close(got, whiten(values.double(), mask).float(), rtol=1e-2, atol=1e-2)


def test_equal_values_whiten_to_zero_and_the_deviation_may_be_left():
    assert whiten(torch.full((2, 3), 0.1), torch.ones(2, 3)).abs().max().item() < 1e-3
    assert (whiten(torch.full((2, 3), 0.5), torch.ones(2, 3)) == 0.0).all()
    assert whiten(torch.tensor([1.0, 2.0, 6.0]), torch.ones(3), scale_std=False).tolist() == [-2.0, -1.0, 3.0]
