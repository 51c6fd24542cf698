"""``EMA``: an exponential moving average of the trained weights in float32, under any precision and strategy.

Lightning's ``WeightAveraging`` (2.6) copies the whole LightningModule, frozen children included, averages in the type
of the weights (in bfloat16 a decay of 0.999 rounds every step away) and cannot follow sharded models.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhfkit.callbacks.export import HFExport
from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.distributed import full_shape, is_sharded, local_shard
from rlhfkit.mesh import mesh_of
from rlhfkit.protocols import STATES_OF_RANKS, RLHFStrategy
from rlhfkit.trainer_parts import callbacks_of
from rlhfkit.validation import check_integer, check_number

SavedShares = tuple[int, Callable[[int], Mapping[str, Tensor]]]
"""How many ranks have saved shares of an average, and the shares of one, by the names of weights."""
OTHER_WEIGHTS = "the checkpoint's EMA is of other weights, of another strategy, or of another tensor_parallel_size"


class EMA(L.Callback):
    """Average every trained parameter; validation and exports use the average, training does not.

    After n averaged updates the average is ``Σ_k d^(n-k) w_k / Σ_k d^(n-k)``, k = 1 .. n: bias-corrected like Adam's
    moments, without the weights before training. Under ``RLHFDeepSpeedStrategy`` each rank averages and saves its own
    shard, 4 bytes per parameter divided by the number of ranks; under other strategies every rank averages everything.
    Checkpoints contain the average, and resuming is bitwise; another number of ranks resumes with the same average,
    except with tensor parallelism, where each rank averages its part of every weight.

    Example::

        ema = EMA(0.999, export=HFExport("averaged"))
        trainer = L.Trainer(callbacks=[ema, HFExport("last")])

    Args:
        decay: d in [0, 1); 0.999 as in Lightning's ``EMAWeightAveraging``. It covers about 1 / (1 - d) updates.
        start_step: Optimizer steps before the first one that is averaged.
        every_n_steps: Average after every n optimizer steps; the decay is per average.
        validate: Validate the average within ``fit``. Must be false beside ``RolloutCallback``, which would sync the
            averaged weights to the engine.
        export: Writes the average instead of the weights, when it is due.
        device: Where the average is kept, e.g. ``"cpu"``; ``None``: the device of the weights.

    Raises:
        ValueError: If a number is out of range; at the start of a fit, if ``validate`` meets a ``RolloutCallback``, or
            if a checkpoint's average is of other weights.
        TypeError: At the start of a fit, if the weights are sharded by a strategy other than ``RLHFDeepSpeedStrategy``.
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        start_step: int = 0,
        every_n_steps: int = 1,
        validate: bool = True,
        export: HFExport | None = None,
        device: str | None = None,
    ) -> None:
        check_number("decay", decay, minimum=0, below=1)
        check_integer("start_step", start_step, minimum=0)
        check_integer("every_n_steps", every_n_steps, minimum=1)
        self.decay = decay
        self.start_step = start_step
        self.every_n_steps = every_n_steps
        self.validate = validate
        self.export = export
        self.device = device
        self.updates = 0
        """Number of averaged updates."""
        self._average: dict[str, Tensor] = {}
        self._step = 0  # the latest optimizer step that was seen
        self._per_rank = False
        self._in_slices = False  # weights that are whole on every rank are averaged in slices
        self._saved_ranks: SavedShares | None = None  # averages of a checkpoint of other ranks
        self._swapped = ExitStack()

    # ------------------------------------------------------------------ averaging

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse ``validate=True`` beside a ``RolloutCallback``."""
        if stage != "fit":
            return
        if self.validate and any(isinstance(callback, RolloutCallback) for callback in callbacks_of(trainer)):
            raise ValueError(
                "EMA(validate=True) and RolloutCallback do not fit: validation would sync the averaged weights, and "
                "the next iteration would sample from them; use EMA(validate=False) and export the average"
            )
        if self.export is not None:
            self.export.setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the average, or check that a checkpoint's average fits the weights."""
        # RLHFDeepSpeedStrategy writes the callbacks of each rank, others those of rank 0, which then needs everything.
        self._per_rank = isinstance(trainer.strategy, RLHFStrategy)
        # With tensor parallelism ranks have different parts of a weight, of which each averages its own.
        self._in_slices = self._per_rank and mesh_of(trainer).tensor == 1
        shares = {name: self._share(parameter) for name, parameter in self._parameters(pl_module).items()}
        self._step = trainer.global_step
        saved, self._saved_ranks = self._saved_ranks, None
        if not self.updates:
            self._average = {name: share.to(self.device, torch.float32, copy=True) for name, share in shares.items()}
            return
        if saved is not None and self._per_rank:
            if not self._in_slices:
                raise ValueError(
                    "the checkpoint's EMA was saved by another number of ranks or with another "
                    "tensor_parallel_size, for which averages of divided weights are not split again: resume with the "
                    "same, or without EMA"
                )
            self._average = self._share_anew(saved, self._parameters(pl_module), shares)
        sizes = {name: share.numel() for name, share in shares.items()}
        if sizes != {name: average.numel() for name, average in self._average.items()}:
            raise ValueError(OTHER_WEIGHTS)
        self._average = {name: self._average[name].to(self.device or share.device) for name, share in shares.items()}

    def _share_anew(
        self, saved: SavedShares, parameters: Mapping[str, Any], shares: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """This rank's share of averages that another number of ranks has saved."""
        average = {}
        for name, parameter in parameters.items():
            numel = math.prod(full_shape(parameter))
            start = min(numel, dist.get_rank() * math.ceil(numel / dist.get_world_size()))
            end = start + shares[name].numel()
            average[name] = slice_of_shares(saved, name, numel, start, end)
        return average

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Average after an optimizer step, if it is due."""
        done = trainer.global_step - self.start_step
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if done <= 0 or done % self.every_n_steps:
            return
        self.updates += 1
        weight = (1.0 - self.decay) / (1.0 - self.decay**self.updates)
        for name, parameter in self._parameters(pl_module).items():
            average = self._average[name]
            average.lerp_(self._share(parameter).to(average), weight)

    def _parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}

    def _share(self, parameter: Any) -> Tensor:
        """This rank's part of a parameter, a flat view of its memory."""
        if is_sharded(parameter):
            if not self._per_rank:
                raise TypeError("EMA of weights sharded by ZeRO 3 needs RLHFDeepSpeedStrategy, which saves all shards")
            return local_shard(parameter)
        if isinstance(parameter, DTensor):
            raise TypeError("EMA does not support weights sharded by FSDP or tensor parallelism; use rlhf_zero3")
        flat: Tensor = parameter.data.view(-1)
        size, rank = self._slice(flat)
        return flat[rank * size : (rank + 1) * size]

    def _slice(self, flat: Tensor) -> tuple[int, int]:
        """Elements of an unsharded parameter per rank, and the index of this rank's part."""
        if not self._in_slices:
            return flat.numel(), 0
        return math.ceil(flat.numel() / dist.get_world_size()), dist.get_rank()

    # ------------------------------------------------------------------ swapping

    @contextmanager
    def applied(self, pl_module: L.LightningModule) -> Iterator[None]:
        """Replace the weights by the average inside the context, and restore them bitwise. A collective.

        Before the first average the weights stay in place. Example::

            with ema.applied(module):
                module.save_pretrained("averaged")
        """
        if not self.updates:
            yield
            return
        parameters = self._parameters(pl_module)
        trained = {name: self._share(parameter).clone() for name, parameter in parameters.items()}
        self._put(parameters, self._average)
        try:
            yield
        finally:
            self._put(parameters, trained)

    @torch.no_grad()
    def _put(self, parameters: Mapping[str, nn.Parameter], shares: Mapping[str, Tensor]) -> None:
        """Write this rank's shares, then gather the other ranks' for parameters that are whole on every rank."""
        for name, parameter in parameters.items():
            share = self._share(parameter)
            share.copy_(shares[name])
            if self._in_slices and not is_sharded(parameter):
                self._gather_slices(parameter.data.view(-1), share)
        # At ZeRO 3, small parameters are whole on every rank.
        whole: list[Any] = [p for p in parameters.values() if is_sharded(p)]
        whole = [parameter for parameter in whole if parameter.ds_status.name == "AVAILABLE"]
        if whole:
            whole[0].partition(whole)
            whole[0].all_gather(whole)

    def _gather_slices(self, flat: Tensor, share: Tensor) -> None:
        """Write the slices of all ranks into a parameter."""
        size, _ = self._slice(flat)
        own = nn.functional.pad(share, (0, size - share.numel()))
        slices = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(slices, own)
        flat.copy_(torch.cat(slices)[: flat.numel()])

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replace the weights by the average."""
        if self.validate and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._swapped.enter_context(self.applied(pl_module))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the weights."""
        self._swapped.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the weights, unless that needs other ranks, which may be gone."""
        if trainer.world_size == 1 or not self._per_rank:
            self._swapped.close()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Export the average if it is due."""
        if self.export is not None and self.export.every_n_epochs is not None:
            with self.applied(pl_module):
                self.export.on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Export the final average."""
        if self.export is not None:
            with self.applied(pl_module):
                self.export.on_train_end(trainer, pl_module)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of the average."""
        return {"updates": self.updates, "average": self._average if self.updates else {}}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the averages of all ranks if another number of them has saved the checkpoint."""
        states = checkpoint.get(STATES_OF_RANKS)
        if states is None:
            self._saved_ranks = None
            return

        @functools.cache  # each file is opened once, when it is needed
        def share(rank: int) -> Mapping[str, Tensor]:
            average: Mapping[str, Tensor] = states[rank]["callbacks"].get(self.state_key, {}).get("average", {})
            return average

        self._saved_ranks = len(states), share

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the average; it is checked when training starts."""
        self.updates, self._average = state_dict["updates"], dict(state_dict["average"])


def slice_of_shares(saved: SavedShares, name: str, numel: int, start: int, end: int) -> Tensor:
    """Elements ``start`` to ``end`` of a flat tensor of ``numel`` elements of which each rank has saved an equal share.

    Raises ValueError if the shares are not those of such a tensor.
    """
    num_ranks, share_of = saved
    size = math.ceil(numel / num_ranks)
    parts = [torch.empty(0)]
    for rank in range(start // size, math.ceil(end / size)) if end > start else ():
        share, first = share_of(rank).get(name), rank * size
        if share is None or share.numel() != min(size, numel - first):
            raise ValueError(OTHER_WEIGHTS)
        parts.append(share[max(start - first, 0) : end - first])
    return torch.cat(parts)
