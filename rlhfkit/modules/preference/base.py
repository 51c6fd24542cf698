"""``PreferenceModule``: the base of the modules that learn from pairs of answers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.formats import PreferenceBatch
from rlhfkit.losses import LossOutput, sequence_logprobs
from rlhfkit.losses.metrics import share_metric
from rlhfkit.models import PolicyOutput, policy_output
from rlhfkit.modules.base import PolicyModule
from rlhfkit.parts import Part


def reference_part(model: str | None, *, precompute: bool) -> Part:
    """The part that gives log-probs of a reference model, during training or computed before it."""
    from rlhfkit.modules.parts.answer_reference import AnswerReference, PrecomputedReference

    return PrecomputedReference(model) if precompute else AnswerReference(model)


def reference_of(module: PolicyModule) -> Any:
    """The :class:`~rlhfkit.modules.parts.answer_reference.AnswerReference` of a module; ``None``: it has none."""
    return next((part for part in module.parts if "ref_logprobs" in part.writes), None)


def with_its_arguments(
    module: PolicyModule, loss: Callable[..., LossOutput], example: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Callable[..., LossOutput]:
    """A loss with its own arguments, which become attributes of the module.

    It is computed once of ``example``, what it is given beside them, so that bad arguments raise before training.
    """
    for name, value in arguments.items():
        setattr(module, name, value)
    made = partial(loss, **arguments)
    made(**example)
    return made


class PreferenceModule(PolicyModule):
    """A policy that learns which of two answers is better; a subclass defines the :meth:`loss`.

    Losses are means over the pairs of the whole optimizer step, independent of micro-batches, ranks, padding and
    packing. Logged for the pairs of each step: ``loss``, ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins``,
    ``rewards/accuracies`` (share of pairs whose chosen answer has the larger reward), ``logps/chosen``,
    ``logps/rejected`` (nats per answer). The suffix ``_epoch`` marks exact means over the epoch, the prefix ``val/``
    those over the validation pairs.
    """

    batch_types = (PreferenceBatch,)
    without_dropout = True

    # ------------------------------------------------------------------ one micro-batch

    def prepare(self, batch: PreferenceBatch) -> PreferenceBatch:
        """Add inputs of the loss besides the policy's log-probs, e.g. those of a reference; none here."""
        return batch

    def policy_output(self, batch: PreferenceBatch) -> PolicyOutput:
        """Log-probs of the tokens of both answers; their shared prefix goes through the model once."""
        balance = self.balances_routers
        return policy_output(self.policy, batch, batch.loss_mask, router_aux_loss=balance)

    def answer_logprobs(self, batch: PreferenceBatch, logprobs: Tensor) -> Tensor:
        """(2B,) log-probs of the answers of B pairs, summed over their tokens from ``logprobs``, (2B, T-1)."""
        return sequence_logprobs(logprobs, batch.loss_mask)

    def pair_arguments(self, batch: PreferenceBatch, out: PolicyOutput) -> dict[str, Any]:
        """Keyword arguments that all losses of pairs take, e.g. :func:`~rlhfkit.losses.simpo_loss`.

        Log-probs and lengths of both answers, and the number of pairs of the optimizer step.
        """
        logps, lengths = self.answer_logprobs(batch, out.logprobs), batch.loss_mask.sum(-1)
        return {
            "chosen": batch.chosen(logps),
            "rejected": batch.rejected(logps),
            "chosen_lengths": batch.chosen(lengths),
            "rejected_lengths": batch.rejected(lengths),
            "mean_chosen_length": batch.mean_chosen_length,
            "mask": batch.pair_mask,
            "denominator": batch.pair_denominator,
        }

    def loss(self, batch: PreferenceBatch, out: PolicyOutput) -> LossOutput:
        """The loss of one micro-batch of B pairs, after :meth:`prepare`; override it for another objective."""
        return self._pair_loss(**self.pair_arguments(batch, out))

    def _pair_loss(self, **arguments: Any) -> LossOutput:
        """The loss of pairs, from :meth:`pair_arguments`."""
        # Abstract by hand: a LightningModule is no abc.ABC, and a subclass may override loss() instead.
        raise NotImplementedError(f"{type(self).__name__} has to define loss()")

    def learn_by(
        self, pair_loss: Callable[..., LossOutput], example: Mapping[str, Any] | None = None, /, **arguments: Any
    ) -> None:
        """Set the loss, such as :func:`~rlhfkit.losses.simpo_loss`; its arguments become attributes of the module.

        ``example``: what it is given beside :meth:`pair_arguments`, of one pair, to compute its loss before training.

        Raises:
            ValueError: If the loss refuses an argument.
        """
        zero, one = torch.zeros(1), torch.ones(1)
        pair = {"chosen": zero, "rejected": zero, "chosen_lengths": one, "rejected_lengths": one, **(example or {})}
        self._pair_loss = with_its_arguments(self, pair_loss, pair, arguments)  # type: ignore[method-assign]
        self.attach_parts()

    # ------------------------------------------------------------------ hooks

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        """Compute and log the loss of one micro-batch."""
        pairs = batch.pair_mask.sum()
        batch = self.prepare(batch)
        out = self.policy_output(batch)
        result = self.with_terms(self.loss(batch, out), batch, out)
        loss = share_metric(result.loss, pairs, batch.pair_denominator)
        self.log_step({"loss": loss, **result.metrics, **self.on_bar(result.metrics)}, pairs)
        self.log_metrics({**result.metrics, **self.observed(batch, out)}, pairs, suffix="_epoch")
        return result.loss

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Log mean loss and metrics over the validation pairs."""
        pairs = batch.pair_mask.sum()
        batch = self.prepare(batch)
        result = self.loss(batch, self.policy_output(batch))
        loss = share_metric(result.loss, pairs, batch.pair_denominator)
        self.log_metrics({"loss": loss}, pairs, prefix="val/", prog_bar=True)
        self.log_metrics(result.metrics, pairs, prefix="val/")

    def predict_step(self, batch: PreferenceBatch, batch_idx: int) -> dict[str, Tensor]:
        """Log-probs of both answers of each pair, ``logps/chosen`` and ``logps/rejected``, (B,) each."""
        with torch.no_grad():
            batch = self.prepare(batch)
            logps = self.answer_logprobs(batch, self.policy_output(batch).logprobs)
        return {"logps/chosen": batch.chosen(logps).cpu(), "logps/rejected": batch.rejected(logps).cpu()}
