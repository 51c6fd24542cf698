"""Models of a module that are on machines of their own: starting them, and waiting for their numbers."""

from typing import Protocol

import lightning as L
import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import exchange_errors, true_on_all_ranks
from rlhfkit.models.load import precision_dtype
from rlhfkit.roles import FrozenModel, ModelPoolError
from rlhfkit.roles.frozen_model import PendingNumbers
from rlhfkit.roles.pending_rows import WeightsMissingError
from rlhfkit.roles.replica import Role


class Asking(Protocol):
    """A module that asks."""

    @property
    def trainer(self) -> L.Trainer:
        """The running Trainer."""
        ...

    def forward_batches(self, experience: Experience) -> list[Tensor]:
        """Indices of the rows of each forward pass."""
        ...


def ask(pool: FrozenModel, role: Role, module: Asking, experience: Experience | None) -> PendingNumbers | None:
    """Ask for numbers of this rank's rows, which may be none; the first time, start the replicas. A collective."""
    precision = module.trainer.precision  # the numbers are those of a child of the module
    pool.start(role, weights=precision_dtype(precision), compute=precision_dtype(precision, compute=True))
    return None if experience is None else pool.submit(experience, module.forward_batches(experience))


def pool_result(asked: PendingNumbers | None, pool: FrozenModel, columns: int | None = None) -> Tensor:
    """Wait for the numbers of this rank's rows, see :meth:`PendingNumbers.result`; (0, 1) without any. A collective.

    Replicas that were restarted get the weights of a model that has moved, and are asked again.

    Raises:
        ModelPoolError: On all ranks, if those of one rank cannot be computed.
    """
    while True:
        values, failure, behind = torch.zeros(0, 1), None, False
        try:
            values = values if asked is None else asked.result(columns)
        except WeightsMissingError:
            behind = True
        except ModelPoolError as error:  # the other ranks are told below, then it is raised here
            failure = error
        raised = exchange_errors(failure, error_type=ModelPoolError)
        if raised is not None:
            raise raised
        if pool.version == 0 or true_on_all_ranks(not behind):
            return values
        pool.refresh()
