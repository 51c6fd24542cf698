"""Outputs of a frozen model over a whole data set, computed once before training and cached on disk.

The name of the cache file is a hash of everything that the numbers depend on.
"""

import logging
from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import lightning as L
import torch

from rlhfkit.data.batch import TokenExample
from rlhfkit.data.loaders.steps import ExampleTable, StepLoader
from rlhfkit.models.lora import adapter_base
from rlhfkit.protocols import MixedDataset

log = logging.getLogger(__name__)

_SAMPLE = 2**20
"""Bytes at either end of a weight file that are hashed: enough to see any training step."""


def tokens_fingerprint(examples: Iterable[TokenExample]) -> str:
    """Hash of the tokens, masks and images of examples."""
    digest = blake2b(digest_size=16)
    for example in examples:
        digest.update(array("q", [len(example.input_ids), *example.input_ids]).tobytes())
        digest.update(bytes(example.loss_mask))
        digest.update("".join(image.key for image in example.attachments).encode())
    return digest.hexdigest()


def model_fingerprint(model: str) -> str:
    """Hash of a model folder (names, sizes and both ends of its files), or name and commit of a hub model.

    The folder of an adapter includes its base model.
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
    """Indices of examples, longest first, in batches of at most ``max_tokens`` tokens or a single example."""
    batches: list[list[int]] = []
    left = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if lengths[index] > left:
            batches.append([])
            left = max_tokens
        batches[-1].append(index)
        left -= lengths[index]
    return batches


def data_sets(loaders: Any) -> list[Any]:
    """The data sets of the Trainer's StepLoader(s); for a mixture, its sources."""
    found: list[Any] = []
    for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
        if isinstance(loader, StepLoader):
            found += loader.examples.sources if isinstance(loader.examples, MixedDataset) else [loader.examples]
    return found


def tables_of(loaders: Any, *kinds: type) -> list[ExampleTable[Any]]:
    """The :func:`data_sets` that hold such examples, of which values can be computed before training."""
    return [one for one in data_sets(loaders) if isinstance(one, ExampleTable) and one.example in kinds]


def cache_folder(chosen: str | None, kind: str) -> Path:
    """The folder that was chosen, or one of this kind in the cache of ``datasets``, where tokens are kept too."""
    if chosen is not None:
        return Path(chosen)
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "rlhfkit" / kind


def load_or_compute(
    key: Callable[[], list[Any]], folder: Path, trainer: L.Trainer, compute: Callable[[], Any], what: str
) -> Any:
    """Read tensors from disk, or compute and save them. A collective; only rank 0 reads and writes.

    Args:
        key: Called on rank 0; the ``repr`` of its result identifies the tensors.
        folder: Created when missing.
        trainer: The running Trainer.
        compute: A collective that returns the same tensors on every rank.
        what: Description of the tensors, for the log.
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
        log.info("%s were computed and saved in %s", what, file)
    return values
