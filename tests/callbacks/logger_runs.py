"""A process that gives a run's samples and metrics to one logger after another: ``logger_runs.py FOLDER KIND ...``.

It prints a line of JSON for each: the metrics that were logged, the columns of the table, and its rows.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from rl_runs import fit_run

from rlhfkit import SampleTable
from rlhfkit.costs import Throughput


def logger_of(kind: str, folder: Path) -> Any:
    """A logger that needs no network."""
    if kind == "tensorboard":
        return TensorBoardLogger(folder / "logs")
    if kind == "wandb":
        return WandbLogger(save_dir=folder, offline=True, project="rlhfkit")
    return MLFlowLogger(tracking_uri=f"file:{folder}/logs")


def main() -> None:
    quiet = {"WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    os.environ.update(quiet, MLFLOW_ALLOW_FILE_STORE="true")  # MLflow 3 wants a database otherwise
    for kind in sys.argv[2:]:
        folder = Path(sys.argv[1], kind)
        folder.mkdir()
        with contextlib.redirect_stdout(sys.stderr):
            logger, callbacks = logger_of(kind, folder), [Throughput(), SampleTable(rows=4)]
            fit_run(folder, callbacks=callbacks, max_epochs=2, logger=logger, log_every_n_steps=1)
            metrics, columns, rows = READERS[kind](logger, folder)
        print(json.dumps([sorted(metrics), columns, rows]), flush=True)


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


READERS = {"tensorboard": from_tensorboard, "wandb": from_wandb, "mlflow": from_mlflow}


if __name__ == "__main__":
    main()
