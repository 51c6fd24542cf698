"""Engines that step together or not at all: a loss or gradient that is not finite on any rank stops all of them."""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhfkit.distributed import all_reduce
from rlhfkit.strategies.deepspeed.gradients import discard_gradients

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class Outcome(Enum):
    """What became of an optimizer step."""

    STEPPED = "every engine stepped"
    SKIPPED = "a loss or gradient was not finite: no engine stepped"
    RESCALED = "an fp16 gradient overflowed: no engine stepped, and the dynamic loss scale has fallen"


class GradientWatch:
    """Notes the size of every gradient of one engine while it is computed, wherever DeepSpeed puts it afterwards.

    ZeRO keeps gradients in other places at every stage (parameters, flat buffers, CPU memory); hooks on the parameters
    see them all before. They run one kernel per parameter and backward pass and never wait for the device.

    The watched number is the sum of the norms of all gradients of all micro-batches. It bounds the norm of what the
    optimizer will see (triangle inequality). So where its square is a finite float32, no average over micro-batches and
    ranks and no norm that DeepSpeed computes can overflow either, and no engine decides otherwise on its own.

    Args:
        module: Whose trainable parameters are watched.
        device: Where gradients are computed.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._handles = [p.register_hook(self._note) for p in module.parameters() if p.requires_grad]
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new accumulation window begins."""
        self._norms: list[Tensor] = []
        self._gradients = torch.zeros((), dtype=torch.float32, device=self._device)
        self._losses = torch.zeros((), dtype=torch.float32, device=self._device)

    def _note(self, gradient: Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))

    def after_backward(self, loss: Tensor) -> None:
        """Add up what one backward pass of ``loss`` has shown."""
        if self._norms:
            self._gradients += torch.stack(self._norms).sum()
        self._norms = []
        self._losses += loss.detach().float().abs()

    def totals(self) -> Tensor:
        """(2,) float32: sums of the absolute losses and of the squared bound on the gradient, since the last reset."""
        return torch.stack([self._losses, self._gradients.square()])

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class SynchronizedSteps:
    """Steps the engines of one optimizer together or not at all.

    A policy that goes on while its critic stands still would train on stale values, and ranks or engines that disagree
    on the number of updates cannot be resumed exactly. So one number that is not finite, in a loss or gradient of any
    engine of the optimizer on any rank, leaves the weights and optimizer states of all its engines as they were.

    Args:
        engines: All training engines by child name.
        device: Of this rank.
    """

    def __init__(self, engines: Mapping[str, "DeepSpeedEngine"], device: torch.device) -> None:
        self._left_out: set[str] = set()  # of the coming step
        self._passed_by: set[str] = set()  # of the last
        self._watches = {name: GradientWatch(engine.module, device) for name, engine in engines.items()}

    def after_backward(self, names: Iterable[str], loss: Tensor) -> None:
        """Note that ``loss`` was propagated back through the named engines."""
        for name in names:
            self._watches[name].after_backward(loss)

    def step(self, engines: Mapping[str, "DeepSpeedEngine"]) -> Outcome:
        """Step these engines, or drop the gradients of all. Collective: one sum of two numbers per engine.

        Under fp16 with a dynamic loss scale, an overflowing gradient is how the scale is found: as long as the scale of
        the engine can fall, DeepSpeed lowers it and nothing is counted as an error.
        """
        self._passed_by = self._left_out & set(engines)
        self._left_out -= self._passed_by
        engines = {name: engine for name, engine in engines.items() if name not in self._passed_by}
        if not engines:
            return Outcome.STEPPED
        losses, gradients = self._finite(list(engines))
        if all(losses.values()) and all(gradients.values()):
            for engine in engines.values():
                engine.step()
            outcome = Outcome.STEPPED
        else:
            to_rescale = {n for n in engines if losses[n] and not gradients[n] and loss_scale_can_fall(engines[n])}
            for name, engine in engines.items():
                if name in to_rescale:
                    engine.step()  # DeepSpeed sees the overflow too: it drops the gradients and lowers the scale
                else:
                    discard_gradients(engine)
            explained = all(losses.values()) and to_rescale == {name for name in engines if not gradients[name]}
            outcome = Outcome.RESCALED if explained else Outcome.SKIPPED
        for name in engines:
            self.forget(name)
        return outcome

    def skip_update(self, name: str) -> None:
        """Let the coming step pass an engine by, whose gradients were dropped."""
        self._left_out.add(name)

    def was_left_out(self, name: str) -> bool:
        """Whether the last step passed the engine by."""
        return name in self._passed_by

    def _finite(self, names: list[str]) -> tuple[dict[str, bool], dict[str, bool]]:
        """Whether the losses, and the gradients, of each named engine were finite on all ranks."""
        totals = torch.stack([self._watches[name].totals() for name in names])
        all_reduce(totals)
        losses, gradients = torch.isfinite(totals).T.tolist()
        return dict(zip(names, losses, strict=True)), dict(zip(names, gradients, strict=True))

    def forget(self, name: str) -> None:
        """The gradients of one engine were used or dropped."""
        self._watches[name].reset()

    def remove(self) -> None:
        """Take all hooks off."""
        for watch in self._watches.values():
            watch.remove()


def loss_scale_can_fall(engine: "DeepSpeedEngine") -> bool:
    """Whether the engine trains in fp16 with a dynamic loss scale above its minimum."""
    if not engine.fp16_enabled():
        return False
    if hasattr(engine.optimizer, "loss_scaler"):  # ZeRO 1 to 3
        scaler = engine.optimizer.loss_scaler
        return bool(scaler.dynamic and scaler.cur_scale > scaler.min_scale)
    scale = engine.optimizer.loss_scale_config
    return bool(scale.dynamic_loss_scale and scale.cur_scale > scale.min_loss_scale)
