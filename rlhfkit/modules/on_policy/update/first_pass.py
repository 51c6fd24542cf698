"""``FirstPassLogprobs``: old log-probs of later epochs, from the forward passes of a first epoch of one update."""

import dataclasses
from collections.abc import Mapping

import lightning as L
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.trainer_parts import epochs_of


class FirstPassLogprobs:
    """Keeps what the policy gave the tokens of an iteration before its first update, without a forward pass for it.

    Where an epoch of the iteration is one optimizer update, the log-probs that the first epoch trains with are those of
    the old policy, and every later epoch has the same micro-batches in the same order. With several updates an epoch,
    micro-batches have old log-probs that were computed before the iteration, and nothing is kept.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def reset(self) -> None:
        """Forget all: the iteration is over."""
        self._kept = {}

    def complete(self, batch: Experience, trainer: L.Trainer, batch_idx: int) -> Experience:
        """Add old log-probs to a micro-batch of a later epoch that has none.

        Args:
            batch: A micro-batch, of B sequences.
            trainer: Its Trainer.
            batch_idx: Number of the micro-batch in the iteration.
        """
        place, epoch = _place(trainer, batch_idx)
        if not epoch or batch.old_logprobs is not None:
            return batch
        return dataclasses.replace(batch, old_logprobs=self._kept[place].to(batch.action_mask.device))

    def keep(self, batch: Experience, logprobs: Tensor, trainer: L.Trainer, batch_idx: int) -> None:
        """Keep the log-probs (B, T-1) with which the first epoch trains on a micro-batch, if later ones need them."""
        place, epoch = _place(trainer, batch_idx)
        if not epoch and batch.old_logprobs is None and one_update_per_epoch(trainer):
            self._kept[place] = logprobs.detach()

    def state_dict(self) -> dict[int, Tensor]:
        """What is kept, by the number of the micro-batch; none outside of an iteration."""
        return {place: logprobs.cpu() for place, logprobs in self._kept.items()}

    def load_state_dict(self, state: Mapping[int, Tensor]) -> None:
        """Inverse of :meth:`state_dict`."""
        self._kept = dict(state)


def one_update_per_epoch(trainer: L.Trainer) -> bool:
    """Whether there are several epochs over an iteration, each of one optimizer update."""
    epochs = epochs_of(trainer)
    return epochs > 1 and int(trainer.num_training_batches) == epochs * trainer.accumulate_grad_batches


def _place(trainer: L.Trainer, batch_idx: int) -> tuple[int, int]:
    """Number of a micro-batch in its epoch of the iteration, and number of that epoch."""
    epoch, place = divmod(batch_idx, int(trainer.num_training_batches) // epochs_of(trainer))
    return place, epoch
