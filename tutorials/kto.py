"""KTO: Qwen3-0.6B learns from single answers that people liked or disliked.

The same run: ``rlhfkit fit --config rlhfkit://kto``. ``python tutorials/kto.py`` is for one GPU of 80 GB. Eight GPUs,
a model of 8B parameters: ``--model Qwen/Qwen3-8B --strategy rlhf_zero3 --devices 8 --accumulate_grad_batches 2``.
Several machines: ``rlhfkit init kto``.
"""

import lightning as L
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhfkit import HFExport, KTOModule, ModelLoading, Optimization, RunReport, UnpairedPreferenceDataModule


def train(
    model: str = "Qwen/Qwen3-0.6B",
    data: str = "trl-lib/kto-mix-14k",
    *,
    max_length: int = 2048,
    micro_batch_size: int = 8,
    accumulate_grad_batches: int = 16,  # 1 GPU * 8 * 16 = 128 answers an update
    max_epochs: int = 1,
    max_steps: int = -1,
    accelerator: str = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    strategy: str = "auto",
    precision: str = "bf16-mixed",  # weights in float32, arithmetic in bfloat16
) -> L.Trainer:
    """Train the model; what is written is in runs/kto."""
    L.seed_everything(0)
    module = KTOModule(
        model,
        lr=5e-7,
        beta=0.1,
        optimization=Optimization(warmup_steps=10),
        loading=ModelLoading(gradient_checkpointing=True),
    )
    rows = UnpairedPreferenceDataModule(
        data,
        validation_data=data,
        prompt="prompt",  # messages, as the completion
        completion="completion",
        label="label",  # true or false
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
        logger=CSVLogger("runs", "kto"),
        callbacks=[ModelCheckpoint(), HFExport("runs/kto/model"), RunReport()],
    )
    trainer.fit(module, rows)
    return trainer


if __name__ == "__main__":
    auto_cli(train)
