"""Supervised fine-tuning: Qwen3-0.6B-Base learns from the conversations of Tulu 3.

The same run: ``rlhfkit fit --config rlhfkit://sft``. ``python tutorials/sft.py`` is for one GPU of 80 GB. Eight GPUs,
a model of 8B parameters: ``--model Qwen/Qwen3-8B-Base --strategy rlhf_zero3 --devices 8 --accumulate_grad_batches
2``. Several machines: ``rlhfkit init sft``.
"""

import lightning as L
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhfkit import HFExport, ModelLoading, Optimization, RunReport, SFTDataModule, SFTModule


def train(
    model: str = "Qwen/Qwen3-0.6B-Base",
    data: str = "allenai/tulu-3-sft-mixture",
    *,
    max_length: int = 4096,
    micro_batch_size: int = 8,
    accumulate_grad_batches: int = 16,  # 1 GPU * 8 * 16 = 128 conversations an update
    max_epochs: int = 2,
    max_steps: int = -1,
    accelerator: str = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    strategy: str = "auto",
    precision: str = "bf16-mixed",  # weights in float32, arithmetic in bfloat16
) -> L.Trainer:
    """Train the model; what is written is in runs/sft."""
    L.seed_everything(0)
    module = SFTModule(
        model,
        lr=5e-6,
        optimization=Optimization(warmup_steps=200, lr_schedule="linear"),
        loading=ModelLoading(gradient_checkpointing=True),
    )
    rows = SFTDataModule(
        data,
        split="train[2%:]",  # the data has one split: the first 2 % are for validation
        validation_data=data,
        validation_split="train[:2%]",
        messages="messages",  # only the assistant's turns are learned
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
        logger=CSVLogger("runs", "sft"),
        callbacks=[ModelCheckpoint(every_n_train_steps=500), HFExport("runs/sft/model"), RunReport()],
    )
    trainer.fit(module, rows)
    return trainer


if __name__ == "__main__":
    auto_cli(train)
