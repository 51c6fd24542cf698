"""Preference modules without a reference model: ``SimPOModule``, ``CPOModule`` and ``ORPOModule``.

The formulas and their papers are in :mod:`rlhfkit.losses.preference.reference_free`.
"""

from typing import Any

from rlhfkit.losses import LossOutput, cpo_loss, orpo_loss, simpo_loss
from rlhfkit.losses.preference.reference_free import CPOLossType
from rlhfkit.models import LoRA
from rlhfkit.modules.optimizers.schedules import Schedule
from rlhfkit.modules.preference.base import PreferenceModule
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
        weight_decay: Decoupled weight decay; ``sgd`` adds it to the gradient.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: After warm-up: ``constant``; ``linear`` or ``cosine`` decay to the end of training; ``wsd``:
            constant, then decay in the last part; ``inverse_sqrt``: as 1 / sqrt(step). See :class:`PolicyModule`.
        attention: ``None`` or ``auto``: packed with the first kernel that can run, where the model can be packed;
            ``varlen``, ``flash_attention_2``, ``flash_attention_3``, ``buckets``: packed with this one; else
            Transformers' ``attn_implementation`` (``sdpa``, ``eager``, ...), padded. See :class:`PolicyModule`.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters, not the model's own weights; ``None``: all weights, or the adapter that ``model``
            holds.
        **kwargs: See :class:`PolicyModule`.

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
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        lr_schedule: Schedule = "constant",
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        lora: LoRA | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            lr=lr,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            lr_schedule=lr_schedule,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            **kwargs,
        )
        check_number("beta", beta, above=0)
        check_number("gamma", gamma, minimum=0)
        check_number("alpha", alpha)
        check_number("label_smoothing", label_smoothing, minimum=0, below=0.5)
        check_number("nll_coef", nll_coef, minimum=0)
        self.beta = beta
        self.gamma = gamma
        self.alpha = alpha
        self.label_smoothing = label_smoothing
        self.nll_coef = nll_coef
        self._check_loss()
        self.attach_parts()

    def _pair_loss(self, **arguments: Any) -> LossOutput:
        return simpo_loss(
            **arguments,
            beta=self.beta,
            gamma=self.gamma,
            alpha=self.alpha,
            label_smoothing=self.label_smoothing,
            nll_coef=self.nll_coef,
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
        weight_decay: Decoupled weight decay; ``sgd`` adds it to the gradient.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: After warm-up: ``constant``; ``linear`` or ``cosine`` decay to the end of training; ``wsd``:
            constant, then decay in the last part; ``inverse_sqrt``: as 1 / sqrt(step). See :class:`PolicyModule`.
        attention: ``None`` or ``auto``: packed with the first kernel that can run, where the model can be packed;
            ``varlen``, ``flash_attention_2``, ``flash_attention_3``, ``buckets``: packed with this one; else
            Transformers' ``attn_implementation`` (``sdpa``, ``eager``, ...), padded. See :class:`PolicyModule`.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters, not the model's own weights; ``None``: all weights, or the adapter that ``model``
            holds.
        **kwargs: See :class:`PolicyModule`.

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
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        lr_schedule: Schedule = "constant",
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        lora: LoRA | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            lr=lr,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            lr_schedule=lr_schedule,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            **kwargs,
        )
        check_number("beta", beta, above=0)
        check_number("label_smoothing", label_smoothing, minimum=0, below=0.5)
        check_number("nll_coef", nll_coef, minimum=0)
        self.beta = beta
        self.loss_type = loss_type
        self.label_smoothing = label_smoothing
        self.nll_coef = nll_coef
        self._check_loss()
        self.attach_parts()

    def _pair_loss(self, **arguments: Any) -> LossOutput:
        return cpo_loss(
            **arguments,
            beta=self.beta,
            loss_type=self.loss_type,
            label_smoothing=self.label_smoothing,
            nll_coef=self.nll_coef,
        )


class ORPOModule(PreferenceModule):
    """ORPO (Hong et al., 2024, arXiv:2403.07691): supervised fine-tuning of a base model with an odds-ratio penalty.

    See :func:`~rlhfkit.losses.orpo_loss`.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's default for DPO).
        beta: Weight of the odds-ratio term, the paper's λ; 0.1 as in the paper and TRL.
        weight_decay: Decoupled weight decay; ``sgd`` adds it to the gradient.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: After warm-up: ``constant``; ``linear`` or ``cosine`` decay to the end of training; ``wsd``:
            constant, then decay in the last part; ``inverse_sqrt``: as 1 / sqrt(step). See :class:`PolicyModule`.
        attention: ``None`` or ``auto``: packed with the first kernel that can run, where the model can be packed;
            ``varlen``, ``flash_attention_2``, ``flash_attention_3``, ``buckets``: packed with this one; else
            Transformers' ``attn_implementation`` (``sdpa``, ``eager``, ...), padded. See :class:`PolicyModule`.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters, not the model's own weights; ``None``: all weights, or the adapter that ``model``
            holds.
        **kwargs: See :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        beta: float = 0.1,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        lr_schedule: Schedule = "constant",
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        lora: LoRA | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            lr=lr,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            lr_schedule=lr_schedule,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            **kwargs,
        )
        check_number("beta", beta, above=0)
        self.beta = beta
        self._check_loss()
        self.attach_parts()

    def _pair_loss(self, **arguments: Any) -> LossOutput:
        return orpo_loss(**arguments, beta=self.beta)
