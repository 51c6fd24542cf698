"""What one rank runs for the guard tests: numbers that are not finite on the last rank, at every stage."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from rlhfkit.callbacks import NonFiniteGuard
from rlhfkit.callbacks.guard import NonFiniteError
from rlhfkit.data.batch import PaddedBatch
from rlhfkit.strategies import RLHFDeepSpeedStrategy
from strategies import toys
from strategies.parity_cases import RANK, RANKS, full_weights, weight_difference

POISON = {3: "loss", 6: "critic gradient"}
"""Of 10 micro-batches in windows of 2: the second and the fourth of five updates."""


class Poisoned(toys.Toy):
    """On the last rank, the losses of some micro-batches, or only the gradients, are not finite."""

    poison = POISON

    def training_step(self, batch: PaddedBatch, index: int) -> Tensor:
        tokens = batch.input_ids
        loss = super().training_step(tokens, index)
        kind, last = self.poison.get(index, ""), self.global_rank == self.trainer.world_size - 1
        if kind.endswith("gradient"):  # on all ranks: at stage 3 a forward pass is a collective
            output = self.critic(tokens) if kind.startswith("critic") else self.policy(input_ids=tokens).logits
            nothing = output * 0
            # Adds 0; the root's slope at 0 is infinite, times 0: a gradient of NaN.
            loss = loss + (nothing.abs().sqrt() if last else nothing).sum()
        return loss * float("nan") if kind == "loss" and last else loss


class Batches(toys.ShareLoader):
    """The share of each global batch, as a batch of ours."""

    def __iter__(self) -> Any:
        for tokens in super().__iter__():
            yield PaddedBatch(input_ids=tokens, attention_mask=torch.ones_like(tokens).bool())


class Watch(toys.pl.Callback):
    """Weights, and everything an optimizer keeps, after every update."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.states: list[list[Tensor]] = []
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index % 2:
            children = ["policy", "critic"] if module.hparams.critic else ["policy"]
            self.weights.append(full_weights(module, trainer.strategy, children))
            engines = getattr(trainer.strategy, "engines", {})
            optimizers = [e.basic_optimizer for e in engines.values()] or trainer.optimizers
            states = [v for o in optimizers for state in o.state.values() for v in state.values()]
            for engine in engines.values():
                states += getattr(engine.optimizer, "fp32_partitioned_groups_flat", [])
                states += [p for group in engine.basic_optimizer.param_groups for p in group["params"]]
            self.states.append([value.detach().clone() for value in states if isinstance(value, Tensor)])
            self.logged.append(float(trainer.callback_metrics["skipped_updates"]))


def changes(history: list[Any], same: Any) -> list[bool]:
    """Whether anything changed between neighbouring updates."""
    return [not same(a, b) for a, b in pairwise(history)]


def equal_tensors(first: list[Tensor], second: list[Tensor]) -> bool:
    """Bitwise equality of lists of tensors."""
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def guarded(strategy: Any, model: str, rank: int = RANK, ranks: int = RANKS, **options: Any) -> dict[str, Any]:
    """Five updates, of which two are poisoned."""
    module, watch, guard = Poisoned(model, critic=True), Watch(), NonFiniteGuard(max_skipped_updates=2)
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0} | options
    trainer = toys.trainer(strategy, ranks, callbacks=[guard, watch], **settings)
    trainer.fit(module, Batches(toys.global_batches(10), rank, ranks))
    return {
        "weights": watch.weights[-1],
        "report": {
            "weights": changes(watch.weights, lambda a, b: weight_difference(a, b) == 0) if rank == 0 else [],
            "states": changes(watch.states, equal_tensors),
            "logged": watch.logged,
            "skipped": guard.skipped_updates,
        },
    }


def everything(folder: Path, model: str) -> dict[str, Any]:
    """All cases in one launch."""
    plain = guarded("auto", model, 0, 1, gradient_clip_val=None)
    report: dict[str, Any] = {"plain": plain["report"]}
    strategies = {f"stage {stage}": f"rlhf_zero{stage}" for stage in range(4)}
    strategies |= {f"stage {stage}, offload": f"rlhf_zero{stage}_offload" for stage in (2, 3)} | {"ddp": "ddp"}
    for case, strategy in strategies.items():
        result = guarded(strategy, model, gradient_clip_val=None)
        off = weight_difference(result["weights"], plain["weights"]) if RANK == 0 else 0.0
        report[case] = result["report"] | {"difference_to_plain": off}
    for stage in (0, 2, 3):
        report[f"stage {stage}, bf16"] = guarded(f"rlhf_zero{stage}", model, precision="bf16-true")["report"]
    report["stop"] = {name: stop(name, folder, model) for name in ("rlhf_zero2", "ddp")}
    # torch computes in fp16 on every CPU, slowly; DeepSpeed refuses CPUs without instructions for it.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    report["fp16"] = {str(stage): half(stage, folder, model) for stage in range(4)}
    return report


def stop(strategy: str, folder: Path, model: str) -> dict[str, Any]:
    """Three bad updates in a row end the run."""
    module = Poisoned(model)
    module.poison = dict.fromkeys(range(3, 12), "loss")
    guard = NonFiniteGuard(max_skipped_updates=3, folder=folder / strategy)
    trainer = toys.trainer(strategy, RANKS, callbacks=[guard], accumulate_grad_batches=2)
    data = Batches(toys.global_batches(12), RANK, RANKS)
    try:
        trainer.fit(module, data)
    except NonFiniteError as error:
        (file,) = (folder / strategy).glob(f"*/rank_{RANK:05d}.pt")
        dump = torch.load(file, weights_only=True)
        batches = [PaddedBatch.from_state_dict(entry["batch"]) for entry in dump["batches"]]
        return {
            "message": str(error),
            "folder": str(file.parent),
            "indices": [entry["batch_index"] for entry in dump["batches"]],
            "finite": [bool(entry["finite_loss"]) for entry in dump["batches"]],
            "same": [torch.equal(b.input_ids, data.shares[6 + i]) for i, b in enumerate(batches)],
            "step": trainer.global_step,
        }
    return {"message": "no error"}


def half(stage: int, folder: Path, model: str) -> dict[str, Any]:
    """fp16 gradients that no loss scale makes finite."""
    strategy = RLHFDeepSpeedStrategy(stage=stage, initial_scale_power=2, min_loss_scale=1, hysteresis=1)
    module, guard = Poisoned(model), NonFiniteGuard(2, folder=folder / f"half-{stage}")
    module.poison = dict.fromkeys(range(2, 12), "policy gradient")
    trainer = toys.trainer(strategy, RANKS, callbacks=[guard], precision="16-true")
    message = ""
    try:
        trainer.fit(module, Batches(toys.global_batches(12), RANK, RANKS))
    except NonFiniteError as error:
        message = str(error)
    return {
        "rescaled": strategy.rescaled_updates,
        "skipped": strategy.skipped_updates,
        "message": message,
        "steps": len(module.losses),
    }
