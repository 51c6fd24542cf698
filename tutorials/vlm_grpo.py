"""GRPO with images: Qwen3-VL-2B learns to solve the problems of Geometry3K, which are texts about a drawing.

The same run: ``rlhfkit fit --config rlhfkit://vlm_grpo``. ``python tutorials/vlm_grpo.py`` is for one GPU of 80 GB.
Eight GPUs, of which four train a model of 8B parameters and four generate: ``--model Qwen/Qwen3-VL-8B-Instruct
--strategy rlhf_zero3 --devices 4 --accumulate_grad_batches 8 --engine rlhfkit.VLLMPool --engine.num_engines 4``.
Several machines: ``rlhfkit init vlm_grpo``. On two cores, with a model and pictures made on the spot:
``python tutorials/vlm_grpo_squares.py``.
"""

import lightning as L
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhfkit import (
    GRPOModule,
    HFExport,
    ModelLoading,
    Optimization,
    PromptDataModule,
    RolloutCallback,
    RolloutEngine,
    RunReport,
    SamplingSpec,
)
from rlhfkit.rewards import math_match


def train(
    model: str = "Qwen/Qwen3-VL-2B-Instruct",
    data: str = "hiyouga/geometry3k",
    *,
    engine: RolloutEngine | None = None,  # in this process; or rlhfkit.VLLMPool
    rollout_batch_size: int = 128,  # prompts an iteration
    group_size: int = 8,  # answers to each
    max_new_tokens: int = 1024,
    micro_batch_size: int = 8,  # answers in a forward pass
    accumulate_grad_batches: int = 32,  # 128 * 8 answers / (1 GPU * 8 * 32) = 4 updates an iteration
    max_epochs: int = 200,  # iterations of generate, score, learn
    accelerator: str = "auto",
    devices: int = 1,
    strategy: str = "auto",
    precision: str = "bf16-mixed",  # weights in float32, arithmetic in bfloat16
) -> L.Trainer:
    """Train the model; what is written is in runs/vlm_grpo."""
    L.seed_everything(0)
    module = GRPOModule(
        model,
        lr=1e-6,
        optimization=Optimization(warmup_steps=10),
        loading=ModelLoading(gradient_checkpointing=True),  # train_vision=True trains the vision part, too
    )
    prompts = PromptDataModule(
        data,
        validation_data=data,
        prompt="problem",  # with "<image>" where its picture belongs, which is in the column images
        answer="answer",
        system="Reason step by step, and put your final answer within \\boxed{}.",
        rollout_batch_size=rollout_batch_size,
        micro_batch_size=micro_batch_size,
    )
    rollouts = RolloutCallback(
        math_match,
        engine=engine,
        sampling=SamplingSpec(group_size=group_size, max_new_tokens=max_new_tokens),
    )
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        precision=precision,
        max_epochs=max_epochs,
        accumulate_grad_batches=accumulate_grad_batches,
        gradient_clip_val=1.0,
        check_val_every_n_epoch=10,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=CSVLogger("runs", "vlm_grpo"),
        callbacks=[ModelCheckpoint(every_n_epochs=20), HFExport("runs/vlm_grpo/model"), RunReport(), rollouts],
    )
    trainer.fit(module, prompts)
    return trainer


if __name__ == "__main__":
    auto_cli(train)
