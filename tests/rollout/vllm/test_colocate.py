"""``VLLMPool(colocate=True)`` as far as it goes without GPUs: on a CPU vLLM's sleep frees no memory, but it pauses."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import digits, prompts_file
from shared_pool import SharedPool

from rlhfkit import GRPOModule, PromptDataModule, RolloutCallback, SamplingSpec
from rlhfkit.data.types import Prompt
from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.supervision.handle import EngineHandles
from rlhfkit.rollout.supervision.health import State
from rlhfkit.rollout.weight_sync.cuda_ipc import IPCSender, _announcement
from rlhfkit.rollout.weight_sync.sender import GlooSender
from rlhfkit.rollout.weight_sync.source import ModuleWeights
from rollout.vllm.test_pool import load_trainer_model

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
    """What the engines do: in the manager's books, and whether they say themselves that they are paused."""
    import ray

    assert pool.manager is not None
    handles = pool.manager.handles
    answers = ray.get([handle.actor.health.remote() for handle in handles])
    return {handle.state for handle in handles}, {answer["paused"] for answer in answers}


def test_weights_that_were_kept_serve_again_after_waking(
    colocated: SharedPool, vllm_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colocated, "sleep_level", 1)
    colocated.load(ModuleWeights(load_trainer_model(vllm_model)), 0)
    before = colocated.generate(PROMPTS, SPEC, iteration=0)
    colocated.sleep()
    colocated.sleep()  # a second call does nothing
    assert doing(colocated) == ({State.ASLEEP}, {True})
    with pytest.raises(RuntimeError, match=r"asleep: call wake\(\)"):
        colocated.generate(PROMPTS, SPEC, iteration=0)
    colocated.wake()
    assert doing(colocated) == ({State.SERVING}, {False})
    assert colocated.version == 0
    after = colocated.generate(PROMPTS, SPEC, iteration=0)
    assert [sample.token_ids for sample in after] == [sample.token_ids for sample in before]


def test_weights_that_were_dropped_are_not_served_before_the_next_load(colocated: SharedPool, vllm_model: Path) -> None:
    weights = ModuleWeights(load_trainer_model(vllm_model))
    colocated.load(weights, 0)
    colocated.sleep()
    assert colocated.version is None
    colocated.wake()
    assert doing(colocated) == ({State.STALE}, {False})
    with pytest.raises(RuntimeError, match="no complete weights"):
        colocated.generate(PROMPTS, SPEC, iteration=0)
    colocated.sleep()
    colocated.load(weights, 1)
    assert doing(colocated) == ({State.ASLEEP}, {True})  # without a cache, for which training makes room first
    with pytest.raises(RuntimeError, match=r"asleep: call wake\(\)"):
        colocated.generate(PROMPTS, SPEC, iteration=0)
    colocated.wake()
    assert doing(colocated) == ({State.SERVING}, {False})
    assert {token.versions[0] for token in colocated.generate(PROMPTS, SPEC, iteration=0)} == {1}


def test_engines_sleep_while_the_policy_learns_and_it_learns_the_same(
    vllm_pool: SharedPool, vllm_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At both levels, with a validation after each iteration, which engines sleep through and wake after."""
    other = tmp_path / "validation"
    other.mkdir()
    seen: list[tuple[set[State], set[bool]]] = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(doing(vllm_pool))

    def run() -> torch.Tensor:
        seen.clear()
        torch.manual_seed(0)
        rollouts = RolloutCallback(digits, engine=vllm_pool, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[rollouts, Look()],
        )  # fmt: skip
        data = PromptDataModule(
            prompts_file(tmp_path),
            answer="answer",
            rollout_batch_size=8,
            micro_batch_size=16,
            validation_data=prompts_file(other, rows=4),
        )
        module = GRPOModule(str(vllm_model), lr=5e-3)
        trainer.fit(module, data)
        return torch.cat([parameter.detach().flatten() for parameter in module.policy.parameters()])

    apart = run()
    assert seen == [({State.SERVING}, {False})] * 4
    for level in (2, 1):
        with monkeypatch.context() as patch:
            patch.setattr(vllm_pool, "colocate", True)
            patch.setattr(vllm_pool, "sleep_level", level)
            beside = run()
        assert seen == [({State.ASLEEP}, {True})] * 4
        assert torch.equal(beside, apart)


def test_what_each_sender_announces_is_what_vllm_takes(vllm_pool: SharedPool) -> None:
    """Every transfer's handshake and announcement, read by vLLM's own classes in a process that has vLLM."""
    import ray

    assert vllm_pool.manager is not None
    handle = vllm_pool.manager.handles[0]
    infos = [WeightInfo("a", (2, 3), torch.float32), WeightInfo("b", (4,), torch.bfloat16)]

    class Listening(EngineHandles):
        """Two engines of two processes each that write down what they are told."""

        @property
        def num_workers(self) -> int:
            return 4

        def submit(self, method: str, *args: Any, each: Any = None, **ignored: Any) -> Any:
            told.append((method, list(each) if each is not None else [args] * 2))
            return SimpleNamespace(result=list, poll=lambda: None)

    told: list[tuple[str, list[tuple[Any, ...]]]] = []
    listening = Listening((handle, handle), 2, "127.0.0.1", 5.0)
    IPCSender().connect(listening)
    listening.update(_announcement(infos, {"GPU-0": (1, 2)}))
    gloo = GlooSender(timeout=5.0)
    gloo.connect(listening)
    gloo.close()

    def understood(actor: Any, told: Any) -> list[Any]:
        """Runs where vLLM is."""
        from types import SimpleNamespace

        from vllm.distributed.weight_transfer import ipc_engine

        from rlhfkit.rollout.vllm.plugin import GlooWeightTransferEngine

        # As engine_environment() has it for this transfer; vLLM reads its variables once.
        ipc_engine.envs = SimpleNamespace(VLLM_ALLOW_INSECURE_SERIALIZATION=True)
        read = []
        for engine, method, rows in told:
            kind = {"ipc": ipc_engine.IPCWeightTransferEngine, "gloo": GlooWeightTransferEngine}[engine]
            take = {"connect": kind.parse_init_info, "update": kind.parse_update_info}[method]
            read += [vars(take(object.__new__(kind), *row)) for row in rows]
        return read

    sent = [(engine, *what) for engine, what in zip(("ipc", "ipc", "gloo"), told, strict=True)]
    first, second, update, _, *rendezvous = ray.get(handle.actor.__ray_call__.remote(understood, sent))
    assert first == second == {"packed": True}
    assert update["ipc_handles"] == {"GPU-0": (1, 2)}
    assert (update["names"], update["tensor_sizes"]) == (["a", "b"], [24, 8])
    assert [one["rank_offset"] for one in rendezvous] == [1, 3]
