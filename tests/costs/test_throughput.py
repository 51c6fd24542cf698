"""``Throughput`` measures what it says: work by seconds, of all ranks."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from modules import data_runs
from rl_runs import setup_run
from tiny_models import tiny_model

import rlhfkit.costs.throughput as throughput
from rlhfkit import SFTDataModule, SFTModule
from rlhfkit.costs import Throughput
from rlhfkit.costs.estimation import train_flops
from rlhfkit.costs.model_shape import model_shape
from rlhfkit.costs.throughput import gpu_named, rates
from rlhfkit.rollout.vllm.actor import EngineLoad


class Kept(Callback):
    """Keeps what an iteration, or an optimizer step, has logged."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.tokens = self.squares = self.rows = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        lengths = batch.lengths.tolist()
        self.tokens += sum(lengths)
        self.squares += sum(length**2 for length in lengths)
        self.rows += len(lengths)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_a_run_of_own_samples_logs_rates_memory_and_the_time_left(tmp_path: Path) -> None:
    kept = Kept()
    trainer, module, data, rollouts = setup_run(tmp_path, callbacks=[Throughput(), kept], max_epochs=2)
    trainer.fit(module, data)
    first, last = kept.logged
    for one in kept.logged:
        assert min(one[f"perf/{name}"] for name in ("trained_tokens_per_s", "samples_per_s", "gflops_per_rank")) > 0
        assert one["memory/process_gib"] > 0.1
        assert "perf/hidden_s" not in one  # nothing is sampled beside learning
    assert first["perf/hours_left"] > 0
    assert last["perf/hours_left"] == 0
    generated = sum(len(sample.token_ids) for sample in rollouts.samples)  # of the answers alone
    seconds = rollouts.timing.metrics(1)["time/generate"]
    assert last["perf/generated_tokens_per_s"] == pytest.approx(generated / seconds, rel=1e-4)
    assert last["tokens/s"] == last["perf/tokens_per_s"]  # on the bar
    rows = len(rollouts.samples)
    assert last["perf/tokens_per_s"] == pytest.approx(last["perf/samples_per_s"] * generated / rows, rel=1e-4)


def test_operations_are_those_of_what_is_trained_by_the_seconds_of_learning_and_the_gpus_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(perf_counter=itertools.count(1.0).__next__)  # moves by a second each time that it is asked
    monkeypatch.setattr(throughput, "time", clock)
    with pytest.raises(ValueError, match="every_n_steps"):
        Throughput(every_n_steps=0)
    folder, kept = str(tiny_model(tmp_path / "model")), Kept()
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)]
    meter = Throughput(every_n_steps=2)
    run = data_runs.trainer(tmp_path, max_epochs=1, callbacks=[meter, kept])
    run.fit(SFTModule(folder), SFTDataModule(rows, micro_batch_size=4))
    (logged,) = kept.logged  # one measurement of two steps; began, learning since, now: a second between each two
    assert logged["perf/trained_tokens_per_s"] == kept.tokens
    assert logged["perf/samples_per_s"] == kept.rows / 2
    work = train_flops(model_shape(folder), kept.tokens, kept.squares / kept.tokens, gradient_checkpointing=False)
    assert logged["perf/gflops_per_rank"] == pytest.approx(work / 1e9, rel=1e-6)
    meter._gpu = gpu_named("NVIDIA H100 80GB HBM3")
    rank = {"tokens": float(kept.tokens), "squares": float(kept.squares), "learn": 2.0}
    assert meter._arithmetic([rank, rank]) == {"perf/mfu": pytest.approx(work / 2 / 989e12)}


def test_work_of_ranks_is_added_up_and_the_slowest_one_counts() -> None:
    ranks = [
        {"tokens": 100.0, "learn": 2.0, "rows": 4.0, "whole": 5.0, "memory/learn_gib": 1.0},
        {"tokens": 60.0, "learn": 4.0, "rows": 4.0, "whole": 4.0, "memory/learn_gib": 3.0},
    ]
    ranks[0] |= {"generated": 60.0, "generate": 3.0, "score": 1.0, "wait": 1.0, "engine/waiting": 7.0}
    ranks[1] |= {"generated": 30.0, "generate": 2.0}
    assert rates(ranks) == {
        "perf/trained_tokens_per_s": 40.0,
        "perf/generated_tokens_per_s": 30.0,
        "perf/tokens_per_s": 18.0,
        "perf/samples_per_s": 1.6,
        "perf/hidden_s": 3.0,
        "engine/waiting": 7.0,
        "memory/learn_gib": 3.0,
    }


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA L40", None),
    ],
)
def test_gpus_are_found_by_the_drivers_name(device: str, name: str | None) -> None:
    found = gpu_named(device)
    assert (found and found.name) == name


def test_the_load_of_an_engine_is_that_since_it_was_last_asked() -> None:
    load = EngineLoad()
    assert load.take() == {}
    for running, waiting, cache in ((4, 2, 0.5), (2, 0, 0.25)):
        stats = SimpleNamespace(num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=cache)
        load.factory(None, 0).record(stats, None, engine_idx=0)
    load.record(None, None)
    assert load.take() == {"running": 3.0, "waiting": 1.0, "kv_cache": 0.5}
    assert load.take() == {}
