"""What somebody who takes a loss alone gets wrong most often: the error says which argument, and what to give."""

import pytest
import torch

from rlhfkit.losses import bco_loss, dpo_loss, dr_grpo_loss, group_advantages, grpo_loss, kto_loss

ROWS = torch.zeros(2)
TOKENS = torch.zeros(2, 3)
LABELS = torch.tensor([True, False])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: grpo_loss(TOKENS, TOKENS, ROWS, TOKENS, beta=0.1),
            "^grpo_loss has no beta; it has logprobs, .* clip_low",
        ),
        (lambda: group_advantages([1.0, 0.0], ROWS.long()), "rewards must be a tensor, got list"),
        (lambda: dpo_loss(ROWS, ROWS, ROWS, ROWS, loss_type=["sigmoid", "sft"]), "a mapping to their weights"),
        # -1 would count as desirable
        (lambda: kto_loss(ROWS, ROWS, torch.tensor([1, -1]), 0.1), "desirable must be a bool tensor, got torch.int64"),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_kto_and_bco_compare_all_answers_with_one_number():
    with pytest.raises(ValueError, match=r"kl must be one number for all answers, got \(2,\)"):
        kto_loss(ROWS, ROWS, LABELS, ROWS)
    with pytest.raises(ValueError, match="shift must be one number for all answers"):
        bco_loss(ROWS, ROWS, LABELS, ROWS)


def test_the_loss_of_no_sequences_is_zero():
    none = TOKENS[:0]
    assert dr_grpo_loss(none, none, ROWS[:0], none, max_length=3).loss.item() == 0.0
