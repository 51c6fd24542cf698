"""Learning from single answers, each labelled desirable or not: ``KTOModule`` and ``BCOModule``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from rlhfkit.data.batch import TokenBatch
from rlhfkit.data.formats import ReferencedBatch, UnpairedBatch, UnpairedExample, prompt_tokens
from rlhfkit.data.loaders.steps import ExampleTable
from rlhfkit.distributed import all_reduce, full_parameters
from rlhfkit.losses import LossOutput, bco_loss, kto_kl_estimate, kto_loss, sequence_logprobs
from rlhfkit.losses.metrics import share_metric
from rlhfkit.losses.preference.unpaired import KTOLossType, density_ratio_weights, kto_kl_sums
from rlhfkit.models import LoRA, ModelLoading, policy_output
from rlhfkit.models.forward import unwrap
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.optim import Optimization
from rlhfkit.modules.precompute import tables_of
from rlhfkit.modules.preference.base import reference_of, reference_part, with_its_arguments
from rlhfkit.parts import GivenPart
from rlhfkit.validation import check_number

ADVISED_RATIO = (1.0, 1.5)
"""The paper's range for ``λ_D n_D / (λ_U n_U)``, see :func:`~rlhfkit.losses.kto_loss`."""


class UnpairedModule(PolicyModule):
    """A policy that learns from single answers, each labelled desirable or not; a subclass says by which loss.

    Its constructor calls :meth:`learn_by`, or it overrides :meth:`loss`.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate.
        ref_model: Folder or hub name of the reference; ``None``: ``model``.
        precompute_ref_log_probs: Compute the reference's log-probs once, before training; no reference model is kept,
            see :class:`~rlhfkit.modules.parts.answer_reference.PrecomputedReference`.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`~rlhfkit.modules.PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    beta: float
    desirable_weight: float
    undesirable_weight: float
    kl: Tensor
    """() float32, reference point of the current optimizer step; 0 for losses without one."""
    has_reference_point = False
    """Whether the loss has a reference point, which the mismatched pairs of a step estimate."""
    batch_types = (UnpairedBatch,)
    without_dropout = True

    def __init__(
        self,
        model: str,
        *,
        lr: float,
        ref_model: str | None = None,
        precompute_ref_log_probs: bool = False,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        self.own_parts = [reference_part(ref_model, precompute=precompute_ref_log_probs)]
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        self.ref_model_name = ref_model
        self.precompute_ref_log_probs = precompute_ref_log_probs
        # A buffer, so that a checkpoint within an optimizer step contains it.
        self.register_buffer("kl", torch.zeros(()))
        self._validation_kl = torch.zeros(())
        self._sums = torch.zeros(6)

    def learn_by(self, answer_loss: Callable[..., LossOutput], example: Mapping[str, Any], /, **arguments: Any) -> None:
        """Set the loss, such as :func:`~rlhfkit.losses.kto_loss`; its arguments become attributes of the module.

        ``example``: what it is given beside log-probs and labels, of one answer, to compute its loss before training.

        Raises:
            ValueError: If an argument is out of range.
        """
        check_number("beta", arguments["beta"], above=0)
        for name in ("desirable_weight", "undesirable_weight"):
            check_number(name, arguments[name], minimum=0)
        zero = torch.zeros(1)
        answer = {"logprobs": zero, "ref_logprobs": zero, "desirable": zero == 0, **example}
        self._answer_loss = with_its_arguments(self, answer_loss, answer, arguments)  # type: ignore[method-assign]
        self.attach_parts()

    # ------------------------------------------------------------------ forward

    def answer_logprobs(self, batch: TokenBatch, logprobs: Tensor) -> Tensor:
        """(B,) log-probs of completions from those of their tokens, (B, T-1); override it for another measure."""
        return sequence_logprobs(logprobs, batch.loss_mask)

    def _answer_logprobs(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """(B,) log-probs of completions under a model."""
        return self.answer_logprobs(batch, policy_output(model, batch, batch.loss_mask).logprobs)

    def reference_logprobs(self, batch: ReferencedBatch) -> Tensor:
        """(B,) reference log-probs of completions; RuntimeError if they should be in the data and are not."""
        logprobs: Tensor = reference_of(self).logprobs(batch)
        return logprobs

    @torch.no_grad()
    def kl_estimate(self, mismatched: Sequence[ReferencedBatch]) -> Tensor:
        """The reference point (nats per sequence, at least 0) from the mismatched pairs of all ranks. A collective.

        Raises ValueError if there are none.
        """
        if not mismatched:
            raise ValueError(
                "the batch that starts an optimizer step has no mismatched pairs: KTO needs answers to at least two "
                "different prompts in the data of UnpairedPreferenceDataModule, and in each optimizer step of a "
                "stream; loss_type='apo_zero_unpaired' does without"
            )
        sums = torch.zeros(2, device=self.device)
        for batch in mismatched:
            counted = batch.loss_mask.any(-1)
            policy = self._answer_logprobs(self.policy, batch)
            sums += kto_kl_sums(policy, self.reference_logprobs(batch), counted)
        return kto_kl_estimate(all_reduce(sums))

    def loss(self, batch: UnpairedBatch, logprobs: Tensor, ref_logprobs: Tensor, kl: Tensor) -> LossOutput:
        """The loss of one micro-batch; override it for another objective.

        Args:
            batch: B labelled answers.
            logprobs: (B,) log-probs under the policy.
            ref_logprobs: (B,) log-probs under the reference model.
            kl: Scalar, the reference point of the step; 0 for losses without one.
        """
        arguments = self.answer_arguments(batch, kl)
        return self._answer_loss(logprobs=logprobs, ref_logprobs=ref_logprobs, **arguments)

    def answer_arguments(self, batch: UnpairedBatch, kl: Tensor) -> dict[str, Any]:
        """Keyword arguments of the loss beside log-probs: labels, and the number of answers of the optimizer step."""
        return {
            "desirable": batch.desirable,
            "mask": batch.loss_mask.any(-1),
            "denominator": batch.sequence_denominator,
        }

    def _answer_loss(self, **arguments: Any) -> LossOutput:
        # Abstract by hand: a LightningModule is no abc.ABC, and a subclass may override loss() instead.
        raise NotImplementedError(f"{type(self).__name__} has to define loss()")

    def _evaluated(self, batch: UnpairedBatch, logprobs: Tensor, kl: Tensor) -> LossOutput:
        result = self.loss(batch, logprobs, self.reference_logprobs(batch), kl)
        self._sums = self._sums.to(self.device) + _class_sums(result.metrics)
        return result

    @staticmethod
    def _loss_metric(batch: UnpairedBatch, loss: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The loss as a mean over answers, and their number."""
        answers = batch.loss_mask.any(-1).sum()
        return {"loss": share_metric(loss, answers, batch.sequence_denominator)}, answers

    # ------------------------------------------------------------------ hooks

    def training_step(self, batch: UnpairedBatch, batch_idx: int) -> Tensor:
        """Compute and log the loss of one micro-batch; the first of a step estimates the reference point."""
        if self.has_reference_point and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.kl.copy_(self.kl_estimate(batch.mismatched))
        out = policy_output(self.policy, batch, batch.loss_mask, router_aux_loss=self.balances_routers)
        result = self._evaluated(batch, self.answer_logprobs(batch, out.logprobs), self.kl)
        result = self.with_terms(result, batch, out)
        self.log_step(*self._loss_metric(batch, result.loss))
        self.log_metrics(self.observed(batch, out), batch.loss_mask.any(-1).sum(), suffix="_epoch")
        if "aux_loss" in result.metrics:
            self.log_step({"aux_loss": result.metrics["aux_loss"]}, batch.loss_mask.sum())
        return result.loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log means over the answers of the step."""
        super().on_before_optimizer_step(optimizer)
        metrics = self._class_metrics(self.kl)
        self.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)
        if self.trainer.progress_bar_callback is not None:
            margin = metrics["rewards/margins"]
            self.log("margin", margin, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)

    def on_validation_epoch_start(self) -> None:
        """Save the sums of training until validation ends."""
        self._training_sums, self._sums = self._sums, torch.zeros(6)

    def validation_step(self, batch: UnpairedBatch, batch_idx: int) -> None:
        """Log the mean loss over the validation answers; the first batch estimates the reference point."""
        if self.has_reference_point and batch_idx == 0:
            self._validation_kl = self.kl_estimate(batch.mismatched)
        logprobs = self._answer_logprobs(self.policy, batch)
        loss = self._evaluated(batch, logprobs, self._validation_kl.to(self.device)).loss
        self.log_metrics(*self._loss_metric(batch, loss), prefix="val/", prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        """Log means over the validation answers."""
        metrics = self._class_metrics(self._validation_kl)
        self.log_dict({f"val/{name}": value for name, value in metrics.items()}, batch_size=1)
        self._sums = self._training_sums

    def _class_metrics(self, kl: Tensor) -> dict[str, Tensor]:
        """Means of each class since the last call, over all ranks. A collective."""
        chosen_rewards, rejected_rewards, chosen_logps, rejected_logps, chosen, rejected = all_reduce(self._sums)
        self._sums = torch.zeros_like(self._sums)
        means = {
            "rewards/chosen": chosen_rewards / chosen.clamp(min=1),
            "rewards/rejected": rejected_rewards / rejected.clamp(min=1),
            "logps/chosen": chosen_logps / chosen.clamp(min=1),
            "logps/rejected": rejected_logps / rejected.clamp(min=1),
            "count/chosen": chosen,
            "count/rejected": rejected,
        }
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means | ({"kl": kl} if self.has_reference_point else {})

    def predict_step(self, batch: UnpairedBatch, batch_idx: int) -> Tensor:
        """(B,) implicit rewards ``β (log π(y|x) - log π_ref(y|x))``."""
        with torch.no_grad():
            logratio = self._answer_logprobs(self.policy, batch) - self.reference_logprobs(batch)
        return self.beta * logratio.cpu()


class KTOModule(UnpairedModule):
    """Kahneman–Tversky optimization (Ethayarajh et al., 2024, arXiv:2402.01306).

    The reference point, an estimate of ``KL(π ‖ π_ref)``, is exact over the optimizer step: the first micro-batch has
    the mismatched pairs of the whole step, which go through the policy once without gradient and are summed over all
    ranks before the first loss. So neither it nor the gradient depends on micro-batches, ranks, padding or packing.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's default).
        beta: β of the loss; 0.1 as in the paper and TRL.
        desirable_weight: λ_D, weight of the desirable answers. For unbalanced data a warning suggests a value.
        undesirable_weight: λ_U, weight of the other answers.
        loss_type: ``kto``, or ``apo_zero_unpaired`` (D'Oosterlinck et al., 2024, arXiv:2408.06266), which needs no
            mismatched pairs.
        ref_model: Folder or hub name of the reference; ``None``: ``model``.
        precompute_ref_log_probs: Compute the reference's log-probs once, before training; no reference model is kept.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`~rlhfkit.modules.PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        loss_type: KTOLossType = "kto",
        ref_model: str | None = None,
        precompute_ref_log_probs: bool = False,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        super().__init__(
            model,
            lr=lr,
            ref_model=ref_model,
            precompute_ref_log_probs=precompute_ref_log_probs,
            optimization=optimization,
            lora=lora,
            loading=loading,
            parts=parts,
        )
        self.has_reference_point = loss_type == "kto"
        self.learn_by(
            kto_loss,
            {"kl": self.kl if self.has_reference_point else None},
            beta=beta,
            desirable_weight=desirable_weight,
            undesirable_weight=undesirable_weight,
            loss_type=loss_type,
        )

    def answer_arguments(self, batch: UnpairedBatch, kl: Tensor) -> dict[str, Any]:
        """With the reference point, which ``apo_zero_unpaired`` has not."""
        return {**super().answer_arguments(batch, kl), "kl": kl if self.has_reference_point else None}

    def on_train_start(self) -> None:
        """Check the weights of the two classes."""
        super().on_train_start()
        parts = tables_of(self.trainer.train_dataloader, UnpairedExample)
        labels = [wanted for part in parts for wanted in part.values["desirable"]]
        self.check_weights(sum(labels), len(labels) - sum(labels))

    def check_weights(self, desirable: int, undesirable: int) -> None:
        """Warn if one class outweighs the other by more than the paper advises, given the numbers of their answers."""
        good, bad = self.desirable_weight, self.undesirable_weight
        if not (desirable and undesirable and good and bad):
            return
        ratio, (low, high) = good * desirable / (bad * undesirable), ADVISED_RATIO
        if low <= ratio <= high:
            return
        share = undesirable / desirable
        rank_zero_warn(
            f"the data has {desirable} desirable and {undesirable} undesirable answers; weighted by {good} and {bad} "
            f"they count {ratio:.2f} to 1, and the KTO paper advises {low} to {high}: use desirable_weight between "
            f"{low * bad * share:.2f} and {high * bad * share:.2f}, or undesirable_weight between "
            f"{good / share / high:.2f} and {good / share / low:.2f}"
        )


class BCOModule(UnpairedModule):
    """Binary classifier optimization (Jung et al., 2024, arXiv:2404.04656).

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
            (underlying distribution matching): by
            :func:`~rlhfkit.losses.preference.unpaired.density_ratio_weights` of each prompt's embedding, which is the
            mean of the input embeddings of its tokens in the initial policy. Needs a DataModule that holds the data in
            memory.
        ref_model: Folder or hub name of the reference; ``None``: ``model``.
        precompute_ref_log_probs: Compute the reference's log-probs once, before training; no reference model is kept.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`~rlhfkit.modules.PolicyModule`.

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
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        check_number("shift_decay", shift_decay, minimum=0, below=1)
        super().__init__(
            model,
            lr=lr,
            ref_model=ref_model,
            precompute_ref_log_probs=precompute_ref_log_probs,
            optimization=optimization,
            lora=lora,
            loading=loading,
            parts=parts,
        )
        self.shift_decay = shift_decay
        self.match_prompts = match_prompts
        self.prompt_weights: Tensor | None = None
        """(N,) float32, weights of all training answers, with ``match_prompts``."""
        self.moments = torch.zeros(4, dtype=torch.float64)
        """Moving averages of the mean rewards of desirable and of other answers, and the weight of each. Not a buffer,
        whose type would be that of the weights."""
        self._means: dict[str, Tensor] = {}
        self.learn_by(
            bco_loss,
            {"shift": self.reward_shift},
            beta=beta,
            desirable_weight=desirable_weight,
            undesirable_weight=undesirable_weight,
        )

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
        parts = tables_of(self.trainer.train_dataloader, UnpairedExample)
        if not parts:
            raise RuntimeError("match_prompts found no table of UnpairedExample: use UnpairedPreferenceDataModule")
        sizes = [len(part) for part in parts]
        if self.prompt_weights is None or len(self.prompt_weights) != sum(sizes):
            embeddings = torch.cat([self.prompt_embeddings(part) for part in parts])
            desirable = torch.tensor([wanted for part in parts for wanted in part.values["desirable"]])
            self.prompt_weights = density_ratio_weights(embeddings, desirable)
        for part, weights in zip(parts, torch.split(self.prompt_weights, sizes), strict=True):
            part.values["weight"] = weights

    @torch.no_grad()
    def prompt_embeddings(self, examples: ExampleTable[UnpairedExample]) -> Tensor:
        """(N, E) float32 embeddings of the prompts on the CPU; override it for another model. A collective."""
        table = cast(Any, unwrap(self.policy)).get_input_embeddings().weight
        with full_parameters([table]):
            rows = table.detach().float().cpu()
        prompts = (prompt_tokens(examples.answers[row]) for row in range(len(examples)))
        return torch.stack([rows[torch.tensor(prompt)].mean(0) for prompt in prompts])

    def answer_arguments(self, batch: UnpairedBatch, kl: Tensor) -> dict[str, Any]:
        """With the reward shift, and the weights of prompts."""
        return {**super().answer_arguments(batch, kl), "shift": self.reward_shift, "weights": batch.weights}

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


def _class_sums(metrics: Mapping[str, Tensor]) -> Tensor:
    """(6,) sums from the means of :func:`~rlhfkit.losses.kto_loss`: rewards, log-probs and counts of both classes."""
    counts = torch.stack([metrics["count/chosen"], metrics["count/rejected"]]).float()
    rewards = torch.stack([metrics["rewards/chosen"], metrics["rewards/rejected"]]).float()
    logps = torch.stack([metrics["logps/chosen"], metrics["logps/rejected"]]).float()
    return torch.cat([rewards * counts, logps * counts, counts])
