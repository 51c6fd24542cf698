"""DPO and its variants against closed forms; TRL's values: ``modules/preference/test_dpo.py``."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from rlhfkit.losses import (
    PreferencePairs,
    dpo_loss,
    length_desensitized_logprobs,
    sequence_logprobs,
    wpo_weights,
)
from rlhfkit.losses.preference.dpo import (
    DIVERGENCES,
    PAIR_LOSSES,
    AlphaDivergence,
    best_and_worst,
    forward_kl,
    pair_partners,
    rejected_values,
)

GOLDEN_FOLDER = Path(__file__).parents[2] / "golden"
OPENRLHF = json.loads((GOLDEN_FOLDER / "openrlhf.json").read_text())["dpo"]
NEEDS_SMOOTHING = {"exo_pair": 0.1, "robust": 0.1}


def pair_batch(seed: int = 0, pairs: int = 6, dtype: torch.dtype = torch.float64):
    """chosen, rejected, ref_chosen, ref_rejected, chosen_lengths, rejected_lengths."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -20 * torch.rand(4, pairs, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 9, (2, pairs), generator=generator)
    return (*logprobs.to(dtype).unbind(), *lengths.unbind())


def loss_of(name, chosen, rejected, ref_chosen, ref_rejected, chosen_lengths, rejected_lengths, **knobs):
    lengths = {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths}
    knobs = {"label_smoothing": NEEDS_SMOOTHING.get(name, 0.0), "loss_type": name, **lengths, **knobs}
    return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, **knobs)


# --- values of peers -------------------------------------------------------------------------------------------------


def test_value_and_rewards_match_openrlhf():
    inputs = [torch.tensor(row) for row in OPENRLHF["inputs"]]
    for name, knobs in (
        ("dpo", {}),
        ("cdpo_ls01", {"label_smoothing": 0.1}),
        ("ipo", {"loss_type": "ipo_sum"}),  # OpenRLHF's IPO works on sums, which ours has under a name of its own
    ):
        loss, chosen_rewards, rejected_rewards = OPENRLHF[name]
        output = dpo_loss(*inputs, beta=0.1, **knobs)
        assert output.loss.item() == pytest.approx(loss, abs=1e-6 * max(1.0, loss))
        assert output.metrics["rewards/chosen"].item() == pytest.approx(sum(chosen_rewards) / 2, abs=1e-6)
        assert output.metrics["rewards/rejected"].item() == pytest.approx(sum(rejected_rewards) / 2, abs=1e-6)


# --- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("sigmoid", math.log(2)), ("sigmoid_norm", math.log(2)), ("hinge", 1.0), ("ipo", 25.0), ("ipo_sum", 25.0)),
        *(("nca_pair", 2 * math.log(2)), ("robust", math.log(2)), ("bco_pair", 2 * math.log(2)), ("sppo_hard", 50.0)),
        *(("aot", math.log(2)), ("aot_unpaired", math.log(2)), ("apo_zero", 1.0), ("apo_down", 1.0)),
        *(("discopop", 0.5 * math.log(2) + 0.5), ("exo_pair", -math.log(2) - 0.5 * math.log(0.09))),
    ],
)
def test_value_at_the_reference(name, value):
    chosen, rejected, *_, chosen_lengths, rejected_lengths = pair_batch()
    output = loss_of(name, chosen, rejected, chosen, rejected, chosen_lengths, rejected_lengths)
    assert output.loss.item() == pytest.approx(value)
    assert output.metrics["rewards/margins"] == 0
    assert output.metrics["rewards/accuracies"] == 0  # ties are wrong


def test_mixture_is_the_weighted_sum_and_takes_functions():
    batch = pair_batch()

    def squared(pairs: PreferencePairs):
        return pairs.margin.square()

    lengths = {"chosen_lengths": batch[4], "rejected_lengths": batch[5]}
    mixed = dpo_loss(*batch[:4], loss_type={"sigmoid": 1.0, "sft": 0.5, squared: 2.0}, **lengths).loss
    parts = [dpo_loss(*batch[:4], loss_type=name, **lengths).loss for name in ("sigmoid", "sft", squared)]
    torch.testing.assert_close(mixed, parts[0] + 0.5 * parts[1] + 2.0 * parts[2])


def test_likelihood_term_is_the_mean_nll_per_token():
    batch = pair_batch()
    plain, with_nll = dpo_loss(*batch[:4]), dpo_loss(*batch[:4], nll_coef=0.3, chosen_lengths=batch[4])
    nll = (-batch[0] / batch[4]).mean()
    torch.testing.assert_close(with_nll.loss - plain.loss, 0.3 * nll)
    torch.testing.assert_close(with_nll.metrics["nll_loss"], nll)


def test_reference_free_is_a_reference_of_zeros():
    chosen, rejected, *_ = pair_batch()
    zeros = torch.zeros_like(chosen)
    expected = dpo_loss(chosen, rejected, zeros, zeros).loss
    torch.testing.assert_close(dpo_loss(chosen, rejected, reference_free=True).loss, expected)


def test_weights_scale_pairs_and_carry_no_gradient():
    chosen, rejected, ref_chosen, ref_rejected, *_ = pair_batch()
    weights = torch.rand_like(chosen).requires_grad_()
    chosen.requires_grad_()
    dpo_loss(chosen, rejected, ref_chosen, ref_rejected, weights=weights).loss.backward()
    plain = chosen.detach().clone().requires_grad_()
    dpo_loss(plain, rejected, ref_chosen, ref_rejected).loss.backward()
    torch.testing.assert_close(chosen.grad, weights.detach() * plain.grad)
    assert weights.grad is None


