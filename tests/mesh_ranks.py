"""Runs of ranks that share forward passes, and the same runs on one rank, for ``test_mesh.py``."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from plain_sgd import PlainSGD
from rl_runs import PlainGRPO, digits, prompts_file, samples_of_all_ranks
from shared_pool import SharedPool

from rlhfkit import (
    EMA,
    Invariants,
    ModelLoading,
    NonFiniteGuard,
    PromptDataModule,
    RolloutCallback,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
)
from rlhfkit.mesh import forward_group_of
from rlhfkit.models.forward import unwrap
from rlhfkit.modules.parts import MovingReference
from rlhfkit.rollout import ModuleWeights, RolloutEngine
from rlhfkit.strategies import RLHFDeepSpeedStrategy

CAP = 12
"""Tokens that each of two sequence ranks may compute: fewer than the longest rows have."""
TEXTS = [{"text": "ab" * (1 + number % 9) + str(number)} for number in range(12)]
SAMPLING = SamplingSpec(group_size=4, max_new_tokens=12, min_new_tokens=1)


class PlainSFT(PlainSGD, SFTModule):
    """Supervised training with SGD, whose loss is not a number in one micro-batch of one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        broken = self.trainer.global_step == 2 and batch_idx % self.trainer.accumulate_grad_batches == 0
        return loss * torch.nan if broken and self.global_rank == 0 else loss


class Keep(L.Callback):
    """What was sampled, what this rank had in each micro-batch, and the final weights; saves a checkpoint once."""

    def __init__(self, path: Path | None = None, last: int | None = None, epochs: Path | None = None) -> None:
        self.path, self.last, self.epochs = path, last, epochs
        self.tokens: list[Any] = []
        self.sizes: list[int] = []
        self.trained: list[int] = []
        self.turns: list[int] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.together = 1
        self.start = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.start = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(int(batch.attention_mask.sum()))
        self.trained.append(int(batch.action_mask.sum()))
        if trainer.current_epoch == self.last and batch_idx == 0:
            assert trainer.global_step == self.start, "inside an accumulation window"
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.epochs is not None:
            trainer.save_checkpoint(f"{self.epochs}, {trainer.current_epoch}.ckpt")
        if not isinstance(trainer.datamodule, PromptDataModule):
            return
        rollouts = RolloutCallback.of(trainer)
        if not rollouts.inside_collected_iteration:
            return
        self.tokens.append([one.token_ids.tolist() for one in samples_of_all_ranks(rollouts)])
        experience = rollouts.experience
        assert experience is not None
        turns = pl_module.passes.turns(pl_module.policy, experience, None)
        self.turns = [0 if rows is None else int(experience.select(rows).attention_mask.sum()) for rows in turns]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        group = forward_group_of(unwrap(pl_module.policy))
        self.together = 1 if group is None else group.mesh.forward_group_size
        averages = [one for one in trainer.callbacks if isinstance(one, EMA)]
        for name in ("policy", "reference"):
            if hasattr(pl_module, name):
                self._keep(name, getattr(pl_module, name))
        for ema in averages:
            with ema.applied(pl_module):
                self._keep("average", pl_module.policy)

    def _keep(self, label: str, model: Any) -> None:
        self.weights |= {f"{label}.{name}": tensor.detach().clone() for name, tensor in ModuleWeights(model)}


