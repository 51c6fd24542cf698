import pytest
import torch
import torch.nn.functional as F

from rlhfkit.losses import bradley_terry_loss, process_reward_loss

from ..policy_cases import OPENRLHF, TRL


def step_batch(*classes: int, soft: bool = False):
    """logits, labels, mask for 4 answers of 5 tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, *classes, generator=generator, dtype=torch.float64)
    labels, mask = torch.rand(2, 4, 5, generator=generator).double()
    return logits, labels if soft else (labels * max(classes, default=2)).long(), mask < 0.5


@pytest.mark.parametrize("case", TRL["reward_model"]["cases"], ids=lambda case: case["name"])
def test_value_gradient_and_metrics_match_trl(case):
    logits = torch.tensor(TRL["reward_model"]["inputs"]["logits"], dtype=torch.float64, requires_grad=True)
    margin = torch.tensor(TRL["reward_model"]["inputs"]["margin"], dtype=torch.float64) if case["uses_margin"] else None
    centering = case["args"].get("center_rewards_coefficient", 0.0)
    output = bradley_terry_loss(*logits.squeeze(-1).chunk(2), margin=margin, centering=centering)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-10)
    torch.testing.assert_close(logits.grad, torch.tensor(case["grad"], dtype=torch.float64), rtol=1e-10, atol=1e-14)
    names = {"min_reward": "rewards/min", "mean_reward": "rewards/mean", "max_reward": "rewards/max"}
    names |= {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}
    for theirs, ours in names.items():  # TRL logs in float32
        assert output.metrics[ours].item() == pytest.approx(case["metrics"][theirs], rel=2e-5), ours


def test_value_matches_openrlhf():
    case = OPENRLHF["rm"]
    chosen, rejected, margin = (torch.tensor(case[name]) for name in ("c", "r", "margin"))
    assert bradley_terry_loss(chosen, rejected).loss.item() == pytest.approx(case["sigmoid"], abs=1e-6)
    with_margin = bradley_terry_loss(chosen, rejected, margin=margin)
    assert with_margin.loss.item() == pytest.approx(case["sigmoid_margin"], abs=1e-6)
    # Quirk left behind: OpenRLHF's logexp is another way to write the same number, infinite for large gaps.
    assert bradley_terry_loss(chosen, rejected).loss.item() == pytest.approx(case["logexp"], abs=1e-6)


def test_steps_match_openrlhf():
    # Quirk left behind: OpenRLHF's own data set cannot make float labels, so that the path never ran; its loss did.
    case = OPENRLHF["prm"]
    logits = torch.tensor(case["logits"])[..., case["reward_token_ids"]]
    hard = torch.tensor(case["hard_labels"]) - case["reward_token_ids"][0]  # token ids 2, 3 to classes 0, 1
    for name, labels in (("hard", hard), ("soft", torch.tensor(case["soft_labels"]))):
        output = process_reward_loss(logits, labels, torch.tensor(case["inputs"]) == case["placeholder"])
        assert output.loss.item() == pytest.approx(case[name][0], abs=1e-6)
        assert output.metrics["prm/accuracy"] == case[name][1]
        assert output.metrics["prm/steps"] == 2


def test_ties_are_wrong_and_large_gaps_finite():
    chosen, rejected = torch.tensor([1.0, 2.0, 0.0, float("nan")]), torch.tensor([0.0, 2.0, 1.0, 0.0])
    accuracy = bradley_terry_loss(chosen, rejected, mask=torch.tensor([1, 1, 1, 0])).metrics["rewards/accuracies"]
    assert accuracy.item() == pytest.approx(1 / 3)
    for pairs in (0, 4):  # none that counts
        output = bradley_terry_loss(chosen[:pairs], rejected[:pairs], mask=torch.zeros(pairs))
        assert [output.loss.item(), *map(float, output.metrics.values())] == [0.0] * (1 + len(output.metrics))
    large = bradley_terry_loss(torch.tensor([-1e4]), torch.tensor([1e4]), margin=5.0)
    assert large.loss.item() == pytest.approx(20_005.0)


# --- process rewards -------------------------------------------------------------------------------------------------


def test_hard_labels_equal_torch_cross_entropy():
    logits, labels, mask = step_batch(4)
    output = process_reward_loss(logits, labels, mask)
    torch.testing.assert_close(output.loss, F.cross_entropy(logits[mask], labels[mask]))
    assert output.metrics["prm/steps"] == mask.sum()
    accuracy = (logits.argmax(-1) == labels)[mask].float().mean()
    torch.testing.assert_close(output.metrics["prm/accuracy"], accuracy)


@pytest.mark.parametrize("soft", [False, True])
def test_one_logit_equals_two_logits_of_which_one_is_zero(soft):
    logits, labels, mask = step_batch(soft=soft)
    two = torch.stack([logits, torch.zeros_like(logits)], -1)
    expected = process_reward_loss(two, labels if soft else 1 - labels, mask)  # hard class 0 is the good one there
    output = process_reward_loss(logits, labels, mask)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.metrics["prm/accuracy"], expected.metrics["prm/accuracy"])
