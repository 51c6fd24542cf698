"""Small complete runs of reinforcement learning, for tests: a random tiny model is rewarded for writing digits."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from plain_sgd import PlainSGD
from tiny_models import tiny_model

from rlhfkit import (
    Ahead,
    GRPOModule,
    LocalEngine,
    PromptDataModule,
    RolloutCallback,
    Sample,
    SamplingSpec,
)
from rlhfkit.distributed import gather_objects
from rlhfkit.rollout import ModuleWeights

RANK, RANKS = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
"""Of this process, and those of its launch. Read once: Lightning deletes WORLD_SIZE when a fit ends."""


def on_all_ranks(strategy: str = "ddp") -> dict[str, Any]:
    """Arguments of a Trainer for a fit on all ranks, which may be one."""
    if RANKS > 1:
        os.environ["WORLD_SIZE"] = str(RANKS)
    return {"strategy": strategy if RANKS > 1 else "auto", "devices": RANKS, "use_distributed_sampler": False}


def digits(samples: Sequence[Sample]) -> list[float]:
    """Share of digits among eight characters."""
    return [sum(character.isdigit() for character in sample.text) / 8 for sample in samples]


def only_odd(samples: Sequence[Sample]) -> list[float]:
    """Groups of even prompts all get 0."""
    return [sample.sample_index * (sample.prompt.index % 2) / 8 for sample in samples]


class SaveAt(L.Callback):
    """Saves a checkpoint after a micro-batch: of four an iteration, the sixth is between two updates of the second."""

    def __init__(self, path: Path, batch: int = 6) -> None:
        self.path, self.batch, self.count = path, batch, 0

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.count += 1
        if self.count == self.batch:
            trainer.save_checkpoint(self.path)


class PlainGRPO(PlainSGD, GRPOModule):
    """GRPO with SGD."""


def additions(rows: int) -> list[dict[str, str]]:
    """Prompts and answers."""
    return [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(rows)]


def prompts_file(folder: Path, rows: int = 40) -> str:
    """Additions as JSON lines."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in additions(rows)))
    return str(path)


def grpo_settings(model: str | Path, data: str, **trainer: Any) -> dict[str, Any]:
    """A configuration of ``rlhfkit fit``: GRPO with a pattern as the reward, and what is given of the trainer."""
    reward = {"class_path": "rlhfkit.rewards.FormatReward", "init_args": {"pattern": "[0-9]+"}}
    rollouts = {
        "class_path": "rlhfkit.RolloutCallback",
        "init_args": {"reward": reward, "sampling": {"group_size": 4, "max_new_tokens": 4}},
    }
    return {
        "model": {"class_path": "rlhfkit.GRPOModule", "init_args": {"model": str(model), "lr": 1e-3}},
        "data": {"class_path": "rlhfkit.PromptDataModule", "init_args": {"data": data, "rollout_batch_size": 4}},
        "trainer": trainer | {"callbacks": [rollouts]},
    }


def setup_run(
    folder: Path,
    *,
    module: Callable[..., GRPOModule] = GRPOModule,
    module_arguments: dict[str, Any] | None = None,
    data_arguments: dict[str, Any] | None = None,
    datamodule: Callable[..., PromptDataModule] = PromptDataModule,
    rollouts: RolloutCallback | None = None,
    model: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    **trainer_arguments: Any,
) -> tuple[L.Trainer, GRPOModule, PromptDataModule, RolloutCallback]:
    """Trainer, module, data and callback: 8 prompts x 4 samples in two updates of two micro-batches unless told.

    ``model``: a folder; ``None``: a tiny model is made in ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if model is None and not (folder / "model").exists():
        tiny_model(folder / "model")
    made = module(str(model or folder / "model"), **({"lr": 1e-3} | (module_arguments or {})))
    data = datamodule(
        prompts_file(folder),
        **({"answer": "answer", "rollout_batch_size": 8, "micro_batch_size": 8} | (data_arguments or {})),
    )
    rollouts = rollouts or RolloutCallback(digits, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    plain = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "accumulate_grad_batches": 2}
    own = {"default_root_dir": str(folder), "callbacks": [rollouts, *callbacks]}
    trainer = L.Trainer(**quiet | plain | own | trainer_arguments)
    return trainer, made, data, rollouts


def fit_run(folder: Path, *, resume: Any = None, **arguments: Any) -> tuple[L.Trainer, Any, RolloutCallback]:
    """Trainer, module and callback after the run of :func:`setup_run` with these arguments, from a checkpoint on."""
    trainer, module, data, rollouts = setup_run(folder, **arguments)
    trainer.fit(module, data, ckpt_path=resume)
    return trainer, module, rollouts


def weights(module: GRPOModule) -> dict[str, torch.Tensor]:
    """The policy's weights."""
    return {name: tensor.detach().clone() for name, tensor in module.policy.state_dict().items()}


class SharedEngine(LocalEngine):
    """One engine that serves all ranks, as a pool does."""

    shared = True


def ahead(max_staleness: int, *others: Any) -> list[Any]:
    """Parts of a run that samples ahead by some iterations, and does not for 0."""
    return [*([Ahead(max_staleness)] if max_staleness else []), *others]


def samples_of_all_ranks(rollouts: RolloutCallback) -> list[Sample]:
    """The samples of an iteration, gathered from all ranks, in the order of the iteration."""
    own = list(zip(rollouts.sample_rows, rollouts.samples, strict=True))
    everyone = [each for share in gather_objects(own) for each in share]
    assert sorted(row for row, _ in everyone) == list(range(len(everyone)))  # none is lost or doubled
    return [sample for _, sample in sorted(everyone, key=lambda each: each[0])]


class Iterations(L.Callback):
    """What each iteration was trained on, on all ranks, and the weights in the end, from any strategy."""

    def __init__(self) -> None:
        self.samples: list[list[Sample]] = []
        self.began: list[int] = []
        """Updates before each."""
        self.weights: list[float] = []
        """A number for each of the policy's."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.began.append(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.samples.append(samples_of_all_ranks(RolloutCallback.of(trainer)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = [float(tensor.double().abs().sum()) for _, tensor in ModuleWeights(pl_module.policy)]

    @property
    def tokens(self) -> list[list[Any]]:
        """Of each iteration the place and the tokens of each sample."""
        return [[[one.prompt.index, one.sample_index, one.token_ids.tolist()] for one in each] for each in self.samples]

    @property
    def prompts(self) -> list[list[int]]:
        return [list(dict.fromkeys(one.prompt.index for one in each)) for each in self.samples]
