"""``VLLMPool(colocate=True)`` as far as it goes without GPUs: on a CPU vLLM's sleep frees no memory, but it pauses.

When a run has engines sleep and wake: ``rollout/remote/test_rank_memory.py``.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared_pool import SharedPool

from rlhfkit import SamplingSpec
from rlhfkit.data.types import Prompt
from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.supervision.calls import EngineReceivers
from rlhfkit.rollout.supervision.health import State
from rlhfkit.rollout.weight_sync.source import ModuleWeights
from rollout.vllm.test_pool import load_trainer_model
from rollout.weight_sync import mapped_ipc

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

PROMPTS = [Prompt(index=index, token_ids=[10 + index] * 70) for index in range(4)]
SPEC = SamplingSpec(group_size=2, max_new_tokens=16)


@pytest.fixture
def colocated(vllm_pool: SharedPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedPool]:
    """The shared engines, told to make room; on a CPU nothing else sets colocated ones apart."""
    monkeypatch.setattr(vllm_pool, "colocate", True)
    yield vllm_pool
    vllm_pool.wake()


def doing(pool: SharedPool) -> tuple[set[State], set[bool]]:
    """What the engines do: in the table's books, and whether they say themselves that they are paused."""
    import ray

    assert pool.engines is not None
    handles = pool.engines.handles
    answers = ray.get([handle.actor.health.remote() for handle in handles])
    return {handle.state for handle in handles}, {answer["paused"] for answer in answers}


def test_weights_that_were_kept_serve_after_waking_and_those_that_were_dropped_not_before_the_next_load(
    colocated: SharedPool, vllm_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = ModuleWeights(load_trainer_model(vllm_model))
    colocated.load(weights, 0)

    def tokens() -> list[list[int]]:
        return [sample.token_ids.tolist() for sample in colocated.generate(PROMPTS, SPEC, iteration=0)]

    before = tokens()
    monkeypatch.setattr(colocated, "sleep_level", 1)
    colocated.sleep()
    colocated.sleep()  # a second call does nothing
    assert doing(colocated) == ({State.ASLEEP}, {True})
    with pytest.raises(RuntimeError, match=r"asleep: call wake\(\)"):
        tokens()
    colocated.wake()
    assert doing(colocated) == ({State.SERVING}, {False})
    assert colocated.version == 0
    assert tokens() == before
    monkeypatch.setattr(colocated, "sleep_level", 2)
    colocated.sleep()
    assert colocated.version is None
    colocated.wake()
    assert doing(colocated) == ({State.STALE}, {False})
    with pytest.raises(RuntimeError, match="no complete weights"):
        tokens()
    colocated.sleep()
    colocated.load(weights, 1)
    assert doing(colocated) == ({State.ASLEEP}, {True})  # without a cache, for which training makes room first
    colocated.wake()
    assert doing(colocated) == ({State.SERVING}, {False})
    assert {sample.versions.tolist()[0] for sample in colocated.generate(PROMPTS, SPEC, iteration=0)} == {1}


@pytest.mark.parametrize("bucket_bytes", [100, 2**20])
def test_vllm_reads_from_memory_what_the_trainer_wrote(
    vllm_pool: SharedPool, tmp_path: Path, bucket_bytes: int
) -> None:
    """Every message through vLLM's own parsers and unpacking; only opening the memory is a stand-in (mapped_ipc.py).

    Types of 1 to 8 bytes in an order in which they are out of line, a scalar, nothing, a transposed view, and a tensor
    that is larger than a bucket.
    """
    import ray

    ray.cloudpickle.register_pickle_by_value(mapped_ipc)
    assert vllm_pool.engines is not None
    handle = vllm_pool.engines.handles[0]
    torch.manual_seed(0)
    weights = {
        "norm": torch.randn(3).bfloat16(),
        "router.correction": torch.randn(5),  # float32 after 6 bytes
        "packed": torch.randint(-128, 127, (3, 3), dtype=torch.int8),
        "scale": torch.tensor(2.5),  # float32 after 9 bytes
        "quantized": torch.randn(4, 5).to(torch.float8_e4m3fn),
        "exact": torch.randn(2, dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.zeros(0, 4, dtype=torch.float16),
        "transposed": torch.randn(6, 7).T,
        "large": torch.randn(11, 13, dtype=torch.float16),
    }
    infos = [WeightInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()]
    sizes: list[int] = []
    received: list[Any] = []

    class Reader(EngineReceivers):
        """Gives each message to vLLM at once, as the buffer holds the next chunk afterwards."""

        def submit(self, method: str, *args: Any, each: Any = None, **ignored: Any) -> Any:
            message = args[0] if each is None else each[0][0]
            sizes.extend([sum(message["tensor_sizes"])] if method == "update" else [])
            read = handle.actor.__ray_call__.remote(mapped_ipc.read_with_vllm, method, message)
            received.extend(ray.get(read))
            return SimpleNamespace(result=list)

    sender = mapped_ipc.MappedSender(tmp_path / "buffer", bucket_bytes=bucket_bytes)
    reader = Reader((handle,), 1, "127.0.0.1", 5.0)
    sender.connect(reader)
    sender.send(reader, infos, iter(weights.items()))
    expected = [
        (name, str(one.dtype), list(one.shape), one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, one in weights.items()
    ]
    assert received == expected
    assert sizes == ([6, 29, 43, 168, 286] if bucket_bytes == 100 else [6, 29, 43, 454])
    assert sender.exported == [max(sizes)]
