"""Asynchronous rollouts: what is trained on, how old it may be, and what overlaps."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import digits, setup_run, weights
from strategies import ranks

from rlhfkit import LocalEngine, RolloutCallback, Sample, SamplingSpec

SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)


class Watch(L.Callback):
    """Per iteration: prompts, rewards, versions of the tokens and the version when training on them began."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.rewards: list[float] = []
        self.ages: list[set[int]] = []
        self._version = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._version = trainer.global_step

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        samples = next(each for each in trainer.callbacks if isinstance(each, RolloutCallback)).samples
        self.prompts.append(list(dict.fromkeys(sample.prompt.index for sample in samples)))
        self.rewards.append(sum(sample.reward or 0.0 for sample in samples) / len(samples))
        self.ages.append({self._version - version for sample in samples for version in sample.versions})


def run(folder: Path, staleness: int, **arguments: Any) -> tuple[Any, Any, RolloutCallback, Watch]:
    watch = Watch()
    rollouts = RolloutCallback(digits, sampling=SAMPLING, max_staleness=staleness)
    trainer, module, data, _ = setup_run(
        folder, rollouts=rollouts, callbacks=[watch], **({"max_epochs": 4} | arguments)
    )
    trainer.fit(module, data)
    return trainer, module, rollouts, watch


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_same_prompts_in_the_same_order_and_nothing_older_than_allowed(tmp_path: Path, staleness: int) -> None:
    _, _, _, turns = run(tmp_path, 0)
    trainer, _, rollouts, ahead = run(tmp_path, staleness)
    assert ahead.prompts == turns.prompts
    updates = 2  # per iteration
    # A thread that gets little of the processor begins later, and is then less stale, never more.
    assert all(max(ages) <= updates * min(number, staleness) for number, ages in enumerate(ahead.ages))
    assert max(max(ages) for ages in ahead.ages) >= updates
    assert all(len(ages) == 1 for ages in ahead.ages)  # an iteration is sampled from one policy
    assert [max(ages) for ages in turns.ages] == [0] * 4
    assert trainer.callback_metrics["rollout/staleness"] == max(ahead.ages[-1])
    assert rollouts.ahead is not None


def test_no_staleness_is_bitwise_the_run_that_takes_turns(tmp_path: Path) -> None:
    """The thread is the only difference: with the same weights it samples what the trainer would have."""
    _, module, _, _ = run(tmp_path, 0, max_epochs=1)
    _, other, _, _ = run(tmp_path, 1, max_epochs=1)  # the first iteration is never stale
    for name, tensor in weights(module).items():
        assert torch.equal(tensor, weights(other)[name])


class SlowEngine(LocalEngine):
    """Takes its time, as a remote engine does: without using the processor."""

    def generate(self, prompts: Any, sampling: Any, *, iteration: int) -> list[Sample]:
        time.sleep(0.4)
        return super().generate(prompts, sampling, iteration=iteration)


def test_generating_overlaps_with_training_and_the_trace_shows_it(tmp_path: Path) -> None:
    trained: list[tuple[float, float]] = []

    class SlowTraining(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            start = time.perf_counter()
            time.sleep(0.1)
            trained.append((start, time.perf_counter()))

    rollouts = RolloutCallback(digits, engine=SlowEngine(), sampling=SAMPLING, max_staleness=1)
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts, callbacks=[SlowTraining()], max_epochs=4)
    trainer.fit(module, data)
    generated = [event for event in rollouts.phases.events if event.name == "generate"]
    assert [event.iteration for event in generated] == [0, 1, 2, 3]
    for event in generated[1:]:
        overlaps = [start < event.start + event.seconds and event.start < end for start, end in trained]
        assert any(overlaps), f"nothing was trained on while iteration {event.iteration} was sampled"
    assert float(trainer.callback_metrics["time/generate"]) >= 0.4
    path = rollouts.phases.write_trace(tmp_path / "trace.json")
    assert {"generate", "score", "wait", "prepare", "publish"} <= {
        event["name"] for event in json.loads(path.read_text())["traceEvents"]
    }


def test_validation_has_the_engine_to_itself_and_learning_works(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    trainer, _, _, watch = run(
        tmp_path,
        1,
        max_epochs=14,
        module_arguments={"lr": 5e-3, "correction": "tis"},
        data_arguments={"validation_data": str(tmp_path / "held.jsonl"), "validation_split": "train"},
    )
    assert "val/reward" in trainer.callback_metrics
    assert sum(watch.rewards[-3:]) / 3 > sum(watch.rewards[:3]) / 3 + 0.2
    assert 0.0 < trainer.callback_metrics["rollout_corr/eff_sample_size"] <= 1.0


def test_an_error_while_sampling_ahead_ends_the_run_with_that_error(tmp_path: Path) -> None:
    calls: list[int] = []

    def broken_later(samples: Sequence[Sample]) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("the reward is broken")
        return digits(samples)

    rollouts = RolloutCallback(broken_later, sampling=SAMPLING, max_staleness=2)
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts, max_epochs=6)
    with pytest.raises(ArithmeticError, match="the reward is broken"):
        trainer.fit(module, data)
    assert trainer.current_epoch == 2


def test_what_does_not_fit_together_is_refused() -> None:
    class Plain(LocalEngine):
        stream = None  # type: ignore[assignment]
        updates_in_flight = False

    with pytest.raises(ValueError, match="max_staleness must be 0"):
        RolloutCallback(digits, max_staleness=-1)
    with pytest.raises(ValueError, match="rollout_timeout"):
        RolloutCallback(digits, max_staleness=1, rollout_timeout=0)
    with pytest.raises(ValueError, match="give max_staleness=1 or more"):
        RolloutCallback(digits, in_flight=True)
    with pytest.raises(ValueError, match="Plain does not say that it can"):
        RolloutCallback(digits, engine=Plain(), max_staleness=1, in_flight=True)
    with pytest.raises(ValueError, match="oversampling must be 0"):
        RolloutCallback(digits, oversampling=-0.5)
    with pytest.raises(ValueError, match=r"oversampling=0\.5 .* Plain cannot"):
        RolloutCallback(digits, engine=Plain(), oversampling=0.5)


def train_ahead_on_ranks(folder: Path) -> dict[str, Any]:
    """Entry point of a rank."""
    import os

    watch = Watch()
    rollouts = RolloutCallback(digits, sampling=SAMPLING, max_staleness=1)
    trainer, module, data, _ = setup_run(
        folder / f"rank{os.environ['LOCAL_RANK']}",
        rollouts=rollouts,
        callbacks=[watch],
        data_arguments={"micro_batch_size": 4},
        max_epochs=4,
        strategy="ddp",
        devices=2,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data)
    return {"prompts": watch.prompts, "rewards": watch.rewards, "ages": [sorted(ages) for ages in watch.ages]}


@pytest.mark.distributed
def test_two_ranks_sample_ahead_what_one_does(tmp_path: Path) -> None:
    _, _, _, alone = run(tmp_path, 1)
    first, second = ranks.run("callbacks.test_rollout_ahead:train_ahead_on_ranks", 2, tmp_path / "ranks")
    assert first == second
    assert first["prompts"] == alone.prompts
    assert first["rewards"] == pytest.approx(alone.rewards)
    assert first["ages"] == [sorted(ages) for ages in alone.ages]
