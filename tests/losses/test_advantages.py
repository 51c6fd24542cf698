import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.losses import group_advantages

from .policy_cases import FIELD, TRL, tensors

TRL_INPUTS = {
    name: torch.tensor([torch.nan if r is None else r for r in value])
    for name, value in TRL["advantages"]["inputs"].items()
    if name.startswith("r") and isinstance(value[0], float)
}
TRL_GROUP = torch.arange(16) // 4
TRL_CASES = {case["name"]: case for case in TRL["advantages"]["cases"]}


def trl_rewards(case):
    """TRL sums several rewards; one that is missing counts 0 as long as another is there."""
    stacked = torch.stack(
        [
            TRL_INPUTS[name] if name != "r2" else torch.tensor(TRL["advantages"]["inputs"]["r2"])
            for name in case["rewards"]
        ]
    )
    return torch.where(stacked.isnan().all(0), torch.nan, stacked.nansum(0))


@pytest.mark.parametrize("name", [name for name in TRL_CASES if name.startswith("scale_")])
def test_trl_golden_group_advantages(name):
    case = TRL_CASES[name]
    got = group_advantages(trl_rewards(case), TRL_GROUP, scale=case["args"]["scale_rewards"])
    torch.testing.assert_close(got, torch.tensor(case["advantages"]), atol=1e-5, rtol=1e-5)  # float32 inside TRL


def test_verl_golden_group_advantages():
    inputs = tensors(FIELD["inputs"])
    got = group_advantages(inputs["reward"], inputs["group"].long(), eps=1e-6)
    expected = torch.tensor(FIELD["verl_advantage"]["grpo"]["adv"], dtype=torch.float64)
    torch.testing.assert_close(got[:, None] * inputs["mask"], expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(("reward", "size"), [(0.1, 8), (0.9, 8), (0.3, 16), (1 / 3, 7)])
def test_equal_rewards_have_advantage_exactly_zero(scale, reward, size):
    rewards = torch.cat([torch.full((size,), reward), torch.tensor([0.0, 1.0])])
    group = torch.cat([torch.zeros(size, dtype=torch.int64), torch.ones(2, dtype=torch.int64)])
    got = group_advantages(rewards, group, scale=scale)
    assert (got[:size] == 0.0).all()
    assert (got[size:] != 0.0).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_missing_rewards_get_zero_and_leave_the_others_alone(scale):
    rewards, group = torch.tensor([1.0, torch.nan, 0.0, 0.5, torch.nan]), torch.tensor([3, 3, 3, 3, 9])
    got = group_advantages(rewards, group, scale=scale)
    present = torch.tensor([0, 2, 3])
    torch.testing.assert_close(got[present], group_advantages(rewards[present], group[present], scale=scale))
    assert (got[torch.tensor([1, 4])] == 0.0).all()


@given(seed=st.integers(0, 10_000), scale=st.sampled_from(["group", "batch", "none"]))
@settings(max_examples=50, deadline=None)
def test_order_of_rows_and_names_of_groups_do_not_matter(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    group = torch.randint(0, 4, (13,), generator=generator)
    rewards = torch.randn(13, generator=generator)
    rewards[torch.rand(13, generator=generator) < 0.2] = torch.nan
    order = torch.randperm(13, generator=generator)
    got = group_advantages(rewards, group, scale=scale)
    assert torch.equal(got[order], group_advantages(rewards[order], 100 - 7 * group[order], scale=scale))


def test_group_advantages_compile_without_graph_breaks():
    rewards, group = torch.tensor([1.0, 0.0, torch.nan, 0.5]), torch.tensor([7, 7, 2, 7])
    compiled = torch.compile(group_advantages, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(rewards, group), group_advantages(rewards, group))


@pytest.mark.parametrize(
    ("rewards", "group", "arguments", "message"),
    [
        (torch.zeros(3), torch.zeros(2, dtype=torch.int64), {}, "same shape"),
        (torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.int64), {}, r"\(B,\)"),
        (torch.zeros(3), torch.zeros(3), {}, "integer"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), {"scale": "token"}, "group, batch, none"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), {"eps": -1.0}, "eps"),
    ],
)
def test_bad_arguments_of_group_advantages_raise(rewards, group, arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, group, **arguments)
