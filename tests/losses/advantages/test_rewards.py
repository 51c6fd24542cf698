from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.losses.advantages.rewards import RewardMoments, last_action_mask, normalize_rewards, token_rewards


def test_the_reward_is_on_the_last_action_of_ragged_multi_turn_and_empty_rows():
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    assert last_action_mask(mask).nonzero().tolist() == [[0, 2], [1, 3], [3, 0]]
    got = token_rewards(torch.tensor([1.0, torch.nan, 3.0, 4.0]), mask)
    assert got.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [4, 0, 0, 0]]
    penalty = torch.tensor([[0.05, -0.1, torch.nan]])
    got = token_rewards(torch.tensor([1.0]), torch.tensor([[1, 1, 0]]), penalty=penalty)
    torch.testing.assert_close(got, torch.tensor([[-0.05, 1.1, 0.0]]))


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_wherever_a_reward_was_earned_its_total_is_the_same(seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 9, generator=generator) < 0.5
    mask[0] = False
    earned, rewards = torch.randn(4, 9, generator=generator).double(), torch.randn(4, generator=generator).double()
    rewards[1] = torch.nan
    got = token_rewards(rewards, mask, earned=earned)
    assert not got[~mask].any()
    expected = torch.where(mask.any(-1) & ~rewards.isnan(), rewards, 0.0)
    torch.testing.assert_close(got.sum(-1), expected)
    for row in (2, 3):  # the last action apart, by the definition
        actions = mask[row].nonzero()[:, 0].tolist()
        for place, following in pairwise(actions):
            torch.testing.assert_close(got[row, place], earned[row, place:following].sum())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), parts=st.integers(1, 4))
def test_running_moments_are_those_of_all_rewards_at_once(seed, parts):
    generator = torch.Generator().manual_seed(seed)
    rewards = 100.0 + torch.randn(20, generator=generator, dtype=torch.float64)
    rewards[torch.rand(20, generator=generator) < 0.1] = torch.nan
    moments = merged = RewardMoments.zero()
    for part in rewards.chunk(parts):
        moments, merged = moments.update(part), merged.merge(RewardMoments.zero().update(part))
    present = rewards[~rewards.isnan()]
    torch.testing.assert_close(moments.mean, present.mean())
    torch.testing.assert_close(moments.std, present.std())
    assert merged.plain() == pytest.approx(moments.plain(), rel=1e-12)  # of several ranks
    got = normalize_rewards(rewards, moments.mean, moments.std)
    torch.testing.assert_close(got, (rewards - present.mean()) / present.std(), equal_nan=True)
    got = normalize_rewards(rewards, moments.mean, moments.std, shift_mean=False)
    torch.testing.assert_close(got, rewards / present.std(), equal_nan=True)


def test_moments_of_nothing_and_of_one_leave_the_scale():
    assert RewardMoments.zero().std.item() == 1.0
    empty = RewardMoments.zero().update(torch.tensor([torch.nan]))
    assert (empty.seen.item(), empty.mean.item(), empty.std.item()) == (0.0, 0.0, 1.0)
    one = empty.update(torch.tensor([5.0]))
    assert (one.mean.item(), one.std.item()) == (5.0, 1.0)
    # A deviation of zero is held up by its floor.
    assert normalize_rewards(torch.tensor([5.0]), 5.0, 0.0).item() == 0.0
