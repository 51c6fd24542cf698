"""Small runs under a Lightning Trainer, with data made here: no ``datasets`` package and no file is needed."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from benchmarks.gpu_check.check import Setting
from rlhfkit.data.batch import TokenExample, collate_tokens
from rlhfkit.data.formats.preferences import PreferenceExample, collate_preferences
from rlhfkit.data.formats.unpaired import UnpairedExample, UnpairedLoader, collate_unpaired
from rlhfkit.data.loaders.experience import ExperienceLoader
from rlhfkit.data.loaders.steps import StepLoader
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor, PromptOrder
from rlhfkit.mesh import mesh_of
from rlhfkit.protocols import experience_source_of

DIGIT = 3 + ord("0") - 32
"""Token of the character 0 in the tokenizer of ``models.tiny_model``."""


def trainer(setting: Setting, folder: Path, **arguments: Any) -> L.Trainer:
    """A quiet Trainer on one device."""
    place: dict[str, Any] = {"accelerator": "gpu" if setting.on_gpu else "cpu", "devices": 1}
    if setting.device == "sim":
        from simulated_device import trainer_arguments  # of the tests; the worker has put them on the path

        place = trainer_arguments()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"enable_checkpointing": False, "max_epochs": 1, "default_root_dir": str(folder)}
    return L.Trainer(**place | quiet | plain | arguments)


def with_sgd(kind: type[Any]) -> type[Any]:
    """A module class with SGD, which moves in proportion to the gradient: Adam makes whole steps of rounding near 0."""

    class WithSGD(kind):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameter_groups(), lr=self.lr)

    WithSGD.__name__ = kind.__name__
    return WithSGD


class Answers(L.LightningDataModule):
    """Sums as prompts with one or two answers, as a loader of one kind of batch.

    Args:
        kind: ``tokens``, ``pairs`` or ``labels``.
        rows: Number of examples.
        micro_batch_size: Examples per micro-batch.
    """

    def __init__(self, kind: str, rows: int = 16, micro_batch_size: int = 4) -> None:
        super().__init__()
        self.kind, self.rows, self.micro_batch_size = kind, rows, micro_batch_size

    def train_dataloader(self) -> StepLoader[Any]:
        """All examples, in a new order in each epoch."""
        made: list[Any] = []
        for number in range(self.rows):
            prompt, good = _tokens(f"{number}+{number}="), [*_tokens(str(2 * number)), 1]
            bad = [*_tokens("x" * (number % 7 + 1)), 1]
            if self.kind == "pairs":
                made.append(PreferenceExample.from_token_ids(prompt, good, bad))
            elif self.kind == "labels":
                other = [*_tokens(str(number)), 1]
                answer = _answered(prompt, good if number % 2 else bad)
                made.append(UnpairedExample(answer, bool(number % 2), _answered(prompt, other)))
            else:
                made.append(_answered(prompt, good + bad))
        collate: Callable[..., Any] = {
            "tokens": collate_tokens, "pairs": collate_preferences, "labels": collate_unpaired
        }[self.kind]  # fmt: skip
        loader: Any = UnpairedLoader if self.kind == "labels" else StepLoader
        fields = [one.chosen if self.kind == "pairs" else one.answer if self.kind == "labels" else one for one in made]
        epochs = self.trainer
        return loader(
            made,
            collate,
            lengths=[len(one.input_ids) for one in fields],
            targets=[one.targets for one in fields],
            micro_batch_size=self.micro_batch_size,
            accumulate=epochs.accumulate_grad_batches,
            rank=epochs.global_rank,
            world_size=epochs.world_size,
            ranks_per_forward=mesh_of(epochs).forward_group_size,
            epoch=lambda: epochs.current_epoch,
        )


def _tokens(text: str) -> list[int]:
    """Token ids of printable characters."""
    return [3 + ord(character) - 32 for character in text]


def _answered(prompt: Sequence[int], answer: Sequence[int]) -> TokenExample:
    return TokenExample([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))


class Prompts(L.LightningDataModule):
    """Sums as prompts of reinforcement learning; a :class:`~rlhfkit.protocols.PromptSource`."""

    max_tokens_per_micro_batch = None
    updates_per_iteration = 1
    curriculum_uses_rewards = False

    def __init__(self, rollout_batch_size: int = 8, micro_batch_size: int = 8, rows: int = 40) -> None:
        super().__init__()
        self.rollout_batch_size, self.micro_batch_size, self.rows = rollout_batch_size, micro_batch_size, rows
        self._order, self._cursor = PromptOrder(rows), PromptCursor()

    def prompt_queue(self, after: dict[str, Any] | None = None) -> IterationQueue:
        """The queue of an iteration."""
        cursor = self._cursor if after is None else PromptCursor.from_state_dict(after)
        return IterationQueue(self._order, _prompt, cursor, "sums")

    def set_cursor(self, after: dict[str, Any]) -> None:
        """Move the cursor to the end of a queue."""
        self._cursor = PromptCursor.from_state_dict(after)

    def train_dataloader(self) -> ExperienceLoader[Any]:
        """The experience that the rollout callback makes."""
        source = experience_source_of(self.trainer)
        return ExperienceLoader(source.collect, source.batches_per_iteration())

    def state_dict(self) -> dict[str, Any]:
        """The cursor."""
        return self._cursor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved cursor."""
        self._cursor = PromptCursor.from_state_dict(state_dict)


def _prompt(row: int) -> Prompt:
    text = f"{row}+{row}="
    return Prompt(index=row, token_ids=_tokens(text), text=text, answer=str(2 * row))


def digits(samples: Sequence[Sample]) -> list[float]:
    """Reward: the share of digits among eight tokens."""
    return [sum(DIGIT <= token < DIGIT + 10 for token in sample.token_ids) / 8 for sample in samples]


def weights_of(module: Any) -> Tensor:
    """All trained weights as one float64 vector on the CPU."""
    trained = [one.detach().cpu().double().flatten() for one in module.parameters() if one.requires_grad]
    return torch.cat(trained)


class FirstWeights(L.Callback):
    """Remembers the weights with which training starts."""

    weights: Tensor

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Copy them."""
        self.weights = weights_of(pl_module)


class SaveAfter(L.Callback):
    """Saves a checkpoint after a number of batches."""

    def __init__(self, path: Path, batches: int) -> None:
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save."""
        self.batches -= 1
        if self.batches == 0:
            trainer.save_checkpoint(self.path)


class Published(L.Callback):
    """Keeps the first and the last weights as an engine would get them."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Copy the first."""
        self.start = _published(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Copy the last."""
        self.end = _published(pl_module)


def _published(module: Any) -> dict[str, Tensor]:
    from rlhfkit.rollout import ModuleWeights

    return {name: tensor.detach().cpu().double().clone() for name, tensor in ModuleWeights(module.policy)}


class EpochSeconds(L.Callback):
    """Seconds of each epoch, which is an iteration in reinforcement learning."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the time."""
        self._start = _now()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the time, with the sync of weights at the end."""
        self.seconds.append(_now() - self._start)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
