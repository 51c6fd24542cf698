"""Preference modules without a reference model: ``SimPOModule``, ``CPOModule`` and ``ORPOModule``.

The formulas and their papers stand in :mod:`rlhfkit.losses.preference.reference_free`.
"""

from typing import Any

import torch

from rlhfkit.data.formats.preferences import PreferenceBatch
from rlhfkit.losses import LossOutput, alphapo_loss, cpo_loss, orpo_loss
from rlhfkit.losses.preference.reference_free import CPOLossType
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.preference.base import PreferenceModule
from rlhfkit.validation import check_number

_ONE_PAIR = {
    "chosen": torch.zeros(1),
    "rejected": torch.zeros(1),
    "chosen_lengths": torch.ones(1),
    "rejected_lengths": torch.ones(1),
}
"""A pair whose loss shows every bad knob when a module is constructed, not an hour into the run."""


class SimPOModule(PreferenceModule):
    """SimPO (Meng et al., 2024, arXiv:2405.14734): the length-averaged log-prob is the reward.

    See :func:`~rlhfkit.losses.alphapo_loss`.

    Args:
        model: Folder or hub name of the policy.
        beta: β; the paper uses 2.0 to 2.5. TRL's class default, 0.1, is DPO's.
        gamma: γ, the margin in units of the reward (TRL's ``simpo_gamma``); the paper's values lie between 0.3 and 1.6.
        alpha: Bends the reward: AlphaPO (Gupta et al., 2025, arXiv:2501.03884); 0 is SimPO.
        label_smoothing: ε in [0, 0.5), the probability that a label is wrong.
        nll_coef: Weight of the mean negative log-likelihood per token of the chosen answers; above 0 it is CPO-SimPO.
        **kwargs: See :class:`PreferenceModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        beta: float = 2.0,
        gamma: float = 1.0,
        alpha: float = 0.0,
        label_smoothing: float = 0.0,
        nll_coef: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        check_number("beta", beta, above=0)
        check_number("gamma", gamma, minimum=0)
        check_number("alpha", alpha)
        check_number("label_smoothing", label_smoothing, minimum=0, maximum=1)
        check_number("nll_coef", nll_coef, minimum=0)
        self.beta = beta
        self.gamma = gamma
        self.alpha = alpha
        self.label_smoothing = label_smoothing
        self.nll_coef = nll_coef
        self._loss(**_ONE_PAIR)

    def _loss(self, **arguments: Any) -> LossOutput:
        return alphapo_loss(
            **arguments,
            beta=self.beta,
            gamma=self.gamma,
            alpha=self.alpha,
            label_smoothing=self.label_smoothing,
            nll_coef=self.nll_coef,
        )

    def loss(self, batch: PreferenceBatch, out: PolicyOutput) -> LossOutput:
        """The objective of one micro-batch; the one method to override for another.

        Args:
            batch: B pairs.
            out: What the current policy says about them.
        """
        return self._loss(**self.pair_arguments(batch, out))


class CPOModule(PreferenceModule):
    """CPO (Xu et al., 2024, arXiv:2401.08417): DPO against a uniform reference, plus cross-entropy on chosen answers.

    See :func:`~rlhfkit.losses.cpo_loss`.

    Args:
        model: Folder or hub name of the policy.
        beta: β; 0.1 as in the paper and TRL.
        loss_type: Contrastive term: ``sigmoid`` (the paper's), ``hinge`` or ``ipo``.
        label_smoothing: ε in [0, 0.5), only for ``sigmoid``.
        nll_coef: Weight of the cross-entropy; 1 as in the paper (TRL's ``cpo_alpha``).
        **kwargs: See :class:`PreferenceModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        beta: float = 0.1,
        loss_type: CPOLossType = "sigmoid",
        label_smoothing: float = 0.0,
        nll_coef: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        check_number("beta", beta, above=0)
        check_number("label_smoothing", label_smoothing, minimum=0, maximum=1)
        check_number("nll_coef", nll_coef, minimum=0)
        self.beta = beta
        self.loss_type = loss_type
        self.label_smoothing = label_smoothing
        self.nll_coef = nll_coef
        self._loss(**_ONE_PAIR)

    def _loss(self, **arguments: Any) -> LossOutput:
        return cpo_loss(
            **arguments,
            beta=self.beta,
            loss_type=self.loss_type,
            label_smoothing=self.label_smoothing,
            nll_coef=self.nll_coef,
        )

    def loss(self, batch: PreferenceBatch, out: PolicyOutput) -> LossOutput:
        """The objective of one micro-batch; the one method to override for another.

        Args:
            batch: B pairs.
            out: What the current policy says about them.
        """
        return self._loss(**self.pair_arguments(batch, out))


class ORPOModule(PreferenceModule):
    """ORPO (Hong et al., 2024, arXiv:2403.07691): supervised fine-tuning with a penalty on the odds ratio.

    It starts from a base model and needs no fine-tuning before. See :func:`~rlhfkit.losses.orpo_loss`.

    Args:
        model: Folder or hub name of the policy.
        beta: Weight of the odds-ratio term, the paper's λ; 0.1 as in the paper and TRL.
        **kwargs: See :class:`PreferenceModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, model: str, *, beta: float = 0.1, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        check_number("beta", beta, above=0)
        orpo_loss(**_ONE_PAIR, beta=beta)
        self.beta = beta

    def loss(self, batch: PreferenceBatch, out: PolicyOutput) -> LossOutput:
        """The objective of one micro-batch; the one method to override for another.

        Args:
            batch: B pairs.
            out: What the current policy says about them.
        """
        return orpo_loss(**self.pair_arguments(batch, out), beta=self.beta)
