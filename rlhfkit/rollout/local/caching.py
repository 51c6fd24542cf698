"""Whether a model family's cache of keys and values can be used, tried on a tiny copy of the model.

Recurrent layers may read the padding on the left of a shorter text, models may count positions themselves, and the rows
of some caches cannot be selected; see :mod:`rlhfkit.models.attention.families`.
"""

from functools import cache
from typing import Any

import torch
from torch import nn

from rlhfkit.models.attention.families import SEQUENCES, FamilyKey, TinyCopies, exact_attention, find_problem
from rlhfkit.rollout.local.generator import decode_step, prefill


def cache_problem(model: nn.Module) -> str | None:
    """Return why a batch of texts cannot be continued from a cache by this model's family; ``None``: it can.

    Args:
        model: A Hugging Face causal language model; only its class and configuration are used.
    """
    return _cache_problem(FamilyKey.of(model), exact_attention(model))


def takes_finished_masks(model: nn.Module) -> bool:
    """Whether a model's family continues texts as well with the masks that Transformers would make of theirs.

    Only where all layers attend to all tokens by ``sdpa``: those with windows have masks of their own.

    Args:
        model: As for :func:`cache_problem`, with the attention that it will run with.
    """
    hugging_face: Any = model
    config = hugging_face.config.get_text_config()
    windows = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    if windows or kinds != {"full_attention"} or config._attn_implementation != "sdpa":
        return False
    return _finished_mask_problem(FamilyKey.of(model), exact_attention(model)) is None


@cache
def _finished_mask_problem(family: FamilyKey, attention: str | None) -> str | None:
    return find_problem(lambda: _continued(TinyCopies(family), attention, finished_masks=True))


@cache
def _cache_problem(family: FamilyKey, attention: str | None) -> str | None:
    return find_problem(lambda: _continued(TinyCopies(family), attention))


@torch.no_grad()
def _continued(copies: TinyCopies, attention: str | None, *, finished_masks: bool = False) -> str | None:
    """Prefill all texts but their last two tokens, append one, drop the second text, and append the other.

    ``finished_masks``: also continue the first text alone, which has no padding.
    """
    model: Any = copies.build(attention)
    device = torch.device("cpu")
    first, mask, kept = prefill(model, [text[:-2] for text in SEQUENCES], device)
    order = torch.arange(len(SEQUENCES))
    kept.batch_select_indices(order)
    padded = True if finished_masks else None
    second, mask = decode_step(model, torch.tensor([text[-2] for text in SEQUENCES]), mask, kept, padded=padded)
    order = order[order != 1]
    kept.batch_select_indices(order)
    last = torch.tensor([SEQUENCES[row][-1] for row in order.tolist()])
    third, _ = decode_step(model, last, mask[order], kept, padded=padded)
    rows = [copies.alone[row][-3:].clone() for row in range(len(SEQUENCES))]
    for row, said in enumerate(rows):
        said[0], said[1] = first[row].log_softmax(-1), second[row].log_softmax(-1)
    for place, row in enumerate(order.tolist()):
        rows[row][2] = third[place].log_softmax(-1)
    if finished_masks:
        _, mask, kept = prefill(model, [SEQUENCES[0][:-2]], device)
        alone, _ = decode_step(model, torch.tensor([SEQUENCES[0][-2]]), mask, kept, padded=False)
        rows[0][1] = alone[0].log_softmax(-1)
    return copies.difference(rows, "continued", last=3)
