"""What an iteration does with the prompts of a DataModule, without one and in runs, and prompts without a data set."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from rl_runs import ahead, fit_run, weights

from rlhfkit import Prompt, PromptDataModule, RolloutCallback, Sample, SamplingSpec
from rlhfkit.datamodules.prompts.table import TablePrompts


class NumberedRows:
    """Prompts whose ``index`` counts from ``first`` on."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.rows = range(first, first + count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> Prompt:
        return Prompt(self.rows[position], [5])

    def fingerprint(self) -> str:
        return str(self.rows)


def numbered(count: int, *, first: int = 0, **options: Any) -> TablePrompts:
    """So many prompts, as those of one source."""
    return TablePrompts([NumberedRows(count, first)], **options)  # type: ignore[list-item]


def advance(data: PromptDataModule, count: int) -> None:
    """Move the cursor past the next prompts."""
    queue = data.prompt_queue()
    queue.take(count)
    data.set_cursor(queue.after)


def by_number(samples: Sequence[Sample]) -> list[float]:
    """Every third prompt is solved always, every third never, the others half of the time, whatever the policy."""
    return [(1.0, 0.0, sample.sample_index % 2)[sample.prompt.index % 3] for sample in samples]


class Watch(L.Callback):
    """Prompts of each iteration; saves checkpoints after some batches."""

    def __init__(self, saved: dict[int, Path] | None = None) -> None:
        self.saved, self.batches = saved or {}, 0
        self.prompts: list[list[int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.batches += 1
        if self.batches in self.saved:
            trainer.save_checkpoint(self.saved[self.batches])
        if trainer.is_last_batch:
            samples = RolloutCallback.of(trainer).samples
            self.prompts.append(sorted({sample.prompt.index for sample in samples}))


def watched(
    folder: Path, watch: Watch, *parts: Any, staleness: int = 0, epochs: int = 9, resume: Any = None, **data: Any
) -> tuple[Any, int]:
    """Weights and epoch after a run of iterations of 8 of 40 prompts, which has a given callback."""
    sampling = SamplingSpec(group_size=4, max_new_tokens=2)
    rollouts = RolloutCallback(by_number, sampling=sampling, parts=ahead(staleness, *parts))
    arguments = {"data_arguments": data, "callbacks": [watch], "max_epochs": epochs}
    trainer, module, _ = fit_run(folder, resume=resume, rollouts=rollouts, **arguments)
    return weights(module), trainer.current_epoch
