"""``CriticModule``: a critic that is trained by ranks of its own, for :class:`~rlhfkit.roles.CriticPool`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import LossOutput, value_loss, weighted_metric
from rlhfkit.models import LoRA, ModelLoading
from rlhfkit.models.heads import critic_values, load_scalar_model
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.checkpointing import CheckpointMixin
from rlhfkit.modules.metrics import StepMetrics, as_metrics
from rlhfkit.modules.optim import Optimization
from rlhfkit.parts import GivenPart


class CriticModule(PolicyModule):
    """A critic, ``self.critic``, that learns returns which others have computed.

    Its batches are micro-batches of a ``PPOModule`` with values and returns, each with a factor of its loss.

    Args:
        model: Folder or hub name of the critic's initial model.
        build: Makes the critic in place of ``model``; picklable.
        lr: Peak learning rate (9e-6: OpenRLHF's default).
        value_clip: See :class:`~rlhfkit.modules.PPOModule`.
        value_coef: Factor of the loss.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`~rlhfkit.modules.PolicyModule`.
    """

    critic: nn.Module
    batch_types = ()

    def __init__(
        self,
        model: str,
        *,
        build: Callable[[], nn.Module] | None = None,
        lr: float = 9e-6,
        value_clip: float | None = 0.5,
        value_coef: float = 1.0,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        self.build = build
        self.value_clip = value_clip
        self.value_coef = value_coef
        self.keep_plain(build=None)  # a function is in no checkpoint
        self._since_report = StepMetrics()

    def setup(self, stage: str) -> None:
        """Prepare exact resume."""
        CheckpointMixin.setup(self, stage)  # PolicyModule's also measures a policy

    def configure_model(self) -> None:
        """Build the critic, once."""
        if not hasattr(self, "critic"):
            self.critic = self.build_critic()

    def build_critic(self) -> nn.Module:
        """Load the critic, or make it with ``build``."""
        if self.build is not None:
            return self.build()
        return load_scalar_model(
            self.model_name,
            dtype=self.model_dtype,
            lora=self.lora,
            loading=self.loading,
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: the training ranks check the rows of their batches."""

    def value_output(self, batch: Experience) -> Tensor:
        """(B, T-1) float32 values of the states in which tokens were chosen; 0 outside the mask."""
        return critic_values(self.critic, batch, batch.action_mask)[0]

    def training_step(self, batch: tuple[Experience, float], batch_idx: int) -> Tensor:
        """Compute the value loss of one micro-batch."""
        rows, scale = batch
        values, router_loss = critic_values(self.critic, rows, rows.action_mask, router_aux_loss=self.balances_routers)
        found = self.value_loss(rows, values)
        metrics = {**found.metrics, "value/loss": weighted_metric(found.loss * scale, 1.0)}
        result = LossOutput(self.value_coef * found.loss, metrics)
        if router_loss is not None:
            from rlhfkit.modules.parts.router_loss import with_critic_router

            result = with_critic_router(self, result, router_loss, rows.action_mask)
        self._since_report.add("report", as_metrics(result.metrics, rows.action_mask.sum(), self.device))
        return result.loss * scale

    def value_loss(self, batch: Experience, values: Tensor) -> LossOutput:
        """Compute the loss from current values, (B, T-1)."""
        mask, denominator = batch.action_mask, batch.token_denominator
        old, returns = batch.columns["values"], batch.columns["returns"]
        return value_loss(values, old, returns, mask, clip=self.value_clip, denominator=denominator)

    def take_metrics(self) -> Mapping[str, Tensor]:
        """The metrics of all micro-batches since the last call, over all ranks. A collective."""
        return self._since_report.take()