def sft(folder: Path, model: str, engine: RolloutEngine | None, groups: int, cap: int) -> Any:
    """Steps of 4 micro-batches, each of the texts that fit into the tokens of two ranks."""
    data = SFTDataModule(
        TEXTS, max_length=2 * CAP, max_tokens_per_micro_batch=cap,
        validation_data=TEXTS[3:9], validation_split="train",
    )  # fmt: skip
    callbacks = [EMA(0.5, validate=False), NonFiniteGuard()]
    return PlainSFT(model, lr=0.05), data, callbacks, {"accumulate_grad_batches": 4 // max(1, groups)}


def grpo(folder: Path, model: str, engine: RolloutEngine | None, groups: int, cap: int) -> Any:
    """Two updates of an iteration of 8 rows, in as many micro-batches as they need; rows above a rank's share."""
    size: dict[str, Any] = {"micro_batch_size": 2}
    if groups:
        size = {"max_tokens_per_micro_batch": cap, "updates_per_iteration": 2}
    data = PromptDataModule(prompts_file(folder), answer="answer", rollout_batch_size=2, **size)
    reference = MovingReference(steps=2, alpha=0.25)  # sharded and divided like the policy
    loading = ModelLoading(max_tokens_per_forward=CAP)
    module = PlainGRPO(model, lr=0.05, kl_coef=0.01, loading=loading, parts=[reference])
    rollouts = RolloutCallback(digits, engine=engine, sampling=SAMPLING)
    return module, data, [rollouts, Invariants()], {"accumulate_grad_batches": 1 if groups else 2}


RUNS: dict[str, Callable[..., Any]] = {"sft": sft, "grpo": grpo}


def fit(
    folder: Path,
    model: str,
    engine: RolloutEngine | None,
    run: str,
    strategy: Any,
    keep: Keep,
    epochs: int,
    **arguments: Any,
) -> dict[str, Any]:
    """Some epochs of a run, or the rest of them.

    A run is made for the number of ``groups`` that compute forward passes together, 0 on one rank, and for tokens that
    a rank may compute (``cap``): those of a group are always as many.
    """
    rank, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    own = folder / f"rank{rank}"
    own.mkdir(parents=True, exist_ok=True)
    sequence, tensor = (getattr(strategy, f"{kind}_parallel_size", 1) for kind in ("sequence", "tensor"))
    groups = 0 if world == 1 else world // (sequence * tensor)
    module, data, callbacks, more = RUNS[run](own, model, engine, groups, 2 * CAP // sequence)
    trainer = L.Trainer(
        **more, accelerator="cpu", strategy=strategy, devices=world, max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, default_root_dir=str(own), callbacks=[*callbacks, keep],
    )  # fmt: skip
    trainer.fit(module, data, **arguments)
    assert keep.together == sequence * tensor
    if world > 1:
        os.environ["WORLD_SIZE"] = str(world)  # Lightning deletes it when a fit ends
    return {
        "tokens": keep.tokens,
        "sizes": keep.sizes,
        "trained": keep.trained,
        "turns": keep.turns,
        "steps": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items() if "time/" not in name},
    }


MESHES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "sft": ("sft", 3, 3, {"sequence_parallel_size": 2}),
    "grpo": ("grpo", 3, 2, {"sequence_parallel_size": 2}),
    "grpo, ring of four": ("grpo", 2, 1, {"sequence_parallel_size": 4, "sequence_parallel": "ring"}),
    "grpo, tensor": ("grpo", 2, 1, {"tensor_parallel_size": 2}),
}
"""The run, its epochs, the ZeRO stage and the sizes of each mesh of four ranks."""
SAVED = ("sft", "grpo")
"""Saved after the first micro-batch of the last epoch: inside an accumulation window.

Tensor ranks resume bitwise in strategies/test_tensor_parallel.py.
"""
RESUMED_ELSEWHERE = ("grpo",)
"""Its second epoch is run once more without groups, and after it the third one with them."""


def everything(folder: Path, model: str) -> dict[str, Any]:
    """Entry point of a rank: every run; those that are saved end bit for bit the same when they go on from there."""
    report: dict[str, Any] = {}
    pool = SharedPool(kv_cache_gib=0.1, max_model_len=64)
    for name, (run, epochs, stage, sizes) in MESHES.items():
        path, last = folder / f"{name}.ckpt", epochs - 1 if name in SAVED else None
        keep = Keep(path, last, folder / name if name in RESUMED_ELSEWHERE else None)
        report[name] = fit(folder, model, pool, run, RLHFDeepSpeedStrategy(stage, **sizes), keep, epochs)
        if os.environ["LOCAL_RANK"] == "0":
            torch.save(keep.weights, folder / f"{name}.pt")
        if name in SAVED:
            rest = Keep()
            strategy = RLHFDeepSpeedStrategy(stage, **sizes)
            fit(folder, model, pool, run, strategy, rest, epochs, ckpt_path=str(path))
            for key, weight in keep.weights.items():
                assert torch.equal(rest.weights[key], weight), f"{name}, resumed: {key}"
            assert 0 < len(rest.sizes) < len(keep.sizes)
            assert keep.sizes[-len(rest.sizes) :] == rest.sizes
        if name in RESUMED_ELSEWHERE:
            alone, back = Keep(epochs=folder / f"{name} alone"), Keep()
            strategy = RLHFDeepSpeedStrategy(stage)
            fit(folder, model, pool, run, strategy, alone, 2, ckpt_path=f"{folder / name}, 0.ckpt")
            strategy = RLHFDeepSpeedStrategy(stage, **sizes)
            fit(folder, model, pool, run, strategy, back, epochs, ckpt_path=f"{folder / name} alone, 1.ckpt")
            if os.environ["LOCAL_RANK"] == "0":
                torch.save(back.weights, folder / f"{name}, elsewhere.pt")
    pool.really_close()
    return report
