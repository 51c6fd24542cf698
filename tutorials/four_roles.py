"""PPO with all roles apart: the policy learns here; an engine, reference, reward model and critic are Ray actors.

``python tutorials/four_roles.py`` takes one to three minutes on two cores. A small model learns additions, written
with or without the question (``42`` or ``17+25=42``); people prefer to see the question, a reward model learns that
from comparisons, and PPO makes the policy follow. ``Placement`` says where each role is, and prints it; on a cluster
with GPUs the same lines use its GPUs. ``RunReport`` writes a page that shows who worked when.
"""

import argparse
import logging
import random
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import arithmetic
import datasets
import lightning as L
import torch
import transformers
from grpo_arithmetic import quiet_trainer

from rlhfkit import (
    Ahead,
    LocalEngine,
    Optimization,
    Placement,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardModule,
    RolloutCallback,
    RunReport,
    Sample,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
    Validation,
)
from rlhfkit.cli.jsonl import read_lines
from rlhfkit.modules.parts import Correction, Reference, RewardModel


def supervised_start(folder: Path, rows: list[dict[str, Any]], epochs: int) -> Path:
    """Supervised fine-tuning on answers of which half repeat the question."""
    coin = random.Random(0)
    demonstrations = [row | {"answer": coin.choice(["", row["question"]]) + row["answer"]} for row in rows]
    module = SFTModule(str(folder / "model"), lr=2e-3, optimization=Optimization(warmup_steps=50))
    data = SFTDataModule(demonstrations, prompt="question", completion="answer", micro_batch_size=64, max_length=64)
    quiet_trainer(folder, max_epochs=epochs).fit(module, data)
    return module.save_pretrained(folder / "sft")


def reward_model(folder: Path, rows: list[dict[str, Any]], start: Path) -> Path:
    """Fine-tune the start to score an answer with its question higher than one without."""
    pairs = [row | {"chosen": row["question"] + row["answer"], "rejected": row["answer"]} for row in rows]
    module = RewardModule(
        str(start), lr=5e-4, optimization=Optimization(warmup_steps=20), center_rewards_coefficient=0.01
    )
    data = PreferenceDataModule(pairs[:1000], prompt="question", micro_batch_size=64, max_length=64)
    quiet_trainer(folder, max_epochs=2).fit(module, data)
    return module.save_pretrained(folder / "reward")


def shows_question(samples: Sequence[Sample]) -> list[float]:
    """What people like; training never sees this function."""
    return [float(sample.text.startswith(sample.prompt.text)) for sample in samples]


def preferred(folder: Path, model: Path) -> float:
    """Share of held-out answers that people like."""
    questions = str(folder / "heldout.jsonl")
    data = PromptDataModule(
        questions, validation_data=questions, prompt="question", answer="answer", validation_batch_size=500
    )
    sampling = SamplingSpec(max_new_tokens=12)
    rollouts = RolloutCallback(
        shows_question, engine=LocalEngine(max_sequences=500), sampling=sampling, parts=[Validation(sampling)]
    )
    module = PPOModule(str(model), kl_coef=0.0)
    return quiet_trainer(folder, callbacks=[rollouts]).validate(module, data, verbose=False)[0]["val/reward"]


def train_with_ppo(folder: Path, start: Path, reward: Path, iterations: int, max_staleness: int) -> RunReport:
    """PPO with every role where the placement says; returns the drawn timeline."""
    placement = Placement(trainer=1, engines=1, reference=1, reward=1, critic=1)
    module = PPOModule(
        str(start),
        lr=2e-4,
        critic=placement.critic(str(reward)),
        critic_lr=1e-3,
        kl_coef=0.05,
        parts=[
            Reference(placement.reference(str(start))),
            RewardModel(placement.reward(str(reward))),
            Correction("tis"),  # samples are an iteration old
        ],
    )
    rollouts = RolloutCallback(
        engine=placement.engines(max_model_len=64, kv_cache_gib=0.125),
        sampling=SamplingSpec(group_size=2, max_new_tokens=12),
        parts=[Ahead(max_staleness)] if max_staleness else [],
    )
    data = PromptDataModule(
        str(folder / "train.jsonl"), prompt="question", answer="answer", rollout_batch_size=256, micro_batch_size=128
    )
    report = RunReport(
        str(folder / "report.html"), name="PPO with engine, reference, reward model and critic on actors of their own"
    )
    quiet_trainer(folder, max_epochs=iterations, callbacks=[rollouts, report]).fit(module, data)
    module.save_pretrained(folder / "ppo")
    placement.close()
    return report


def main(words: list[str] | None = None) -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/four_roles"), help="where everything is written")
    parser.add_argument("--iterations", type=int, default=20, help="of PPO")
    parser.add_argument("--sft-epochs", type=int, default=10, help="of supervised fine-tuning")
    parser.add_argument("--max-staleness", type=int, default=1, help="0: sampling and learning take turns")
    arguments = parser.parse_args(words)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    torch.set_num_threads(1)  # five processes share the cores
    began = time.perf_counter()
    L.seed_everything(0, verbose=False)
    folder = arithmetic.make(arguments.folder)
    rows = read_lines(folder / "demonstrations.jsonl")
    start = supervised_start(folder, rows, arguments.sft_epochs)
    reward = reward_model(folder, rows, start)
    before = preferred(folder, start)
    print(f"a start and a reward model after {time.perf_counter() - began:.0f} s; now PPO", flush=True)
    report = train_with_ppo(folder, start, reward, arguments.iterations, arguments.max_staleness)
    print(f"held-out answers as preferred before PPO: {before:.1%}")
    print(f"held-out answers as preferred after PPO:  {preferred(folder, folder / 'ppo'):.1%}")
    print("busy: " + ", ".join(f"{lane} {share:.0%}" for lane, share in report.times.busy_shares().items()))
    print(f"report: {report.saved}")
    print(f"took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
