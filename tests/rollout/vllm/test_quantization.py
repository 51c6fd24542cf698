"""FP8 engines: vLLM's CPU build computes them for real, with weights that are quantized again at every sync."""

from pathlib import Path

import pytest
import torch
from rl_runs import PlainGRPO, digits, fit_run
from shared_pool import SMALL, SharedPool
from tiny_models import token_logprobs

from rlhfkit import RolloutCallback, SamplingSpec
from rlhfkit.models import ModelLoading, load_causal_lm
from rlhfkit.modules.parts.correction import Correction
from rlhfkit.rollout.vllm.arguments import quantization_arguments
from rlhfkit.rollout.vllm.pool import VLLMPool
from rlhfkit.rollout.weight_sync.source import ModuleWeights

TOKENS = [(7 * position) % 100 + 5 for position in range(60)]


def test_engines_that_compute_in_32_bits_are_refused() -> None:
    assert quantization_arguments("fp8", torch.bfloat16) == {"quantization": "fp8_per_channel"}
    assert quantization_arguments("fp8_per_tensor", "float16") == {"quantization": "fp8_per_tensor"}
    assert not quantization_arguments(None, torch.float32)
    with pytest.raises(ValueError, match=r"in 16 bits, got float32: set VLLMPool\(dtype='bfloat16'\)"):
        quantization_arguments("fp8", torch.float32)


def test_a_pool_says_that_it_is_quantized() -> None:
    pools = [VLLMPool(), VLLMPool(quantization="fp8"), VLLMPool(engine_arguments={"quantization": "mxfp8"})]
    assert [pool.quantized for pool in pools] == [False, True, True]


@pytest.mark.vllm
def test_every_sync_takes_effect_and_the_mismatch_is_measured_and_corrected(
    vllm_model: Path, ray_session: None, tmp_path: Path
) -> None:
    pool = SharedPool(quantization="fp8", dtype="bfloat16", max_model_len=128, **SMALL | {"bucket_bytes": None})
    pool.start(str(vllm_model), dtype=torch.bfloat16)
    try:
        policy = load_causal_lm(str(vllm_model), loading=ModelLoading(attention="sdpa"))
        scores, policies = [], []
        for version in range(3):
            generator = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
            pool.load(ModuleWeights(policy, dtype=torch.bfloat16), version)
            policies.append(token_logprobs(policy, TOKENS).detach())
            scores.append(torch.tensor(pool.score([TOKENS])[0]))
        difference = torch.tensor([[float((score - own).abs().mean()) for own in policies] for score in scores])
        own, others = difference.diagonal(), difference[~torch.eye(3, dtype=torch.bool)]
        assert own.min() > 0.02  # it is not bfloat16, whose mean is 0.005
        assert own.max() < 0.15
        assert others.min() > 3 * own.max()

        # The same weights are the same numbers.
        pool.load(ModuleWeights(policy, dtype=torch.bfloat16), 3)
        assert torch.equal(torch.tensor(pool.score([TOKENS])[0]), scores[-1])

        pool.close()  # the engines lose their version only
        rollouts = RolloutCallback(digits, engine=pool, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
        trainer, module, _ = fit_run(
            tmp_path, module=PlainGRPO, model=vllm_model, rollouts=rollouts, module_arguments={"lr": 0.05},
            data_arguments={"micro_batch_size": 16}, accumulate_grad_batches=1, precision="bf16-true",
        )  # fmt: skip
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        assert [part.kind for part in module.parts if isinstance(part, Correction)] == ["tis"]
        assert 0.005 < metrics["rollout_corr/logprob_abs_diff_mean"] < 0.15
        assert metrics["rollout_corr/is_mean"] == pytest.approx(1.0, abs=0.1)
        assert 0.01 < metrics["rollout/probe_difference"] < 0.3
    finally:
        pool.really_close()
