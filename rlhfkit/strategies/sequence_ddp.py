"""``SequenceParallelDDPStrategy``: sequence parallelism under Lightning's own DDP, without DeepSpeed."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

from rlhfkit.mesh import SequenceParallel
from rlhfkit.strategies.forward_groups import ForwardGroupMixin


class SequenceParallelDDPStrategy(ForwardGroupMixin, DDPStrategy):
    """Lightning's DDP whose neighbouring ranks divide the tokens of each forward pass among themselves.

    DDP's mean of the gradients over all ranks is the right one as it is: see :mod:`rlhfkit.mesh`.

    Args:
        sequence_parallel_size: Ranks that compute forward passes together.
        sequence_parallel: How attention sees all tokens; both as in
            :class:`~rlhfkit.strategies.strategy.RLHFDeepSpeedStrategy`.
        **kwargs: Arguments of Lightning's ``DDPStrategy``.

    Raises:
        ValueError: If an argument is wrong.
    """

    strategy_name = "rlhf_sequence_ddp"

    def __init__(
        self, sequence_parallel_size: int, sequence_parallel: SequenceParallel = "ulysses", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.divide_sequences(sequence_parallel_size, sequence_parallel)

    def setup(self, trainer: pl.Trainer) -> None:
        """Attach the forward group, then wrap the module."""
        assert self.lightning_module is not None
        self.attach_forward_group(self.lightning_module)
        super().setup(trainer)

    def teardown(self) -> None:
        """Detach the forward group."""
        if self.lightning_module is not None:
            self.detach_forward_group(self.lightning_module)
        super().teardown()
