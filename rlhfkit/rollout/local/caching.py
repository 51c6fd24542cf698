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


@cache
def _cache_problem(family: FamilyKey, attention: str | None) -> str | None:
    return find_problem(lambda: _continued(TinyCopies(family), attention))


@torch.no_grad()
def _continued(copies: TinyCopies, attention: str | None) -> str | None:
    """Prefill all texts but their last two tokens, append one, drop the second text, and append the other."""
    model: Any = copies.build(attention)
    device = torch.device("cpu")
    first, mask, kept = prefill(model, [text[:-2] for text in SEQUENCES], device)
    order = torch.arange(len(SEQUENCES))
    kept.batch_select_indices(order)
    second, mask = decode_step(model, torch.tensor([text[-2] for text in SEQUENCES]), mask, kept)
    order = order[order != 1]
    kept.batch_select_indices(order)
    third, _ = decode_step(model, torch.tensor([SEQUENCES[row][-1] for row in order.tolist()]), mask[order], kept)
    rows = [copies.alone[row][-3:].clone() for row in range(len(SEQUENCES))]
    for row, said in enumerate(rows):
        said[0], said[1] = first[row].log_softmax(-1), second[row].log_softmax(-1)
    for place, row in enumerate(order.tolist()):
        rows[row][2] = third[place].log_softmax(-1)
    return copies.difference(rows, "continued", last=3)
