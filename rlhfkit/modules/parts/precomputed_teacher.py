"""``PrecomputedTeacher``: a teacher's likeliest tokens for given texts, computed once before training."""

from itertools import accumulate
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from rlhfkit.data.batch import collate_tokens
from rlhfkit.data.formats import collate_distilled, distilled_examples
from rlhfkit.data.loaders.steps import StepLoader, TokenizedDataset
from rlhfkit.distributed import all_reduce, run_on_each_rank
from rlhfkit.models.distillation import teacher_logits
from rlhfkit.models.forward import unwrap
from rlhfkit.modules.precompute import (
    cache_folder,
    load_or_compute,
    model_fingerprint,
    token_batches,
    tokens_fingerprint,
)
from rlhfkit.modules.teachers import check_teacher_tokens
from rlhfkit.parts import Part
from rlhfkit.roles import ModelPoolError, ServedModel

_SERVED_EXAMPLES = 256
"""Examples whose answers of a server are in memory at a time."""


class PrecomputedTeacher(Part):
    """The ``top_k`` likeliest tokens of the teacher of a ``DistillationModule``, computed before training, then cached.

    ``precompute_teacher=True`` makes one. No teacher is kept. Needs a DataModule of rlhfkit that holds the data in
    memory::

        DistillationModule("small", "large", top_k=64, parts=[PrecomputedTeacher(cache="likeliest")])

    Args:
        cache: Folder of these tokens; ``None``: ``rlhfkit/teacher_logprobs`` in the cache folder of ``datasets``.
    """

    writes = ("teacher_logprobs", "teacher_ids")

    def __init__(self, *, cache: str | None = None) -> None:
        self.cache = cache

    def attach(self, module: Any) -> None:
        """Become a part of a module that learns from a teacher.

        Raises:
            ValueError: If it is another module, or it is not said how many tokens.
        """
        super().attach(module)
        if not hasattr(module, "teacher_rows"):
            raise ValueError(f"PrecomputedTeacher is for DistillationModule, not {type(module).__name__}: leave it out")
        if module.top_k is None:
            raise ValueError("precompute_teacher keeps the teacher's likeliest tokens only: say how many, top_k=64")

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compute the teacher's outputs for all data."""
        self._compute_all(trainer.train_dataloader)
        self._compute_all(trainer.val_dataloaders)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compute the teacher's outputs for validation data."""
        self._compute_all(trainer.val_dataloaders)

    def _compute_all(self, loaders: Any) -> None:
        """Replace the examples of rlhfkit's loaders by ones with the teacher's likeliest tokens. A collective."""
        for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
            if isinstance(loader, StepLoader) and loader.collate is collate_tokens:
                examples = cast(TokenizedDataset, loader.examples)
                loader.examples = distilled_examples(examples, *self._load_or_compute(examples))
                loader.collate = collate_distilled

    def _load_or_compute(self, examples: TokenizedDataset) -> tuple[Tensor, Tensor]:
        """:meth:`teacher_top_k` from the cache, or by a teacher that is loaded for this pass only."""
        count, module = len(examples.lengths), self.module

        def key() -> list[Any]:
            data = tokens_fingerprint(examples[index] for index in range(count))
            if module.served_teacher is not None:  # what the server has loaded cannot be seen
                return [data, module.served_teacher.plain(), module.top_k]
            return [data, model_fingerprint(module.teacher_name), module.top_k, str(module.trainer.precision)]

        def compute() -> tuple[Tensor, Tensor]:
            if module.served_teacher is not None:
                return self.served_top_k(examples, module.served_teacher)
            return self.teacher_top_k(examples, module.build_teacher().to(module.device))

        folder = cache_folder(self.cache, "teacher_logprobs")
        what = f"the teacher's {module.top_k} likeliest tokens of {count} examples"
        found: tuple[Tensor, Tensor] = load_or_compute(key, folder, module.trainer, compute, what)
        return found

    @torch.no_grad()
    def teacher_top_k(self, examples: TokenizedDataset, teacher: nn.Module) -> tuple[Tensor, Tensor]:
        """The teacher's K likeliest tokens at every trained token, each rank computing its share. A collective.

        ``examples`` are the same on every rank. Returns (all trained tokens, K) float32 log-probs over the whole
        vocabulary and int32 ids, on the CPU, the same on every rank.
        """
        from tqdm.auto import tqdm

        module = self.module
        world, rank, top_k = module.trainer.world_size, module.global_rank, module.top_k
        student: Any = unwrap(module.policy)
        vocabulary = student.config.get_text_config().vocab_size  # the teacher's may be padded further
        ends = list(accumulate(examples.targets))
        logprobs = torch.zeros(ends[-1], top_k)
        ids = torch.zeros(ends[-1], top_k, dtype=torch.int32)
        batches = token_batches(examples.lengths, self.module.loading.max_tokens_per_forward)
        for chosen in tqdm(batches[rank::world], desc="Teacher log-probs", disable=rank > 0, leave=False):
            batch = collate_tokens([examples[row] for row in chosen]).to(module.device)
            places = torch.cat([torch.arange(ends[row] - examples.targets[row], ends[row]) for row in chosen])
            with module.trainer.precision_plugin.forward_context():
                rows = teacher_logits(teacher, batch, batch.loss_mask)
                for start in range(0, len(places), module.chunk_size):
                    part = slice(start, start + module.chunk_size)
                    best = rows(part)[0][:, :vocabulary].float().log_softmax(-1).topk(top_k, -1)
                    logprobs[places[part]], ids[places[part]] = best.values.cpu(), best.indices.int().cpu()
        return all_reduce(logprobs.to(module.device)).cpu(), all_reduce(ids.to(module.device)).cpu()

    def served_top_k(self, examples: TokenizedDataset, teacher: ServedModel) -> tuple[Tensor, Tensor]:
        """:meth:`teacher_top_k` of a teacher behind a server; each rank asks for its share. A collective."""
        module = self.module
        check_teacher_tokens(module.teacher_name, module)
        world, rank, top_k = module.trainer.world_size, module.global_rank, module.top_k
        precision = torch.float32  # the server's own counts
        teacher.start("logprobs", weights=precision, compute=precision)
        ends = list(accumulate(examples.targets))
        logprobs, ids = torch.zeros(ends[-1], top_k), torch.zeros(ends[-1], top_k, dtype=torch.int32)
        own = [row for row in range(rank, len(examples.lengths), world) if examples.targets[row]]

        def ask() -> None:
            for start in range(0, len(own), _SERVED_EXAMPLES):
                chosen = own[start : start + _SERVED_EXAMPLES]
                rows = [examples[row] for row in chosen]
                found = teacher.top_tokens(rows, top_k)
                for row, example, (values, tokens) in zip(chosen, rows, found, strict=True):
                    trained = torch.as_tensor(example.loss_mask, dtype=torch.bool)[-len(values) :]
                    part = slice(ends[row] - examples.targets[row], ends[row])
                    logprobs[part], ids[part] = values[trained], tokens[trained].int()

        try:
            run_on_each_rank(ask, error_type=ModelPoolError)
        finally:
            teacher.close()
        return all_reduce(logprobs.to(module.device)).cpu(), all_reduce(ids.to(module.device)).cpu()
