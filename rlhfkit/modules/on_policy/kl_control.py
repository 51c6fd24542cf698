"""How far the policy may go in one iteration: the KL at which its updates stop, and how a step passes a child by."""

from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import kl_estimate
from rlhfkit.validation import check_number


class KLEarlyStopping:
    """Says when the policy has gone far enough from the one that began the iteration.

    The distance is k3 of old to new over all tokens of an update, as measured while its gradient is computed and so
    before the update is made: where it is above the limit that update and all later ones of the iteration are not.
    That is how Spinning Up, Stable-Baselines3 and TRL's PPO stop.

    Args:
        limit: Nats per token, positive; ``None``: never.

    Raises:
        ValueError: If the limit is not positive.
    """

    def __init__(self, limit: float | None) -> None:
        check_number("kl_early_stop", limit, above=0, optional=True)
        self.limit = limit
        self.stopped = False
        """Whether the policy stands still for the rest of the iteration."""
        self._distance: Tensor | float = 0.0

    def begin(self) -> None:
        """A new iteration."""
        self.stopped, self._distance = False, 0.0

    @torch.no_grad()
    def measure(self, batch: Experience, logprobs: Tensor) -> None:
        """Look at one micro-batch.

        Args:
            batch: With log-probs before the iteration, except in its first update, where there is no distance yet.
            logprobs: (B, T-1) of the policy now.
        """
        if self.limit is None or self.stopped or batch.old_logprobs is None:
            return
        distance = kl_estimate(batch.old_logprobs, logprobs.detach(), mask=batch.action_mask).sum()
        self._distance = self._distance + distance / max(batch.step_tokens or float(batch.action_mask.sum()), 1.0)

    def decide(self, module: Any) -> bool:
        """Whether the update that is about to be made is too late. The same on all ranks; a collective.

        Args:
            module: The LightningModule.
        """
        if self.limit is None or self.stopped:
            return self.stopped
        total = torch.as_tensor(self._distance, dtype=torch.float32, device=module.device)
        self._distance = 0.0
        self.stopped = float(module.trainer.strategy.reduce(total, reduce_op="sum")) > self.limit
        return self.stopped


def skip_update(module: Any, child: str) -> None:
    """Let the optimizer step that is about to be made leave a child alone; for ``on_before_optimizer_step``.

    Its gradients are dropped. Weights and optimizer state stay bitwise as they are: no weight decay, and no momentum of
    earlier steps either. Learning-rate schedules and ``global_step`` go on.

    Args:
        module: The LightningModule.
        child: Name of one of its children that is trained.
    """
    skip_update = getattr(
        module.trainer.strategy, "skip_update", None
    )  # RLHFDeepSpeedStrategy: gradients are its engine's
    if skip_update is not None:
        skip_update(child)
        return
    for parameter in getattr(module, child).parameters():
        parameter.grad = None  # an optimizer leaves parameters without gradient alone
