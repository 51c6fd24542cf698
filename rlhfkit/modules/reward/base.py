"""``ScalarModule``: the base of the modules that train a reward model, and ``Calibration`` of its predictions."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import TokenBatch
from rlhfkit.distributed import all_reduce
from rlhfkit.losses import LossOutput
from rlhfkit.losses.metrics import share_metric
from rlhfkit.models import LoRA, ModelLoading, load_scalar_model
from rlhfkit.models.heads import scalar_forward
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.optim import Optimization
from rlhfkit.parts import GivenPart
from rlhfkit.validation import check_number

BINS = 20
"""Bins of predicted probability."""


class ScalarModule(PolicyModule):
    """Training and validation of a :class:`~rlhfkit.models.ScalarModel`, whose outputs are numbers instead of tokens.

    The model is ``self.policy``, the name that strategies and exporters use. A subclass defines which outputs are used
    (:meth:`scores`), the :meth:`loss`, and the probabilities that they predict (:meth:`predictions`).

    Args:
        model: Folder or hub name of a causal language model, or of a classifier of the right kind.
        lr: Peak learning rate (9e-6: OpenRLHF's default for reward models).
        head_std: Standard deviation of a new head, see :func:`~rlhfkit.models.load_scalar_model`.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`~rlhfkit.modules.PolicyModule`.
    """

    stepwise: ClassVar[bool] = False
    """Whether steps are scored instead of whole sequences."""

    def __init__(
        self,
        model: str,
        *,
        lr: float = 9e-6,
        head_std: float | None = None,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        check_number("head_std", head_std, minimum=0, optional=True)
        self.head_std = head_std
        self.attach_parts()

    def build_policy(self) -> nn.Module:
        """Load the model; override to wrap or change it."""
        model = load_scalar_model(
            self.model_name,
            stepwise=self.stepwise,
            head_std=self.head_std,
            dtype=self.model_dtype,
            lora=self.lora,
            loading=self.loading,
        )
        # Transformers' classifiers find the last token by skipping padding tokens. Where the end-of-sequence token is
        # the padding token they would read the one before it; without one they refuse padded batches instead.
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        model.config.get_text_config().pad_token_id = None if pad == end else pad
        return model

    def read(self, batch: TokenBatch, mask: Tensor) -> Tensor:
        """(B, T) float32 raw outputs at the tokens of ``mask``, (B, T) bool; 0 at other tokens.

        In training it also computes the router's loss.
        """
        out = scalar_forward(self.policy, batch, mask, router_aux_loss=self.balances_routers)
        self.router_loss = out.router_aux_loss
        return out.values

    # ------------------------------------------------------------------ abstract
    # A LightningModule is no abc.ABC, so an incomplete subclass can be built; these raise when they are called.

    def scores(self, batch: Any) -> Tensor:
        """Outputs of the model that the loss uses, by :meth:`read`."""
        raise NotImplementedError(f"{type(self).__name__} has to define scores()")

    def loss(self, batch: Any, out: Tensor) -> LossOutput:
        """The loss of one micro-batch; ``out`` is the result of :meth:`scores`."""
        raise NotImplementedError(f"{type(self).__name__} has to define loss()")

    def predictions(self, batch: Any, out: Tensor) -> tuple[Tensor, Tensor]:
        """(N,) predicted probabilities of events, and (N,) whether they happened."""
        raise NotImplementedError(f"{type(self).__name__} has to define predictions()")

    def number_of_cases(self, batch: Any, out: Tensor) -> Tensor:
        """Scalar, N of :meth:`predictions`; override it where N is known without waiting for the device."""
        return torch.tensor(len(self.predictions(batch, out.detach())[0]), device=out.device)

    # ------------------------------------------------------------------ steps

    def _loss_metric(self, batch: TokenBatch, loss: Tensor, count: Tensor) -> dict[str, Tensor]:
        """The loss as a mean over cases, of which the batch has ``count``."""
        denominator = batch.token_denominator if self.stepwise else batch.sequence_denominator
        return {"loss": share_metric(loss, count, denominator)}

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """Compute and log the loss of one micro-batch."""
        self.router_loss = None
        out = self.scores(batch)
        result = self.with_terms(self.loss(batch, out), batch, out)
        count = self.number_of_cases(batch, out)
        self.log_step(self._loss_metric(batch, result.loss, count) | self.on_bar(result.metrics), count)
        self.log_metrics({**result.metrics, **self.observed(batch, out)}, count)
        return result.loss

    def on_validation_epoch_start(self) -> None:
        """Reset accuracy and calibration."""
        self._calibration = Calibration(self.device)

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Log the mean loss over the validation data, and update the other metrics."""
        out = self.scores(batch)
        self.update_metrics(batch, out)
        result = self.loss(batch, out)
        count = self.number_of_cases(batch, out)
        self.log_metrics(self._loss_metric(batch, result.loss, count), count, prefix="val/", prog_bar=True)

    def update_metrics(self, batch: Any, out: Tensor) -> None:
        """Add a validation batch, with its :meth:`scores`, to accuracy and calibration."""
        self._calibration.add(*self.predictions(batch, out))

    def on_validation_epoch_end(self) -> None:
        """Log accuracy and calibration over the validation data of all ranks."""
        self._calibration.sums = all_reduce(self._calibration.sums)
        self.log_dict({f"val/{name}": value for name, value in self._calibration.metrics().items()}, sync_dist=True)


class Calibration:
    """Accuracy, expected calibration error and Brier score of predicted probabilities.

    The expected calibration error is that of Guo et al. (2017, arXiv:1706.04599, equation 3) with 20 equal bins of the
    predicted probability; the Brier score (1950) is ``mean (p - y)²``. Adding the sums of all ranks gives the values
    over all data.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(BINS, 5, dtype=torch.float64, device=device)
        """(20, 5): in each bin the number of cases, and the sums of p, y, (p - y)² and of correct predictions."""

    def add(self, probability: Tensor, outcome: Tensor) -> None:
        """Count cases with predicted probabilities p (N,) and outcomes y (N,): 0 or 1, or known probabilities."""
        p, y = probability.detach().double(), outcome.detach().double()
        correct = ((p >= 0.5) == (y > 0.5)).double()
        case = torch.stack([torch.ones_like(p), p, y, (p - y).square(), correct], -1)
        self.sums.index_add_(0, (p * BINS).long().clamp(max=BINS - 1), case)

    def metrics(self) -> dict[str, float]:
        """``accuracy``, ``ece`` and ``brier``, each in [0, 1]; 0 without cases."""
        count, p, y, squares, correct = self.sums.unbind(-1)
        total = count.sum().clamp(min=1.0)
        return {
            "accuracy": float(correct.sum() / total),
            "ece": float((p - y).abs().sum() / total),
            "brier": float(squares.sum() / total),
        }
