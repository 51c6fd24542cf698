"""DPO and its variants against closed forms; TRL's values: ``modules/preference/test_dpo.py``."""

import pytest
import torch

from rlhfkit import losses
from rlhfkit.losses.preference.dpo import (
    DIVERGENCES,
    PAIR_LOSSES,
    AlphaDivergence,
    best_and_worst,
    pair_partners,
    rejected_values,
)

from ..policy_cases import OPENRLHF


def pair_batch():
    """chosen, rejected, ref_chosen, ref_rejected."""
    return -20 * torch.rand(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# --- values of peers -------------------------------------------------------------------------------------------------


def test_value_and_rewards_match_openrlhf():
    inputs = [torch.tensor(row) for row in OPENRLHF["dpo"]["inputs"]]
    for name, knobs in (
        ("dpo", {}),
        ("cdpo_ls01", {"label_smoothing": 0.1}),
        ("ipo", {"loss_type": "ipo_sum"}),  # OpenRLHF's IPO works on sums, which ours has under a name of its own
    ):
        loss, chosen_rewards, rejected_rewards = OPENRLHF["dpo"][name]
        output = losses.dpo_loss(*inputs, beta=0.1, **knobs)
        assert output.loss.item() == pytest.approx(loss, abs=1e-6 * max(1.0, loss))
        assert output.metrics["rewards/chosen"].item() == pytest.approx(sum(chosen_rewards) / 2, abs=1e-6)
        assert output.metrics["rewards/rejected"].item() == pytest.approx(sum(rejected_rewards) / 2, abs=1e-6)


# --- closed forms ----------------------------------------------------------------------------------------------------


def test_reference_free_is_a_reference_of_zeros_and_ties_are_wrong():
    chosen, rejected, *_ = pair_batch()
    zeros = torch.zeros_like(chosen)
    expected = losses.dpo_loss(chosen, rejected, zeros, zeros).loss
    torch.testing.assert_close(losses.dpo_loss(chosen, rejected, reference_free=True).loss, expected)
    assert losses.dpo_loss(chosen, rejected, chosen, rejected).metrics["rewards/accuracies"] == 0


def test_weights_scale_pairs_and_carry_no_gradient():
    batch, weights = pair_batch().requires_grad_(), torch.rand(6).double().requires_grad_()
    weighted, plain = (
        torch.autograd.grad(losses.dpo_loss(*batch, weights=one).loss, (batch, weights), allow_unused=True)
        for one in (weights, None)
    )
    torch.testing.assert_close(weighted[0], weights.detach() * plain[0])
    assert weighted[1] is None


def test_alpha_divergence_joins_its_neighbours_and_stays_finite():
    logratio = torch.linspace(-3, 3, 13, dtype=torch.float64)
    near = AlphaDivergence(1.0 + 1e-9)(logratio)
    torch.testing.assert_close(near, logratio, rtol=1e-6, atol=1e-8)
    far = torch.tensor([-1e4, 1e4])
    for name in ("forward_kl", "js", "alpha"):
        assert DIVERGENCES[name](far).isfinite().all()


def test_sequence_logprobs_sum_or_average_the_selected_tokens():
    logprobs = torch.tensor([[-1.0, -2.0, float("nan")], [float("inf"), -3.0, -5.0]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    assert losses.sequence_logprobs(logprobs, mask).tolist() == [-3.0, -8.0]
    assert losses.sequence_logprobs(logprobs, mask, mean=True).tolist() == [-1.5, -4.0]


# --- what must always hold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("margin", [-1e4, 1e4])
@pytest.mark.parametrize("name", sorted(PAIR_LOSSES))
def test_extreme_margins_give_finite_loss_and_gradient_in_float32(name, margin):
    zeros, lengths = torch.zeros(2), torch.full((2,), 3)
    # DiscoPOP grows like e^-z by definition: here where a product of its factors is zero times infinity.
    chosen = torch.tensor([max(margin, -950.0) if name == "discopop" else margin, 0.0]).requires_grad_()
    knobs = {"label_smoothing": 0.1} if name in ("exo_pair", "robust") else {}
    knobs |= {"loss_type": name, "chosen_lengths": lengths, "rejected_lengths": lengths}
    output = losses.dpo_loss(chosen, zeros, zeros, zeros, **knobs)
    output.loss.backward()
    assert output.loss.isfinite()
    assert chosen.grad.isfinite().all()


# --- pairs among the samples of a prompt -----------------------------------------------------------------------------


def test_best_and_worst_are_one_each_of_a_group_whose_rewards_differ() -> None:
    rewards = torch.tensor([torch.nan, 1.0, 2.0, 2.0, 0.0, 0.0, torch.nan, 3.0, 3.0, 5.0])
    signs = best_and_worst(rewards, torch.tensor([4, 4, 4, 4, 4, 4, 1, 1, 1, 2]))
    assert sorted(zip(rewards[signs != 0].tolist(), signs[signs != 0].tolist(), strict=True)) == [(0.0, -1), (2.0, 1)]


def test_partners_have_the_values_of_the_rejected_answers() -> None:
    signs = torch.tensor([0.0, 1, -1, -1, 0, 1, 1])
    group = torch.tensor([3, 3, 3, 8, 8, 8, 9])
    partners, pairs = pair_partners(signs, group)
    assert pairs.tolist() == [False, True, False, False, False, True, False]  # group 9 has no rejected answer
    values = torch.tensor([1.0, 2, 3, 4, 5, 6, 7])
    assert rejected_values(partners, values).tolist() == [0, 3, 0, 0, 0, 4, 0]
