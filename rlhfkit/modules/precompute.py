"""Reference log-probs of a whole data set, computed once and kept on disk.

A reference that does not move says the same about a pair in every epoch: one pass over the data before training takes
its place, and no second model is held. The file's name is a fingerprint of everything that the numbers depend on.
"""

import logging
from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor, nn

from rlhfkit.data.formats.preferences import PreferenceBatch, PreferenceExample, collate_preferences
from rlhfkit.distributed import all_reduce
from rlhfkit.models.lora import adapter_base

log = logging.getLogger(__name__)

_SAMPLE = 2**20
"""Bytes at either end of a weight file that go into its fingerprint: enough to see any training step."""


class Pairs(Protocol):
    """A data set of two answers each; :class:`~rlhfkit.data.formats.preferences.PreferenceExamples` is one."""

    lengths: list[int]

    def __len__(self) -> int:
        """Number of pairs."""
        ...

    def __getitem__(self, index: int, /) -> PreferenceExample:
        """One pair."""
        ...


AnswerLogprobs = Callable[[nn.Module, PreferenceBatch], Tensor]
"""(2B,) log-probs of the answers of a batch under a model."""


def data_fingerprint(examples: Pairs) -> str:
    """Hash of the tokens and masks of all answers.

    Args:
        examples: N pairs.
    """
    digest = blake2b(digest_size=16)
    for index in range(len(examples)):
        pair = examples[index]
        for answer in (pair.chosen, pair.rejected):
            digest.update(array("q", [len(answer.input_ids), *answer.input_ids]).tobytes())
            digest.update(bytes(answer.loss_mask))
    return digest.hexdigest()


def model_fingerprint(model: str) -> str:
    """Hash of a model folder (names and sizes of files, and both ends of each), or name and commit of a hub model.

    Args:
        model: Folder or hub name; an adapter's folder stands for its base model too.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        from transformers import AutoConfig

        return f"{model}@{getattr(AutoConfig.from_pretrained(model), '_commit_hash', None)}"
    digest = blake2b(digest_size=16)
    for file in sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".json")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE))
            stream.seek(max(size - _SAMPLE, 0))
            digest.update(stream.read())
    base = adapter_base(folder)
    return digest.hexdigest() + ("" if base is None else f"+{model_fingerprint(base)}")


def token_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """All indices, longest first, in batches of at most ``max_tokens`` tokens or a single index.

    Args:
        lengths: Tokens of each example.
        max_tokens: Of a batch.
    """
    batches: list[list[int]] = []
    left = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if lengths[index] > left:
            batches.append([])
            left = max_tokens
        batches[-1].append(index)
        left -= lengths[index]
    return batches


@torch.no_grad()
def compute_reference(
    examples: Pairs, model: nn.Module, logprobs: AnswerLogprobs, trainer: L.Trainer, *, max_tokens: int
) -> Tensor:
    """Log-probs of all answers under a model, each rank computing its share. A collective.

    Args:
        examples: N pairs, the same on every rank.
        model: The reference.
        logprobs: What is kept of a batch.
        trainer: Tells ranks, device and precision.
        max_tokens: Tokens per forward pass.

    Returns:
        (N, 2) float32 on the CPU, chosen and rejected, the same on every rank.
    """
    from tqdm.auto import tqdm

    device, world, rank = trainer.strategy.root_device, trainer.world_size, trainer.global_rank
    total = torch.zeros(len(examples), 2, device=device)
    batches = token_batches(examples.lengths, max_tokens)
    training = model.training
    model.eval()
    for first in tqdm(range(0, len(batches), world), desc="Reference log-probs", disable=rank > 0, leave=False):
        # Every rank runs equally many forward passes: a sharded model gathers its weights in each.
        rows = batches[min(first + rank, len(batches) - 1)]
        batch = collate_preferences([examples[row] for row in rows]).to(device)
        with trainer.precision_plugin.forward_context():
            values = logprobs(model, batch)
        if first + rank < len(batches):
            total[rows] = values.float().view(-1, 2)
    model.train(training)
    return all_reduce(total).cpu()


def cached_reference(
    examples: Pairs,
    key: Callable[[], Iterator[Any]],
    folder: Path,
    trainer: L.Trainer,
    compute: Callable[[], Tensor],
) -> Tensor:
    """Read the log-probs, or compute and keep them. A collective; only rank 0 touches the disk.

    Args:
        examples: N pairs.
        key: Everything beside the data that the numbers depend on; asked on rank 0.
        folder: Where the files are.
        trainer: Tells the ranks.
        compute: A collective that gives (N, 2).

    Returns:
        (N, 2) float32.
    """
    what = f"reference log-probs of {len(examples)} pairs"
    return kept_on_disk(lambda: [data_fingerprint(examples), *key()], folder, trainer, compute, what)


def kept_on_disk(
    key: Callable[[], list[Any]], folder: Path, trainer: L.Trainer, compute: Callable[[], Any], what: str
) -> Any:
    """Read tensors, or compute and keep them. A collective; only rank 0 touches the disk.

    Args:
        key: Everything that they depend on, with a telling ``repr``; asked on rank 0.
        folder: Where the files are.
        trainer: Tells the ranks.
        compute: A collective that gives the same tensors on every rank.
        what: They are, for the log.

    Returns:
        What ``compute`` gives.
    """
    file, found = Path(), None
    if trainer.is_global_zero:
        file = folder / f"{blake2b(repr(key()).encode(), digest_size=16).hexdigest()}.pt"
        if file.is_file():
            found = torch.load(file, weights_only=True)
            log.info("%s were read from %s", what, file)
    found = trainer.strategy.broadcast(found)
    if found is not None:
        return found
    values = compute()
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".tmp")
        torch.save(values, unfinished)
        unfinished.replace(file)
        log.info("%s were computed and kept in %s", what, file)
    return values
