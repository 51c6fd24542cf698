"""Every function of ``rlhfkit.losses``, and arguments that it can be given."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rlhfkit import losses

B, T, V, H = 4, 5, 7, 3
"""Sequences, tokens, vocabulary and hidden size."""
OF_FILES = {
    "advantages.rewards": ("normalize_rewards", "token_rewards"),
    "aggregation": ("masked_moments", "select"),
    "metrics": ("exp_mean_metric", "min_metric"),
    "policy.base": ("clipped_surrogate", "policy_tokens"),
    "preference.dpo": ("best_and_worst", "pair_partners", "rejected_values"),
    "preference.unpaired": ("density_ratio_weights", "kto_kl_sums"),
}
"""Functions that only a file of the losses names, by that file."""
COMPOSITE = {"sum_losses"}
"""Of what others give: part of every loss."""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function
    for name in losses.__all__
    if inspect.isfunction(function := getattr(losses, name)) and name not in COMPOSITE
} | {name: getattr(import_module(f"rlhfkit.losses.{file}"), name) for file, names in OF_FILES.items() for name in names}
"""All functions that are given tensors, by name."""
NAMES = sorted({*FUNCTIONS} - {"turn_advantages"})  # which is of an iteration, on the CPU
LEAVES = ("logprobs", "chosen", "rejected", "values", "logits", "student", "hidden", "weight", "entropy", "token_loss")
"""Arguments that collect a gradient."""


def examples() -> dict[str, Any]:
    """A value for every required argument, by name: (B, T) tensors, unless :data:`OTHER_SHAPES` has another."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def chosen(*shape: int) -> Tensor:
        return torch.randint(V, shape, generator=generator)

    mask = torch.arange(T) < torch.tensor([5, 3, 1, 4])[:, None]
    names = ("advantages", "values", "old_values", "returns", "token_loss", "logits")
    tokens = {name: normal(B, T) for name in names}
    names = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs", "log_sum_squares")
    tokens |= {name: -normal(B, T).abs() for name in names}
    tokens |= {"mask": mask, "labels": torch.ones(B, T), "versions": torch.full((B, T), 2)}
    tokens |= {"ratio": normal(B, T).exp(), "entropy": normal(B, T).abs(), "spans": (torch.arange(T) // 2).repeat(B, 1)}
    names = ("ref_chosen", "ref_rejected", "mismatched", "ref_mismatched", "logratio", "rewards", "greedy_rewards")
    rows = {name: normal(B) for name in names}
    # In the range of log-probs of sequences, so that odds and their logarithms are finite.
    rows |= {name: -1 - normal(B).abs() for name in ("chosen", "rejected")}
    rows |= {"lengths": mask.sum(-1), "chosen_lengths": mask.sum(-1), "rejected_lengths": mask.sum(-1).flip(0)}
    rows |= {"public_lengths": torch.ones(B, dtype=torch.int64), "group": torch.tensor([0, 0, 1, 1])}
    rows |= {"signs": torch.tensor([1.0, -1.0, 1.0, -1.0]), "truncated": torch.tensor([True, False, False, True])}
    rows |= {name: torch.tensor([True, False, True, False]) for name in ("desirable", "by_policy")}
    rows |= {"embeddings": normal(B, 3), "common": torch.tensor([[0, 2], [1, 1], [4, 0]])}
    rows |= {"partners": torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()}
    logits = {name: normal(B, T, V) for name in ("student", "teacher")}
    logits |= {"tokens": chosen(B, T), "teacher_tokens": chosen(B, T), "targets": chosen(B * T)}
    logits |= {"hidden": normal(B * T, H), "coefficients": normal(B * T)}
    numbers = {"kl": torch.tensor(0.1), "value": torch.tensor(1.5), "sums": torch.tensor([0.5, 4.0])}
    numbers |= {"coef": 0.5, "alpha": 0.5, "mean": 0.5, "std": 2.0, "weight": 2.0, "high": 2.0, "threshold": 0.1}
    numbers |= {"k": 2, "max_length": 16, "buffer": 4, "version": 3, "clip_low": 0.2, "clip_high": 0.2}
    return numbers | rows | tokens | logits | {"level": "sequence-sum"}


def other_shapes() -> dict[str, dict[str, Any]]:
    """Arguments that differ from :func:`examples`, and optional ones that matter, by function."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    sequences = {"logprobs": -normal(B).abs(), "ref_logprobs": -normal(B).abs()}
    head = {"weight": normal(V, H)}
    return {
        "kto_loss": sequences,
        "bco_loss": sequences,
        "rejected_values": {"values": normal(B)},
        "kto_kl_sums": {"mask": None},
        "linear_logprobs": head | {"entropy": True},
        "logits_logprobs": {"logits": normal(B * T, V), "entropy": True},
        "gae": {"rewards": normal(B, T)},
        "discounted_returns": {"rewards": normal(B, T)},
        "dr_grpo_loss": {"max_length": 16},
        "gdpo_advantages": {"rewards": normal(B, 2)},
        "dpo_loss": {"ref_chosen": -normal(B).abs(), "ref_rejected": -normal(B).abs()},
    }


def arguments_of(name: str) -> dict[str, Any]:
    """Those that a function needs, and optional ones that matter."""
    shared = examples()
    wanted = inspect.signature(FUNCTIONS[name]).parameters.values()
    required = {one.name: shared[one.name] for one in wanted if one.default is one.empty and one.name in shared}
    return required | other_shapes().get(name, {})


def called(function: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors that a function returns, and its gradients if it is differentiable."""
    given = {
        name: value.detach().clone().requires_grad_() if name in LEAVES and isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    result = function(**given)
    tensors = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
    differentiable = [one for one in tensors if one.requires_grad]
    if differentiable:
        torch.stack([one.sum() for one in differentiable]).sum().backward()
    gradients = [one.grad for one in given.values() if isinstance(one, Tensor) and one.grad is not None]
    return [one.detach() for one in [*tensors, *gradients]]
