"""DAPO: Qwen3-1.7B learns to solve the problems of MATH.

The same run: ``rlhfkit fit --config rlhfkit://dapo``. ``python tutorials/dapo.py`` is for one GPU of 80 GB. Eight
GPUs, of which four train a model of 8B parameters and four generate: ``--model Qwen/Qwen3-8B --strategy rlhf_zero3
--devices 4 --accumulate_grad_batches 8 --engine rlhfkit.VLLMPool --engine.num_engines 4``. Several machines:
``rlhfkit init dapo``.
"""

import lightning as L
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhfkit import (
    DynamicSampling,
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
from rlhfkit.rewards import LengthPenalty, WeightedSum, math_match


def train(
    model: str = "Qwen/Qwen3-1.7B",
    data: str = "DigitalLearningGmbH/MATH-lighteval",
    *,
    validation_data: str = "HuggingFaceH4/MATH-500",  # the same columns
    engine: RolloutEngine | None = None,  # in this process; or rlhfkit.VLLMPool
    rollout_batch_size: int = 128,  # prompts an iteration
    group_size: int = 16,  # answers to each
    max_new_tokens: int = 2048,
    micro_batch_size: int = 8,  # answers in a forward pass
    accumulate_grad_batches: int = 32,  # 128 * 16 answers / (1 GPU * 8 * 32) = 8 updates an iteration
    max_epochs: int = 200,  # iterations of generate, score, learn
    accelerator: str = "auto",
    devices: int = 1,
    strategy: str = "auto",
    precision: str = "bf16-mixed",  # weights in float32, arithmetic in bfloat16
) -> L.Trainer:
    """Train the model; what is written is in runs/dapo."""
    L.seed_everything(0)
    module = GRPOModule(
        model,
        lr=1e-6,
        clip_low=0.2,
        clip_high=0.28,
        optimization=Optimization(warmup_steps=20),
        loading=ModelLoading(gradient_checkpointing=True),
        preset="dapo",
    )
    prompts = PromptDataModule(
        data,
        validation_data=validation_data,
        prompt="problem",
        answer="solution",  # ends with the answer in \boxed{}
        system="Reason step by step, and put your final answer within \\boxed{}.",
        chat_template_kwargs={"enable_thinking": False},  # of Qwen3
        rollout_batch_size=rollout_batch_size,
        micro_batch_size=micro_batch_size,
    )
    rollouts = RolloutCallback(
        WeightedSum(correct=math_match, overlong=LengthPenalty(max_new_tokens, soft_zone=max_new_tokens // 4)),
        engine=engine,
        parts=[DynamicSampling(by="correct")],  # groups that are all right or all wrong are replaced
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
        logger=CSVLogger("runs", "dapo"),
        callbacks=[ModelCheckpoint(every_n_epochs=20), HFExport("runs/dapo/model"), RunReport(), rollouts],
    )
    trainer.fit(module, prompts)
    return trainer


if __name__ == "__main__":
    auto_cli(train)
