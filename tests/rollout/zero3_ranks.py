"""Two ranks of a ZeRO-3 training that publish their policy; each rank is a process (``strategies/ranks.py``)."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from strategies import ranks
from tiny_models import token_logprobs

from rlhfkit.models import ModelLoading
from rlhfkit.rollout.weight_sync.source import ModuleWeights

RANKS = 2
BUCKET_BYTES = 2**15  # several buckets, and tensors larger than one


def run_ranks(scenario: str, model: Path, folder: Path) -> list[dict[str, Any]]:
    """Run a scenario of this file, for a model folder, on all ranks and return what they report."""
    return ranks.run(f"rollout.zero3_ranks:{scenario}", RANKS, folder, model=str(model))


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


def message_of(function: Callable[[], Any]) -> str:
    """Type and text of the exception that a call raises; empty if none."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained_adapter(model_folder: str) -> Any:
    """The model in a folder with a LoRA adapter that changes it, in float32 on every rank."""
    from rlhfkit.models import LoRA, load_causal_lm

    model = load_causal_lm(model_folder, loading=ModelLoading(attention="sdpa"), lora=LoRA(rank=4))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def diverge_on_the_last_rank(engine: Any) -> None:
    """A NaN in the last rank's shard of one weight."""
    parameter: Any = engine.module.get_parameter("model.layers.1.mlp.down_proj.weight")
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter.ds_tensor.data[-1] = float("nan")


def publish(folder: Path, model: str) -> dict[str, Any]:
    """What the source yields, twice, and after one shard diverged."""
    engine = zero3_engine(model)
    from transformers import AutoModelForCausalLM

    expected = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    report: dict[str, Any] = {}
    for turn in ("first", "second"):
        weights = ModuleWeights(engine, bucket_bytes=BUCKET_BYTES)
        large = [parameter for parameter in engine.module.parameters() if parameter.ds_numel > 100]
        report[turn] = {
            "announced": [[info.name, list(info.shape), str(info.dtype)] for info in weights.metadata()],
            "sharded": all(parameter.numel() == 0 for parameter in large),
            "equal": {name: bool(torch.equal(tensor, expected[name])) for name, tensor in weights},
        }
    diverge_on_the_last_rank(engine)
    report["diverged"] = message_of(lambda: list(ModuleWeights(engine)))
    return report


def sampled_difference(policy: Any, pool: Any) -> float:
    """Of log-probs of tokens sampled at temperature 0.5, between engine and trainer; each rank has its own prompt."""
    from rlhfkit.data.types import Prompt
    from rlhfkit.rollout.engine import SamplingSpec

    spec = SamplingSpec(group_size=1, max_new_tokens=24, temperature=0.5)
    (made,) = pool.generate([Prompt(index=0, token_ids=[5, 9, 40 + dist.get_rank()])], spec, iteration=0)
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, (made.token_ids.tolist(), made.logprobs.tolist()))
    worst = 0.0
    for rank, (token_ids, logprobs) in enumerate(gathered):  # a forward pass is a collective
        with torch.no_grad():
            expected = token_logprobs(policy, [5, 9, 40 + rank, *token_ids], 0.5)[2:]
        worst = max(worst, float((expected - torch.tensor(logprobs)).abs().max()))
    return worst


def tokens_of(samples: list[Any]) -> list[list[int]]:
    """Token ids of samples."""
    return [sample.token_ids.tolist() for sample in samples]


class EachRankItsShare:
    """What two ranks sample through one pool, each its own prompts, with one engine."""

    def __init__(self, pool: Any) -> None:
        from rlhfkit.data.types import Prompt
        from rlhfkit.rollout.engine import SamplingSpec

        self.pool = pool
        self.spec = SamplingSpec(group_size=4, max_new_tokens=150, min_new_tokens=140)
        self.prompts = [Prompt(index=index, token_ids=[10 + index] * 20) for index in range(8)]
        self.own = self.prompts[dist.get_rank() :: RANKS]

    def sample(self) -> list[list[int]]:
        """This rank's share."""
        return tokens_of(self.pool.generate(self.own, self.spec, iteration=3))

    def alone(self) -> list[list[int]]:
        """This rank's share, from one rank that has sampled all prompts at once."""
        made: list[Any] = [None]
        if dist.get_rank() == 1:
            made = [tokens_of(self.pool.generate(self.prompts, self.spec, iteration=3))]
        dist.broadcast_object_list(made, src=1)
        return [tokens for row in range(dist.get_rank(), 8, RANKS) for tokens in made[0][4 * row : 4 * row + 4]]

    def lose_the_engine(self) -> str:
        """The error of this rank when the engine is killed while both ranks' requests are in flight."""
        stream = self.pool.stream(self.spec, iteration=3)
        for what in (signal.SIGSTOP, signal.SIGKILL):  # stopped before, so that it answers none of them
            if self.pool._sync is not None and self.pool.engines is not None:
                os.kill(self.pool.engines.handles[0].info["pid"], what)
            dist.barrier()
            if what is signal.SIGSTOP:
                stream.submit(self.own)
                dist.barrier()
        try:
            return message_of(lambda: stream.collect(8))
        finally:
            stream.close()


