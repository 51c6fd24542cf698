"""Reward model: Qwen3-0.6B learns which answers of UltraFeedback are preferred.

The same run: ``rlhfkit fit --config rlhfkit://reward_model``. ``python tutorials/reward_model.py`` is for one GPU of
80 GB. Eight GPUs, a model of 8B parameters: ``--model Qwen/Qwen3-8B --strategy rlhf_zero3 --devices 8
--accumulate_grad_batches 2``. Several machines: ``rlhfkit init reward_model``. The tutorials ppo.py and online_dpo.py
read the model that this one writes.
"""

import lightning as L
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhfkit import HFExport, ModelLoading, Optimization, PreferenceDataModule, RewardModule, RunReport


def train(
    model: str = "Qwen/Qwen3-0.6B",
    data: str = "HuggingFaceH4/ultrafeedback_binarized",
    *,
    max_length: int = 2048,
    micro_batch_size: int = 8,
    accumulate_grad_batches: int = 16,  # 1 GPU * 8 * 16 = 128 pairs an update
    max_epochs: int = 1,
    max_steps: int = -1,
    accelerator: str = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    strategy: str = "auto",
    precision: str = "bf16-mixed",  # weights in float32, arithmetic in bfloat16
) -> L.Trainer:
    """Train the model; what is written is in runs/reward_model."""
    L.seed_everything(0)
    module = RewardModule(
        model,
        lr=9e-6,
        center_rewards_coefficient=0.01,
        optimization=Optimization(warmup_steps=20, lr_schedule="cosine"),
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
        logger=CSVLogger("runs", "reward_model"),
        callbacks=[ModelCheckpoint(), HFExport("runs/reward_model/model"), RunReport()],
    )
    trainer.fit(module, pairs)
    return trainer


if __name__ == "__main__":
    auto_cli(train)
