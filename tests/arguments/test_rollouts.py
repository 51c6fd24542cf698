"""Every argument of what a run of reinforcement learning is put together of: changed, something can be seen of it."""

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from rlhfkit import (
    EMA,
    Ahead,
    DynamicSampling,
    GRPOModule,
    HFExport,
    LocalEngine,
    LoRA,
    NonFiniteGuard,
    Oversampling,
    PromptDataModule,
    ReplayBuffer,
    RolloutCallback,
    Sample,
    SamplingSpec,
    Validation,
    callbacks,
    episodes,
    rollout,
)
from rlhfkit.callbacks import Alarms, Invariants, Probe, RolloutDump, RunReport, SampleTable, SharedDevices
from rlhfkit.callbacks.rollout.part import RolloutPart
from rlhfkit.datamodules.prompts.curriculum import ByColumn

from . import learning, test_datamodules, test_engines, test_modules
from .table import Change, Rows, Unseen, arguments_of, check_none_is_ignored, observed, quiet_trainer


def longest(samples: Sequence[Sample]) -> list[float]:
    """Another reward."""
    return [float(len(sample.token_ids)) for sample in samples]


def never(samples: Sequence[Sample]) -> bool:
    """Keeps no group."""
    return False


def turns(sample: Sample) -> float:
    """The same for all samples."""
    return 1.0


def seldom(samples: Sequence[Sample]) -> list[float]:
    """Differs in groups of odd prompts only."""
    return [float(sample.sample_index * (sample.prompt.index % 2)) for sample in samples]


