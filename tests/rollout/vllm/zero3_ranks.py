"""Two ranks of a ZeRO-3 training that publish their policy to a real vLLM engine, and what breaks on the way."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import ray_worker
import torch
import torch.distributed as dist
from tiny_models import token_logprobs

from rlhfkit.data.types import Prompt
from rlhfkit.models import LoRA, ModelLoading, load_causal_lm
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.supervision.health import HealthPolicy
from rlhfkit.rollout.vllm.pool import VLLMPool
from rlhfkit.rollout.weight_sync.source import ModuleWeights
from rollout.vllm.test_pool import EXACT

RANK, RANKS = int(os.environ.get("LOCAL_RANK", 0)), 2
BUCKET_BYTES = 2**15  # several buckets, and tensors larger than one
IDS = [7 + 3 * position % 80 for position in range(48)]
FAILED = "^rank 0 failed: EngineError: .*" if RANK else ""
"""How an error of rank 0 begins."""


def zero3_engine(model_folder: str) -> Any:
    """The model in a folder as a ZeRO-3 engine."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    # deepspeed 0.19.8 would compile a shared-memory all-reduce for a minute; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["RANK"] = os.environ["LOCAL_RANK"]
    deepspeed.init_distributed(dist_backend="gloo")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def check_that_nan_stops_all_ranks(policy: Any) -> None:
    """That is in the last rank's shard of one weight."""
    parameter: Any = policy.module.get_parameter("model.layers.1.mlp.down_proj.weight")
    if RANK == RANKS - 1:
        parameter.ds_tensor.data[-1] = float("nan")
    with pytest.raises(ValueError, match=r"not finite .*model\.layers\.1\.mlp\.down_proj\.weight"):
        list(ModuleWeights(policy))


def check_scores(policy: Any, pool: Any) -> None:
    """Log-probs of the engine are the trainer's, on every rank."""
    with torch.no_grad():
        expected = token_logprobs(policy, IDS)
    torch.testing.assert_close(torch.tensor(pool.score([IDS])[0]), expected, rtol=0, atol=EXACT)


def check_samples_at_half_temperature(policy: Any, pool: Any) -> None:
    """Each rank has its own prompt; a forward pass is a collective."""
    spec = SamplingSpec(group_size=1, max_new_tokens=24, temperature=0.5)
    (made,) = pool.generate([Prompt(index=0, token_ids=[5, 9, 40 + RANK])], spec, iteration=0)
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, (made.token_ids.tolist(), made.logprobs.tolist()))
    for rank, (token_ids, logprobs) in enumerate(gathered):
        with torch.no_grad():
            expected = token_logprobs(policy, [5, 9, 40 + rank, *token_ids], 0.5)[2:]
        # Logits divided by T bring their rounding errors with them.
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=2 * EXACT)


def kill_the_engine(pool: Any) -> None:
    dist.barrier()  # all have their answers
    if RANK == 0:
        os.kill(pool.engines.handles[0].info["pid"], signal.SIGKILL)
    dist.barrier()


def serve(folder: Path, model: str) -> None:
    """Entry point of a rank: train and publish, then break things. Every rank notices alike."""
    import ray

    policy = zero3_engine(model)
    if RANK == 0:
        ray_worker.use()
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False
        )
    with pytest.raises(EngineError, match=FAILED + re.escape("9 engine(s) need 9 CPU(s), but Ray's cluster has 2")):
        VLLMPool(num_engines=9, device="cpu").start(model, dtype=torch.float32)
    patient = HealthPolicy(probe_timeout=60, max_restarts=1, recovery_timeout=1)
    pool = VLLMPool(device="cpu", kv_cache_gib=1 / 16, sync_timeout=60, bucket_bytes=BUCKET_BYTES, health=patient)
    adapted = load_causal_lm(model, loading=ModelLoading(attention="sdpa"), lora=LoRA(rank=4))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:  # the same on every rank
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    pool.configure_weights(ModuleWeights(adapted))
    pool.start(model, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="the engines have no complete weights"):
        pool.score([IDS])

    ids = torch.tensor([IDS])
    for version in (1, 2):
        policy.backward(policy(ids, labels=ids).loss)
        policy.step()
        pool.load(ModuleWeights(policy, bucket_bytes=BUCKET_BYTES), version)
        assert pool.version == version
        assert all(one.numel() == 0 for one in policy.module.parameters() if one.ds_numel > 100)  # still shards
        check_scores(policy, pool)
    check_samples_at_half_temperature(policy, pool)

    class LastRankFails(ModuleWeights):
        def __iter__(self) -> Any:
            for number, (name, tensor) in enumerate(super().__iter__()):
                yield name, tensor
                if number == 3 and RANK == RANKS - 1:
                    raise OSError("the last rank's disk is gone")

    # One bucket: all collectives of the source have run before its first tensor, as the failure must not be of one.
    kind, before = (OSError, "") if RANK else (EngineError, "rank 1 failed: OSError: ")
    with pytest.raises(kind, match=f"^{before}the last rank's disk is gone"):
        pool.load(LastRankFails(policy, bucket_bytes=2**40), 3)
    assert pool.version is None  # after a failure between the ranks nobody knows one, and the next load heals it
    # The engine was started for this adapter, so it has merged weights until now, and then gets the matrices alone,
    # with the weights under them if it lacks these.
    sent = [pool.sync_metrics()["rollout/sync_bytes"]]
    for version in (3, 4):
        pool.load(ModuleWeights(adapted), version)
        sent.append(pool.sync_metrics()["rollout/sync_bytes"])
        check_scores(adapted, pool)
    assert 0 < sent[2] == sent[1] - sent[0] < 0.2 * sent[0]
    assert pool.sync_metrics()["rollout/sync_bytes_saved"] == sent[0] - sent[2]

    kill_the_engine(pool)
    pool.load(ModuleWeights(adapted), 5)  # waits for the new engine, which lacks the weights under the adapter
    assert pool.version == 5
    assert pool.sync_metrics()["rollout/sync_bytes"] == sent[1]
    check_scores(adapted, pool)
    kill_the_engine(pool)  # one death too many (max_restarts=1), found by the load or a probe
    before = r"^rank 0 failed: Engine\w+: .*" if RANK else ""
    with pytest.raises(EngineError, match=f"(?s){before}vLLM engine 0 of 1") as dead:
        pool.load(ModuleWeights(policy, bucket_bytes=BUCKET_BYTES), 6)
    assert RANK or "died while" in str(dead.value)
    assert pool.version is None
    check_that_nan_stops_all_ranks(policy)
    pool.close()
    if RANK == 0:
        ray.shutdown()
