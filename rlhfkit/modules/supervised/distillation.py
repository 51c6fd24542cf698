"""``DistillationModule``: train a student on the next-token distributions of a teacher (Hinton et al., 2015)."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import TokenBatch, collate_tokens
from rlhfkit.data.formats.distilled import DistilledBatch, DistilledExamples, collate_distilled
from rlhfkit.data.loaders.steps import StepLoader, TokenizedDataset
from rlhfkit.distributed import all_reduce, exchange_errors
from rlhfkit.losses import LossOutput, cross_entropy_loss, distillation_loss, logits_logprobs
from rlhfkit.losses.distillation import Divergence, Remainder
from rlhfkit.losses.metrics import share_metric
from rlhfkit.models import unwrap
from rlhfkit.models.distillation import TeacherRows, compare_logits, teacher_logits
from rlhfkit.modules.arguments import refuse_without_effect
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.policy_arguments import PolicyArguments
from rlhfkit.modules.precompute import (
    cache_folder,
    load_or_compute,
    model_fingerprint,
    token_batches,
    tokens_fingerprint,
)
from rlhfkit.modules.teachers import (
    check_comparison,
    check_teacher_tokens,
    load_teacher,
)
from rlhfkit.roles import ModelPoolError, ServedModel, frozen_model
from rlhfkit.roles.served_model import MAX_TOP
from rlhfkit.validation import check_integer, check_number, function_name, resolve_function

_SERVED_EXAMPLES = 256
"""Examples whose answers of a server are in memory at a time."""


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
        divergence: ``forward_kl``, ``reverse_kl``, ``jsd``, a function of the log-probs of student and teacher, or its
            dotted name; see :func:`~rlhfkit.losses.distillation_loss`.
        temperature: τ, divides the logits of both; 1 as in GKD and TRL.
        teacher_weight: Weight of the teacher in ``jsd``; 0.5 as in TRL's GKD (its β).
        distillation_coef: c in [0, 1]; 1 leaves the cross-entropy out (OpenRLHF's ``kd_coef`` is 0.4).
        top_k: Compare only the teacher's K likeliest tokens; ``None``: all.
        remainder: Treatment of the other tokens: ``bucket`` makes them one category, ``renormalize`` leaves them out.
        precompute_teacher: Compute the teacher's K likeliest tokens before training; needs ``top_k``.
        teacher_cache: Folder for them, only with it; ``None``: ``rlhfkit/teacher_logprobs`` in the
            cache folder of ``datasets``.
        chunk_size: Trained tokens whose logits exist at a time; changes memory and speed, not the result.
        max_tokens_per_forward: Tokens per forward pass of ``precompute_teacher``; only with it.
        **kwargs: Optimizer and loading of the model: :class:`~rlhfkit.modules.policy_arguments.PolicyArguments`.

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
        **kwargs: Unpack[PolicyArguments],
    ) -> None:
        super().__init__(model, lr=lr, **kwargs)
        check_number("temperature", temperature, above=0)
        check_number("distillation_coef", distillation_coef, minimum=0, maximum=1)
        check_integer("max_tokens_per_forward", max_tokens_per_forward, minimum=1)
        if precompute_teacher and top_k is None:
            raise ValueError("precompute_teacher keeps the teacher's likeliest tokens only: say how many, top_k=64")
        if not precompute_teacher:
            given = {"teacher_cache": teacher_cache is not None}
            given |= {"max_tokens_per_forward": max_tokens_per_forward != 16384}
            refuse_without_effect(given, "precompute_teacher=False")
        named = isinstance(divergence, str) and "." not in divergence
        self.divergence: Any = divergence if named else resolve_function(divergence, "divergence")
        self.hparams.update(divergence=divergence if isinstance(divergence, str) else function_name(divergence))
        self.served_teacher = None if isinstance(teacher, str) else cast(ServedModel, frozen_model(teacher))
        """The teacher, if it is behind a server; ``None``: it is loaded."""
        self.teacher_name = str(teacher) if self.served_teacher is None else self.served_teacher.model
        if self.served_teacher is not None:
            self.hparams.update(teacher=self.served_teacher.plain())
            if not precompute_teacher:
                raise ValueError(
                    "a ServedModel gives the teacher's likeliest tokens, once before training: use "
                    f"precompute_teacher=True with top_k, which vLLM limits to {MAX_TOP} (--max-logprobs)"
                )
        check_comparison(
            divergence,
            teacher_weight=teacher_weight,
            top_k=top_k,
            remainder=remainder,
            chunk_size=chunk_size,
        )
        self.temperature = temperature
        self.teacher_weight = teacher_weight
        self.distillation_coef = distillation_coef
        self.top_k = top_k
        self.remainder: Remainder = remainder
        self.precompute_teacher = precompute_teacher
        self.teacher_cache = teacher_cache
        self.chunk_size = chunk_size
        self.max_tokens_per_forward = max_tokens_per_forward
        # Compute the loss of one token, so that bad arguments raise before training.
        rows = torch.zeros(1, max(top_k or 0, 2))
        ids = torch.arange(rows.shape[1])[None] if precompute_teacher else None
        self.compare(rows, (rows, ids), torch.zeros(1, dtype=torch.int64), None)
        self.attach_parts()

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
        """The loss of one micro-batch; its metrics are mean divergence and cross-entropy of the trained tokens."""
        mask = batch.loss_mask
        denominator = batch.token_denominator or max(float(mask.sum()), 1.0)
        (divergence, cross_entropy), router_loss = compare_logits(
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
        result = LossOutput(share * divergence + (1.0 - share) * cross_entropy, parts)
        return self.with_router_loss(result, router_loss, mask)

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

    # ------------------------------------------------------------------ the teacher, before training

    def _precompute(self, loaders: Any) -> None:
        """Replace the examples of rlhfkit's loaders by ones with the teacher's likeliest tokens. A collective."""
        if not self.precompute_teacher:
            return
        for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
            if isinstance(loader, StepLoader) and loader.collate is collate_tokens:
                examples = cast(TokenizedDataset, loader.examples)
                loader.examples = DistilledExamples(examples, *self._load_or_compute(examples))
                loader.collate = collate_distilled

    def _load_or_compute(self, examples: TokenizedDataset) -> tuple[Tensor, Tensor]:
        """:meth:`teacher_top_k` from the cache, or by a teacher that is loaded for this pass only."""
        count = len(examples.lengths)

        def key() -> list[Any]:
            data = tokens_fingerprint(examples[index] for index in range(count))
            if self.served_teacher is not None:  # what the server has loaded cannot be seen
                return [data, self.served_teacher.plain(), self.top_k]
            return [data, model_fingerprint(self.teacher_name), self.top_k, str(self.trainer.precision)]

        def compute() -> tuple[Tensor, Tensor]:
            if self.served_teacher is not None:
                return self.served_top_k(examples, self.served_teacher)
            return self.teacher_top_k(examples, self.build_teacher().to(self.device))

        folder = cache_folder(self.teacher_cache, "teacher_logprobs")
        what = f"the teacher's {self.top_k} likeliest tokens of {count} examples"
        found: tuple[Tensor, Tensor] = load_or_compute(key, folder, self.trainer, compute, what)
        return found

    @torch.no_grad()
    def teacher_top_k(self, examples: TokenizedDataset, teacher: nn.Module) -> tuple[Tensor, Tensor]:
        """The teacher's K likeliest tokens at every trained token, each rank computing its share. A collective.

        ``examples`` are the same on every rank. Returns (all trained tokens, K) float32 log-probs over the whole
        vocabulary and int32 ids, on the CPU, the same on every rank.
        """
        from tqdm.auto import tqdm

        world, rank, top_k = self.trainer.world_size, self.global_rank, cast(int, self.top_k)
        student: Any = unwrap(self.policy)
        vocabulary = student.config.get_text_config().vocab_size  # the teacher's may be padded further
        ends = list(accumulate(examples.targets))
        logprobs = torch.zeros(ends[-1], top_k)
        ids = torch.zeros(ends[-1], top_k, dtype=torch.int32)
        batches = token_batches(examples.lengths, self.max_tokens_per_forward)
        for chosen in tqdm(batches[rank::world], desc="Teacher log-probs", disable=rank > 0, leave=False):
            batch = collate_tokens([examples[row] for row in chosen]).to(self.device)
            places = torch.cat([torch.arange(ends[row] - examples.targets[row], ends[row]) for row in chosen])
            with self.trainer.precision_plugin.forward_context():
                rows = teacher_logits(teacher, batch, batch.loss_mask)
                for start in range(0, len(places), self.chunk_size):
                    part = slice(start, start + self.chunk_size)
                    best = rows(part)[0][:, :vocabulary].float().log_softmax(-1).topk(top_k, -1)
                    logprobs[places[part]], ids[places[part]] = best.values.cpu(), best.indices.int().cpu()
        return all_reduce(logprobs.to(self.device)).cpu(), all_reduce(ids.to(self.device)).cpu()

    def served_top_k(self, examples: TokenizedDataset, teacher: ServedModel) -> tuple[Tensor, Tensor]:
        """:meth:`teacher_top_k` of a teacher behind a server; each rank asks for its share. A collective."""
        check_teacher_tokens(self.teacher_name, self)
        world, rank, top_k = self.trainer.world_size, self.global_rank, cast(int, self.top_k)
        precision = torch.float32  # the server's own counts
        teacher.start("logprobs", weights=precision, compute=precision)
        ends = list(accumulate(examples.targets))
        logprobs, ids = torch.zeros(ends[-1], top_k), torch.zeros(ends[-1], top_k, dtype=torch.int32)
        own = [row for row in range(rank, len(examples.lengths), world) if examples.targets[row]]
        try:
            failure: Exception | None = None
            try:
                for start in range(0, len(own), _SERVED_EXAMPLES):
                    chosen = own[start : start + _SERVED_EXAMPLES]
                    rows = [examples[row] for row in chosen]
                    found = teacher.top_tokens([list(row.input_ids) for row in rows], top_k)
                    for row, example, (values, tokens) in zip(chosen, rows, found, strict=True):
                        trained = torch.as_tensor(example.loss_mask, dtype=torch.bool)[-len(values) :]
                        part = slice(ends[row] - examples.targets[row], ends[row])
                        logprobs[part], ids[part] = values[trained], tokens[trained].int()
            except Exception as error:  # the other ranks are told
                failure = error
            raised = exchange_errors(failure, error_type=ModelPoolError)
            if raised is not None:
                raise raised
        finally:
            teacher.close()
        return all_reduce(logprobs.to(self.device)).cpu(), all_reduce(ids.to(self.device)).cpu()

    # ------------------------------------------------------------------ hooks

    def on_train_start(self) -> None:
        """Compute the teacher's outputs for all data, if they are precomputed."""
        super().on_train_start()
        self._precompute(self.trainer.train_dataloader)
        self._precompute(self.trainer.val_dataloaders)

    def on_validation_start(self) -> None:
        """Compute the teacher's outputs for validation data, if they are precomputed."""
        self._precompute(self.trainer.val_dataloaders)

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """Compute and log the loss of one micro-batch."""
        loss, parts = self.loss(batch)
        tokens = batch.loss_mask.sum()
        self.log_step({"loss": share_metric(loss, tokens, batch.token_denominator)}, tokens)
        self.log_metrics({**parts, **self.observed(batch, None)}, tokens, suffix="_epoch")
        return loss

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Log the mean loss over the validation tokens."""
        loss, parts = self.loss(batch)
        tokens = batch.loss_mask.sum()
        self.log_metrics(
            {"loss": share_metric(loss, tokens, batch.token_denominator)}, tokens, prefix="val/", prog_bar=True
        )
        self.log_metrics(parts, tokens, prefix="val/")
