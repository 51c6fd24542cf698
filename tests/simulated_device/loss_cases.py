"""Every function of ``rlhfkit.losses`` on the CPU and on the simulated device."""

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from rlhfkit import losses
from simulated_device import SimulatedTensor, record_host_waits, register

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

    mask = torch.arange(T) < torch.tensor([5, 3, 1, 4])[:, None]
    tokens = {name: normal(B, T) for name in ("advantages", "values", "old_values", "returns", "token_loss")}
    rows = {name: normal(B) for name in ("ref_chosen", "ref_rejected", "mismatched", "ref_mismatched", "logratio")}
    # In the range of log-probs of sequences, so that odds and their logarithms are finite.
    rows |= {name: -1 - normal(B).abs() for name in ("chosen", "rejected")}
    names = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs")
    tokens |= {name: -normal(B, T).abs() for name in names}
    numbers = {
        "clip_low": 0.2, "clip_high": 0.2, "coef": 0.5, "k": 2, "max_length": 16, "buffer": 4, "threshold": 0.1,
        "alpha": 0.5, "high": 2.0, "level": "sequence-sum", "mean": 0.5, "std": 2.0, "version": 3, "weight": 2.0,
    }  # fmt: skip
    others = {
        "mask": mask, "rewards": normal(B), "group": torch.tensor([0, 0, 1, 1]), "lengths": mask.sum(-1),
        "chosen_lengths": mask.sum(-1), "rejected_lengths": mask.sum(-1).flip(0),
        "public_lengths": torch.ones(B, dtype=torch.int64), "ratio": normal(B, T).exp(), "entropy": normal(B, T).abs(),
        "truncated": torch.tensor([True, False, False, True]), "desirable": torch.tensor([True, False, True, False]),
        "kl": torch.tensor(0.1), "sums": torch.tensor([0.5, 4.0]), "labels": torch.ones(B, T),
        "versions": torch.full((B, T), 2), "log_sum_squares": -normal(B, T).abs(), "student": normal(B, T, V),
        "teacher": normal(B, T, V), "common": torch.tensor([[0, 2], [1, 1], [4, 0]]),
        "tokens": torch.randint(V, (B, T), generator=generator),
        "teacher_tokens": torch.randint(V, (B, T), generator=generator), "hidden": normal(B * T, H),
        "targets": torch.randint(V, (B * T,), generator=generator), "coefficients": normal(B * T),
        "logits": normal(B, T), "value": torch.tensor(1.5), "greedy_rewards": normal(B),
        "spans": (torch.arange(T) // 2).expand(B, T).clone(), "embeddings": normal(B, 3),
        "signs": torch.tensor([1.0, -1.0, 1.0, -1.0]), "by_policy": torch.tensor([True, False, True, False]),
        "partners": torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]).bool(),
    }  # fmt: skip
    return numbers | rows | tokens | others


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


def every_function(folder: Path, names: list[str]) -> dict[str, Any]:
    """Entry point: what differs from the CPU, and the host waits, forward and backward, of each function."""
    register()
    shared, special = examples(), other_shapes()
    found: dict[str, Any] = {}
    for name in names:
        function = FUNCTIONS[name]
        wanted = inspect.signature(function).parameters.values()
        required = [one.name for one in wanted if one.default is one.empty]
        arguments = {one: shared[one] for one in required if one in shared} | special.get(name, {})
        expected = called(function, arguments)
        moved = tree_map(lambda one: one.to("sim") if isinstance(one, Tensor) else one, arguments)
        with record_host_waits() as waits:
            problem = compared(function, moved, expected)
        found[name] = {"problem": problem, "waits": dict(waits.lines), "tensors": len(expected)}
    return found


def compared(function: Callable[..., Any], arguments: dict[str, Any], expected: list[Tensor]) -> str | None:
    """How the results of a function on the simulated device differ from those on the CPU."""
    try:
        tensors = called(function, arguments)
        devices = {one.device.type for one in tensors}
        values = [one.values for one in tensors if isinstance(one, SimulatedTensor)]
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if devices == {"sim"} else f"tensors on {devices}"


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
