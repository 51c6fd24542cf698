"""Preference modules without a reference model: ``SimPOModule``, ``CPOModule`` and ``ORPOModule``.

The formulas and their papers are in :mod:`rlhfkit.losses.preference.reference_free`.
"""

from collections.abc import Sequence

from rlhfkit.losses import cpo_loss, orpo_loss, simpo_loss
from rlhfkit.losses.preference.reference_free import CPOLossType
from rlhfkit.models import LoRA, ModelLoading
from rlhfkit.modules.optim import Optimization
from rlhfkit.modules.preference.base import PreferenceModule
from rlhfkit.parts import GivenPart
from rlhfkit.validation import check_number


class SimPOModule(PreferenceModule):
    """SimPO (Meng et al., 2024, arXiv:2405.14734), whose reward is the log-prob averaged over the answer's tokens.

    See :func:`~rlhfkit.losses.simpo_loss`.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's default for DPO).
        beta: β; the paper uses 2.0 to 2.5. TRL's class default, 0.1, is DPO's.
        gamma: γ, the margin in units of the reward (TRL's ``simpo_gamma``); 0.3 to 1.6 in the paper.
        alpha: Shape of the reward in AlphaPO (Gupta et al., 2025, arXiv:2501.03884); 0 is SimPO.
        label_smoothing: ε in [0, 0.5), the probability that a label is wrong.
        nll_coef: Weight of the mean negative log-likelihood per token of the chosen answers; above 0: CPO-SimPO.
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
        beta: float = 2.0,
        gamma: float = 1.0,
        alpha: float = 0.0,
        label_smoothing: float = 0.0,
        nll_coef: float = 0.0,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        check_number("beta", beta, above=0)
        check_number("gamma", gamma, minimum=0)
        check_number("alpha", alpha)
        check_number("label_smoothing", label_smoothing, minimum=0, below=0.5)
        check_number("nll_coef", nll_coef, minimum=0)
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        self.learn_by(
            simpo_loss, beta=beta, gamma=gamma, alpha=alpha, label_smoothing=label_smoothing, nll_coef=nll_coef
        )


class CPOModule(PreferenceModule):
    """CPO (Xu et al., 2024, arXiv:2401.08417): DPO with a uniform reference, plus cross-entropy of chosen answers.

    See :func:`~rlhfkit.losses.cpo_loss`.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's default for DPO).
        beta: β; 0.1 as in the paper and TRL.
        loss_type: Contrastive term: ``sigmoid`` (the paper's), ``hinge`` or ``ipo``.
        label_smoothing: ε in [0, 0.5), the probability that a label is wrong; only for ``sigmoid``.
        nll_coef: Weight of the cross-entropy; 1 as in the paper (``cpo_alpha`` in TRL).
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
        loss_type: CPOLossType = "sigmoid",
        label_smoothing: float = 0.0,
        nll_coef: float = 1.0,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        check_number("beta", beta, above=0)
        check_number("label_smoothing", label_smoothing, minimum=0, below=0.5)
        check_number("nll_coef", nll_coef, minimum=0)
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        self.learn_by(cpo_loss, beta=beta, loss_type=loss_type, label_smoothing=label_smoothing, nll_coef=nll_coef)


class ORPOModule(PreferenceModule):
    """ORPO (Hong et al., 2024, arXiv:2403.07691): supervised fine-tuning of a base model with an odds-ratio penalty.

    See :func:`~rlhfkit.losses.orpo_loss`.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's default for DPO).
        beta: Weight of the odds-ratio term, the paper's λ; 0.1 as in the paper and TRL.
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
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        check_number("beta", beta, above=0)
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        self.learn_by(orpo_loss, beta=beta)
