"""``EMA``: an exponential moving average of the trained weights, in float32, whatever precision and strategy.

Lightning's ``WeightAveraging`` (2.6) copies the whole LightningModule, frozen children included, averages in the type
of the weights (in bfloat16 a decay of 0.999 rounds every step away) and cannot follow sharded models.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from rlhfkit.callbacks.export import HFExport
from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.distributed import is_sharded, local_shard
from rlhfkit.protocols import RLHFStrategy, callbacks_of
from rlhfkit.validation import check_integer, check_number


class EMA(L.Callback):
    """Averages every parameter that is trained; validation and exports see the average, training goes on without it.

    After n averaged updates the average is ``Σ_k d^(n-k) w_k / Σ_k d^(n-k)``, k = 1 .. n: corrected for its start, as
    Adam's moments are. The weights before training have no part in it, so a short run does not give them back.

    Under ``RLHFDeepSpeedStrategy`` each rank averages and saves its own share, 4 bytes per parameter divided by the
    number of ranks; under other strategies every rank averages everything. It is part of the checkpoint, and resuming
    is bitwise.

    Example::

        ema = EMA(0.999, export=HFExport("averaged"))
        trainer = L.Trainer(callbacks=[ema, HFExport("last")])

    Args:
        decay: d in [0, 1); 0.999 as in Lightning's ``EMAWeightAveraging``. It looks back about 1 / (1 - d) updates.
        start_step: Optimizer steps before the first one that is averaged.
        every_n_steps: Average after every so many optimizer steps; the decay counts these.
        validate: Validate the average within ``fit``. Must be off beside ``RolloutCallback``, which publishes to the
            engine whatever weights are in place.
        export: Writes the average, at the times it is told.
        device: Where the average is kept, for example ``"cpu"``; beside the weights when ``None``.

    Raises:
        ValueError: If a number is out of range; at the start of a fit, if ``validate`` meets a ``RolloutCallback``, or
            if a checkpoint's average is of other weights or ranks.
        TypeError: At the start of a fit, if the weights are sharded by another strategy than ours.
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
        """How many times the weights were averaged."""
        self._average: dict[str, Tensor] = {}
        self._step = 0  # the last optimizer step that was looked at
        self._per_rank = False
        self._swapped = ExitStack()

    # ------------------------------------------------------------------ averaging

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check what can be checked before anything runs."""
        if stage != "fit":
            return
        if self.validate and any(isinstance(callback, RolloutCallback) for callback in callbacks_of(trainer)):
            raise ValueError(
                "EMA(validate=True) and RolloutCallback do not fit: validation would publish the averaged weights, and "
                "the next iteration sample from them; use EMA(validate=False) and export the average"
            )
        if self.export is not None:
            self.export.setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at how the weights are laid out; take up the average of a checkpoint."""
        # RLHFDeepSpeedStrategy writes the callbacks of each rank, others those of rank 0, which then needs everything.
        self._per_rank = isinstance(trainer.strategy, RLHFStrategy)
        shares = {name: self._share(parameter) for name, parameter in self._parameters(pl_module).items()}
        self._step = trainer.global_step
        if not self.updates:
            self._average = {name: share.to(self.device, torch.float32, copy=True) for name, share in shares.items()}
            return
        sizes = {name: share.numel() for name, share in shares.items()}
        if sizes != {name: average.numel() for name, average in self._average.items()}:
            raise ValueError("the checkpoint's EMA is of other weights, or of another strategy or number of ranks")
        self._average = {name: self._average[name].to(self.device or share.device) for name, share in shares.items()}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Average when an optimizer step was made and it is due."""
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
        """This rank's part of a parameter, flat, in the parameter's own memory."""
        if is_sharded(parameter):
            if not self._per_rank:
                raise TypeError("EMA of weights sharded by ZeRO 3 needs RLHFDeepSpeedStrategy, which saves all shards")
            return local_shard(parameter)
        if hasattr(parameter, "to_local"):
            raise TypeError("EMA does not support weights sharded by FSDP or tensor parallelism; use rlhf_zero3")
        flat = parameter.data.view(-1)
        size, rank = self._slice(flat)
        return flat[rank * size : (rank + 1) * size]

    def _slice(self, flat: Tensor) -> tuple[int, int]:
        """Elements of a whole parameter that each rank averages, and which of these parts is this rank's."""
        if not self._per_rank:
            return flat.numel(), 0
        return math.ceil(flat.numel() / dist.get_world_size()), dist.get_rank()

    # ------------------------------------------------------------------ swapping

    @contextmanager
    def applied(self, pl_module: L.LightningModule) -> Iterator[None]:
        """The average in the weights' place, for a while; the very same weights are back afterwards. A collective.

        Example::

            with ema.applied(module):
                module.save_pretrained("averaged")

        Args:
            pl_module: The module that is being trained. Nothing happens before the first update.
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
        """Write this rank's shares, and give every rank what it holds of the others'."""
        for name, parameter in parameters.items():
            share = self._share(parameter)
            share.copy_(shares[name])
            if self._per_rank and not is_sharded(parameter):
                self._spread(parameter.data.view(-1), share)
        # Small ones are whole on every rank at ZeRO 3 too.
        whole: list[Any] = [p for p in parameters.values() if getattr(p, "ds_status", None) is not None]
        whole = [parameter for parameter in whole if parameter.ds_status.name == "AVAILABLE"]
        if whole:
            whole[0].partition(whole)
            whole[0].all_gather(whole)

    def _spread(self, flat: Tensor, share: Tensor) -> None:
        """Fill in the slices of the other ranks."""
        size, _ = self._slice(flat)
        own = nn.functional.pad(share, (0, size - share.numel()))
        slices = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(slices, own)
        flat.copy_(torch.cat(slices)[: flat.numel()])

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the average in place."""
        if self.validate and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._swapped.enter_context(self.applied(pl_module))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the weights back."""
        self._swapped.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Put the weights back, if that needs no rank that may be gone."""
        if trainer.world_size == 1 or not self._per_rank:
            self._swapped.close()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Export when it is due."""
        if self.export is not None and self.export.every_n_epochs is not None:
            with self.applied(pl_module):
                self.export.on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Export the last average."""
        if self.export is not None:
            with self.applied(pl_module):
                self.export.on_train_end(trainer, pl_module)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The average, this rank's share of it."""
        return {"updates": self.updates, "average": self._average if self.updates else {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up an average; it is checked when training starts.

        Args:
            state_dict: From :meth:`state_dict`.
        """
        self.updates, self._average = state_dict["updates"], dict(state_dict["average"])
