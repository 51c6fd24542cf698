"""What senders tell the engines, read by the classes of the installed vLLM, 0.32 or 0.33.

Covers ``native.py`` as far as it goes without GPUs: everything but NCCL itself.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared_pool import SharedPool

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.supervision.handle import EngineHandles
from rlhfkit.rollout.weight_sync.process_group.sender import ProcessGroupSender

INFOS = [WeightInfo("a", (2, 3), torch.float32), WeightInfo("b", (4,), torch.bfloat16)]
WEIGHTS = [("a", torch.ones(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))]


class Recorded(RuntimeError):
    """Raised instead of waiting for engines that do not exist."""


class Listening(EngineHandles):
    """Two engines of two workers each that write down what they are told."""

    def submit(self, method: str, *args: Any, each: Any = None, **ignored: Any) -> Any:
        self.told.append((method, [row[0] for row in each] if each is not None else [args[0]] * 2))
        return SimpleNamespace(result=list, poll=self.poll)

    def poll(self) -> None:
        if self.raises:
            raise Recorded


def listening(*, raises: bool) -> Listening:
    two = Listening((SimpleNamespace(), SimpleNamespace()), 2, "127.0.0.1", 5.0)  # type: ignore[arg-type]
    object.__setattr__(two, "told", [])
    object.__setattr__(two, "raises", raises)
    return two


def announced_in_groups(backend: Any) -> list[tuple[str, list[dict[str, Any]]]]:
    """What our own sender tells engines before the first byte."""
    from rlhfkit.rollout.weight_sync.process_group.transport import NetworkTransport

    engines, sender = listening(raises=True), ProcessGroupSender(backend, timeout=5.0, shared_memory=False)
    with pytest.raises(Recorded):
        sender.connect(engines)

    class Silent:
        device = torch.device("cpu")

        def broadcast(self, block: Any) -> Any:
            return SimpleNamespace(is_completed=lambda: False)

        def close(self) -> None:
            pass

    sender._transport = NetworkTransport(Silent(), 5.0)  # type: ignore[arg-type]
    with pytest.raises(Recorded):
        sender.send(engines, INFOS, iter(WEIGHTS))
    sender.close()
    return engines.told


def announced_by_vllm() -> tuple[list[tuple[str, list[dict[str, Any]]]], list[str]]:
    """What vLLM's own sender tells engines, and the names of what it would broadcast. Runs where vLLM is."""
    from vllm.distributed.weight_transfer import nccl_engine

    from rlhfkit.rollout.weight_sync.native import NativeSender

    sent: list[str] = []

    class WithoutNccl(nccl_engine.NCCLTrainerWeightTransferEngine):
        def _broadcast(self, source: Any, meta: Any) -> None:
            sent.extend(name for name, _ in self._checked_iter(source, meta))

    engines, sender = listening(raises=False), NativeSender(bucket_bytes=77)
    before = nccl_engine.open_trainer_endpoint, nccl_engine.NCCLTrainerWeightTransferEngine
    factory = sys.modules["vllm.distributed.weight_transfer.factory"].WeightTransferTrainerFactory
    registered = dict(factory._registry)
    try:
        nccl_engine.open_trainer_endpoint = lambda init_info: None
        factory._registry["nccl"] = lambda: WithoutNccl
        sender.connect(engines)
        sender.send(engines, INFOS, iter(WEIGHTS))
        sender.send(engines, INFOS, iter(WEIGHTS))
    finally:
        nccl_engine.open_trainer_endpoint = before[0]
        factory._registry.clear()
        factory._registry.update(registered)
    return engines.told, sent


def read_by_vllm(engine: str, told: list[tuple[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The fields that vLLM's classes read. Runs where vLLM is."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    import rlhfkit.rollout.vllm.plugin  # noqa: F401  # registers ours

    kind: Any = WeightTransferEngineFactory._registry[engine]()
    missing = getattr(kind, "__abstractmethods__", frozenset())
    assert not missing, f"{kind.__name__} does not implement {sorted(missing)}"
    parse = {"connect": kind.parse_init_info, "update": kind.parse_update_info}
    return [vars(parse[method](object.__new__(kind), row)) for method, rows in told for row in rows]


def all_of_it() -> dict[str, Any]:
    """Both senders' announcements, read. Runs where vLLM is."""
    told, sent = announced_by_vllm()
    return {
        "groups": {backend: read_by_vllm("rlhfkit", announced_in_groups(backend)) for backend in ("gloo", "nccl")},
        "native": read_by_vllm("nccl", told),
        "sent": sent,
    }


@pytest.mark.vllm
@pytest.mark.ray
def test_what_senders_announce_is_what_vllm_reads(vllm_pool: SharedPool) -> None:
    import ray

    def run_there(actor: Any, file: str, tests: str) -> Any:
        import runpy
        import sys

        sys.path.append(tests)
        return runpy.run_path(file)["all_of_it"]()

    assert vllm_pool.manager is not None
    actor = vllm_pool.manager.handles[0].actor
    check(ray.get(actor.__ray_call__.remote(run_there, __file__, str(Path(__file__).parents[2]))))


def check(read: dict[str, Any]) -> None:
    for backend, (first, second, update, _) in read["groups"].items():
        assert (first["backend"], first["world_size"], first["shared_memory"]) == (backend, 5, None)
        assert [first["rank_offset"], second["rank_offset"]] == [1, 3]
        assert update == {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}
    first, second, update, *_ = read["native"]
    assert [first["rank_offset"], second["rank_offset"]] == [1, 3]
    assert (first["world_size"], first["packed"], first["packed_buffer_size_bytes"]) == (5, True, 77)
    assert (update["names"], update["shapes"]) == (["a", "b"], [[2, 3], [4]])
    assert read["sent"] == ["a", "b"] * 2


if __name__ == "__main__":  # for a vLLM that is not installed: PYTHONPATH=<its folder> python <this file>
    check(all_of_it())
    import vllm

    print(vllm.__version__, "fine")
