"""``DistillationModule``: a student learns the next-token distributions of a teacher (Hinton et al., 2015)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import TokenBatch
from rlhfkit.data.formats.distilled import DistilledBatch
from rlhfkit.losses import LossOutput, cross_entropy_loss, distillation_loss, logits_logprobs
from rlhfkit.losses.distillation import Divergence, Remainder
from rlhfkit.models.distillation import TeacherRows, compare_logits, teacher_logits
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.functions import function_name, resolve_function
from rlhfkit.modules.router_loss import with_router_loss
from rlhfkit.modules.supervised.teacher import load_teacher
from rlhfkit.modules.supervised.teacher_cache import precompute_teacher
from rlhfkit.validation import check_integer, check_number


class DistillationModule(PolicyModule):
    """A policy that learns to say what a teacher says, at the tokens the data marks.

    ``(1 - c) * cross-entropy + c * divergence``, each the mean over the trained tokens of the whole optimizer step,
    whatever the micro-batches, ranks, padding or packing. The teacher is a frozen model beside the student, or its K
    likeliest tokens are computed once before training and kept on disk (``precompute_teacher``; no second model is held
    then). Student and teacher must have the same tokens. Logits exist for ``chunk_size`` tokens at a time.

    Override :meth:`compare` for another objective on the logits of both.

    Args:
        model: Folder or hub name of the student.
        teacher: Folder or hub name of the teacher.
        lr: Peak learning rate (5e-6: that of :class:`SFTModule`).
        divergence: ``forward_kl``, ``reverse_kl``, ``jsd``, a function of the log-probs of student and teacher, or its
            dotted name; see :func:`~rlhfkit.losses.distillation_loss`.
        temperature: τ, divides the logits of both; 1 as in GKD and TRL.
        teacher_weight: w of ``jsd``; 0.5 as in GKD and TRL (their β).
        distillation_coef: c in [0, 1]; 1 leaves the cross-entropy out (OpenRLHF's ``kd_coef`` is 0.4).
        top_k: Compare the teacher's K likeliest tokens only; all when ``None``.
        remainder: What becomes of the others: ``bucket`` makes them one category, ``renormalize`` leaves them out.
        precompute_teacher: Compute the teacher's K likeliest tokens of all examples before training; needs ``top_k``.
        teacher_cache: Folder of these; ``None``: ``teacher_logprobs`` in the Trainer's ``default_root_dir``.
        chunk_size: Trained tokens whose logits exist at a time; changes memory and speed, not the result.
        max_tokens_per_forward: Tokens per forward pass of ``precompute_teacher``.
        **kwargs: See :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range; when the models are loaded, if their tokens differ.
    """

    teacher: nn.Module
    frozen_children = (*PolicyModule.frozen_children, "teacher")
    batch_types = (TokenBatch, DistilledBatch)

    def __init__(
        self,
        model: str,
        teacher: str,
        *,
        lr: float = 5e-6,
        divergence: Divergence | Callable[[Tensor, Tensor], Tensor] | str = "forward_kl",
        temperature: float = 1.0,
        teacher_weight: float = 0.5,
        distillation_coef: float = 1.0,
        top_k: int | None = None,
        remainder: Remainder = "bucket",
        precompute_teacher: bool = False,
        teacher_cache: str | None = None,
        chunk_size: int = 1024,
        max_tokens_per_forward: int = 16384,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, lr=lr, **kwargs)
        check_number("temperature", temperature, above=0)
        check_number("teacher_weight", teacher_weight, minimum=0, maximum=1)
        check_number("distillation_coef", distillation_coef, minimum=0, maximum=1)
        check_integer("top_k", top_k, minimum=1, optional=True)
        check_integer("chunk_size", chunk_size, minimum=1, why="it is in tokens")
        check_integer("max_tokens_per_forward", max_tokens_per_forward, minimum=1)
        if precompute_teacher and top_k is None:
            raise ValueError("precompute_teacher keeps the teacher's likeliest tokens only: say how many, top_k=64")
        named = isinstance(divergence, str) and "." not in divergence
        self.divergence: Any = divergence if named else resolve_function(divergence, "divergence")
        self.hparams.update(divergence=divergence if isinstance(divergence, str) else function_name(divergence))
        self.teacher_name = teacher
        self.temperature = temperature
        self.teacher_weight = teacher_weight
        self.distillation_coef = distillation_coef
        self.top_k = top_k
        self.remainder: Remainder = remainder
        self.precompute_teacher = precompute_teacher
        self.teacher_cache = teacher_cache
        self.chunk_size = chunk_size
        self.max_tokens_per_forward = max_tokens_per_forward
        # One tiny evaluation shows every bad knob of the loss here, not an hour into the run.
        rows = torch.zeros(1, max(top_k or 0, 2))
        ids = torch.arange(rows.shape[1])[None] if precompute_teacher else None
        self.compare(rows, (rows, ids), torch.zeros(1, dtype=torch.int64), None)

    def configure_model(self) -> None:
        """Build the student, and the teacher unless what it says is computed before training."""
        super().configure_model()
        if not self.precompute_teacher and not hasattr(self, "teacher"):
            self.teacher = self.build_teacher()

    def build_teacher(self) -> nn.Module:
        """Load the teacher, frozen.

        Raises:
            ValueError: If its tokens are not the student's.
        """
        return load_teacher(self.teacher_name, self)

    # ------------------------------------------------------------------ the loss

    def compare(
        self, student: Tensor, teacher: tuple[Tensor, Tensor | None], tokens: Tensor, denominator: float | None
    ) -> Tensor:
        """Divergence and cross-entropy of some tokens; the one method to override for another objective.

        Args:
            student: (m, V) logits.
            teacher: (m, V) logits and ``None``; or (m, K) log-probs and the token ids that they are of.
            tokens: (m,) int64, what the data says.
            denominator: What the sums over tokens are divided by.

        Returns:
            (2,) the summed divergence and cross-entropy, both divided; the latter is 0 if it has no part in the loss.
        """
        values, ids = teacher
        if ids is None:  # one family pads its vocabulary to different sizes; no token has these ids
            size = min(student.shape[-1], values.shape[-1])
            student, values = student[..., :size], values[..., :size]
        mask = torch.ones_like(tokens, dtype=torch.bool)[None]
        divergence = distillation_loss(
            student[None],
            values[None],
            mask,
            divergence=self.divergence,
            temperature=self.temperature,
            teacher_weight=self.teacher_weight,
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
        """The objective of one micro-batch and its parts.

        Args:
            batch: B sequences.

        Returns:
            The loss, and as metrics the parts it is made of, as shares of the step's means.
        """
        mask = batch.loss_mask
        teacher = self.teacher_rows(batch)
        denominator = batch.token_denominator or max(float(mask.sum()), 1.0)
        (divergence, cross_entropy), balance = compare_logits(
            self.policy,
            batch,
            mask,
            lambda logits, tokens, part: self.compare(logits, teacher(part), tokens, denominator),
            chunk_size=self.chunk_size,
            router_aux_loss=self.balances_routers,
        )
        share = self.distillation_coef
        parts = {"distillation/divergence": divergence.detach()}
        if share < 1.0:
            parts["distillation/cross_entropy"] = cross_entropy.detach()
        coef = self.router_aux_loss_coef if self.balances_routers else 0.0
        return with_router_loss(
            LossOutput(share * divergence + (1.0 - share) * cross_entropy, parts), balance, mask, coef
        )

    def teacher_rows(self, batch: TokenBatch) -> TeacherRows:
        """What the teacher says about the trained tokens of a batch.

        Args:
            batch: B sequences.

        Raises:
            RuntimeError: If it was to be computed before training and the batch does not have it.
        """
        if isinstance(batch, DistilledBatch):
            return lambda part: (batch.teacher_logprobs[part], batch.teacher_ids[part])
        if self.precompute_teacher:
            raise RuntimeError(
                "precompute_teacher found no tokenised examples behind this batch's loader: use SFTDataModule, or a "
                "StepLoader over TokenExample"
            )
        return teacher_logits(self.teacher, batch, batch.loss_mask)

    # ------------------------------------------------------------------ hooks

    def on_train_start(self) -> None:
        """Let the teacher speak once, if it is not to be held."""
        self._precompute(self.trainer.train_dataloader)
        self._precompute(self.trainer.val_dataloaders)

    def on_validation_start(self) -> None:
        """The same for validation data."""
        self._precompute(self.trainer.val_dataloaders)

    def _precompute(self, loaders: Any) -> None:
        if self.precompute_teacher:
            for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
                precompute_teacher(loader, self)

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """One micro-batch."""
        loss, parts = self.loss(batch)
        self.log_step({"loss": loss.detach()})
        self.log_means({f"{name}_epoch": value for name, value in parts.items()})
        return loss

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Mean loss over the validation tokens."""
        loss, parts = self.loss(batch)
        self.log("val/loss", loss, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=1)
        self.log_means({f"val/{name}": value for name, value in parts.items()})
