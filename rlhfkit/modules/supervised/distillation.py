"""``DistillationModule``: train a student on the next-token distributions of a teacher (Hinton et al., 2015)."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import TokenBatch
from rlhfkit.data.formats import DistilledBatch
from rlhfkit.losses import LossOutput, cross_entropy_loss, distillation_loss, logits_logprobs
from rlhfkit.losses.distillation import Divergence, Remainder
from rlhfkit.losses.metrics import share_metric
from rlhfkit.models import LoRA, ModelLoading
from rlhfkit.models.distillation import TeacherRows, compare_logits, teacher_logits
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.optim import Optimization
from rlhfkit.modules.teachers import checked_divergence, load_teacher
from rlhfkit.parts import GivenPart, plain_value
from rlhfkit.roles import ServedModel
from rlhfkit.roles.served_model import MAX_TOP
from rlhfkit.validation import GivenFunction, check_number


class DistillationModule(PolicyModule):
    """Knowledge distillation: a policy learns a teacher's next-token distributions at the tokens that the data marks.

    The loss is ``(1 - c) * cross-entropy + c * divergence``, each the mean over the trained tokens of the whole
    optimizer step, independent of micro-batches, ranks, padding and packing. The teacher is a frozen model beside the
    student, or its K likeliest tokens are computed once before training and cached on disk (``precompute_teacher``).
    Student and teacher must have the same tokens. Override :meth:`compare` for another objective on the logits of both.

    Args:
        model: Folder or hub name of the student.
        teacher: Folder or hub name of the teacher. A :class:`~rlhfkit.roles.ServedModel`: a teacher behind
            ``vllm serve``, whose K likeliest tokens are computed before training; with ``precompute_teacher`` only.
        lr: Peak learning rate (5e-6: that of :class:`SFTModule`).
        divergence: ``forward_kl``, ``reverse_kl``, ``jsd``, a function of the log-probs of student and teacher, such as
            ``JensenShannon(0.1)`` of :mod:`rlhfkit.losses.distillation` (TRL's β of GKD), or its dotted name; see
            :func:`~rlhfkit.losses.distillation_loss`.
        temperature: τ, divides the logits of both; 1 as in GKD and TRL.
        distillation_coef: c in [0, 1]; 1 leaves the cross-entropy out (OpenRLHF's ``kd_coef`` is 0.4).
        top_k: Compare only the teacher's K likeliest tokens; ``None``: all.
        remainder: Treatment of the other tokens: ``bucket`` makes them one category, ``renormalize`` leaves them out.
        precompute_teacher: Compute the teacher's K likeliest tokens before training, see
            :class:`~rlhfkit.modules.parts.precomputed_teacher.PrecomputedTeacher`; needs ``top_k``.
        chunk_size: Trained tokens whose logits exist at a time; changes memory and speed, not the result.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`~rlhfkit.modules.PolicyModule`.

    Raises:
        ValueError: If an argument is out of range; when the models are loaded, if their tokens differ.
    """

    teacher: nn.Module
    frozen_children = (*PolicyModule.frozen_children, "teacher")
    batch_types = (TokenBatch, DistilledBatch)

    def __init__(
        self,
        model: str,
        teacher: str | ServedModel,
        *,
        lr: float = 5e-6,
        divergence: Divergence | GivenFunction = "forward_kl",
        temperature: float = 1.0,
        distillation_coef: float = 1.0,
        top_k: int | None = None,
        remainder: Remainder = "bucket",
        precompute_teacher: bool = False,
        chunk_size: int = 1024,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        if precompute_teacher:
            from rlhfkit.modules.parts.precomputed_teacher import PrecomputedTeacher

            self.own_parts = [PrecomputedTeacher()]
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        check_number("temperature", temperature, above=0)
        check_number("distillation_coef", distillation_coef, minimum=0, maximum=1)
        self.keep_plain(divergence=plain_value(divergence, "divergence"))
        self.served_teacher = None if isinstance(teacher, str) else cast(ServedModel, ServedModel.of(teacher))
        """The teacher, if it is behind a server; ``None``: it is loaded."""
        self.teacher_name = str(teacher) if self.served_teacher is None else self.served_teacher.model
        if self.served_teacher is not None:
            self.keep_plain(teacher=self.served_teacher.plain())
        self.divergence = checked_divergence(divergence, top_k=top_k, remainder=remainder, chunk_size=chunk_size)
        self.temperature = temperature
        self.distillation_coef = distillation_coef
        self.top_k = top_k
        self.remainder: Remainder = remainder
        self.chunk_size = chunk_size
        self.attach_parts()
        self.precompute_teacher = any("teacher_logprobs" in part.writes for part in self.parts)
        """Whether the teacher's outputs are computed before training."""
        if self.served_teacher is not None and not self.precompute_teacher:
            raise ValueError(
                "a ServedModel gives the teacher's likeliest tokens, once before training: use "
                f"precompute_teacher=True with top_k, which vLLM limits to {MAX_TOP} (--max-logprobs)"
            )
        # Compute the loss of one token, so that bad arguments raise before training.
        rows = torch.zeros(1, max(top_k or 0, 2))
        ids = torch.arange(rows.shape[1])[None] if self.precompute_teacher else None
        self.compare(rows, (rows, ids), torch.zeros(1, dtype=torch.int64), None)

    def configure_model(self) -> None:
        """Build the student, and the teacher unless its outputs are computed before training."""
        super().configure_model()
        if not self.precompute_teacher and not hasattr(self, "teacher"):
            self.teacher = self.build_teacher()

    def build_teacher(self) -> nn.Module:
        """Load the teacher, frozen; raises ValueError if its tokens differ from the student's."""
        return load_teacher(self.teacher_name, self)

    # ------------------------------------------------------------------ the loss

    def compare(
        self, student: Tensor, teacher: tuple[Tensor, Tensor | None], tokens: Tensor, denominator: float | None
    ) -> Tensor:
        """(2,) sums over tokens of divergence and cross-entropy, divided; override it for another objective.

        Cross-entropy is 0 if it has no part in the loss.

        Args:
            student: (m, V) logits.
            teacher: (m, V) logits and ``None``; or (m, K) log-probs and their token ids.
            tokens: (m,) int64, the tokens of the data.
            denominator: What the sums are divided by.
        """
        values, ids = teacher
        if ids is None:  # models of one family pad their vocabulary to different sizes; no token has these ids
            size = min(student.shape[-1], values.shape[-1])
            student, values = student[..., :size], values[..., :size]
        mask = torch.ones_like(tokens, dtype=torch.bool)[None]
        divergence = distillation_loss(
            student[None],
            values[None],
            mask,
            divergence=self.divergence,
            temperature=self.temperature,
            top_k=self.top_k if ids is None else None,
            teacher_ids=None if ids is None else ids[None],
            remainder=self.remainder,
            denominator=denominator,
        ).loss
        if self.distillation_coef == 1.0:
            return torch.stack([divergence, torch.zeros_like(divergence)])
        logprobs = logits_logprobs(student, tokens).logprobs
        return torch.stack([divergence, cross_entropy_loss(logprobs[None], mask, denominator=denominator).loss])

    def loss(self, batch: TokenBatch) -> LossOutput:
        """The loss of one micro-batch; its metrics are mean divergence and cross-entropy of the trained tokens."""
        mask = batch.loss_mask
        denominator = batch.token_denominator or max(float(mask.sum()), 1.0)
        (divergence, cross_entropy), self.router_loss = compare_logits(
            self.policy,
            batch,
            mask,
            self.compare,
            self.teacher_rows(batch),
            chunk_size=self.chunk_size,
            denominator=denominator,
            router_aux_loss=self.balances_routers,
        )
        share = self.distillation_coef
        parts = {"distillation/divergence": share_metric(divergence, mask.sum(), denominator)}
        if share < 1.0:
            parts["distillation/cross_entropy"] = share_metric(cross_entropy, mask.sum(), denominator)
        return LossOutput(share * divergence + (1.0 - share) * cross_entropy, parts)

    def teacher_rows(self, batch: TokenBatch) -> TeacherRows | tuple[Tensor, Tensor]:
        """The teacher's outputs for a batch; RuntimeError with ``precompute_teacher`` if it does not have them."""
        if isinstance(batch, DistilledBatch):
            return batch.teacher_logprobs, batch.teacher_ids
        if self.precompute_teacher:
            raise RuntimeError(
                "precompute_teacher found no tokenised examples behind this batch's loader: use SFTDataModule, or a "
                "StepLoader over TokenExample"
            )
        return teacher_logits(self.teacher, batch, batch.loss_mask)

    # ------------------------------------------------------------------ hooks

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """Compute and log the loss of one micro-batch."""
        result = self.with_terms(self.loss(batch), batch, None)
        tokens = batch.loss_mask.sum()
        self.log_step({"loss": share_metric(result.loss, tokens, batch.token_denominator)}, tokens)
        self.log_metrics({**result.metrics, **self.observed(batch, None)}, tokens, suffix="_epoch")
        return result.loss

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Log the mean loss over the validation tokens."""
        result = self.loss(batch)
        tokens = batch.loss_mask.sum()
        self.log_metrics(
            {"loss": share_metric(result.loss, tokens, batch.token_denominator)}, tokens, prefix="val/", prog_bar=True
        )
        self.log_metrics(result.metrics, tokens, prefix="val/")
