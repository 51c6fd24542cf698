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
from step_cases import KINDS, rows_of
from torch import Tensor

from rlhfkit import SFTDataModule, SFTModule

from .data_runs import SOURCES, Steps, texts, trainer


def values(metrics: Mapping[str, Tensor], prefix: str = "") -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if name.startswith(prefix)}


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
