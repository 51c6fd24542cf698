"""Short fits that a rank runs, many in one process, and how two of them are compared."""

import os
from collections.abc import Sequence
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
    """Losses of a fit, gradient norms of each step, and full weights at the end, while engines are there."""

    def __init__(self) -> None:
        self.module: Any = None
        self.losses: list[float] = []
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
        self.module, self.losses = module, getattr(module, "losses", self.losses)
        children = [name for name in ("policy", "critic") if hasattr(module, name)]
        self.weights = full_weights(module, trainer.strategy, children)


def fit(
    module: Any,
    strategy: Any,
    batches: list[torch.Tensor] | None = None,
    *,
    loader: Any = toys.ShareLoader,
    callbacks: Sequence[Any] = (),
    resume: Path | None = None,
    **trainer: Any,
) -> Spy:
    """One fit, of four global batches unless told; under the strategy ``"auto"`` it is plain Lightning on one rank."""
    rank, ranks = (0, 1) if strategy == "auto" else (RANK, RANKS)
    spy, share = Spy(), loader(batches or toys.global_batches(4), rank, ranks)
    toys.trainer(strategy, ranks, callbacks=[spy, *callbacks], **trainer).fit(module, share, ckpt_path=resume)
    return spy


def run(
    strategy: Any, model: str, epochs: int, callbacks: list[Any], resume: Path | None = None, **options: Any
) -> Spy:
    """Fit with dropout, two engines, a frozen reference, accumulation 2 and a schedule, so that all state matters."""
    batches, kind = toys.global_batches(options.pop("batches", 6)), options.pop("kind", toys.Toy)
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0} | options.pop("trainer", {})
    module = kind(model, **({"critic": True, "reference": True, "dropout": 0.2} | options))
    toys.pl.seed_everything(11 + RANK, verbose=False)
    return fit(module, strategy, batches, callbacks=callbacks, resume=resume, max_epochs=epochs, **trainer)


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


def check_equal(found: Spy, expected: Spy, what: str, tolerance: float = 0.0, *, skipped: int = 0) -> None:
    """Fails unless losses, but the first ``skipped`` expected ones, and weights differ by ``tolerance`` at most."""
    loss = difference(found.losses, expected.losses[skipped:])
    weight = weight_difference(found.weights, expected.weights) if RANK == 0 else 0.0
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
