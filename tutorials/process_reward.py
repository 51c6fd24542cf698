"""Process reward model: Qwen3-0.6B learns which steps of Math-Shepherd's solutions are right.

The same run: ``rlhfkit fit --config rlhfkit://process_reward``. ``python tutorials/process_reward.py`` is for one GPU
of 80 GB. Eight GPUs, a model of 8B parameters: ``--model Qwen/Qwen3-8B --strategy rlhf_zero3 --devices 8
--accumulate_grad_batches 2``. Several machines: ``rlhfkit init process_reward``.
"""

import lightning as L
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhfkit import HFExport, ModelLoading, Optimization, ProcessRewardModule, RunReport, StepwiseDataModule


def train(
    model: str = "Qwen/Qwen3-0.6B",
    data: str = "trl-lib/math_shepherd",
    *,
    max_length: int = 1024,
    micro_batch_size: int = 16,
    accumulate_grad_batches: int = 16,  # 1 GPU * 16 * 16 = 256 solutions an update
    max_epochs: int = 1,
    max_steps: int = -1,
    accelerator: str = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    strategy: str = "auto",
    precision: str = "bf16-mixed",  # weights in float32, arithmetic in bfloat16
) -> L.Trainer:
    """Train the model; what is written is in runs/process_reward."""
    L.seed_everything(0)
    module = ProcessRewardModule(
        model, lr=1e-6, optimization=Optimization(warmup_steps=50), loading=ModelLoading(gradient_checkpointing=True)
    )
    rows = StepwiseDataModule(
        data,
        validation_data=data,
        prompt="prompt",
        completions="completions",  # a list of steps
        labels="labels",  # a list of as many booleans
        separator="\n",  # ends a step, which is judged there
        max_length=max_length,
        micro_batch_size=micro_batch_size,
    )
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        strategy=strategy,
        precision=precision,
        max_epochs=max_epochs,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate_grad_batches,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger("runs", "process_reward"),
        callbacks=[ModelCheckpoint(every_n_train_steps=500), HFExport("runs/process_reward/model"), RunReport()],
    )
    trainer.fit(module, rows)
    return trainer


if __name__ == "__main__":
    auto_cli(train)
