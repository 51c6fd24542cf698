"""PPO: Qwen3-0.6B learns to give answers that a reward model prefers.

The same run: ``rlhfkit fit --config rlhfkit://ppo``. First the reward model: ``python tutorials/reward_model.py``.
Then ``python tutorials/ppo.py`` is for one GPU of 80 GB. Eight GPUs, of which four train a policy of 8B parameters
and four generate: ``--model Qwen/Qwen3-8B --strategy rlhf_zero3 --devices 4 --accumulate_grad_batches 8 --engine
rlhfkit.VLLMPool --engine.num_engines 4``. Several machines: ``rlhfkit init ppo``.
"""

import lightning as L
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhfkit import (
    HFExport,
    ModelLoading,
    Optimization,
    PPOModule,
    PromptDataModule,
    RolloutCallback,
    RolloutEngine,
    RunReport,
    SamplingSpec,
)
from rlhfkit.modules.parts import CriticWarmup
from rlhfkit.rewards import ModelReward


def train(
    model: str = "Qwen/Qwen3-0.6B",
    data: str = "HuggingFaceH4/ultrafeedback_binarized",
    *,
    reward_model: str = "runs/reward_model/model",
    critic_warmup_steps: int = 20,  # updates in which only the critic learns
    engine: RolloutEngine | None = None,  # in this process; or rlhfkit.VLLMPool
    rollout_batch_size: int = 1024,  # prompts an iteration
    max_new_tokens: int = 1024,
    micro_batch_size: int = 8,  # answers in a forward pass
    accumulate_grad_batches: int = 32,  # 1024 answers / (1 GPU * 8 * 32) = 4 updates an iteration
    max_epochs: int = 200,  # iterations of generate, score, learn
    accelerator: str = "auto",
    devices: int = 1,
    strategy: str = "auto",
    precision: str = "bf16-mixed",  # weights in float32, arithmetic in bfloat16
) -> L.Trainer:
    """Train the model; what is written is in runs/ppo."""
    L.seed_everything(0)
    module = PPOModule(
        model,
        lr=1e-6,
        critic=reward_model,  # begins as the reward model
        critic_lr=9e-6,
        kl_coef=0.01,
        optimization=Optimization(warmup_steps=10),
        loading=ModelLoading(gradient_checkpointing=True),
        parts=[CriticWarmup(critic_warmup_steps)],
    )
    prompts = PromptDataModule(
        data,
        split="train_prefs",
        validation_data=data,
        validation_split="test_prefs",
        prompt="prompt",
        max_prompt_length=1024,
        overlong_prompts="drop",
        chat_template_kwargs={"enable_thinking": False},  # of Qwen3
        rollout_batch_size=rollout_batch_size,
        micro_batch_size=micro_batch_size,
    )
    rollouts = RolloutCallback(
        ModelReward(reward_model),
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
        logger=CSVLogger("runs", "ppo"),
        callbacks=[ModelCheckpoint(every_n_epochs=20), HFExport("runs/ppo/model"), RunReport(), rollouts],
    )
    trainer.fit(module, prompts)
    return trainer


if __name__ == "__main__":
    auto_cli(train)
