"""Step all engines of an optimizer or none: a loss or gradient that is not finite on any rank skips the update."""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhfkit.distributed import all_reduce
from rlhfkit.strategies.deepspeed.gradients import discard_gradients

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class StepOutcome(Enum):
    """Result of an optimizer step."""

    STEPPED = "every engine stepped"
    SKIPPED = "a loss or gradient was not finite: no engine stepped"
    RESCALED = "an fp16 gradient overflowed: no engine stepped, and the dynamic loss scale has fallen"


class GradientNormTracker:
    """Sums the norms of all gradients of one engine, by hooks on its parameters.

    Hooks work at every ZeRO stage, wherever DeepSpeed keeps the gradients afterwards. They run one kernel per parameter
    and backward pass, without device synchronization.

    The sum over all micro-batches is an upper bound of the norm that the optimizer sees (triangle inequality). If its
    square is a finite float32, no average over micro-batches and ranks and no norm that DeepSpeed computes can
    overflow, so that no engine skips a step on its own.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        parameters: list[Any] = [p for p in module.parameters() if p.requires_grad]
        self._handles = [p.register_hook(self._add_norm) for p in parameters]  # torch 2.13 does not type it
        self.reset()

    def reset(self) -> None:
        """Begin a new accumulation window."""
        self._norms: list[Tensor] = []
        self._gradients = torch.zeros((), dtype=torch.float32, device=self._device)
        self._losses = torch.zeros((), dtype=torch.float32, device=self._device)

    def _add_norm(self, gradient: Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))

    def after_backward(self, loss: Tensor) -> None:
        """Add the gradients of one backward pass and the absolute value of ``loss``."""
        if self._norms:
            self._gradients += torch.stack(self._norms).sum()
        self._norms = []
        self._losses += loss.detach().float().abs()

    def totals(self) -> Tensor:
        """(2,) float32: sum of absolute losses and squared sum of gradient norms, since the last reset."""
        return torch.stack([self._losses, self._gradients.square()])

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class SynchronizedSteps:
    """Steps all engines of one optimizer, or none if a loss or gradient is not finite in any of them on any rank.

    A policy is then never updated without its critic, and all ranks and engines agree on the number of updates, which
    exact resume requires.
    """

    def __init__(self, engines: Mapping[str, "DeepSpeedEngine"], device: torch.device) -> None:
        self._to_skip: set[str] = set()  # in the next step
        self._skipped: set[str] = set()  # in the last step
        self._trackers = {name: GradientNormTracker(engine.module, device) for name, engine in engines.items()}

    def after_backward(self, names: Iterable[str], loss: Tensor) -> None:
        """Record a backward pass of ``loss`` through the named engines."""
        for name in names:
            self._trackers[name].after_backward(loss)

    def step(self, engines: Mapping[str, "DeepSpeedEngine"]) -> StepOutcome:
        """Step these engines, or drop the gradients of all. A collective: one sum of two numbers per engine.

        Under fp16 with a dynamic loss scale, an overflow is not an error as long as DeepSpeed can lower the scale.
        """
        self._skipped = self._to_skip & set(engines)
        self._to_skip -= self._skipped
        engines = {name: engine for name, engine in engines.items() if name not in self._skipped}
        if not engines:
            return StepOutcome.STEPPED
        losses, gradients = self._finite(list(engines))
        if all(losses.values()) and all(gradients.values()):
            for engine in engines.values():
                engine.step()
            outcome = StepOutcome.STEPPED
        else:
            to_rescale = {n for n in engines if losses[n] and not gradients[n] and loss_scale_can_fall(engines[n])}
            for name, engine in engines.items():
                if name in to_rescale:
                    engine.step()  # DeepSpeed sees the overflow too: it drops the gradients and lowers the scale
                else:
                    discard_gradients(engine)
            explained = all(losses.values()) and to_rescale == {name for name in engines if not gradients[name]}
            outcome = StepOutcome.RESCALED if explained else StepOutcome.SKIPPED
        for name in engines:
            self.reset(name)
        return outcome

    def skip_update(self, name: str) -> None:
        """Leave an engine whose gradients were dropped out of the next step."""
        self._to_skip.add(name)

    def was_skipped(self, name: str) -> bool:
        """Whether :meth:`skip_update` left the engine out of the last step."""
        return name in self._skipped

    def _finite(self, names: list[str]) -> tuple[dict[str, bool], dict[str, bool]]:
        """Whether the losses, and the gradients, of each engine were finite on all ranks. A collective."""
        totals = torch.stack([self._trackers[name].totals() for name in names])
        all_reduce(totals)
        losses, gradients = torch.isfinite(totals).T.tolist()
        return dict(zip(names, losses, strict=True)), dict(zip(names, gradients, strict=True))

    def reset(self, name: str) -> None:
        """Begin a new accumulation window of one engine."""
        self._trackers[name].reset()

    def remove(self) -> None:
        """Remove all hooks."""
        for tracker in self._trackers.values():
            tracker.remove()


def loss_scale_can_fall(engine: "DeepSpeedEngine") -> bool:
    """Whether the engine trains in fp16 with a dynamic loss scale above its minimum."""
    if not engine.fp16_enabled():
        return False
    if hasattr(engine.optimizer, "loss_scaler"):  # ZeRO 1 to 3
        scaler = engine.optimizer.loss_scaler
        return bool(scaler.dynamic and scaler.cur_scale > scaler.min_scale)
    scale = engine.optimizer.loss_scale_config
    return bool(scale.dynamic_loss_scale and scale.cur_scale > scale.min_loss_scale)