def test_alpha_divergence_joins_its_neighbours_and_stays_finite():
    logratio = torch.linspace(-3, 3, 13, dtype=torch.float64)
    torch.testing.assert_close(AlphaDivergence(0.0)(logratio), forward_kl(logratio))
    torch.testing.assert_close(AlphaDivergence(1.0)(logratio), logratio)
    near = AlphaDivergence(1.0 + 1e-9)(logratio)
    torch.testing.assert_close(near, logratio, rtol=1e-6, atol=1e-8)
    far = torch.tensor([-1e4, 1e4])
    for name in ("forward_kl", "js", "alpha"):
        assert DIVERGENCES[name](far).isfinite().all()


def test_a_divergence_can_be_a_function():
    answers = pair_batch()[:4]
    assert dpo_loss(*answers, divergence=AlphaDivergence()).loss == dpo_loss(*answers, divergence="alpha").loss


def test_sequence_logprobs_sum_or_average_the_selected_tokens():
    logprobs = torch.tensor([[-1.0, -2.0, float("nan")], [float("inf"), -3.0, -5.0]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    assert sequence_logprobs(logprobs, mask).tolist() == [-3.0, -8.0]
    assert sequence_logprobs(logprobs, mask, mean=True).tolist() == [-1.5, -4.0]


def test_length_desensitising_counts_tokens_along_the_mask():
    logprobs = torch.tensor([[-1.0, float("nan"), -2.0, -4.0, -8.0]])
    mask = torch.tensor([[1, 0, 1, 1, 1]])
    for alpha, expected in ((1.0, -15.0), (0.0, -3.0), (0.5, -9.0)):
        assert length_desensitized_logprobs(logprobs, mask, torch.tensor([2]), alpha=alpha).item() == expected


def test_wpo_weight_is_one_for_a_uniform_policy():
    vocabulary = 11
    logprobs = torch.full((2, 3), -math.log(vocabulary), dtype=torch.float64, requires_grad=True)
    log_sum_squares = torch.full((2, 3), -math.log(vocabulary), dtype=torch.float64)
    weights = wpo_weights(logprobs, torch.tensor([[1, 1, 0], [1, 0, 0]]), log_sum_squares)
    torch.testing.assert_close(weights, torch.ones(2, dtype=torch.float64))
    assert not weights.requires_grad


# --- what must always hold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "margin"),
    # DiscoPOP is missing where it grows like e^-z by definition; the test below has it up to its float32 range.
    [(name, margin) for name in sorted(PAIR_LOSSES) for margin in (-1e4, 1e4) if (name, margin) != ("discopop", -1e4)],
)
def test_extreme_margins_give_finite_loss_and_gradient_in_float32(name, margin):
    zeros, lengths = torch.zeros(2), torch.full((2,), 3)
    chosen = torch.tensor([margin, 0.0]).requires_grad_()
    output = loss_of(name, chosen, zeros, zeros, zeros, lengths, lengths)
    output.loss.backward()
    assert output.loss.isfinite()
    assert chosen.grad.isfinite().all()


def test_discopop_is_finite_where_the_product_of_its_factors_is_zero_times_infinity():
    chosen, zeros = torch.tensor([-950.0]).requires_grad_(), torch.zeros(1)
    output = dpo_loss(chosen, zeros, zeros, zeros, beta=0.1, loss_type="discopop")
    output.loss.backward()
    assert output.loss.item() == pytest.approx(95.0)  # -log σ(-95): the exponential part has vanished
    assert chosen.grad.isfinite().all()


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_transport_losses_ignore_the_order(name):
    batch = pair_batch()
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    torch.testing.assert_close(loss_of(name, *batch).loss, loss_of(name, *(tensor[order] for tensor in batch)).loss)


# --- pairs among the samples of a prompt, against a search by hand ----------------------------------------------------


def test_best_and_worst_are_those_of_a_search_over_each_group() -> None:
    generator = random.Random(0)
    for _ in range(50):
        group = [generator.randrange(4) for _ in range(12)]
        rewards = [generator.choice([0.0, 1.0, 2.0, float("nan")]) for _ in range(12)]
        signs = best_and_worst(torch.tensor(rewards), torch.tensor(group)).tolist()
        for number in set(group):
            known = {row: rewards[row] for row in range(12) if group[row] == number and rewards[row] == rewards[row]}
            chosen = [row for row in range(12) if group[row] == number and signs[row] == 1]
            rejected = [row for row in range(12) if group[row] == number and signs[row] == -1]
            if len(set(known.values())) < 2:
                assert not chosen
                assert not rejected
            else:
                assert [known[row] for row in chosen] == [max(known.values())]
                assert [known[row] for row in rejected] == [min(known.values())]


def test_partners_have_the_values_of_the_rejected_answers() -> None:
    signs = torch.tensor([0.0, 1, -1, -1, 0, 1, 1])
    group = torch.tensor([3, 3, 3, 8, 8, 8, 9])
    partners, pairs = pair_partners(signs, group)
    assert pairs.tolist() == [False, True, False, False, False, True, False]  # group 9 has no rejected answer
    values = torch.tensor([1.0, 2, 3, 4, 5, 6, 7])
    assert rejected_values(partners, values).tolist() == [0, 3, 0, 0, 0, 4, 0]
