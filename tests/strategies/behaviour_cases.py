"""What one rank runs for the behaviour tests: precision, evaluation, discarding, manual optimization."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import rlhfkit.strategies  # noqa: F401  (registers the names)
from strategies import toys
from strategies.parity_cases import RANK, RANKS, Spy, difference, fit, weight_difference

DISCARDED = [*((stage, "32-true") for stage in range(4)), (0, "bf16-true"), (3, "bf16-true")]
"""Stages and precisions at which a gradient is dropped; in 16 bits stages 1 and 2 keep it where they do in 32."""

EVALUATED = (0, 2, 3)
"""Stages at which one module is evaluated and trained in turn; at stage 1 each rank has whole weights, as at 2."""


def everything(folder: Path, model: str, stages: list[int]) -> dict[str, Any]:
    """All behaviours in one launch; what they are compared with runs once for all stages."""
    exact = fit("rlhf_zero2", model=model, reference=True)
    validated, optimized = evaluation(model, "auto", 0, 1), manual(model, "auto", 0, 1)
    return {
        "precision": {
            f"{stage}, {kind}": precision(exact, model, stage, kind)
            for stage in stages
            for kind in BF16[: 1 + (stage == 3)]
        },
        "evaluation": {
            str(stage): {
                "expected": validated,
                "found": evaluation(model, f"rlhf_zero{stage}", RANK, RANKS),
            }
            for stage in EVALUATED
        },
        "discard": {f"{stage}, {kind}": discard(model, stage, kind) for stage, kind in DISCARDED},
        "manual": {str(stage): apart(manual(model, f"rlhf_zero{stage}", RANK, RANKS), optimized) for stage in stages},
        "inputs": batch_dtypes(model),
    }


Run = tuple[list[float], dict[str, torch.Tensor]]
"""Losses and final weights."""


def apart(run: Run, expected: Run) -> dict[str, float]:
    """Largest differences between two runs."""
    return {
        "loss": difference(run[0], expected[0]),
        "weight": weight_difference(run[1], expected[1]) if RANK == 0 else 0.0,
    }


BF16 = ("bf16-true", "bf16-mixed")


def precision(exact: dict[str, Any], model: str, stage: int, kind: str) -> dict[str, Any]:
    """bf16 against fp32."""
    rounded = fit(f"rlhf_zero{stage}", model=model, reference=True, trainer={"precision": kind})
    dtypes = {str(weight.dtype) for weight in rounded["weights"].values()}
    return {"loss": difference(exact["losses"], rounded["losses"]), "dtypes": sorted(dtypes)}


class Seen(toys.Toy):
    """Notes what a batch looks like when it arrives."""

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self.seen = {name: str(value.dtype) for name, value in batch.items()}
        self.buffers_seen = str(self.policy.module.model.rotary_emb.inv_freq.dtype)
        return super().training_step(batch["tokens"], index)


def batch_dtypes(model: str) -> dict[str, str]:
    """Dtypes that a bf16 run sees."""
    module = Seen(model)
    batch = {
        "tokens": toys.global_batches(1)[0],
        "advantages": torch.ones(8),
        "old": torch.ones(8, dtype=torch.float64),
    }
    toys.trainer("rlhf_zero2", RANKS, precision="bf16-true").fit(module, DataLoader([batch], batch_size=None))
    return module.seen | {"rotary": module.buffers_seen}


def evaluation(model: str, strategy: str, rank: int, ranks: int) -> list[float]:
    """Validation before, between and after two fits with one module."""
    module, shares = toys.Toy(model, reference=True), toys.ShareLoader(toys.global_batches(2), rank, ranks)

    def validate() -> float:
        return toys.trainer(strategy, ranks).validate(module, shares, verbose=False)[0]["validation_loss"]

    losses = [validate()]
    for _ in range(2):
        toys.trainer(strategy, ranks).fit(module, shares)
        losses.append(validate())
    return losses


class Dropping(toys.Toy):
    """Manual optimization: in step 1 a gradient is computed and thrown away before the real one."""

    waste = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        optimizer = self.optimizers()
        if index == 1 and self.waste:
            self.manual_backward(100 * self.policy_loss(batch.flip(0)))
            optimizer.zero_grad()
        loss = self.policy_loss(batch)
        self.losses.append(self.mean_over_ranks(loss))
        self.manual_backward(loss)
        optimizer.step()


def discard(model: str, stage: int, kind: str) -> dict[str, float]:
    """A run with a dropped gradient against one that never computed it."""
    results = []
    for waste in (True, False):
        module, spy = Dropping(model, optimizer="sgd"), Spy()
        module.waste = waste
        trainer = toys.trainer(f"rlhf_zero{stage}", RANKS, callbacks=[spy], precision=kind)
        trainer.fit(module, toys.ShareLoader(toys.global_batches(3), RANK, RANKS))
        results.append((module.losses, spy.weights))
    return apart(*results)


class TwoOptimizers(toys.Toy):
    """Manual optimization: an optimizer, a window and a clipping value for each child."""

    def __init__(self, model: str) -> None:
        super().__init__(model, optimizer="sgd", critic=True)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.policy.parameters(), lr=0.5), torch.optim.SGD(self.critic.parameters(), lr=0.1)]

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        policy, critic = self.optimizers()
        loss = self.policy_loss(batch)
        self.losses.append(self.mean_over_ranks(loss))
        self.manual_backward(loss / 2)
        if index % 2:
            self.clip_gradients(policy, gradient_clip_val=0.3)
            policy.step()
            policy.zero_grad()
        self.manual_backward((self.critic(batch) - batch / toys.VOCABULARY).square().mean())
        critic.step()
        critic.zero_grad()


def manual(model: str, strategy: str, rank: int, ranks: int) -> Run:
    """A run with two optimizers."""
    module, spy = TwoOptimizers(model), Spy()
    shares = toys.ShareLoader(toys.global_batches(4), rank, ranks)
    toys.trainer(strategy, ranks, callbacks=[spy]).fit(module, shares)
    return module.losses, spy.weights
