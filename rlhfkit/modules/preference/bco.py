"""``BCOModule``: binary classifier optimization (Jung et al., 2024, arXiv:2404.04656)."""

from typing import Any, Unpack, cast

import torch
from torch import Tensor

from rlhfkit.data.formats.unpaired import UnpairedBatch, UnpairedExamples
from rlhfkit.distributed import full_parameters
from rlhfkit.losses import LossOutput, bco_loss, density_ratio_weights
from rlhfkit.models import unwrap
from rlhfkit.modules.arguments import drop_hyperparameters
from rlhfkit.modules.policy_arguments import ReferenceArguments
from rlhfkit.modules.preference.kto import KTOModule
from rlhfkit.modules.preference.reference import data_sets
from rlhfkit.validation import check_number


class BCOModule(KTOModule):
    """Binary classifier optimization: learning from single answers, each labelled desirable or not.

    ``ℓ = -log σ(βΔ - δ)`` for desirable answers and ``-log σ(-(βΔ - δ))`` for the others, see
    :func:`~rlhfkit.losses.bco_loss`. The reward shift ``δ = (m_D + m_U) / 2`` is between the mean rewards of both
    classes. These are exponential moving averages over the optimizer steps so far, of all ranks, and 0 before the
    first step, when the policy is its reference; so the loss is the same for any micro-batches and ranks, and needs no
    mismatched answers and one forward pass less than KTO. (TRL takes the mean of all rewards so far, this micro-batch's
    among them.)

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (5e-7: TRL's default).
        beta: β of the loss; 0.1 as in TRL.
        desirable_weight: λ_D, weight of the desirable answers.
        undesirable_weight: λ_U, weight of the other answers.
        shift_decay: Decay d of the moving averages, ``m ← d m + (1 - d) mean``, in [0, 1); corrected for their start at
            0 as in Adam.
        match_prompts: Weight undesirable answers so that their prompts are distributed like those of desirable ones
            (underlying distribution matching): by :func:`~rlhfkit.losses.density_ratio_weights` of each prompt's
            embedding, which is the mean of the input embeddings of its tokens in the initial policy. Needs a
            DataModule that holds the data in memory.
        ref_model: Folder or hub name of the reference; ``None``: ``model``.
        precompute_ref_log_probs: Compute the reference's log-probs once, before training; no reference model is kept.
        **kwargs: Reference, optimizer and loading of the model:
            :class:`~rlhfkit.modules.policy_arguments.ReferenceArguments`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        lr: float = 5e-7,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        shift_decay: float = 0.9,
        match_prompts: bool = False,
        ref_model: str | None = None,
        precompute_ref_log_probs: bool = False,
        **kwargs: Unpack[ReferenceArguments],
    ) -> None:
        if "loss_type" in kwargs:
            raise TypeError("BCOModule has one loss and no loss_type; KTOModule and DPOModule have several")
        check_number("shift_decay", shift_decay, minimum=0, below=1)
        super().__init__(
            model,
            lr=lr,
            beta=beta,
            desirable_weight=desirable_weight,
            undesirable_weight=undesirable_weight,
            loss_type="apo_zero_unpaired",  # needs no mismatched answers either
            ref_model=ref_model,
            precompute_ref_log_probs=precompute_ref_log_probs,
            **kwargs,
        )
        drop_hyperparameters(["loss_type"], self, KTOModule)
        self.shift_decay = shift_decay
        self.match_prompts = match_prompts
        self.prompt_weights: Tensor | None = None
        """(N,) float32, weights of all training answers, with ``match_prompts``."""
        self.moments = torch.zeros(4, dtype=torch.float64)
        """Moving averages of the mean rewards of desirable and of other answers, and the weight of each. Not a buffer,
        whose type would be that of the weights."""
        self._means: dict[str, Tensor] = {}

    @property
    def reward_shift(self) -> Tensor:
        """Scalar float64 δ, from the steps so far; with only one class, half its mean."""
        means = self.moments[:2] / self.moments[2:].clamp(min=1e-12)
        return means.mean()

    def on_train_start(self) -> None:
        """Weight undesirable answers, with ``match_prompts``; raises RuntimeError if the data is not in memory."""
        super().on_train_start()
        if not self.match_prompts:
            return
        parts = [part for part in data_sets(self.trainer.train_dataloader) if isinstance(part, UnpairedExamples)]
        if not parts:
            raise RuntimeError("match_prompts found no UnpairedExamples: use UnpairedPreferenceDataModule")
        sizes = [len(part) for part in parts]
        if self.prompt_weights is None or len(self.prompt_weights) != sum(sizes):
            embeddings = torch.cat([self.prompt_embeddings(part) for part in parts])
            desirable = torch.tensor([wanted for part in parts for wanted in part.desirable])
            self.prompt_weights = density_ratio_weights(embeddings, desirable)
        for part, weights in zip(parts, torch.split(self.prompt_weights, sizes), strict=True):
            part.weights = weights

    @torch.no_grad()
    def prompt_embeddings(self, examples: UnpairedExamples) -> Tensor:
        """(N, E) float32 embeddings of the prompts on the CPU; override it for another model. A collective."""
        table = cast(Any, unwrap(self.policy)).get_input_embeddings().weight
        with full_parameters([table]):
            rows = table.detach().float().cpu()
        return torch.stack([rows[torch.tensor(examples.prompt(row))].mean(0) for row in range(len(examples))])

    def check_weights(self, desirable: int, undesirable: int) -> None:
        """The KTO paper's advice about weights is not for this loss."""

    def loss(self, batch: UnpairedBatch, logprobs: Tensor, ref_logprobs: Tensor, kl: Tensor) -> LossOutput:
        """The loss of one micro-batch of B answers; override it for another objective. ``kl`` is not used."""
        return bco_loss(
            logprobs,
            ref_logprobs,
            batch.desirable,
            self.reward_shift,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
            weights=batch.weights,
            mask=batch.loss_mask.any(-1),
            denominator=batch.sequence_denominator,
        )

    def _class_metrics(self, kl: Tensor) -> dict[str, Tensor]:
        self._means = super()._class_metrics(kl) | {"reward_shift": self.reward_shift.float()}
        return self._means

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log means over the answers of the step, and move the averages by them."""
        super().on_before_optimizer_step(optimizer)
        means = torch.stack([self._means["rewards/chosen"], self._means["rewards/rejected"]]).double()
        known = torch.stack([self._means["count/chosen"], self._means["count/rejected"]]) > 0
        new = torch.cat([means, torch.ones_like(means)])
        moments = self.moments.to(new.device)
        self.moments = torch.where(known.repeat(2), self.shift_decay * moments + (1 - self.shift_decay) * new, moments)

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the moving averages, and the weights of prompts, which are the initial policy's."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["reward_moments"] = self.moments.tolist()
        checkpoint["prompt_weights"] = self.prompt_weights

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the moving averages and the weights of prompts."""
        super().on_load_checkpoint(checkpoint)
        self.moments = torch.tensor(checkpoint["reward_moments"], dtype=torch.float64)
        self.prompt_weights = checkpoint["prompt_weights"]
