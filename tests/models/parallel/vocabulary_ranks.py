"""What the ranks of a tensor group do with ``rlhfkit.models.parallel.vocabulary``."""

import os
from typing import Any

import torch
import torch.distributed as dist

from rlhfkit.losses import linear_logprobs
from rlhfkit.models.parallel.vocabulary import GroupVocabulary

CASES: dict[str, dict[str, Any]] = {
    "log-probs": {},
    "entropy": {"entropy": True},
    "temperature, bias, scale and cap": {
        "entropy": True,
        "temperature": 0.7,
        "logit_scale": 0.5,
        "logit_softcap": 3.0,
        "bias": True,
    },
    "small tiles": {"entropy": True, "chunk": 3},
}


def outputs(vocabulary: int, tokens: int, bias: bool = False, **options: Any) -> list[torch.Tensor]:
    """Results and gradients of the head, in float64."""
    generator = torch.Generator().manual_seed(vocabulary)
    hidden, weight, shift, outer = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((tokens, 5), (vocabulary, 5), (vocabulary,), (2, tokens))
    )
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    inputs = [one.requires_grad_() for one in ([hidden, weight, shift] if bias else [hidden, weight])]
    logprobs, entropy = linear_logprobs(hidden, weight, targets, bias=shift if bias else None, **options)
    found = [one for one in (logprobs, entropy) if one is not None]
    loss = sum(((one * factor).sum() for one, factor in zip(found, outer, strict=False)), torch.zeros(()))
    return [*(one.detach() for one in found), *torch.autograd.grad(loss, inputs)]


def compare(**_: Any) -> dict[str, Any]:
    """Largest differences to one rank, for vocabularies that the ranks divide evenly, unevenly, and not at all."""
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    division = GroupVocabulary(dist.group.WORLD)
    report = {}
    for name, options in CASES.items():
        for vocabulary in (12, 13, 2):
            for tokens in (9, 0):
                want = outputs(vocabulary, tokens, **options)
                got = outputs(vocabulary, tokens, division=division, **options)
                assert [one.shape for one in got] == [one.shape for one in want]
                differences = [(a - b).abs().max().item() for a, b in zip(got, want, strict=True) if a.numel()]
                report[f"{name}, {vocabulary} entries, {tokens} tokens"] = max(differences, default=0.0)
    return report
