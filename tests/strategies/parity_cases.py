"""Short fits that a rank runs, many in one process, and how two of them are compared."""

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
        children = [name for name in ("policy", "critic") if hasattr(module, name)]
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
    return float((torch.tensor(first, dtype=torch.float64) - torch.tensor(second, dtype=torch.float64)).abs().max())


def weight_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of any weight."""
    if first.keys() != second.keys():
        return float("inf")
    return float(torch.stack([(first[name].double() - second[name].double()).abs().max() for name in first]).max())


Run = tuple[list[float], dict[str, torch.Tensor]]
"""Losses, and the final weights of rank 0."""


def check_equal(found: Run, expected: Run, what: str, tolerance: float = 0.0) -> None:
    """Fails unless losses and weights of two runs differ by ``tolerance`` at most."""
    loss, weight = difference(found[0], expected[0]), weight_difference(found[1], expected[1]) if RANK == 0 else 0.0
    assert loss <= tolerance, f"{what}: losses differ by {loss}, weights by {weight}"
    assert weight <= tolerance, f"{what}: weights differ by {weight}"


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal bit for bit, down to tensors in the attributes of DeepSpeed's objects."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second or (hasattr(first, "__dict__") and same(vars(first), vars(second)))


def run(
    strategy: Any, model: str, epochs: int, callbacks: list[Any], resume: Path | None = None, **options: Any
) -> tuple[Any, Spy]:
    """Fit with dropout, two engines, a frozen reference, accumulation 2 and a schedule, so that all state matters."""
    batches = options.pop("batches", 6)
    fit = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0} | options.pop("trainer", {})
    kind = options.pop("kind", toys.Toy)
    settings = {"critic": True, "reference": True, "dropout": 0.2} | options
    module, spy = kind(model, **settings), Spy()
    trainer = toys.trainer(strategy, RANKS, max_epochs=epochs, callbacks=[spy, *callbacks], **fit)
    toys.pl.seed_everything(11 + RANK, verbose=False)
    trainer.fit(module, toys.ShareLoader(toys.global_batches(batches), RANK, RANKS), ckpt_path=resume)
    return module, spy
