"""``RewardModule``: a Bradley-Terry reward model, trained on preference pairs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.batch import TokenBatch
from rlhfkit.data.formats import PreferenceBatch
from rlhfkit.distributed import all_reduce
from rlhfkit.losses import LossOutput, bradley_terry_loss
from rlhfkit.models import LoRA, ModelLoading, reward_output
from rlhfkit.models.forward import unwrap
from rlhfkit.models.heads import last_tokens
from rlhfkit.modules.optim import Optimization
from rlhfkit.modules.reward.base import ScalarModule
from rlhfkit.parts import GivenPart
from rlhfkit.validation import check_number

MIN_STD = 1e-8
"""Smallest standard deviation that rewards are divided by (OpenRLHF's)."""


class RewardModule(ScalarModule):
    """A reward model, whose output at the last token is larger for the preferred answer.

    The loss is the mean over the pairs of the whole optimizer step, with the margin where the data has one (Llama 2,
    Touvron et al., 2023, arXiv:2307.09288, section 3.2.2).

    Every validation epoch stores mean and standard deviation of the rewards of all validation answers in the model's
    configuration (``mean`` and ``std``, OpenRLHF's names). They normalize the rewards of :meth:`predict_step` and
    :class:`~rlhfkit.rewards.models.ModelReward`; loss and metrics, and all rewards without validation data, are raw.

    Args:
        model: Folder or hub name of a causal language model, or of a reward model to continue with.
        lr: Peak learning rate (9e-6: OpenRLHF's default for reward models).
        center_rewards_coefficient: Weight of the squared sum of both rewards, which keeps rewards near 0; TRL suggests
            0.01.
        label_smoothing: Probability that a preference is wrong, below 0.5; TRL's and OpenRLHF's have no such option.
        head_std: Standard deviation of a new head, see :func:`~rlhfkit.models.load_scalar_model`.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`~rlhfkit.modules.PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    batch_types = (PreferenceBatch,)

    def __init__(
        self,
        model: str,
        *,
        lr: float = 9e-6,
        center_rewards_coefficient: float = 0.0,
        label_smoothing: float = 0.0,
        head_std: float | None = None,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        super().__init__(
            model, lr=lr, head_std=head_std, optimization=optimization, lora=lora, loading=loading, parts=parts
        )
        check_number("center_rewards_coefficient", center_rewards_coefficient, minimum=0)
        check_number("label_smoothing", label_smoothing, minimum=0, below=0.5)
        self.center_rewards_coefficient = center_rewards_coefficient
        self.label_smoothing = label_smoothing

    def scores(self, batch: TokenBatch) -> Tensor:
        """(2B,) raw rewards."""
        return self.read(batch, last_tokens(batch)).sum(1)

    def loss(self, batch: PreferenceBatch, out: Tensor) -> LossOutput:
        """The loss of B pairs with (2B,) raw rewards; override it for another objective."""
        return bradley_terry_loss(
            batch.chosen(out),
            batch.rejected(out),
            margin=None if batch.margins is None else batch.chosen(batch.margins),
            centering=self.center_rewards_coefficient,
            label_smoothing=self.label_smoothing,
            mask=batch.pair_mask,
            denominator=batch.pair_denominator,
        )

    def predictions(self, batch: PreferenceBatch, out: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted probability (at least 1/2) that the answer with the larger reward is preferred, and if it is."""
        difference = (batch.chosen(out) - batch.rejected(out))[batch.pair_mask]
        return difference.abs().sigmoid(), difference > 0  # a tie is wrong

    def number_of_cases(self, batch: PreferenceBatch, out: Tensor) -> Tensor:
        """Pairs."""
        return batch.pair_mask.sum()

    def predict_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """(B,) rewards, normalized by the configuration's mean and standard deviation."""
        with torch.no_grad():
            return reward_output(self.policy, batch, normalized=True).cpu()

    # ------------------------------------------------------------------ mean and standard deviation

    def on_validation_epoch_start(self) -> None:
        """Reset accuracy, calibration and moments."""
        super().on_validation_epoch_start()
        self._moments = torch.zeros(3, dtype=torch.float64, device=self.device)

    def update_metrics(self, batch: PreferenceBatch, out: Tensor) -> None:
        """Add a validation batch to accuracy, calibration and moments."""
        super().update_metrics(batch, out)
        rewards = out[batch.pair_mask.repeat_interleave(2)].double()
        self._moments += torch.stack([torch.ones_like(rewards), rewards, rewards.square()]).sum(-1)

    def on_validation_epoch_end(self) -> None:
        """Log accuracy, calibration and moments, and store the moments in the configuration."""
        super().on_validation_epoch_end()
        count, total, squares = all_reduce(self._moments).tolist()
        if self.trainer.sanity_checking or count < 2:
            return
        mean = total / count
        std = max((squares - total * mean) / (count - 1), 0.0) ** 0.5
        self.log_dict({"val/reward_mean": mean, "val/reward_std": std}, sync_dist=True)
        self.constants = (mean, max(std, MIN_STD))

    @property
    def constants(self) -> tuple[float, float] | None:
        """Mean and standard deviation in the model's configuration, which normalize rewards; ``None``: not set."""
        config: Any = unwrap(self.policy).config
        mean, std = getattr(config, "mean", None), getattr(config, "std", None)
        return None if mean is None or std is None else (mean, std)

    @constants.setter
    def constants(self, values: tuple[float, float] | None) -> None:
        config: Any = unwrap(self.policy).config
        config.mean, config.std = values or (None, None)

    def on_fit_start(self) -> None:
        """Remove the constants of an earlier training, unless it is resumed."""
        super().on_fit_start()
        if self.trainer.ckpt_path is None:
            self.constants = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the normalization constants."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["reward_constants"] = self.constants

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the normalization constants."""
        super().on_load_checkpoint(checkpoint)
        self.constants = checkpoint["reward_constants"]
