import itertools
import math
import statistics
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit import losses

from ..policy_cases import TRL

TRL_REWARDS = {
    name: torch.tensor([torch.nan if reward is None else reward for reward in values])
    for name, values in TRL["advantages"]["inputs"].items()
    if name.startswith("r") and name != "ref_logps"
}
TRL_GROUP = torch.arange(16) // 4
TRL_CASES = {case["name"]: case for case in TRL["advantages"]["cases"]}
FLOAT32_INSIDE_TRL = {"rtol": 1e-5, "atol": 1e-5}


ESTIMATORS = {
    **{f"group {scale}": partial(losses.group_advantages, scale=scale) for scale in ("group", "batch", "none")},
    "rloo": losses.rloo_advantages,
    "opo": lambda rewards, group: losses.opo_advantages(rewards, group, torch.full_like(group, 7)),
    "gdpo": lambda rewards, group: losses.gdpo_advantages(rewards[:, None], group),
    "best": losses.best_of_group_advantages,
    "pass at 2": partial(losses.pass_at_k_advantages, k=2),
}
every_estimator = pytest.mark.parametrize("estimate", ESTIMATORS.values(), ids=ESTIMATORS)


def trl_columns(case):
    return torch.stack([TRL_REWARDS[name] for name in case["rewards"]], -1)


def trl_rewards(case):
    """TRL's sum of several rewards: one that is missing counts 0 as long as another is there."""
    columns = trl_columns(case)
    return torch.where(columns.isnan().all(-1), torch.nan, columns.nansum(-1))


@pytest.mark.parametrize("name", TRL_CASES)
def test_trl_golden_advantages(name):
    case = TRL_CASES[name]
    rewards, args = trl_rewards(case), case["args"]
    if name.startswith("gdpo"):
        got = losses.gdpo_advantages(trl_columns(case), TRL_GROUP)
    elif name == "rloo/norm":
        advantages = losses.rloo_advantages(rewards, TRL_GROUP)
        got = (advantages - advantages.mean()) / (advantages.std() + 1e-4)
    elif name == "rloo/kl":
        policy, reference = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in TRL["advantages"]["inputs"][key]], True)
            for key in ("old_logps", "ref_logps")
        )
        kl = losses.kl_estimate(policy, reference, estimator="k1").sum(-1)  # padding is 0 in both
        got = losses.rloo_advantages(rewards - args["beta"] * kl, TRL_GROUP)
    elif name.startswith("rloo"):
        got = losses.rloo_advantages(rewards, TRL_GROUP)
    else:
        got = losses.group_advantages(rewards, TRL_GROUP, scale=args.get("scale_rewards", "group"))
    torch.testing.assert_close(got, torch.tensor(case["advantages"]), **FLOAT32_INSIDE_TRL)


@every_estimator
@pytest.mark.parametrize(("reward", "size"), [(0.1, 8), (0.9, 8), (0.3, 16), (1 / 3, 7), (1.0, 4), (0.0, 4)])
def test_equal_rewards_have_advantage_exactly_zero(estimate, reward, size):
    rewards = torch.cat([torch.full((size,), reward), torch.tensor([0.0, 1.0, 0.0])])
    group = torch.cat([torch.zeros(size, dtype=torch.int64), torch.ones(3, dtype=torch.int64)])
    got = estimate(rewards, group)
    assert (got[:size] == 0.0).all()
    assert got[size + 1] > 0.0


@every_estimator
def test_missing_rewards_get_zero_and_leave_the_others_alone(estimate):
    rewards, group = torch.tensor([1.0, torch.nan, 0.0, 0.0, torch.nan]), torch.tensor([3, 3, 3, 3, 9])
    got = estimate(rewards, group)
    present = torch.tensor([0, 2, 3])
    torch.testing.assert_close(got[present], estimate(rewards[present], group[present]))
    assert (got[torch.tensor([1, 4])] == 0.0).all()
    assert (got[present] != 0.0).any()
    assert estimate(torch.tensor([1.0, 0.0]), torch.tensor([0, 1])).tolist() == [0.0, 0.0]  # each alone


@every_estimator
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_order_of_rows_and_names_of_groups_change_no_bit(estimate, seed):
    generator = torch.Generator().manual_seed(seed)
    group = torch.randint(0, 4, (13,), generator=generator)
    rewards = torch.randn(13, generator=generator)
    rewards[torch.rand(13, generator=generator) < 0.2] = torch.nan
    order = torch.randperm(13, generator=generator)
    got = estimate(rewards, group)
    again = estimate(rewards[order], 100 - 7 * group[order])
    assert torch.equal(again, got[order])


@pytest.mark.parametrize(("size", "right", "k"), [(4, 1, 2), (6, 2, 3), (5, 3, 2), (7, 1, 1), (6, 5, 1)])
def test_pass_at_k_is_the_mean_over_all_groups_of_k(size, right, k):
    rewards = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
    groups = list(itertools.combinations(range(size), k))
    wins = torch.tensor([float(rewards[list(group)].max()) for group in groups])
    wins = (wins - wins.mean()) / wins.std(unbiased=False)
    expected = [wins[[row in group for group in groups]].mean() for row in range(size)]
    got = losses.pass_at_k_advantages(rewards, torch.zeros(size, dtype=torch.int64), k=k)
    torch.testing.assert_close(got.float(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    group = torch.tensor([0, 0, 0, 0, 1])  # of which every 2 succeed, and one that is too small
    assert not losses.pass_at_k_advantages(torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]), group, k=2).any()


def test_gpg_scales_the_centred_reward_up_for_samples_without_a_gradient():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5, math.nan])
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    got = losses.gpg_advantages(rewards, group)
    # Seven samples have a reward, two of them are in a group where rewards differ: B / (B - M) = 7 / 2.
    assert got.tolist() == pytest.approx([1.75, -1.75, 0, 0, 0, 0, 0, 0])
    assert not losses.gpg_advantages(torch.ones(8), group).any()


def test_baselines_of_other_answers_by_hand():
    got = losses.opo_advantages(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64), torch.tensor([30, 10]))
    assert got.tolist() == pytest.approx([0.25, -0.75])
    rewards, greedy = torch.tensor([1.0, 0.0, torch.nan, 0.5]), torch.tensor([0.25, 0.25, 1.0, torch.nan])
    assert losses.remax_advantages(rewards, greedy).tolist() == [0.75, -0.25, 0.0, 0.0]
    best, group = torch.tensor([3.0, 1.0, 0.0, 2.0, 2.0]), torch.tensor([0, 0, 0, 1, 1])  # only a single one learns
    assert losses.best_of_group_advantages(best, group, normalize=False).tolist() == [2.0, 0.0, 0.0, 0.0, 0.0]
    normalized = losses.best_of_group_advantages(best, group)
    assert normalized.tolist() == pytest.approx([2.0 / statistics.stdev([3.0, 1.0, 0.0]), 0.0, 0.0, 0.0, 0.0], rel=1e-5)
    columns, group = torch.tensor([[1.0, 5.0], [0.0, 5.0], [0.0, 0.0], [1.0, 9.0]]), torch.tensor([0, 0, 1, 1])
    first = losses.gdpo_advantages(columns, group, weights=[1.0, 0.0])
    torch.testing.assert_close(first, losses.gdpo_advantages(columns[:, :1], group))
