"""Metrics of a step and of an epoch do not depend on how a step is split into micro-batches."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import learning
from lightning.pytorch.callbacks import LambdaCallback
from rl_runs import fit_run
from step_cases import KINDS, rows_of
from tiny_models import tiny_model
from torch import Tensor

from rlhfkit import (
    GRPOModule,
    LocalEngine,
    PreferenceDataModule,
    RolloutCallback,
    Sample,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
    StepwiseDataModule,
    UnpairedPreferenceDataModule,
)
from rlhfkit.losses import LossOutput, max_metric
from rlhfkit.models import ModelLoading, PolicyOutput
from rlhfkit.modules.parts import Correction

from .data_runs import Steps, texts, trainer


class Drifting(LocalEngine):
    """Log-probs that are off by an amount that differs from sample to sample, as another kernel's would be."""

    def generate(self, *arguments: Any, **options: Any) -> list[Sample]:
        samples = super().generate(*arguments, **options)
        for sample in samples:
            shift = 0.02 * (sample.sample_index - 1) + 0.01 * (sample.prompt.index % 3)
            sample.logprobs = [logprob + shift for logprob in sample.logprobs.tolist()]
        return samples


def by_length(samples: list[Sample]) -> list[float]:
    return [len(sample.token_ids) / 30 + sample.sample_index / 10 for sample in samples]


class Curious(GRPOModule):
    """Logs a metric of its own, which says how it reduces."""

    def loss(self, batch: Any, out: PolicyOutput) -> LossOutput:
        base = super().loss(batch, out)
        return LossOutput(base.loss, {**base.metrics, "policy/entropy_max": max_metric(out.entropy, batch.action_mask)})


def values(metrics: Mapping[str, Tensor], prefix: str = "") -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if name.startswith(prefix)}


def iteration(tmp_path: Path, accumulate: int, attention: str | None = None) -> dict[str, float]:
    """Two updates of 16 uneven samples each, in so many micro-batches."""
    sampling = SamplingSpec(group_size=4, max_new_tokens=30, top_p=0.95)
    trainer, _, _ = fit_run(
        tmp_path,
        module=Curious,
        module_arguments={
            "lr": 1e-3,
            "kl_coef": 0.1,
            "parts": [Correction("tis").plain()],
            "loading": ModelLoading(attention=attention),
        },
        data_arguments={"micro_batch_size": 16 // accumulate},
        rollouts=RolloutCallback(by_length, engine=Drifting(), sampling=sampling),
        accumulate_grad_batches=accumulate,
        max_epochs=1,
    )
    assert trainer.global_step == 2
    return {name: value for name, value in values(trainer.callback_metrics).items() if not name.startswith("time/")}


def test_an_iteration_is_measured_alike_however_it_is_split(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    expected = iteration(tmp_path, 1)
    names = {f"policy/{name}" for name in ("ratio_max", "clip_fraction", "approx_kl", "entropy", "entropy_max")}
    names |= {
        f"rollout_corr/{name}"
        for name in ("is_std", "logprob_abs_diff_max", "untruncated_eff_sample_size", "eff_sample_size")
    }
    assert names <= expected.keys()
    assert expected["rollout_corr/logprob_abs_diff_max"] == pytest.approx(0.06, abs=1e-3)
    assert expected["policy/ratio_max"] > 1.0
    for accumulate, attention in ((2, "sdpa"), (4, None)):
        assert iteration(tmp_path, accumulate, attention=attention) == pytest.approx(expected, rel=2e-3, abs=2e-6)


SOURCES: dict[str, Any] = {
    "texts": SFTDataModule,
    "pairs": PreferenceDataModule,
    "unpaired": UnpairedPreferenceDataModule,
    "steps": StepwiseDataModule,
}


@pytest.mark.parametrize("kind", ["sft", "distillation", "dpo", "kto", "reward", "process"])
def test_the_loss_of_a_short_last_window_is_that_of_its_rows(kind: str, tmp_path: Path) -> None:
    """16 rows in steps of 6, 6 and 4, and 7 to validate, in micro-batches of one row or of the whole step."""
    learning.prepare(tmp_path)
    module, data, settings = KINDS[kind]
    # The reference point of KTO pairs the answers of a micro-batch.
    more = settings[1 if kind == "kto" else 0].copy()
    if kind == "distillation":
        more["teacher"] = str(tmp_path / "other")
    logged: dict[int, Any] = {}
    for size in (6, 1):
        steps = Steps()
        run = trainer(tmp_path, accumulate_grad_batches=6 // size, callbacks=[steps], max_epochs=1)
        torch.manual_seed(0)
        rows = rows_of(data, None)
        source = SOURCES[data](rows, validation_data=rows[:7], micro_batch_size=size, shuffle=False)
        run.fit(module(str(tmp_path / "model"), lr=1e-3, **more), source)
        logged[size] = [*steps.logged, values(run.callback_metrics)]
    assert [len(steps) for steps in logged.values()] == [4, 4]
    for step, expected in zip(logged[1], logged[6], strict=True):
        assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_step_of_fewer_batches_than_the_window_logs_the_loss_of_their_tokens(tmp_path: Path) -> None:
    """As with fast_dev_run and limit_train_batches: Lightning steps after one of four micro-batches."""
    texts(tmp_path)
    run = trainer(tmp_path, precision="64-true", max_steps=1, limit_train_batches=1, accumulate_grad_batches=4)
    data = SFTDataModule(str(tmp_path / "data.jsonl"), micro_batch_size=2, cache_dir=tmp_path / "cache")
    run.fit(SFTModule(str(tmp_path / "model"), lr=1e-9), data)
    logged = run.callback_metrics
    assert float(logged["loss"]) == pytest.approx(float(logged["sft/nll_epoch"]), rel=1e-6)


def test_every_validation_has_the_metrics_of_all_its_rows_and_of_no_other(tmp_path: Path) -> None:
    """The mean over their tokens, also of a validation that is limited."""
    texts(tmp_path)
    found: list[dict[str, float]] = []
    keep = LambdaCallback(on_validation_end=lambda run, _: found.append(values(run.callback_metrics, "val/")))
    path = str(tmp_path / "data.jsonl")
    module = SFTModule(str(tmp_path / "model"), lr=1e-4)
    data = SFTDataModule(path, validation_data=path, micro_batch_size=3, cache_dir=tmp_path / "cache")
    run = trainer(tmp_path, precision="64-true", accumulate_grad_batches=1, val_check_interval=0.5, callbacks=[keep])
    run.fit(module, data)
    run.validate(module, data)
    run.validate(module, data)
    checked_first, *seen = found  # two batches, before training
    assert len(seen) == 6
    losses = [one["val/loss"] for one in seen]
    assert checked_first["val/loss"] != pytest.approx(losses[0], rel=1e-2)
    assert losses[0] > losses[1] > losses[2] > losses[3]  # it learns, so that none is left from before
    assert seen[4] == seen[5] == pytest.approx(seen[3])
    for one in seen:
        assert one["val/perplexity"] == pytest.approx(math.exp(one["val/nll"]))
    (limited,) = trainer(tmp_path, precision="64-true", limit_val_batches=2).validate(module, data, verbose=False)
    batches = itertools.islice(data.val_dataloader(), 2)
    expected = -float(torch.cat([row for batch in batches for row in module.predict_step(batch, 0)]).mean())
    assert limited["val/loss"] == pytest.approx(expected, rel=1e-5)
