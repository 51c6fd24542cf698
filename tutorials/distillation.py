"""On-policy distillation: Qwen3-0.6B learns from a larger teacher, on its own answers.

The same run: ``rlhfkit fit --config rlhfkit://distillation``. ``python tutorials/distillation.py`` is for one GPU of
80 GB. Eight GPUs, of which four train a student of 4B parameters and four generate: ``--model Qwen/Qwen3-4B --teacher
Qwen/Qwen3-32B --strategy rlhf_zero3 --devices 4 --accumulate_grad_batches 8 --engine rlhfkit.VLLMPool
--engine.num_engines 4``. Several machines: ``rlhfkit init distillation``.
"""

import lightning as L
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhfkit import (
    HFExport,
    ModelLoading,
    OnPolicyDistillationModule,
    Optimization,
    PromptDataModule,
    RolloutCallback,
    RolloutEngine,
    RunReport,
    SamplingSpec,
)


def train(
    model: str = "Qwen/Qwen3-0.6B",
    data: str = "DigitalLearningGmbH/MATH-lighteval",
    *,
    teacher: str = "Qwen/Qwen3-4B",  # a model with the same tokens
    engine: RolloutEngine | None = None,  # in this process; or rlhfkit.VLLMPool
    rollout_batch_size: int = 256,  # prompts an iteration
    group_size: int = 4,  # answers to each
    max_new_tokens: int = 1024,
    micro_batch_size: int = 8,  # answers in a forward pass
    accumulate_grad_batches: int = 32,  # 256 * 4 answers / (1 GPU * 8 * 32) = 4 updates an iteration
    max_epochs: int = 100,  # iterations of generate, ask the teacher, learn
    accelerator: str = "auto",
    devices: int = 1,
    strategy: str = "auto",
    precision: str = "bf16-mixed",  # weights in float32, arithmetic in bfloat16
) -> L.Trainer:
    """Train the model; what is written is in runs/distillation."""
    L.seed_everything(0)
    module = OnPolicyDistillationModule(
        model,
        teacher,
        lr=1e-5,
        divergence="reverse_kl",
        optimization=Optimization(warmup_steps=10),
        loading=ModelLoading(gradient_checkpointing=True),
    )
    prompts = PromptDataModule(
        data,
        prompt="problem",
        system="Reason step by step, and put your final answer within \\boxed{}.",
        chat_template_kwargs={"enable_thinking": False},  # of Qwen3
        rollout_batch_size=rollout_batch_size,
        micro_batch_size=micro_batch_size,
    )
    rollouts = RolloutCallback(
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
        log_every_n_steps=1,
        logger=CSVLogger("runs", "distillation"),
        callbacks=[ModelCheckpoint(every_n_epochs=20), HFExport("runs/distillation/model"), RunReport(), rollouts],
    )
    trainer.fit(module, prompts)
    return trainer


if __name__ == "__main__":
    auto_cli(train)
