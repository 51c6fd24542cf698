"""What our sender tells the engines, read by the classes of the installed vLLM, 0.32 or 0.33."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared_pool import SharedPool

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.supervision.calls import EngineReceivers
from rlhfkit.rollout.weight_sync.process_group.transfer import ProcessGroupSender

INFOS = [WeightInfo("a", (2, 3), torch.float32), WeightInfo("b", (4,), torch.bfloat16)]
WEIGHTS = [("a", torch.ones(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))]


class Recorded(RuntimeError):
    """Raised instead of waiting for engines that do not exist."""


class Listening(EngineReceivers):
    """Two engines of two workers each that write down what they are told."""

    told: list[Any]

    def submit(self, method: str, *args: Any, each: Any = None, **ignored: Any) -> Any:
        self.told.append((method, [row[0] for row in each] if each is not None else [args[0]] * 2))
        return SimpleNamespace(result=list, poll=self.poll)

    def poll(self) -> None:
        raise Recorded


def listening() -> Listening:
    two = Listening([SimpleNamespace(number=0), SimpleNamespace(number=1)], 2, "127.0.0.1", 5.0)
    two.told = []
    return two


def announced_in_groups(backend: Any) -> list[tuple[str, list[dict[str, Any]]]]:
    """What our own sender tells engines before the first byte."""
    from rlhfkit.rollout.weight_sync.process_group.transport import Transport

    engines, sender = listening(), ProcessGroupSender(backend, timeout=5.0)
    with pytest.raises(Recorded):
        sender.connect(engines)

    class Silent:
        device = torch.device("cpu")

        def broadcast(self, block: Any) -> Any:
            return SimpleNamespace(is_completed=lambda: False)

        def close(self) -> None:
            pass

    sender._transport = Transport(Silent(), 2**20, 5.0)  # type: ignore[arg-type]
    with pytest.raises(Recorded):
        sender.send(engines, INFOS, iter(WEIGHTS))
    sender.close()
    return engines.told


def read_by_vllm(told: list[tuple[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The fields that vLLM's classes read. Runs where vLLM is."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    import rlhfkit.rollout.vllm.plugin  # noqa: F401  # registers ours

    kind: Any = WeightTransferEngineFactory._registry["rlhfkit"]()
    missing = getattr(kind, "__abstractmethods__", frozenset())
    assert not missing, f"{kind.__name__} does not implement {sorted(missing)}"
    parse = {"connect": kind.parse_init_info, "update": kind.parse_update_info}
    return [vars(parse[method](object.__new__(kind), row)) for method, rows in told for row in rows]


def all_of_it() -> dict[str, list[dict[str, Any]]]:
    """The announcements for each kind of group, read. Runs where vLLM is."""
    return {backend: read_by_vllm(announced_in_groups(backend)) for backend in ("gloo", "nccl")}


@pytest.mark.vllm
@pytest.mark.ray
def test_what_senders_announce_is_what_vllm_reads(vllm_pool: SharedPool) -> None:
    import ray

    def run_there(actor: Any, file: str, tests: str) -> Any:
        import runpy
        import sys

        sys.path.append(tests)
        return runpy.run_path(file)["all_of_it"]()

    assert vllm_pool.engines is not None
    actor = vllm_pool.engines.handles[0].actor
    check(ray.get(actor.__ray_call__.remote(run_there, __file__, str(Path(__file__).parents[2]))))


def check(read: dict[str, list[dict[str, Any]]]) -> None:
    for backend, (first, second, update, _) in read.items():
        assert (first["backend"], first["world_size"]) == (backend, 5)
        assert [first["rank_offset"], second["rank_offset"]] == [1, 3]
        assert update == {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}


if __name__ == "__main__":  # for a vLLM that is not installed: PYTHONPATH=<its folder> python <this file>
    check(all_of_it())
    import vllm

    print(vllm.__version__, "fine")
