"""``SampleTable`` prints samples and gives them to loggers."""

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from rl_runs import setup_run

from rlhfkit import SampleTable
from rlhfkit.costs import Throughput

LOGGERS = {
    TensorBoardLogger: "tensorboard",
    WandbLogger: "wandb",
    MLFlowLogger: "mlflow",
}


@pytest.mark.parametrize("kind", LOGGERS)
def test_loggers_get_the_table_and_the_metrics(
    kind: type[Logger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with its own library, without a network."""
    pytest.importorskip(LOGGERS[kind])
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 wants a database otherwise
    arguments: dict[type[Logger], dict[str, Any]] = {
        TensorBoardLogger: {"save_dir": tmp_path / "logs"},
        WandbLogger: {"save_dir": tmp_path, "offline": True, "project": "rlhfkit"},
        MLFlowLogger: {"tracking_uri": f"file:{tmp_path}/logs"},
    }
    logger = kind(**arguments[kind])
    callbacks = [Throughput(), SampleTable(rows=4)]
    trainer, module, data, _ = setup_run(
        tmp_path, callbacks=callbacks, max_epochs=2, logger=logger, log_every_n_steps=1
    )
    trainer.fit(module, data)
    metrics, columns, rows = READERS[kind](logger, tmp_path)
    for name in ("rollout/reward", "time/generate", "perf/trained_tokens_per_s", "perf/hours_left"):
        assert name in metrics
    assert columns == ["iteration", "prompt", "completion", "digits", "reward", "advantage"][-len(columns) :]
    assert rows >= 4
    capsys.readouterr()


def from_tensorboard(logger: Any, folder: Path) -> tuple[set[str], list[str], int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    tags = events.Tags()
    last = events.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0].decode()
    heading, _, *rows = last.splitlines()
    return {*tags["scalars"]}, [cell.strip() for cell in heading.strip("| ").split("|")], len(rows)


def from_wandb(logger: Any, folder: Path) -> tuple[set[str], list[str], int]:
    import wandb

    metrics = {*logger.experiment.summary.keys()}
    wandb.finish()
    (*_, table) = sorted(folder.glob("wandb/offline-run-*/files/media/table/samples*.table.json"))
    found = json.loads(table.read_text())
    return metrics, found["columns"], len(found["data"])


def from_mlflow(logger: Any, folder: Path) -> tuple[set[str], list[str], int]:
    run = logger.experiment.get_run(logger.run_id)
    (path,) = folder.rglob("samples.json")
    found = json.loads(path.read_text())
    assert len(found["data"]) == 8  # of both iterations
    return {*run.data.metrics}, found["columns"], len(found["data"])


READERS = {TensorBoardLogger: from_tensorboard, WandbLogger: from_wandb, MLFlowLogger: from_mlflow}


def test_the_table_is_printed_every_so_many_iterations_with_prompts_and_parts_of_the_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, module, data, rollouts = setup_run(tmp_path, callbacks=[SampleTable(every_n_iterations=2)], max_epochs=3)
    trainer.fit(module, data)
    printed = capsys.readouterr().out
    assert "iteration 0" in printed
    assert "iteration 1" not in printed
    assert "iteration 2" in printed
    columns, rows = SampleTable(rows=4).table(rollouts)
    assert columns == ["prompt", "completion", "digits", "reward", "advantage"]
    assert all(heading in printed for heading in columns)
    best = max(rollouts.samples, key=lambda sample: sample.reward or 0.0)
    assert len(rows) == 4
    assert rows[0][0] == best.prompt.text
    assert rows[0][3] == best.reward
