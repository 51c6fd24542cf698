"""``KLTarget`` and ``StopEarly``: control of the policy's distance beyond a fixed weight of the KL penalty."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import kl_estimate
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.metrics import StepMean
from rlhfkit.modules.optim import skip_update
from rlhfkit.modules.parts.kl_penalty import KLPart
from rlhfkit.parts import Part, Stage, overriding
from rlhfkit.validation import check_integer, check_number


class KLTarget(Part):
    """Moves the weight of the KL penalty towards a KL to the reference of ``target``, after each iteration.

    ``β ← β (1 + clip(KL / target - 1, ±0.2) n / horizon)`` with n samples an iteration (Ziegler et al., 2019,
    arXiv:1909.08593, section 2.2, where KL is that of a whole answer). β is logged as ``policy/kl_coef``. Example::

        PPOModule("sft", kl_coef=0.01, parts=[KLTarget(0.02)])

    Args:
        target: KL in nats per token, the mean over the tokens of all ranks.
        horizon: Samples in which β may change by a fifth (10000: OpenRLHF's).

    Raises:
        ValueError: If an argument is out of range, or the module has no KL penalty.
    """

    stage = Stage.CREDIT  # after the penalty was taken with the coefficient so far, before tokens are left out
    reads = ("old_logprobs", "ref_logprobs")

    def __init__(self, target: float, *, horizon: int = 10000) -> None:
        check_number("KLTarget.target", target, above=0)
        check_integer("KLTarget.horizon", horizon, minimum=1, why="it is in samples")
        self.target = target
        self.horizon = horizon

    def attach(self, module: Any) -> None:
        """Find the penalty."""
        super().attach(module)
        penalty = next((part for part in module.parts if isinstance(part, KLPart)), None)
        if penalty is None:
            raise ValueError(
                f"KLTarget({self.target}) moves the weight of a KL penalty, and {type(module).__name__} has none here: "
                "give a kl_coef to start from, or KLPenalty, or leave it out"
            )
        if callable(penalty.coef):
            raise ValueError(
                "KLTarget moves the weight of the KL penalty, which is a function of the step: leave one out"
            )
        self._penalty = penalty

    def adapted(self, coef: float, kl: float, samples: int) -> float:
        """The next β from this one, the KL in nats per token and the number of samples."""
        error = kl / self.target - 1.0
        return coef * (1.0 + min(max(error, -0.2), 0.2) * samples / self.horizon)

    def prepare(self, rows: Experience) -> Experience:
        """Move β by the KL of all ranks' tokens."""
        old, reference = rows.old_logprobs, rows.columns["ref_logprobs"]
        assert old is not None
        kl = kl_estimate(old, reference, estimator=self._penalty.estimator, mask=rows.action_mask)
        self._penalty.coef = self.adapted(self._coef, self.module.ranks.mean(rows, kl), len(rows.summary))
        return rows

    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Mapping[str, Any]:
        """β."""
        return {"policy/kl_coef": torch.tensor(self._coef)}

    def state_dict(self) -> dict[str, float]:
        """β."""
        return {"coef": self._coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with it."""
        self._penalty.coef = state["coef"]

    @property
    def _coef(self) -> float:
        assert not callable(self._penalty.coef)
        return self._penalty.coef


class StopEarly(Part):
    """Updates the policy no more in an iteration once it is too far from the one that began it.

    The distance is k3 of old to new over all tokens of an update, measured while its gradient is computed; an update
    that exceeds the limit is skipped too, as in Spinning Up and Stable-Baselines3: it and the later ones of the
    iteration leave the policy bitwise unchanged. A critic is still updated, unless it shares the policy's trunk.
    ``policy/kl_early_stopped`` is the share of updates that were skipped. Example::

        PPOModule("sft", parts=[StopEarly(0.015)])

    Args:
        limit: Nats per token (0.015 in Spinning Up; OpenRLHF has none).

    Raises:
        ValueError: If ``limit`` is not positive, or beside a :class:`LogLinear`, which has no old log-probs.
    """

    stage = Stage.SCORE  # first of all

    def __init__(self, limit: float) -> None:
        check_number("StopEarly.limit", limit, above=0)
        self.limit = limit
        self.stopped = False
        """Whether the policy is not updated for the rest of the iteration."""
        self._distance = StepMean()

    def attach(self, module: Any) -> None:
        """Check that later updates know the policy before the iteration."""
        super().attach(module)
        if any(overriding([part], "old_logprobs") for part in module.parts):
            raise ValueError(
                "StopEarly compares with old log-probs, for which LogLinear makes no forward pass: leave out "
                "the one or the other"
            )

    def prepare(self, rows: Experience) -> Experience:
        """Begin an iteration."""
        self.stopped, self._distance = False, StepMean()
        return rows

    @torch.no_grad()
    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Mapping[str, Any]:
        """Add the distance of one micro-batch; the first update has no old log-probs, and distance 0."""
        if not self.stopped and batch.old_logprobs is not None:
            kl = kl_estimate(batch.old_logprobs, out.logprobs.detach(), mask=batch.action_mask)
            self._distance.add(kl.sum(), batch)
        return {}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Skip the update if the policy is too far, the same on all ranks. A collective."""
        if not self.stopped:
            self.stopped = self._distance.take(pl_module) > self.limit
        pl_module.log_means({"policy/kl_early_stopped": torch.full((), float(self.stopped), device=pl_module.device)})
        if self.stopped:
            skip_update(pl_module, "policy")

    def state_dict(self) -> dict[str, bool]:
        """Whether it has stopped, for a checkpoint within an iteration."""
        return {"stopped": self.stopped}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """Continue so."""
        self.stopped = state["stopped"]