class Samples(L.Callback):
    """All that was sampled, in training and in validation."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        rollouts = next(callback for callback in trainer.callbacks if isinstance(callback, RolloutCallback))
        self.seen += [written(sample) for sample in (*rollouts.samples, *rollouts.validation_samples)]


def written(sample: Sample) -> Any:
    return (
        sample.prompt.token_ids.tolist(),
        sample.prompt.answer,
        sample.token_ids.tolist(),
        sample.finish_reason,
        sample.reward,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rollouts")
    learning.prepare(place)
    for name, count in (("prompts", 8), ("others", 6)):
        asked = [f"{i}+{i}=" if i % 2 else f"{i}=" for i in range(count)]
        rows = [
            {"prompt": a, "question": f"{a}?", "marked": f"{a}<eos>", "answer": f"so #### {a}", "level": -i}
            for i, a in enumerate(asked)
        ]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


SAMPLING: dict[str, Any] = {"group_size": 2, "max_new_tokens": 3, "stop_token_ids": tuple(range(64, 128))}


def run(folder: Path, kind: type, arguments: Mapping[str, Any], around: Mapping[str, Any], built: bool) -> Any:
    """Two iterations in which an object of a class has a part: what is sampled, learned, logged, printed, written."""

    def fit(own: Path, given: dict[str, Any]) -> Any:
        parts, watch, samples = put_together(folder, kind, given, around), learning.Watch(), Samples()
        callbacks = [*parts["callbacks"], watch, samples]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            trainer = quiet_trainer(own, max_epochs=around.get("epochs", 2), callbacks=callbacks)
            trainer.fit(parts["module"], parts["data"])
        files = {str(file.relative_to(own)): content(file) for file in own.rglob("*") if file.is_file()}
        return {**watch.seen, "samples": samples.seen, "printed": printed.getvalue(), "files": files}

    return observed(folder, arguments, fit)


def content(file: Path) -> Any:
    """Of a file; of pictures, which hold a date, the size."""
    return file.stat().st_size if file.suffix == ".png" else file.read_bytes()


def put_together(folder: Path, kind: type, given: dict[str, Any], around: Mapping[str, Any]) -> dict[str, Any]:
    """A run with one object of a class in it."""
    data = {"data": str(folder / "prompts.jsonl"), "rollout_batch_size": 4, "micro_batch_size": 4}
    data |= {"validation_data": str(folder / "others.jsonl"), "validation_split": "train"}
    sampling = SamplingSpec(**(SAMPLING | given if kind is SamplingSpec else SAMPLING))
    rollouts: dict[str, Any] = {"reward": learning.scored, "sampling": sampling, "engine": LocalEngine()}
    if issubclass(kind, RolloutPart):
        rollouts["parts"] = [kind(**given)]
    if kind is ReplayBuffer:
        rollouts["reward"] = seldom
    callback = RolloutCallback(**(rollouts | given if kind is RolloutCallback else rollouts))
    extra = [kind(**given)] if issubclass(kind, L.Callback) and kind is not RolloutCallback else []
    prompts = kind if issubclass(kind, PromptDataModule) else PromptDataModule
    lora = LoRA(rank=2) if around.get("lora") else None
    return {
        "module": GRPOModule(str(folder / "model"), lr=0.03, lora=lora),
        "data": prompts(**(data | given if issubclass(kind, PromptDataModule) else data)),
        "callbacks": [callback, *extra],
    }


TEXT = Unseen("learned from only with PretrainingLoss: tests/modules/parts")
SAME_NUMBERS = "the same samples, "
PROMPTS: Rows = {
    "data": Change("@others.jsonl"),
    "prompt": Change("question"),
    "answer": Change("answer"),
    "answer_extractor": Change(str, given={"answer": "answer"}),
    "validation_data": Change("@prompts.jsonl"),
    "pretraining_data": TEXT,
    "split": Change("train[:5]"),
    "validation_split": Change("train[:5]"),
    "subset": Unseen("configurations are the hub's, which no test asks"),
    "rollout_batch_size": Change(2),
    "micro_batch_size": Change(2),
    "max_tokens_per_micro_batch": Change(12, given={"micro_batch_size": None}),
    "updates_per_iteration": Change(
        2, given={"micro_batch_size": None, "max_tokens_per_micro_batch": 100, "updates_per_iteration": 1}
    ),
    "epochs_per_iteration": Change(2),
    "validation_batch_size": Unseen(SAME_NUMBERS + "generated in other portions"),
    "max_prompt_length": Change(3, refused=True),
    "overlong_prompts": Change("drop", given={"max_prompt_length": 3, "rollout_batch_size": 2}, refused=True),
    "shuffle": Change(False),
    "seed": Change(1),
    "curriculum": Change(ByColumn("level")),
    "apply_chat_template": Change(True, refused=True),
    "system": Change("Be brief.", refused=True),
    "chat_template_kwargs": Unseen("a template's own: tests/datamodules/prompts/test_datamodule.py"),
    "special_tokens_in_text": Change("escape", given={"prompt": "marked"}),
    "allow_image_urls": Unseen("no network in tests; without it: tests/datamodules/test_images.py"),
    "tokenizer": Unseen("that of the module unless given: tests/datamodules/prompts/test_datamodule.py"),
    "streaming": Change(True),
    "shuffle_buffer_size": Change(2, given={"streaming": True}),
    "passes": Change(1, given={"streaming": True}, around={"epochs": 3}),
}
TABLE: dict[type, Rows] = {
    PromptDataModule: PROMPTS,
    SamplingSpec: {
        "group_size": Change(3),
        "max_new_tokens": Change(2),
        "min_new_tokens": Change(2),
        "temperature": Change(0.5),
        "top_p": Change(0.5),
        "top_k": Change(2),
        "min_p": Change(0.5),
        "stop": Change(("1", "2", "3", "a", "b")),
        "stop_token_ids": Change((5,)),
        "repetition_penalty": Change(5.0),
        "presence_penalty": Change(2.0),
        "frequency_penalty": Change(2.0),
        "regex": Change("a+", refused=True),  # LocalEngine has no grammars: tests/rollout/server/test_engine.py
        "json_schema": Change({"type": "object"}, refused=True),
        "seed": Change(1),
    },
    DynamicSampling: {
        "by": Change(turns),
        "keep": Change(never, given={"max_rounds": 2}),
        "max_rounds": Change(2, given={"keep": never, "max_rounds": 1}),
    },
    ReplayBuffer: {
        "capacity": Change(1),
        "fraction": Change(0.25),
        "max_age": Change(1),
        "min_reward": Change(2.0),
        "by": Change(turns),
    },
    RolloutCallback: {
        "reward": Change(longest),
        "engine": Unseen("every run with another engine: tests/callbacks/rollout"),
        "group": Unseen("runs with groups of functions: tests/rollout/test_groups.py"),
        "sampling": Change(SamplingSpec(**SAMPLING | {"max_new_tokens": 2})),
        "rollout_timeout": Unseen("seconds: tests/callbacks/rollout/test_async_rollouts.py"),
        "parts": Change([Oversampling(0.5)]),
    },
    Ahead: {
        "max_staleness": Change(2, around={"epochs": 3}),
        "in_flight": Unseen("when weights change depends on time: tests/callbacks/rollout/test_async_rollouts.py"),
    },
    Oversampling: {
        "share": Change(1.0),
        "continued": Change(True),
    },
    Alarms: {"alarms": Unseen("warnings: tests/callbacks/test_alarms.py")},
    Probe: {"tolerance": Change(0.0, refused=True)},
    SharedDevices: {"offload_training": Change(True)},
    Validation: {
        "sampling": Change(SamplingSpec(**SAMPLING)),
        "success_threshold": Change(0.1, given={"sampling": SamplingSpec(**SAMPLING), "success_threshold": 1e9}),
    },
    LocalEngine: {
        "max_sequences": Unseen(SAME_NUMBERS + "so many at a time: tests/rollout/local/test_engine.py"),
        "device": Unseen("a machine with one device has no other"),
        "share_weights": Unseen(SAME_NUMBERS + "memory: tests/rollout/local/test_weights.py"),
    },
    EMA: {
        "decay": Change(0.1, given={"validate": False, "export": partial(HFExport, "@ema")}),
        "start_step": Change(3, given={"validate": False, "export": partial(HFExport, "@ema")}),
        "every_n_steps": Change(3, given={"validate": False, "export": partial(HFExport, "@ema")}),
        "validate": Change(True, given={"validate": False}, refused=True),
        "export": Change(partial(HFExport, "@ema"), given={"validate": False}),
        "device": Unseen("a machine with one device has no other"),
    },
    HFExport: {
        "folder": Change("@there"),
        "adapter": Change(True, around={"lora": True}),
        "every_n_epochs": Change(1),
        "keep": Change(1, given={"every_n_epochs": 1}),
    },
    NonFiniteGuard: {
        "max_skipped_updates": Unseen("updates that are not finite: tests/callbacks/test_guard.py"),
        "folder": Unseen("where batches are written when a run stops: tests/callbacks/test_guard.py"),
    },
    Invariants: {"compares_groups": Unseen("what is checked, not what is done: tests/callbacks/test_dump.py")},
    RolloutDump: {
        "folder": Change("@there"),
        "every_n_iterations": Change(2),
        "keep": Change(1),
    },
    SampleTable: {"rows": Change(2), "every_n_iterations": Change(2), "max_characters": Change(1)},
    RunReport: {
        "path": Change("@there.html"),
        "name": Unseen("in a page whose times differ from run to run: tests/callbacks/test_report.py"),
        "every_n_iterations": Unseen("as above"),
        "groups": Unseen("as above"),
    },
}
LEAST: dict[type, dict[str, Any]] = {
    Oversampling: {"share": 0.25},
    HFExport: {"folder": "@here"},
    RolloutDump: {"folder": "@here"},
    RunReport: {"path": "@here.html"},
}


ALL_TABLES = {
    **TABLE,
    **test_engines.TABLE,
    **test_datamodules.TABLE,
    **{kind: rows for kind, (_, rows) in test_modules.TABLE.items()},
}


@pytest.mark.parametrize("kind", ALL_TABLES)
def test_every_argument_has_a_row(kind: type) -> None:
    assert set(ALL_TABLES[kind]) == set(arguments_of(kind))


def test_every_callback_and_engine_is_in_a_table() -> None:
    public = [getattr(home, name) for home in (callbacks, rollout, episodes) for name in home.__all__]
    kinds = {kind for kind in public if isinstance(kind, type)}
    engines = {kind for kind in kinds if callable(getattr(kind, "generate", None))} - {rollout.RolloutEngine}
    assert engines | {kind for kind in kinds if issubclass(kind, L.Callback)} <= {*TABLE, *test_engines.TABLE}


@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.long
def test_no_argument_is_accepted_and_ignored(folder: Path, kind: type) -> None:
    check_none_is_ignored(kind, TABLE[kind], LEAST.get(kind, {}), partial(run, folder))
