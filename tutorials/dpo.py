"""DPO: Llama-3.2-1B-Instruct learns from the preferred and rejected answers of UltraFeedback.

The same run: ``rlhfkit fit --config rlhfkit://dpo``. ``python tutorials/dpo.py`` is for one GPU of 80 GB. Eight GPUs,
a model of 8B parameters: ``--model meta-llama/Llama-3.1-8B-Instruct --strategy rlhf_zero3 --devices 8
--accumulate_grad_batches 4``. Several machines: ``rlhfkit init dpo``. Meta's models want an accepted licence: ``hf
auth login``.
"""

import lightning as L
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhfkit import DPOModule, HFExport, ModelLoading, Optimization, PreferenceDataModule, RunReport


def train(
    model: str = "meta-llama/Llama-3.2-1B-Instruct",
    data: str = "HuggingFaceH4/ultrafeedback_binarized",
    *,
    max_length: int = 2048,
    micro_batch_size: int = 4,
    accumulate_grad_batches: int = 32,  # 1 GPU * 4 * 32 = 128 pairs an update
    max_epochs: int = 1,
    max_steps: int = -1,
    accelerator: str = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    strategy: str = "auto",
    precision: str = "bf16-mixed",  # weights in float32, arithmetic in bfloat16
) -> L.Trainer:
    """Train the model; what is written is in runs/dpo."""
    L.seed_everything(0)
    module = DPOModule(
        model,
        lr=5e-7,
        beta=0.1,
        optimization=Optimization(warmup_steps=50, lr_schedule="linear"),
        loading=ModelLoading(gradient_checkpointing=True),
    )
    pairs = PreferenceDataModule(
        data,
        split="train_prefs",
        validation_data=data,
        validation_split="test_prefs",
        prompt="prompt",  # a text; both answers are conversations that begin with it
        chosen="chosen",
        rejected="rejected",
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
        logger=CSVLogger("runs", "dpo"),
        callbacks=[ModelCheckpoint(), HFExport("runs/dpo/model"), RunReport()],
    )
    trainer.fit(module, pairs)
    return trainer


if __name__ == "__main__":
    auto_cli(train)
