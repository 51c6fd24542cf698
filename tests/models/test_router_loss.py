"""Covers router_loss.py, with parallel/test_joined_rows.py, where ranks compute forward passes together."""

from typing import Any

import torch
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from rlhfkit.models.router_loss import _has_usual_formula, _loss_of, _sums


def test_the_loss_from_sums_is_that_of_transformers() -> None:
    """For tokens of two members in any order, with gradients."""
    members = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 0])
    logits = [torch.randn(9, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(3)]
    for member, own in enumerate(_sums(logits, 2, members, 2)):
        theirs = modeling_mixtral.load_balancing_loss_func(tuple(one[members == member] for one in logits), 6, 2)
        torch.testing.assert_close(_loss_of(own), theirs)
        found, expected = (torch.autograd.grad(loss, logits, retain_graph=True) for loss in (_loss_of(own), theirs))
        torch.testing.assert_close(found, expected)


def test_a_family_with_another_formula_is_noticed() -> None:
    def squared(logits: tuple[Tensor, ...], experts: int, chosen: int, mask: Any) -> Tensor:
        return modeling_mixtral.load_balancing_loss_func(logits, experts, chosen, mask).square()

    for module in (modeling_mixtral, modeling_qwen3_moe, modeling_gpt_oss):
        assert _has_usual_formula(module.load_balancing_loss_func)
    assert not _has_usual_formula(squared)
