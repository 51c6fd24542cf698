"""A teacher's K likeliest tokens at every trained token of a data set, computed once and kept on disk."""

from array import array
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import collate_tokens
from rlhfkit.data.formats.distilled import DistilledExamples, collate_distilled
from rlhfkit.data.loaders.steps import StepLoader, TokenizedDataset
from rlhfkit.distributed import all_reduce
from rlhfkit.models import unwrap
from rlhfkit.models.distillation import teacher_logits
from rlhfkit.modules.precompute import kept_on_disk, model_fingerprint, token_batches

if TYPE_CHECKING:
    from rlhfkit.modules.supervised.distillation import DistillationModule


def precompute_teacher(loader: Any, module: "DistillationModule") -> None:
    """Give the batches of a loader what the teacher says; the teacher is loaded for this pass only. A collective.

    Args:
        loader: Anything; a :class:`StepLoader` over tokenised examples is changed in place.
        module: Names the teacher, K and the folder of the cache.
    """
    if not isinstance(loader, StepLoader) or loader.collate is not collate_tokens:
        return
    examples: Any = loader.examples
    trainer, top_k = module.trainer, module.top_k
    folder = Path(module.teacher_cache or Path(trainer.default_root_dir) / "teacher_logprobs")

    def key() -> list[Any]:
        told = model_fingerprint(module.teacher_name), top_k, str(trainer.precision)
        return [examples_fingerprint(examples), *told]

    def compute() -> tuple[Tensor, Tensor]:
        teacher = module.build_teacher().to(module.device)
        return teacher_top_k(examples, teacher, module)

    what = f"the teacher's {top_k} likeliest tokens of {len(examples.lengths)} examples"
    logprobs, ids = kept_on_disk(key, folder, trainer, compute, what)
    loader.examples = DistilledExamples(examples, logprobs, ids)
    loader.collate = collate_distilled


def examples_fingerprint(examples: TokenizedDataset) -> str:
    """Hash of all tokens and masks.

    Args:
        examples: N tokenised sequences.
    """
    digest = blake2b(digest_size=16)
    for index in range(len(examples.lengths)):
        example = examples[index]
        digest.update(array("q", [len(example.input_ids), *example.input_ids]).tobytes())
        digest.update(bytes(example.loss_mask))
    return digest.hexdigest()


@torch.no_grad()
def teacher_top_k(
    examples: TokenizedDataset, teacher: nn.Module, module: "DistillationModule"
) -> tuple[Tensor, Tensor]:
    """The teacher's K likeliest tokens, each rank computing its share. A collective.

    Args:
        examples: N tokenised sequences, the same on every rank.
        teacher: A frozen model.
        module: Tells ranks, device, precision and K.

    Returns:
        (all trained tokens, K) float32 log-probs over the whole vocabulary and int32 ids, on the CPU, the same on every
        rank.
    """
    from tqdm.auto import tqdm

    trainer, top_k = module.trainer, module.top_k or 0
    world, rank = trainer.world_size, trainer.global_rank
    student: Any = unwrap(module.policy)
    vocabulary = student.config.get_text_config().vocab_size  # the teacher's may be padded further
    ends = list(accumulate(examples.targets))
    logprobs = torch.zeros(ends[-1], top_k)
    ids = torch.zeros(ends[-1], top_k, dtype=torch.int32)
    batches = token_batches(examples.lengths, module.max_tokens_per_forward)
    for chosen in tqdm(batches[rank::world], desc="Teacher log-probs", disable=rank > 0, leave=False):
        batch = collate_tokens([examples[row] for row in chosen]).to(module.device)
        places = torch.cat([torch.arange(ends[row] - examples.targets[row], ends[row]) for row in chosen])
        with trainer.precision_plugin.forward_context():
            rows = teacher_logits(teacher, batch, batch.loss_mask)
            for start in range(0, len(places), module.chunk_size):
                part = slice(start, start + module.chunk_size)
                best = rows(part)[0][:, :vocabulary].float().log_softmax(-1).topk(top_k, -1)
                logprobs[places[part]], ids[places[part]] = best.values.cpu(), best.indices.int().cpu()
    if world > 1:
        for total in (logprobs, ids):
            total.copy_(all_reduce(total.to(module.device)))
    return logprobs, ids
