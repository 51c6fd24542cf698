"""NEFTune: noise on the embeddings of training sequences, against overfitting to the words of the examples."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhfkit.models import unwrap


@contextmanager
def embedding_noise(model: nn.Module, alpha: float, length: Tensor, seed: str) -> Iterator[None]:
    """Add uniform noise to the embeddings that a model computes in this block.

    Each number of an embedding of size d gets noise in ``±alpha / sqrt(length d)`` (Jain et al., 2023,
    arXiv:2310.05914). The generator is seeded anew, so that a resumed run draws the same noise.

    Args:
        model: A Hugging Face model, bare or wrapped.
        alpha: Size of the noise (5 in the paper, 10 and 15 for larger data sets).
        length: Scalar, tokens of a sequence.
        seed: Any text.
    """
    layer = cast(Any, unwrap(model)).get_input_embeddings()
    number = random.Random(seed).getrandbits(62)

    def add(_layer: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor:
        generator = torch.Generator(embeddings.device).manual_seed(number)
        noise = torch.empty(embeddings.shape, device=embeddings.device).uniform_(-1.0, 1.0, generator=generator)
        return embeddings + (noise * (alpha / (length * embeddings.shape[-1]).sqrt())).to(embeddings.dtype)

    handle = layer.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
