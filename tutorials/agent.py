"""Agent with tools: Qwen3-1.7B learns to solve the problems of MATH with a Python interpreter.

The same run: ``rlhfkit fit --config rlhfkit://agent``. ``python tutorials/agent.py`` is for one GPU of 80 GB. Eight
GPUs, of which four train a model of 8B parameters and four generate: ``--model Qwen/Qwen3-8B --strategy rlhf_zero3
--devices 4 --accumulate_grad_batches 8 --engine rlhfkit.VLLMPool --engine.num_engines 4``. Several machines:
``rlhfkit init agent``.
"""

import lightning as L
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhfkit import (
    Episodes,
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
from rlhfkit.episodes import tool_schemas
from rlhfkit.rewards import LastTurnReward, math_match, python


def train(
    model: str = "Qwen/Qwen3-1.7B",
    data: str = "DigitalLearningGmbH/MATH-lighteval",
    *,
    validation_data: str = "HuggingFaceH4/MATH-500",  # the same columns
    engine: RolloutEngine | None = None,  # in this process; or rlhfkit.VLLMPool
    rollout_batch_size: int = 128,  # prompts an iteration
    group_size: int = 8,  # episodes to each
    max_new_tokens: int = 1024,
    micro_batch_size: int = 8,  # episodes in a forward pass
    accumulate_grad_batches: int = 32,  # 128 * 8 episodes / (1 GPU * 8 * 32) = 4 updates an iteration
    max_epochs: int = 200,  # iterations of generate, score, learn
    accelerator: str = "auto",
    devices: int = 1,
    strategy: str = "auto",
    precision: str = "bf16-mixed",  # weights in float32, arithmetic in bfloat16
) -> L.Trainer:
    """Train the model; what is written is in runs/agent."""
    L.seed_everything(0)
    module = GRPOModule(
        model, lr=1e-6, optimization=Optimization(warmup_steps=10), loading=ModelLoading(gradient_checkpointing=True)
    )
    prompts = PromptDataModule(
        data,
        validation_data=validation_data,
        prompt="problem",
        answer="solution",  # ends with the answer in \boxed{}
        system="Use the Python tool for computations. Put your final answer within \\boxed{}.",
        chat_template_kwargs={"enable_thinking": False, "tools": tool_schemas([python])},
        rollout_batch_size=rollout_batch_size,
        micro_batch_size=micro_batch_size,
    )
    rollouts = RolloutCallback(
        LastTurnReward(math_match),  # what tools print is not searched for the answer
        engine=engine,
        group=Episodes(tools=[python], max_turns=4),
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
        logger=CSVLogger("runs", "agent"),
        callbacks=[ModelCheckpoint(every_n_epochs=20), HFExport("runs/agent/model"), RunReport(), rollouts],
    )
    trainer.fit(module, prompts)
    return trainer


if __name__ == "__main__":
    auto_cli(train)
