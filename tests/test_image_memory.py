"""The memory of a whole run does not grow with the number of pictures it has seen."""

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import PIL.Image
import pyarrow
import pytest
import torch
import transformers
from lightning.pytorch.loggers import CSVLogger
from models.vision_families import TEXT, TOWER, idefics3
from modules import data_runs
from strategies import ranks
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

from rlhfkit import (
    GRPOModule,
    LocalEngine,
    PromptDataModule,
    RolloutCallback,
    RolloutDump,
    RunReport,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
)
from rlhfkit.data.images import Image
from rlhfkit.models import vision

FEW, MANY = 60, 360
SIDE = 224
"""Pixels of the pictures' sides: 147 KiB in RGB, and in a file, as they are noise."""
PROCESSED_SIDE = 112
"""Pixels of the sides of what the model is given: 147 KiB as float32."""
ITERATION = 20
"""Pictures of an iteration."""


def save_model(folder: Path) -> None:
    """A model with pictures of four tokens, however large they are."""
    _, processor = idefics3(False)
    edge = {"longest_edge": PROCESSED_SIDE}
    processor.image_processor.size = processor.image_processor.max_image_size = edge
    config = Idefics3Config(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=TOWER | {"image_size": PROCESSED_SIDE, "patch_size": 28, "initializer_range": 0.1},
        image_token_id=processor.tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def write_rows(folder: Path, count: int, seed: int) -> str:
    """Rows with different pictures: paths, and files in ``data:`` URLs."""
    folder.mkdir(parents=True)
    file = folder / "rows.jsonl"
    with file.open("w") as rows:
        for index in range(count):
            noise = np.random.default_rng((seed, index)).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
            path = folder / f"{index}.png"
            PIL.Image.fromarray(noise).save(path, compress_level=0)
            image = str(path) if index % 2 else Image(path.read_bytes()).plain()
            rows.write(json.dumps({"prompt": "which?", "completion": "red", "answer": "r", "image": image}) + "\n")
    return str(file)


def right(samples: list[Any]) -> list[float]:
    return [float(sample.text.startswith(sample.prompt.answer)) for sample in samples]


def train(kind: str, model: str, rows: str, folder: Path, count: int) -> L.Trainer:
    """One pass over the rows."""
    callbacks: list[Any] = []
    if kind == "grpo":
        module: Any = GRPOModule(model, lr=1e-4, kl_coef=0.01)
        data: Any = PromptDataModule(rows, answer="answer", rollout_batch_size=ITERATION, micro_batch_size=10)
        sampling = SamplingSpec(group_size=2, max_new_tokens=2)
        callbacks = [RolloutCallback(right, engine=LocalEngine(), sampling=sampling)]
        callbacks += [RolloutDump(folder / "dump"), RunReport()]
        epochs = count // ITERATION
    else:
        module = SFTModule(model, lr=1e-4)
        data = SFTDataModule(rows, completion="completion", micro_batch_size=ITERATION)
        epochs = 1
    trainer = data_runs.trainer(
        folder, max_epochs=epochs, limit_val_batches=0, logger=CSVLogger(folder), callbacks=callbacks
    )
    trainer.fit(module, data)
    return trainer


def held(trainer: L.Trainer) -> dict[str, int]:
    """What the process holds while the run's objects are still there."""
    gc.collect()
    pyarrow.default_memory_pool().release_unused()  # of reading the rows' file
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    objects = [type(one) for one in gc.get_objects()]
    return {
        "bytes": int(status["RssAnon"].split()[0]) * 1024,  # files that are mapped, such as tables, do not count
        "references": sum(issubclass(kind, Image) for kind in objects),
        "pictures": sum(issubclass(kind, PIL.Image.Image) for kind in objects),
        "batches": trainer.global_step,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_run_keeps_no_picture_that_it_has_seen(kind: str, tmp_path: Path) -> None:
    """Rows as paths and as bytes; GRPO with an engine in the process, reference, dump and report.

    The bound is three quarters of what the further pictures have as files, the least that could be kept of them.
    """
    [(_, few, many)] = ranks.run(held_after_each_run, 1, tmp_path, kind=kind)
    assert many["batches"] == few["batches"] * MANY / FEW
    assert many["bytes"] - few["bytes"] < (MANY - FEW) * 3 * SIDE**2 * 0.75, (few, many)
    assert max(few["references"], many["references"]) <= ITERATION + 1  # those of one iteration, and the probe's
    assert many["pictures"] == 0


def held_after_each_run(folder: Path, kind: str) -> list[dict[str, int]]:
    """In a process of its own: of three runs, each on pictures of its own.

    The first one takes memory for whatever is used the first time.
    """
    ctypes.CDLL("libc.so.6").mallopt(-8, 1)  # M_ARENA_MAX: each would keep free memory of its own
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    vision.CACHED_BYTES = 2**23  # of an iteration, so that pictures are left out of it as in a long run
    save_model(folder / "model")
    found = []
    for number, count in enumerate((FEW, FEW, MANY)):
        rows = write_rows(folder / f"{kind}-{number}", count, number)
        trainer = train(kind, str(folder / "model"), rows, folder / f"run-{number}", count)
        found.append(held(trainer))
    return found
