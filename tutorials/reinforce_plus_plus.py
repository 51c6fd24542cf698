"""REINFORCE++: Qwen3-0.6B learns to solve the problems of GSM8K from one answer each.

The same run: ``rlhfkit fit --config rlhfkit://reinforce_plus_plus``. ``python tutorials/reinforce_plus_plus.py`` is
for one GPU of 80 GB. Eight GPUs, of which four train a model of 8B parameters and four generate: ``--model
Qwen/Qwen3-8B --strategy rlhf_zero3 --devices 4 --accumulate_grad_batches 4 --engine rlhfkit.VLLMPool
--engine.num_engines 4``. Several machines: ``rlhfkit init reinforce_plus_plus``.
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
    model: str = "Qwen/Qwen3-0.6B",
    data: str = "openai/gsm8k",
    *,
    engine: RolloutEngine | None = None,  # in this process; or rlhfkit.VLLMPool
    rollout_batch_size: int = 1024,  # prompts an iteration
    max_new_tokens: int = 1024,
    micro_batch_size: int = 16,  # answers in a forward pass
    accumulate_grad_batches: int = 16,  # 1024 answers / (1 GPU * 16 * 16) = 4 updates an iteration
    max_epochs: int = 200,  # iterations of generate, score, learn
    accelerator: str = "auto",
    devices: int = 1,
    strategy: str = "auto",
    precision: str = "bf16-mixed",  # weights in float32, arithmetic in bfloat16
) -> L.Trainer:
    """Train the model; what is written is in runs/reinforce_plus_plus."""
    L.seed_everything(0)
    module = GRPOModule(
        model,
        lr=1e-6,
        optimization=Optimization(warmup_steps=10),
        loading=ModelLoading(gradient_checkpointing=True),
        preset="reinforce++",
    )
    prompts = PromptDataModule(
        data,
        subset="main",
        validation_data=data,
        prompt="question",
        answer="answer",  # a solution, which ends with "#### 72"
        system="Reason step by step, and put your final answer within \\boxed{}.",
        chat_template_kwargs={"enable_thinking": False},  # of Qwen3
        rollout_batch_size=rollout_batch_size,
        micro_batch_size=micro_batch_size,
    )
    rollouts = RolloutCallback(
        math_match,
        engine=engine,
        sampling=SamplingSpec(group_size=1, max_new_tokens=max_new_tokens),
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
        logger=CSVLogger("runs", "reinforce_plus_plus"),
        callbacks=[
            ModelCheckpoint(every_n_epochs=20),
            HFExport("runs/reinforce_plus_plus/model"),
            RunReport(),
            rollouts,
        ],
    )
    trainer.fit(module, prompts)
    return trainer


if __name__ == "__main__":
    auto_cli(train)
