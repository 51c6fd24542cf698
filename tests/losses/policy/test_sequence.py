import math

import pytest
import torch

from rlhfkit.losses import gmpo_loss, gspo_loss, gspo_token_loss, luspo_loss, rloo_loss, vespo_loss

from ..policy_cases import TRL, gradient, policy_batch, tensors


def sequences(seed=0):
    """A batch with one advantage per sequence, and its mean and summed log-ratios."""
    batch = policy_batch(seed)
    batch = batch._replace(advantages=batch.advantages[:, 0]).leaf()
    log_ratio = torch.where(batch.mask, batch.logprobs - batch.old_logprobs, 0.0)
    return batch, log_ratio.sum(-1) / batch.mask.sum(-1), log_ratio.sum(-1)


def clipped(ratio, advantages, width):
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - width, 1 + width) * advantages)


def test_gspo_is_one_clipped_term_per_sequence():
    batch, mean, _ = sequences()
    expected = clipped(mean.exp(), batch.advantages, 0.1).mean()
    got = gspo_loss(*batch, clip_low=0.1, clip_high=0.1).loss
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradient(got, batch.logprobs), gradient(expected, batch.logprobs))


def test_luspo_multiplies_each_term_by_the_length():
    batch, mean, _ = sequences()
    expected = (batch.mask.sum(-1) * clipped(mean.exp(), batch.advantages, 0.1)).mean()
    torch.testing.assert_close(luspo_loss(*batch, clip_low=0.1, clip_high=0.1).loss, expected)


def test_rloo_takes_the_ratio_of_the_probability_of_the_whole_sequence():
    batch, _, total = sequences()
    torch.testing.assert_close(rloo_loss(*batch).loss, clipped(total.exp(), batch.advantages, 0.2).mean())


@pytest.mark.parametrize("aggregation", ["sequence-mean-token-mean", "token-mean", "sequence-mean-token-sum"])
def test_gspo_token_is_gspo_when_tokens_share_their_advantage(aggregation):
    batch, _, _ = sequences()
    knobs = {"clip_low": 0.1, "clip_high": 0.1, "aggregation": aggregation}
    token, sequence = gspo_token_loss(*batch, **knobs).loss, gspo_loss(*batch, **knobs).loss
    torch.testing.assert_close(token, sequence)
    torch.testing.assert_close(gradient(token, batch.logprobs), gradient(sequence, batch.logprobs))


def test_gspo_token_gives_each_token_its_own_advantage():
    batch = policy_batch().leaf()
    got = gradient(gspo_token_loss(*batch, clip_low=1.0, clip_high=1e9, denominator=1.0).loss, batch.logprobs)
    log_ratio = torch.where(batch.mask, (batch.logprobs - batch.old_logprobs).detach(), 0.0)
    count = batch.mask.sum(-1, keepdim=True)
    expected = -(log_ratio.sum(-1, keepdim=True) / count).exp() * batch.advantages * batch.mask / count
    torch.testing.assert_close(got, expected)


def test_gmpo_is_a_geometric_mean():
    batch, mean, _ = sequences()
    wide = gmpo_loss(*batch, clip_low=100.0, clip_high=100.0).loss
    torch.testing.assert_close(wide, (-batch.advantages * mean.exp()).mean())


def test_gmpo_clips_tokens_in_log_space_on_the_pessimistic_side():
    old = torch.tensor([[-1.0, 1.0]], dtype=torch.float64)
    logprobs = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)  # log-ratios 1 and -1
    for advantage, expected in ((1.0, (0.4 - 1.0) / 2), (-1.0, (1.0 - 0.4) / 2)):
        output = gmpo_loss(logprobs, old, torch.tensor([advantage]), torch.ones(1, 2))
        assert output.loss.item() == pytest.approx(-advantage * math.exp(expected))
        assert output.metrics["policy/clip_fraction"].item() == 0.5
        clipped_token = 0 if advantage > 0 else 1
        assert gradient(output.loss, logprobs)[0, clipped_token].item() == 0.0


