"""Two ZeRO-3 ranks, one real vLLM engine, reference and reward model, for ``test_callback_vllm.py``."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rl_runs import PlainGRPO, digits, prompts_file, samples_of_all_ranks
from shared_pool import SharedPool

from rlhfkit import Ahead, Invariants, LoRA, ModelPool, PromptDataModule, RolloutCallback, SamplingSpec, VLLMPool
from rlhfkit.callbacks import Probe
from rlhfkit.distributed import get_rank, get_world_size
from rlhfkit.modules.parts import Correction, Reference, RewardModel
from rlhfkit.rollout import ModuleWeights
from rlhfkit.strategies import RLHFDeepSpeedStrategy

SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)
MODES: dict[str, dict[str, Any]] = {
    "in turns": {},
    "roles elsewhere": {},
    "in flight": {"parts": [Ahead(1, in_flight=True)]},
}


class Keep(L.Callback):
    """What every iteration was trained on, how old it was, how well the weights arrived, and the final weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report: dict[str, Any] = {"tokens": [], "versions": [], "probes": [], "own": [], "ranks": []}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        rollouts = RolloutCallback.of(trainer)
        samples = samples_of_all_ranks(rollouts)
        self.report["tokens"].append([(one.prompt.index, one.sample_index, one.token_ids.tolist()) for one in samples])
        self.report["versions"].append([sorted({version for one in samples for version in one.versions.tolist()})])
        self.report["probes"].append(rollouts.part(Probe).difference)
        self.report["sync_bytes"] = rollouts.sync_metrics["rollout/sync_bytes"]
        self.report["own"].append(len(rollouts.samples))
        self.report["ranks"] = [get_rank(), get_world_size()]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        import json

        weights = {name: tensor.cpu().clone() for name, tensor in ModuleWeights(pl_module.policy)}
        if get_rank() == 0:
            torch.save(weights, self.path.with_suffix(".pt"))
        report = self.report | {"weights": [float(tensor.double().abs().sum()) for tensor in weights.values()]}
        self.path.with_name(f"{self.path.name}.{get_rank()}.json").write_text(json.dumps(report))


def module_arguments(mode: str, model: str, reward: str) -> dict[str, Any]:
    """Reference and reward model are children or elsewhere."""
    if mode == "in flight":
        # A pool that was started for another policy gets this one merged, a new one its adapter alone.
        return {"parts": [Correction("tis").plain()], "lora": LoRA(rank=4)}
    arguments: dict[str, Any] = {"kl_coef": 0.1, "parts": [RewardModel(reward).plain()]}
    if mode == "roles elsewhere":
        arguments |= {"parts": [RewardModel(ModelPool(reward)).plain(), Reference(ModelPool(model)).plain()]}
    return arguments


def fit(folder: Path, model: str, mode: str, pool: VLLMPool, strategy: Any, reward: str = "") -> None:
    """Two iterations; every rank writes a report beside ``folder / mode``."""
    folder.mkdir(parents=True, exist_ok=True)
    data_folder = folder / f"data{os.environ.get('LOCAL_RANK', '')}"
    data_folder.mkdir(exist_ok=True)
    rollouts = RolloutCallback(digits, engine=pool, sampling=SAMPLING, **MODES[mode])
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[rollouts, Invariants(), Keep(folder / mode.replace(" ", "_"))],
    )  # fmt: skip
    data = PromptDataModule(prompts_file(data_folder), answer="answer", rollout_batch_size=8, micro_batch_size=16)
    trainer.fit(PlainGRPO(model, lr=0.05, **module_arguments(mode, model, reward)), data)


def by_script(folder: Path, model: str, reward: str) -> dict[str, Any]:
    """Entry point of a rank that a script has started."""
    pool = SharedPool(kv_cache_gib=0.1, max_model_len=64)
    for mode in MODES:
        os.environ["WORLD_SIZE"] = "2"  # Lightning deletes it when a fit ends
        fit(folder, model, mode, pool, "rlhf_zero3", reward)
    pool.really_close()
    return {}


def on_ray(folder: Path, model: str, mode: str) -> None:
    """The same with ranks that are Ray actors, from the driver."""
    pool = VLLMPool(kv_cache_gib=0.1, max_model_len=64)
    strategy = RLHFDeepSpeedStrategy(3, launcher="ray", resources_per_rank={"CPU": 0.25})
    fit(folder, model, mode, pool, strategy)
