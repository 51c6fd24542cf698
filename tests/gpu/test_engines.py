"""vLLM engines on GPUs: iterations whose probes compare log-probs after each sync. An engine starts in a minute."""

from pathlib import Path
from typing import Any

import pytest
from rl_runs import digits, setup_run, weights

from gpu.comparing import Figures
from rlhfkit import LoRA, RolloutCallback, SamplingSpec, VLLMPool

pytestmark = [pytest.mark.vllm, pytest.mark.ray]
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "shares the GPU, weights discarded": (1, {"colocate": True, "sleep_level": 2, "gpu_memory_utilization": 0.3}),
    "shares the GPU, weights kept": (1, {"colocate": True, "sleep_level": 1, "gpu_memory_utilization": 0.3}),
    "NCCL": (2, {"transfer": "nccl"}),
    "gloo": (2, {"transfer": "gloo"}),
    "adapter": (2, {"lora": "adapter"}),
    "8 bits": (2, {"quantization": "fp8"}),
}
"""GPUs that are needed, and arguments of the pool."""


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.cuda(gpus)) for name, (gpus, _) in CASES.items()]
)
def test_an_engine_gets_the_weights_of_every_update(case: str, tmp_path: Path, figures: Figures) -> None:
    """An engine that was sent wrong weights fails the probe, which raises."""
    pytest.importorskip("vllm")
    ray = pytest.importorskip("ray")
    arguments = CASES[case][1]
    pool = VLLMPool(max_model_len=256, start_timeout=150, generate_timeout=60, sync_timeout=30, **arguments)
    rollouts = RolloutCallback(digits, engine=pool, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    options = {"module_arguments": {"lora": LoRA(rank=8)}} if case == "adapter" else {}
    trainer, module, data, _ = setup_run(
        tmp_path, rollouts=rollouts, accelerator="gpu", precision="bf16-true", **options
    )
    try:
        trainer.fit(module, data)
    finally:
        pool.close()
        ray.shutdown()
    assert weights(module)
    # Of sampled tokens; the probe after each sync has its own bounds.
    apart = float(trainer.callback_metrics["rollout_corr/logprob_abs_diff_mean"])
    figures("mean difference in nats", apart, 0.3 if case == "8 bits" else 0.05)
