"""Pretraining text that a policy keeps learning from in reinforcement learning (PTX)."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlhfkit.data.batch import TokenBatch
from rlhfkit.data.loaders.steps import StepLoader
from rlhfkit.datamodules.sft import SFTDataModule


class PretrainingText:
    """Micro-batches of text by number, a function of the number alone, so no cursor is saved.

    A pass over the text takes whole optimizer steps; left-over examples come in later passes, which have other orders.
    ``data`` must be attached to a Trainer and set up. ``accumulate`` is the number of micro-batches per optimizer step
    and rank; ``None``: it differs between steps. Raises ValueError if the text does not fill one optimizer step.
    """

    def __init__(self, data: SFTDataModule, accumulate: int | None) -> None:
        self.loader: StepLoader[TokenBatch] = data.loader(
            data.examples, accumulate=accumulate or 1, shuffle=data.shuffle, drop_last=True
        )
        self._next: int | None = None
        self._batches: Iterator[TokenBatch] = iter(())
        self._step: tuple[range, list[TokenBatch]] = range(0), []

    def batch(self, number: int) -> TokenBatch:
        """Return this rank's micro-batch ``number``, counted from the run's start, with its step's token counts."""
        if number != self._next:
            self._batches = self._iterate_from(number)
        self._next = number + 1
        return next(self._batches)

    def batch_of_step(self, number: int, step: range) -> TokenBatch:
        """Return micro-batch ``number`` of an optimizer step of the micro-batches ``step``, with that step's counts."""
        if self._step[0] != step:
            batches = [self.batch(each) for each in step]
            tokens = sum(batch.step_tokens or 0.0 for batch in batches)
            sequences = sum(batch.step_sequences or 0.0 for batch in batches)
            averaged = sum(batch.step_micro_batches for batch in batches)
            self._step = (
                step,
                [
                    dataclasses.replace(
                        batch, step_tokens=tokens, step_sequences=sequences, step_micro_batches=averaged
                    )
                    for batch in batches
                ],
            )
        return self._step[1][number - step.start]

    def _iterate_from(self, number: int) -> Iterator[TokenBatch]:
        epoch, position = divmod(number, len(self.loader))
        state: dict[str, Any] = self.loader.state_dict() | {"position": position}
        self.loader.load_state_dict(state)
        while True:
            self.loader.set_epoch(epoch)
            yield from self.loader
            epoch += 1
