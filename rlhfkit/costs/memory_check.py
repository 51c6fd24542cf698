"""``MemoryCheck``: a callback that compares the estimate of a run with its GPU, before models are loaded."""

import logging
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn

from rlhfkit.callbacks import RolloutCallback
from rlhfkit.costs.estimation import estimate
from rlhfkit.costs.hardware import GPU
from rlhfkit.costs.memory.parts import TRAINING, phase_bytes
from rlhfkit.gpu_checks import memory_is_tight
from rlhfkit.modules import PolicyModule
from rlhfkit.protocols import callbacks_of, datamodule_of

log = logging.getLogger(__name__)


class MemoryCheck(L.Callback):
    """Warns before training if the run may not fit into its GPUs, with what needs the memory; on GPUs only.

    ``rlhfkit fit`` adds it. From 90 % of the free memory on it is uncertain whether the run fits, as
    :func:`~rlhfkit.costs.estimate` is 10 to 15 % off, so nothing is refused; weights that exceed a GPU are an error of
    the module.

    Example::

        trainer = L.Trainer(strategy="rlhf_zero2", devices=8, callbacks=[MemoryCheck(), rollouts])
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Estimate and warn. Lightning calls this before modules build their networks."""
        device = trainer.strategy.root_device
        if stage != "fit" or device.type != "cuda" or not isinstance(pl_module, PolicyModule):
            return
        cuda: Any = torch.cuda  # has no types
        free, _total = cuda.mem_get_info(device)
        found = memory_warning(trainer, pl_module, str(cuda.get_device_properties(device).name), free)
        if found is not None:
            rank_zero_warn(found)


def memory_warning(trainer: L.Trainer, module: PolicyModule, gpu: str, free: float) -> str | None:
    """Say that a run comes near the ``free`` bytes of each of its GPUs; ``None``: it does not, or it is unknown."""
    rollouts = [one for one in callbacks_of(trainer) if isinstance(one, RolloutCallback)]
    try:
        found = estimate(
            module,
            datamodule_of(trainer),
            rollouts[0] if rollouts else None,
            gpu=GPU(name=gpu, memory=free, flops=1.0, bandwidth=1.0, link=1.0),  # times are not asked for
            strategy=trainer.strategy,
            devices=trainer.num_devices,
            num_nodes=trainer.num_nodes,
            precision=trainer.precision,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
        )
    except (TypeError, ValueError) as error:  # modules, data or strategies of users that the formulas do not describe
        log.info("memory is not estimated: %s", error)
        return None
    phases = phase_bytes(found.memory, TRAINING)
    fullest = max(phases, key=lambda phase: phases[phase])
    parts = {
        f"{part.role}: {part.part}": part.bytes
        for part in found.memory
        if part.place == TRAINING and fullest in part.phases
    }
    return memory_is_tight(parts, gpu, free)
