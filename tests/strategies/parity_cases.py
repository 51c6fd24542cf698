"""What one rank runs for the parity tests: many short fits in one process."""

import os
from pathlib import Path
from typing import Any

import torch

from strategies import toys

# Read once: Lightning deletes WORLD_SIZE from the environment when a fit ends.
RANK, RANKS = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def full_weights(module: Any, strategy: Any, children: list[str]) -> dict[str, torch.Tensor]:
    """All weights of the given children on rank 0."""
    weights = {}
    for child in children:
        if hasattr(strategy, "consolidated_state_dict"):
            state = strategy.consolidated_state_dict(child)
        else:
            state = module.get_submodule(child).state_dict()
        weights |= {f"{child}.{name}": value.clone() for name, value in state.items()}
    return weights


def gradient_norm(module: torch.nn.Module) -> float:
    """Norm of all gradients of a module."""
    return torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]).item()


class Spy(toys.pl.Callback):
    """Keeps full weights at the end of training, while engines are there, and the gradient norms of each step."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.norms: list[dict[str, float]] = []
        self.logged: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if not hasattr(trainer.strategy, "engines"):  # plain Lightning: gradients are where torch puts them
            children = {name: child for name, child in module.named_children() if name != "reference"}
            self.norms.append({name: gradient_norm(child) for name, child in children.items()})

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        if hasattr(trainer.strategy, "engines"):
            self.norms.append(dict(trainer.strategy.gradient_norms))
        if "grad_norm/policy" in trainer.callback_metrics:
            self.logged.append(float(trainer.callback_metrics["grad_norm/policy"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        children = ["policy", "critic"] if module.hparams.critic else ["policy"]
        self.weights = full_weights(module, trainer.strategy, children)


def fit(strategy: Any, *, batches: int = 4, trainer: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """One fit; ``strategy`` None means plain Lightning on one rank."""
    rank, ranks = RANK, RANKS
    if strategy is None:
        rank, ranks, strategy = 0, 1, "auto"
    module, spy = toys.Toy(**options), Spy()
    run = toys.trainer(strategy, ranks, callbacks=[spy], log_every_n_steps=1, **(trainer or {}))
    run.fit(module, toys.ShareLoader(toys.global_batches(batches), rank, ranks))
    return {
        "losses": module.losses,
        "learning_rates": module.learning_rates,
        "weights": spy.weights,
        "norms": spy.norms,
        "logged": spy.logged,
        "steps": run.global_step,
        "child_type": type(module.policy).__name__,
    }


def difference(first: list[float], second: list[float]) -> float:
    """Largest absolute difference; lists of different lengths are infinitely different."""
    if len(first) != len(second):
        return float("inf")
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def weight_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of any weight."""
    if first.keys() != second.keys():
        return float("inf")
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


CASES: dict[str, dict[str, Any]] = {
    "sgd, accumulate 3 of 4, clip": {
        "optimizer": "sgd",
        "trainer": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    },
    "tied": {"optimizer": "sgd"},
    "gradient checkpointing": {"optimizer": "sgd", "checkpointing": True},
    "two engines, reference": {"critic": True, "reference": True, "trainer": {"accumulate_grad_batches": 3}},
}


def parity(folder: Path, models: list[str], stages: list[int], cases: list[str]) -> dict[str, Any]:
    """Differences to plain Lightning for every stage and case. Each rank runs the plain fit for itself."""
    import rlhfkit.strategies  # noqa: F401  (registers the names)

    report: dict[str, Any] = {}
    for case in cases:
        options = {"model": models[1] if case == "tied" else models[0]} | CASES[case]
        for stage in stages:
            result = fit(f"rlhf_zero{stage}", **options)
            report[f"{case}, stage {stage}"] = result
        plain = fit(None, **options)
        for stage in stages:
            result = report[f"{case}, stage {stage}"]
            report[f"{case}, stage {stage}"] = {
                "loss": difference(result["losses"], plain["losses"]),
                "weight": weight_difference(result["weights"], plain["weights"]) if RANK == 0 else 0.0,
                "rate": max(
                    difference(a, b) for a, b in zip(result["learning_rates"], plain["learning_rates"], strict=True)
                ),
                "steps": [result["steps"], plain["steps"]],
                "norms": result["norms"],
                "plain_norms": plain["norms"],
                "logged": result["logged"],
                "child_type": result["child_type"],
                "moved": abs(plain["losses"][0] - plain["losses"][-1]),
            }
    return report
