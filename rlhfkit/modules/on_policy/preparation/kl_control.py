"""KL control: a coefficient that follows a target, and updates that stop once the policy has moved too far."""

from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import kl_estimate
from rlhfkit.protocols import RLHFStrategy
from rlhfkit.validation import check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class KLControl:
    """Control of the policy's distance beyond a fixed ``kl_coef``.

    Example::

        PPOModule("sft", kl_coef=0.01, kl_control=KLControl(target=0.02))
    """

    target: float | None = None
    """KL to the reference, in nats per token, that ``kl_coef`` is adapted to after each iteration; ``None``: fixed."""
    horizon: int = 10000
    """Samples in which the coefficient may change by a fifth (10000: OpenRLHF's and the paper's); only with a
    ``target``."""
    early_stop: float | None = None
    """KL to the policy that began the iteration, in nats per token (k3, over an update's tokens): the update that
    exceeds it and the later ones of the iteration leave the policy bitwise unchanged. A critic is still updated, unless
    it shares the policy's trunk. 0.015 in Spinning Up; ``None``: never, as in OpenRLHF."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_number("KLControl.target", self.target, above=0, optional=True)
        check_integer("KLControl.horizon", self.horizon, minimum=1, why="it is in samples")
        check_number("KLControl.early_stop", self.early_stop, above=0, optional=True)
        if self.target is None and self.horizon != type(self).horizon:
            raise ValueError(f"KLControl(horizon={self.horizon}) is how fast kl_coef follows a target: give target too")

    def adapted(self, coef: float, kl: float, samples: int) -> float:
        """Compute the next coefficient: ``β (1 + clip(KL / target - 1, ±0.2) n / horizon)``.

        β is ``coef``, n ``samples``, and KL is in nats per token; in Ziegler et al. (2019, arXiv:1909.08593, section
        2.2) it is that of a whole answer.
        """
        if self.target is None:
            return coef
        error = kl / self.target - 1.0
        return coef * (1.0 + min(max(error, -0.2), 0.2) * samples / self.horizon)


class KLEarlyStopping:
    """Decides when the policy is too far from the one that began the iteration; ``limit`` is in nats per token.

    The distance is k3 of old to new over all tokens of an update, measured while its gradient is computed; an update
    that exceeds the limit is skipped too, as in Spinning Up, Stable-Baselines3 and TRL.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.stopped = False
        """Whether the policy is not updated for the rest of the iteration."""
        self._distance: Tensor | float = 0.0

    def reset(self) -> None:
        """Begin a new iteration."""
        self.stopped, self._distance = False, 0.0

    @torch.no_grad()
    def measure(self, batch: Experience, logprobs: Tensor) -> None:
        """Add the distance of one micro-batch from ``logprobs``, (B, T-1) of the policy now.

        The first update has no old log-probs, and distance 0.
        """
        if self.stopped or batch.old_logprobs is None:
            return
        distance = kl_estimate(batch.old_logprobs, logprobs.detach(), mask=batch.action_mask).sum()
        self._distance = self._distance + distance / max(batch.step_tokens or float(batch.action_mask.sum()), 1.0)

    def should_stop(self, module: L.LightningModule) -> bool:
        """Whether to skip the coming update. A collective, with the same result on all ranks."""
        if self.stopped:
            return True
        total = torch.as_tensor(self._distance, dtype=torch.float32, device=module.device)
        self._distance = 0.0
        self.stopped = float(module.trainer.strategy.reduce(total, reduce_op="sum")) > self.limit
        return self.stopped


def skip_update(module: L.LightningModule, child: str) -> None:
    """Leave a child of a module unchanged in the coming update; call it in ``on_before_optimizer_step``.

    Its gradients are dropped. Weights and optimizer state stay bitwise the same (no weight decay, no momentum);
    learning-rate schedules and ``global_step`` advance.
    """
    strategy = module.trainer.strategy
    if isinstance(strategy, RLHFStrategy):
        strategy.skip_update(child)  # the gradients are in its engine
        return
    for parameter in module.get_submodule(child).parameters():
        parameter.grad = None  # an optimizer ignores parameters without a gradient
