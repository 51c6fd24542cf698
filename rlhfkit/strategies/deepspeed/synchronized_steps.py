"""Step all engines of an optimizer or none: a loss or gradient that is not finite on any rank skips the update."""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhfkit.distributed import all_reduce
from rlhfkit.strategies.deepspeed import precision
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
    overflow, so that no engine skips a step on its own. In fp16 that takes a second bound: the sum of the largest
    elements, below which no sum over micro-batches and ranks leaves the range of fp16.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, half: bool = False) -> None:
        self._device = device
        self._half = half
        parameters: list[Any] = [p for p in module.parameters() if p.requires_grad]
        self._handles = [p.register_hook(self._add_norm) for p in parameters]  # torch 2.13 does not type it
        self.reset()

    def reset(self) -> None:
        """Begin a new accumulation window."""
        self._norms: list[Tensor] = []
        self._maxima: list[Tensor] = []
        self._largest = torch.zeros((), dtype=torch.float32, device=self._device)
        self._gradients = torch.zeros((), dtype=torch.float32, device=self._device)
        self._losses = torch.zeros((), dtype=torch.float32, device=self._device)

    def _add_norm(self, gradient: Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))
        if self._half:
            self._maxima.append(torch.linalg.vector_norm(gradient.detach(), torch.inf, dtype=torch.float32))

    def after_backward(self, loss: Tensor) -> None:
        """Add the gradients of one backward pass and the absolute value of ``loss``."""
        if self._norms:
            self._gradients += torch.stack(self._norms).sum()
        if self._maxima:
            self._largest += torch.stack(self._maxima).max()
        self._norms, self._maxima = [], []
        self._losses += loss.detach().float().abs()

    def totals(self) -> Tensor:
        """(3,) float32, since the last reset.

        The sum of absolute losses, the squared sum of gradient norms, and in fp16 the sum of largest gradients.
        """
        return torch.stack([self._losses, self._gradients.square(), self._largest])

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
        self._trackers = {
            name: GradientNormTracker(engine.module, device, half=engine.fp16_enabled())
            for name, engine in engines.items()
        }
        self._trained = {name: _trained(engine.module) for name, engine in engines.items()}

    def after_backward(self, names: Iterable[str], loss: Tensor) -> None:
        """Record a backward pass of ``loss`` through the named engines."""
        for name in names:
            self._trackers[name].after_backward(loss)

    def step(self, engines: Mapping[str, "DeepSpeedEngine"]) -> StepOutcome:
        """Step these engines, or drop the gradients of all. A collective: one sum of three numbers per engine.

        Under fp16 with a dynamic loss scale, an overflow is not an error as long as the scale can fall: it falls in the
        engines whose gradients overflowed, and no engine steps.

        Raises:
            RuntimeError: If ``requires_grad`` of parameters has changed since they were made.
        """
        self._check_trained(engines)
        self._skipped = self._to_skip & set(engines)
        self._to_skip -= self._skipped
        engines = {name: engine for name, engine in engines.items() if name not in self._skipped}
        if not engines:
            return StepOutcome.STEPPED
        losses, gradients = self._finite(list(engines))
        if all(losses.values()) and all(gradients.values()):
            outcome = _step_all(list(engines.values()))
        else:
            can_fall = {name for name, engine in engines.items() if precision.loss_scale_can_fall(engine)}
            to_rescale = {name for name in can_fall if losses[name] and not gradients[name]}
            for name, engine in engines.items():
                if name in to_rescale:
                    precision.lower_loss_scale(engine)
                else:
                    discard_gradients(engine)
            explained = all(losses.values()) and to_rescale == {name for name in engines if not gradients[name]}
            outcome = StepOutcome.RESCALED if explained else StepOutcome.SKIPPED
        for name in engines:
            self.reset(name)
        return outcome

    def _check_trained(self, engines: Mapping[str, "DeepSpeedEngine"]) -> None:
        """Raise RuntimeError if parameters were frozen, or others are to be trained, since the engines were made.

        Their optimizers go by flat tensors of all parameters of a group, in which a frozen one would move on by its
        momentum and weight decay; one that was frozen then is in none.
        """
        for name, engine in engines.items():
            before, now = self._trained[name], _trained(engine.module)
            flat = engine.optimizer is not engine.basic_optimizer
            changed = sorted(now - before) + (sorted(before - now) if flat else [])
            if changed:
                raise RuntimeError(
                    f"requires_grad of {len(changed)} parameters of {name!r} was changed during training (first: "
                    f"{changed[0]}), which DeepSpeed's optimizer does not notice: leave it, and set the 'lr' of their "
                    "parameter groups in on_before_optimizer_step, to 0 while they are frozen (Part.parameter_groups "
                    "divides groups)"
                )

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
        if len(names) == 1:
            totals[:, 2] = 0  # DeepSpeed sees the sums themselves; a single engine has no other to wait for
        totals[:, 2] = torch.where(totals[:, 2] <= torch.finfo(torch.float16).max, 0.0, torch.inf)
        losses, norms, largest = torch.isfinite(totals).T.tolist()
        gradients = [norm and element for norm, element in zip(norms, largest, strict=True)]
        return dict(zip(names, losses, strict=True)), dict(zip(names, gradients, strict=True))

    def reset(self, name: str) -> None:
        """Begin a new accumulation window of one engine."""
        self._trackers[name].reset()

    def remove(self) -> None:
        """Remove all hooks."""
        for tracker in self._trackers.values():
            tracker.remove()


def _trained(model: nn.Module) -> set[str]:
    """Names of the parameters that are trained."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _step_all(engines: Sequence["DeepSpeedEngine"]) -> StepOutcome:
    """Step engines whose gradients are finite on all ranks; only the fp16 sum of a single one can still overflow."""
    for number, engine in enumerate(engines):
        can_fall = precision.loss_scale_can_fall(engine)
        if precision.step(engine):
            for waiting in engines[number + 1 :]:
                discard_gradients(waiting)
            return StepOutcome.RESCALED if can_fall else StepOutcome.SKIPPED
    return StepOutcome.STEPPED
