"""What one rank runs to show that the product's own modules resume bitwise at every stage, and on other ranks."""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
from rl_runs import setup_run
from tiny_models import tiny_model

from rlhfkit import DPOModule, GRPOModule, PPOModule, PreferenceDataModule, SFTDataModule, SFTModule
from rlhfkit.checkpoints import CheckpointError
from strategies import toys
from strategies.parity_cases import RANK, RANKS, full_weights, weight_difference

STAGES = {"sft": 0, "dpo": 1, "grpo": 2, "ppo": 3}
"""At which stage each kind is trained.

What engines save does not depend on the module (resume_cases.py), nor what loaders and iterations save on the stage.
"""


class Keep(L.Callback):
    """Saves after a number of batches; keeps all trained weights, and the losses from then on."""

    def __init__(self, after: int, path: Path | None) -> None:
        self.after, self.path = after, path
        self.seen = 0
        self.losses: list[float] = []
        self.weights: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.seen += 1
        if self.path is None or self.seen > self.after:
            self.losses.append(float(outputs["loss"]))
        if self.path is not None and self.seen == self.after:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        children = ["policy", "critic"] if hasattr(module, "critic") else ["policy"]
        self.weights = full_weights(module, trainer.strategy, children)


def prepared(kind: str, folder: Path, strategy: str, keep: Keep, accumulate: int) -> tuple[L.Trainer, Any, Any]:
    """Trainer, module and data: two epochs or iterations of four micro-batches per rank."""
    options = {"strategy": strategy, "devices": RANKS, "use_distributed_sampler": False, "max_epochs": 2}
    options |= {"accumulate_grad_batches": accumulate}
    if kind in ("grpo", "ppo"):
        os.environ["WORLD_SIZE"] = str(RANKS)  # Lightning deletes it when a fit ends
        made: Any = GRPOModule if kind == "grpo" else PPOModule
        sizes = {"micro_batch_size": 4}
        trainer, module, data, _ = setup_run(folder, module=made, data_arguments=sizes, callbacks=[keep], **options)
        return trainer, module, data
    trainer = toys.trainer(callbacks=[keep], ranks=RANKS, **{k: v for k, v in options.items() if k != "devices"})
    if kind == "sft":
        data_file, model = str(folder / "sft.jsonl"), str(folder / "model")
        return trainer, SFTModule(model, lr=1e-3), SFTDataModule(data_file, micro_batch_size=4 // RANKS)
    module = DPOModule(str(folder / "model"), lr=1e-3, ref_model=str(folder / "reference"))
    return trainer, module, PreferenceDataModule(str(folder / "dpo.jsonl"), micro_batch_size=4 // RANKS)


def write(folder: Path) -> None:
    """Models and data, for this rank alone: ranks must not write the same files."""
    tiny_model(folder / "model", seed=1)
    tiny_model(folder / "reference", seed=0)
    rows = [{"prompt": f"{i}+{i}=", "completion": "x" * (i % 5 + 1) + str(2 * i)} for i in range(16)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [
        {"prompt": r["prompt"], "chosen": r["completion"], "rejected": "y" * (i % 3 + 1)} for i, r in enumerate(rows)
    ]
    (folder / "dpo.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def resume(folder: Path, place: str) -> dict[str, Any]:
    """Straight runs against resumed ones, saved inside an epoch; two ranks."""
    own = folder / f"rank{RANK}"
    own.mkdir()
    write(own)
    report = {}
    for kind, stage in STAGES.items():
        path = Path(place) / f"{kind}.ckpt"
        straight, rest = Keep(2, path), Keep(0, None)
        trainer, module, data = prepared(kind, own, f"rlhf_zero{stage}", straight, 2)
        trainer.fit(module, data)
        trainer, module, data = prepared(kind, own, f"rlhf_zero{stage}", rest, 2)
        trainer.fit(module, data, ckpt_path=path)
        report[kind] = {
            "losses": [straight.losses, rest.losses],
            "weight": weight_difference(straight.weights, rest.weights) if RANK == 0 else 0.0,
            "moved": straight.losses[0] != straight.losses[-1],
        }
    return report


def other_ranks(folder: Path, place: str) -> dict[str, str]:
    """The same checkpoints on one rank, inside an epoch: each kind says what does not fit."""
    write(folder)
    report = {}
    for kind in ("sft", "grpo"):
        trainer, module, data = prepared(kind, folder, f"rlhf_zero{STAGES[kind]}", Keep(0, None), 4)
        try:
            trainer.fit(module, data, ckpt_path=Path(place) / f"{kind}.ckpt")
            report[kind] = "no error"
        except (CheckpointError, ValueError) as error:
            report[kind] = f"{type(error).__name__}: {error}"
    return report