def serve(folder: Path, model: str) -> dict[str, Any]:
    """Train and publish to a real vLLM engine, then break things: every rank must notice alike."""
    from rlhfkit.rollout.supervision.health import HealthPolicy
    from rlhfkit.rollout.vllm.pool import VLLMPool

    policy = zero3_engine(model)
    if dist.get_rank() == 0:
        import ray

        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False
        )
    ids = torch.tensor([[7 + 3 * position % 80 for position in range(48)]])
    report: dict[str, Any] = {"differences": [], "versions": []}
    report["too_small"] = message_of(lambda: VLLMPool(num_engines=9, device="cpu").start(model, dtype=torch.float32))
    patient = HealthPolicy(probe_timeout=60, max_restarts=1, recovery_timeout=1)
    pool = VLLMPool(device="cpu", kv_cache_gib=1 / 16, sync_timeout=60, bucket_bytes=BUCKET_BYTES, health=patient)
    adapted = trained_adapter(model)
    pool.configure_weights(ModuleWeights(adapted))
    pool.start(model, dtype=torch.float32)
    report["no_weights"] = message_of(lambda: pool.score(ids.tolist()))

    def difference(policy: Any = policy) -> float:
        """Of log-probs between engine and trainer, on every rank."""
        with torch.no_grad():
            logprobs = token_logprobs(policy, ids[0].tolist())
        return float((torch.tensor(pool.score(ids.tolist())[0]) - logprobs).abs().max())

    def kill_the_engine() -> None:
        dist.barrier()  # all have their answers
        if pool._sync is not None and pool.engines is not None:
            os.kill(pool.engines.handles[0].info["pid"], signal.SIGKILL)

    for version in (1, 2):
        policy.backward(policy(ids, labels=ids).loss)
        policy.step()
        pool.load(ModuleWeights(policy, bucket_bytes=BUCKET_BYTES), version)
        report["versions"].append(pool.version)
        report["differences"].append(difference())

    report["at_temperature_0.5"] = sampled_difference(policy, pool)

    class LastRankFails(ModuleWeights):
        def __iter__(self) -> Any:
            for number, (name, tensor) in enumerate(super().__iter__()):
                yield name, tensor
                if number == 3 and dist.get_rank() == RANKS - 1:
                    raise OSError("the last rank's disk is gone")

    # One bucket: all collectives of the source have run before its first tensor, as the failure must not be of one.
    report["last_rank_fails"] = message_of(lambda: pool.load(LastRankFails(policy, bucket_bytes=2**40), 3))
    report["versions"].append(pool.version)
    # The engine was started for this adapter, so it has merged weights until now, and then gets the matrices alone.
    report["sync_bytes"] = [pool.sync_metrics()]
    for version in (3, 4):
        pool.load(ModuleWeights(adapted), version)
        report["sync_bytes"].append(pool.sync_metrics())
        report["differences"].append(difference(adapted))
    share = EachRankItsShare(pool)
    report["share"], report["alone"] = share.sample(), share.alone()
    report["lost"] = share.lose_the_engine()
    pool.version = None  # what RolloutCallback does then
    pool.load(ModuleWeights(adapted), 5)  # with the weights under the adapter, which the new engine lacks
    report["sync_bytes"].append(pool.sync_metrics())
    report["again"] = share.sample()
    report["versions"].append(pool.version)
    report["after_restart"] = difference(adapted)
    kill_the_engine()
    report["dead_engine"] = message_of(lambda: pool.load(ModuleWeights(policy, bucket_bytes=BUCKET_BYTES), 6))
    report["versions"].append(pool.version)
    pool.close()
    if dist.get_rank() == 0:
        ray.shutdown()
    return report
