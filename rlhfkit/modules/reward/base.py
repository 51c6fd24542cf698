"""``ScalarModule``: what modules that train a :class:`~rlhfkit.models.ScalarModel` share."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import TokenBatch
from rlhfkit.losses import LossOutput
from rlhfkit.models import load_scalar_model
from rlhfkit.models.heads import scalar_forward
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.reward.calibration import Calibration
from rlhfkit.modules.router_loss import with_router_loss
from rlhfkit.validation import check_number


class ScalarModule(PolicyModule):
    """Training and validation of a model that says numbers instead of tokens.

    The model is ``self.policy``, the name that all modules, strategies and exporters know it by. A subclass says what
    it reads off the model (:meth:`scores`), how that is trained (:meth:`loss`), and which probabilities it claims
    (:meth:`claims`).

    Args:
        model: Folder or hub name of a causal language model, or of a classifier of the right kind.
        lr: Peak learning rate.
        head_std: Spread of a new head, see :func:`~rlhfkit.models.load_scalar_model`.
        **kwargs: See :class:`PolicyModule`.
    """

    stepwise: ClassVar[bool] = False
    """Whether steps are judged, and not whole sequences."""

    def __init__(self, model: str, *, lr: float, head_std: float | None = None, **kwargs: Any) -> None:
        super().__init__(model, lr=lr, **kwargs)
        check_number("head_std", head_std, minimum=0, optional=True)
        self.head_std = head_std
        self._router_loss: Tensor | None = None  # of the last forward pass

    def build_policy(self) -> nn.Module:
        """Load the model; override to wrap or change it."""
        model = load_scalar_model(
            self.model_name,
            stepwise=self.stepwise,
            head_std=self.head_std,
            dtype=self.model_dtype,
            attention=self.attention,
            gradient_checkpointing=self.gradient_checkpointing,
            lora=self.lora,
            quantization=self.quantization,
            trust_remote_code=self.trust_remote_code,
        )
        # Transformers' classifiers find the last token by skipping padding tokens. Where the end-of-sequence token is
        # the padding token they would read the one before it; without one they refuse padded batches instead.
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        model.config.get_text_config().pad_token_id = None if pad == end else pad
        return model

    def read(self, batch: TokenBatch, mask: Tensor) -> Tensor:
        """What the model says at some tokens; in training, the load of a mixture of experts is balanced with it.

        Args:
            batch: B sequences.
            mask: (B, T) bool, the tokens that are read.

        Returns:
            (B, T) float32, raw; 0 elsewhere.
        """
        out = scalar_forward(self.policy, batch, mask, router_aux_loss=self.balances_routers)
        self._router_loss = out.router_aux_loss
        return out.values

    # ------------------------------------------------------------------ what a subclass says
    # Abstract. A LightningModule is no abc.ABC, and a user's half-written subclass may be built and looked at, so each
    # raises when it is asked.

    def scores(self, batch: Any) -> Tensor:
        """What the model says about a batch, by :meth:`read`."""
        raise NotImplementedError(f"{type(self).__name__} has to define scores()")

    def loss(self, batch: Any, out: Tensor) -> LossOutput:
        """The objective of one micro-batch; the one method to override for another.

        Args:
            batch: B sequences.
            out: From :meth:`scores`.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define loss()")

    def claims(self, batch: Any, out: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities that the model gives to events, and whether they happened: (N,) each, of the counted ones."""
        raise NotImplementedError(f"{type(self).__name__} has to define claims()")

    # ------------------------------------------------------------------ steps

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """One micro-batch."""
        self._router_loss = None
        out = self.scores(batch)
        result = self.loss(batch, out)
        count = len(self.claims(batch, out.detach())[0])
        learned = torch.tensor(count > 0, device=out.device)
        result = with_router_loss(result, self._router_loss, learned, self.router_aux_loss_coef)
        self.log_step({"loss": result.loss.detach()})
        self.log_metrics(result.metrics, count)
        return result.loss

    def on_validation_epoch_start(self) -> None:
        """Begin to count."""
        self._calibration = Calibration(self.device)

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Mean loss over the validation data; the rest is counted."""
        out = self.scores(batch)
        self.count(batch, out)
        result = self.loss(batch, out)
        self.log("val/loss", result.loss, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=1)

    def count(self, batch: Any, out: Tensor) -> None:
        """Add a validation batch to what is logged at the end of the epoch.

        Args:
            batch: B sequences.
            out: From :meth:`scores`.
        """
        self._calibration.add(*self.claims(batch, out))

    def on_validation_epoch_end(self) -> None:
        """Log accuracy and calibration over the validation data of all ranks."""
        self._calibration.sums = self.sum_over_ranks(self._calibration.sums)
        self.log_dict({f"val/{name}": value for name, value in self._calibration.metrics().items()}, sync_dist=True)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum of a tensor over all ranks. A collective."""
        total = self.trainer.strategy.reduce(values, reduce_op="sum")
        assert isinstance(total, Tensor)
        return total
