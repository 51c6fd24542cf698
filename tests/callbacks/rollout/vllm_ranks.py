"""Two ZeRO-3 ranks on Ray with one real vLLM engine, for ``test_callback_vllm.py``."""

import json
from pathlib import Path
from typing import Any

from rl_runs import Iterations, PlainGRPO, digits, fit_run

from rlhfkit import Ahead, Invariants, LoRA, RolloutCallback, SamplingSpec, VLLMPool
from rlhfkit.callbacks import Probe
from rlhfkit.distributed import get_rank, get_world_size
from rlhfkit.models import load_causal_lm
from rlhfkit.modules.parts import Correction
from rlhfkit.rollout import HealthPolicy
from rlhfkit.strategies import RLHFDeepSpeedStrategy


class Keep(Iterations):
    """Checks each iteration; in the end each rank writes all samples, their versions and the weights."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__()
        self.folder, self.model = folder, model

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        rollouts = RolloutCallback.of(trainer)
        assert get_world_size() == 2
        assert len(rollouts.samples) == 16  # of 8 groups of 4
        assert rollouts.part(Probe).difference <= 1e-5  # type: ignore[union-attr]
        assert max(version for one in self.samples[-1] for version in one.versions.tolist()) <= self.began[-1]
        whole = sum(parameter.nbytes for parameter in load_causal_lm(str(self.model)).parameters())
        assert rollouts.sync_metrics["rollout/sync_bytes"] < 0.2 * whole

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        versions = [one.versions.tolist() for samples in self.samples for one in samples]
        (self.folder / f"rank_{get_rank()}.json").write_text(json.dumps([self.tokens, versions, self.weights]))


def fit(folder: Path, model: Path) -> None:
    """Two iterations in flight, on ranks that are Ray actors; each writes a report into the folder."""
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
        callbacks=[Invariants(), Keep(folder, model)],
        module=PlainGRPO,
        module_arguments={"lr": 0.05, "parts": [Correction("tis").plain()], "lora": LoRA(rank=4)},
        data_arguments={"micro_batch_size": 16},
        accumulate_grad_batches=1,
        strategy=RLHFDeepSpeedStrategy(3, launcher="ray", resources_per_rank={"CPU": 0.25}),
        devices=2,
        use_distributed_sampler=False,
    )
