"""Two ZeRO-3 ranks on Ray with one real vLLM engine, for ``test_callback_vllm.py``."""

from pathlib import Path
from typing import Any

import lightning as L
from rl_runs import PlainGRPO, digits, fit_run, samples_of_all_ranks

from rlhfkit import Ahead, Invariants, LoRA, RolloutCallback, SamplingSpec, VLLMPool
from rlhfkit.callbacks import Probe
from rlhfkit.distributed import get_rank, get_world_size
from rlhfkit.modules.parts import Correction
from rlhfkit.rollout import HealthPolicy, ModuleWeights
from rlhfkit.strategies import RLHFDeepSpeedStrategy


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

        weights = [float(tensor.double().abs().sum()) for _, tensor in ModuleWeights(pl_module.policy)]
        report = self.report | {"weights": weights}
        self.path.with_name(f"{self.path.name}.{get_rank()}.json").write_text(json.dumps(report))


def fit(folder: Path, model: Path) -> None:
    """Two iterations in flight, on ranks that are Ray actors; each writes a report beside ``folder / "run"``."""
    rollouts = RolloutCallback(
        digits,
        # It is started for this policy, so that it gets the adapter alone.
        engine=VLLMPool(kv_cache_gib=0.1, max_model_len=64, health=HealthPolicy(probe_timeout=60)),
        sampling=SamplingSpec(group_size=4, max_new_tokens=8),
        parts=[Ahead(1, in_flight=True)],
    )
    fit_run(
        folder,
        model=model,
        rollouts=rollouts,
        callbacks=[Invariants(), Keep(folder / "run")],
        module=PlainGRPO,
        module_arguments={"lr": 0.05, "parts": [Correction("tis").plain()], "lora": LoRA(rank=4)},
        data_arguments={"micro_batch_size": 16},
        accumulate_grad_batches=1,
        strategy=RLHFDeepSpeedStrategy(3, launcher="ray", resources_per_rank={"CPU": 0.25}),
        devices=2,
        use_distributed_sampler=False,
    )