def test_vespo_kernel_matches_trl():
    inputs, helper = tensors(TRL["grpo_loss"]["inputs"]), TRL["helpers"]["gamma_weights"]
    mask = inputs["completion_mask"]
    leaf = inputs["per_token_logps"].requires_grad_()
    batch = leaf, inputs["old_per_token_logps"], inputs["advantages"], mask
    got = gradient(vespo_loss(*batch, denominator=1.0).loss, leaf)
    expected = -torch.tensor(helper["out"], dtype=torch.float64) * inputs["advantages"][:, None] * mask
    torch.testing.assert_close(got, expected)
    for weights in (inputs["importance_sampling_ratio_sequence"], inputs["importance_sampling_ratio_sequence"][:, 0]):
        by_sequence = gradient(vespo_loss(*batch, weights=weights, denominator=1.0).loss, leaf)
        with_weight = -torch.tensor(helper["out_with_is"], dtype=torch.float64) * inputs["advantages"][:, None] * mask
        torch.testing.assert_close(by_sequence, with_weight)


def test_vespo_weight_is_the_kernel_by_hand():
    old = torch.tensor([[0.0], [0.5], [-0.5]], dtype=torch.float64)
    for sign in (1.0, -1.0):
        inputs = torch.zeros(3, 1, dtype=torch.float64), old, torch.full((3,), sign), torch.ones(3, 1)
        weights = [
            vespo_loss(*(tensor[row : row + 1] for tensor in inputs)).metrics["policy/vespo_weight"].item()
            for row in range(3)
        ]
        assert weights[0] == pytest.approx(1.0)
        k, lam = (2.0, 3.0) if sign > 0 else (3.0, 2.0)
        assert weights[1:] == pytest.approx(
            [math.exp(lam - k / 2 - lam * math.exp(-0.5)), math.exp(lam + k / 2 - lam * math.exp(0.5))]
        )


def test_vespo_weight_is_one_on_policy_and_largest_where_the_docstring_says():
    ratios = torch.linspace(0.05, 4.0, 400, dtype=torch.float64)
    for sign, peak, height in ((1.0, 2 / 3, 1.2081), (-1.0, 3 / 2, 1.2416)):
        inputs = torch.zeros(1, 1, dtype=torch.float64), torch.full((1,), sign), torch.ones(1, 1)
        weights = [
            vespo_loss(inputs[0], -ratio.log().view(1, 1), *inputs[1:]).metrics["policy/vespo_weight"].item()
            for ratio in [torch.ones(()), *ratios]
        ]
        assert weights[0] == pytest.approx(1.0)
        largest = max(range(400), key=lambda index: weights[1 + index])
        assert ratios[largest].item() == pytest.approx(peak, abs=0.01)
        assert max(weights) == pytest.approx(height, abs=1e-3)
        assert weights[1] < 0.2 > weights[-1]


def test_a_mask_as_weights_takes_its_tokens_out_of_vespo_and_leaves_the_kernel():
    batch, _, _ = sequences()
    keep = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[0] = False  # nothing left of a sequence
    plain = gradient(vespo_loss(*batch, denominator=1.0).loss, batch.logprobs)
    masked = vespo_loss(*batch, weights=keep.double(), denominator=1.0)
    torch.testing.assert_close(gradient(masked.loss, batch.logprobs), plain * keep)
    assert plain[keep].abs().sum() > 0
    by_sequence = vespo_loss(*batch, weights=torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]), denominator=1.0)
    rows = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])[:, None]
    torch.testing.assert_close(gradient(by_sequence.loss, batch.logprobs), plain * rows)
    weighted = 1.3 * keep.double()
    some, all_of_them = (
        gradient(vespo_loss(*batch, weights=weights, denominator=1.0).loss, batch.logprobs)
        for weights in (weighted, torch.where(keep, weighted, 1.0))
    )
    torch.testing.assert_close(some, all_of_them * keep)


@pytest.mark.parametrize(
    ("loss", "arguments", "message"),
    [
        (gspo_loss, {"clip_low": 2.0}, "clip_low"),
        (gspo_token_loss, {"clip_high": -1.0}, "clip_high"),
        (gmpo_loss, {"clip_low": -0.4}, "nats"),
        (vespo_loss, {"k_negative": -1.0}, "must not be negative"),
        (vespo_loss, {"weights": torch.ones(5, 3)}, "weights must be one value per sequence"),
    ],
)
def test_bad_arguments_raise(loss, arguments, message):
    with pytest.raises(ValueError, match=message):
        loss(*policy_batch(), **arguments)
