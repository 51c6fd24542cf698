"""KTO against TRL's values, and BCO's weights against a regression by hand in float64."""

import pytest
import torch

from rlhfkit.losses import kto_kl_estimate, kto_loss, sequence_logprobs
from rlhfkit.losses.preference.unpaired import density_ratio_weights, kto_kl_sums

from ..policy_cases import OPENRLHF, TRL


@pytest.mark.parametrize("case", TRL["kto"]["cases"], ids=lambda case: case["name"])
def test_value_gradient_and_metrics_match_trl(case):
    # Quirks left behind: TRL's gradient on masked tokens is not 0, and it takes a nanmean over the batch, which would
    # hide a NaN of an answer that counts.
    inputs, args = TRL["kto"]["inputs"], dict(case["args"])
    policy = torch.tensor(inputs["policy_per_token_logps"], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(inputs["completion_mask"])[:, 1:].bool()
    kl_mask = torch.tensor(inputs["KL_completion_mask"])[:, 1:].bool()

    def summed(name, mask):
        return sequence_logprobs(torch.tensor(inputs[name], dtype=torch.float64), mask)

    kl = None
    if args.get("loss_type") != "apo_zero_unpaired":
        reference = summed(f"ref_KL_per_token_logps_{case['kl_ref']}", kl_mask)
        kl = kto_kl_estimate(kto_kl_sums(summed("policy_KL_per_token_logps", kl_mask), reference))
        assert kl.item() == pytest.approx(case["metrics"]["kl"], rel=1e-10)
    desirable = torch.tensor(case["label"])
    output = kto_loss(sequence_logprobs(policy, mask), summed("ref_per_token_logps", mask), desirable, kl, **args)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-10)
    expected = torch.where(mask, torch.tensor(case["grad"], dtype=torch.float64), 0.0)
    torch.testing.assert_close(policy.grad, expected, rtol=1e-10, atol=1e-14)
    assert (output.metrics["count/chosen"], output.metrics["count/rejected"]) == (desirable.sum(), (~desirable).sum())
    for name, value in case["metrics"].items():
        if name in output.metrics:  # without a KL term TRL logs kl = 0, we log none
            assert output.metrics[name].item() == pytest.approx(value, rel=1e-10), name


def test_unpaired_value_and_rewards_match_openrlhf():
    case, inputs = OPENRLHF["kto"], OPENRLHF["kto"]["inputs"]
    chosen, ref_chosen, rejected, ref_rejected, mismatched, ref_mismatched = (
        torch.tensor(inputs[name]) for name in ("pol_chosen", "ref_chosen", "pol_rej", "ref_rej", "pol_KL", "ref_KL")
    )
    loss, chosen_rewards, rejected_rewards, kl = case["out_loss_cr_rr_KL"]
    output = kto_loss(
        torch.cat([chosen, rejected]),
        torch.cat([ref_chosen, ref_rejected]),
        torch.tensor([True, True, False]),
        kto_kl_estimate(kto_kl_sums(mismatched, ref_mismatched)),
        beta=inputs["beta"],
        desirable_weight=inputs["desirable"],
        undesirable_weight=inputs["undesirable"],
    )
    assert output.loss.item() == pytest.approx(loss, abs=1e-6)
    assert output.metrics["kl"].item() == pytest.approx(kl)
    assert output.metrics["rewards/chosen"].item() == pytest.approx(sum(chosen_rewards) / 2, abs=1e-6)
    assert output.metrics["rewards/rejected"].item() == pytest.approx(rejected_rewards[0])
    assert (output.metrics["count/chosen"], output.metrics["count/rejected"]) == (2, 1)


def test_estimate_over_ranks_clamps_after_the_sum():
    logprobs, reference = -20 * torch.rand(2, 6, generator=torch.Generator().manual_seed(4))
    mask = torch.tensor([1, 1, 0, 1, 0, 1]).bool()
    poisoned = torch.where(mask, logprobs, float("nan")).requires_grad_()
    sums = kto_kl_sums(poisoned, reference.clone().requires_grad_(), mask)
    torch.testing.assert_close(sums, kto_kl_sums(logprobs[mask], reference[mask]))
    assert not sums.requires_grad
    assert kto_kl_estimate(torch.zeros(2)) == 0  # no answers at all
    assert kto_kl_estimate(kto_kl_sums(reference, reference + 1.0)) == 0  # a negative one is clamped
    uneven = torch.tensor([4.0, 2.0]) + torch.tensor([-2.0, 2.0])
    assert kto_kl_estimate(uneven) == 0.5


def test_weights_are_odds_of_a_logistic_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    desirable = torch.rand(40, generator=generator) < (0.8 * embeddings[:, 0] - 0.2).sigmoid()
    found = density_ratio_weights(embeddings, desirable, smallest=1e-6, largest=1e6)
    inputs = torch.cat([embeddings, torch.ones(40, 1, dtype=torch.float64)], 1)
    ridge, solution = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0]).double()), torch.zeros(4, dtype=torch.float64)
    count = int(desirable.sum())
    balance = torch.where(desirable, 20 / count, 20 / (40 - count)).double()
    for _ in range(30):  # Newton's method
        p = (inputs @ solution).sigmoid()
        slope = inputs.T @ (balance * (p - desirable.double())) + ridge @ solution
        curvature = inputs.T @ (inputs * (balance * p * (1 - p))[:, None]) + ridge
        solution = solution - torch.linalg.solve(curvature, slope)
    odds = (inputs @ solution).exp()
    torch.testing.assert_close(found, torch.where(desirable, 1.0, odds).float(), rtol=1e-5, atol=1e-6)
    clamped = density_ratio_weights(embeddings, desirable)
    assert bool((clamped[~desirable] >= 0.5).all())


def test_prompts_that_are_distributed_alike_have_weight_1_however_many_answers_of_each_class_there_are() -> None:
    prompts = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    desirable = torch.arange(60) < 10
    torch.testing.assert_close(density_ratio_weights(prompts.repeat(6, 1), desirable), torch.ones(60))
