"""Attention: packed, padded and Transformers' own against one sequence at a time, eager, in float64 on the CPU."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.compare import distance
from benchmarks.gpu_check.models import FAMILIES, WINDOW, Rows, build, random_sequences, tiny_config

BOUNDS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2e-2, 6e-2)}
"""Relative in norm, of log-probs and of the gradient of all weights. bfloat16 has 8 bits and the model two layers."""
AGAINST_SDPA = 1.5
"""Packed attention in bfloat16 may be this many times as far from the exact result as Transformers' padded sdpa."""


def lengths(setting: Setting) -> list[int]:
    """Ragged: several buckets, single tokens, longer and shorter than the window."""
    return setting.size([300, 2, 17, 129, 64, 33, 5, 257, 16, 90], [30, 2, 17, 9, 16, 33])


def log_probs_and_gradient(model: nn.Module, rows: Rows, packed: bool | None) -> list[Tensor]:
    """Log-probs of all tokens, and the gradient of a weighted sum of them as one vector."""
    from rlhfkit.models import policy_output

    model.zero_grad()
    out = policy_output(model, rows, rows.mask, packed=packed).logprobs
    (out * _weights(out.shape, out.dtype, str(out.device))).sum().backward()
    return [out.detach(), _gradient(model)]


def exact(config: Any, sequences: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """Float64 on the CPU with the weights rounded to ``dtype``, eager attention, each sequence alone."""
    model = build(config, "cpu", torch.float32, "eager").to(dtype).double()
    rows, alone = Rows(sequences), []
    weights = _weights(rows.mask.shape, torch.float64)
    for row, ids in enumerate(sequences):
        one = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        alone.append(one.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])
        (alone[-1] * weights[row, : len(ids) - 1]).sum().backward()
    out = torch.zeros(rows.mask.shape, dtype=torch.float64)
    out[rows.mask] = torch.cat(alone).detach()
    return [out, _gradient(model)]


def _weights(shape: torch.Size, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Weights of the log-probs in the sum whose gradient is compared."""
    return torch.linspace(-1, 1, shape.numel(), dtype=torch.float64).view(shape).to(device, dtype)


def _gradient(model: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def _same_weights(config: Any, setting: Setting, dtype: torch.dtype, attention: str | None) -> nn.Module:
    """A model on the device with the weights of :func:`exact`."""
    return build(config, "cpu", torch.float32, attention).to(dtype).to(setting.device)


@check("attention/families", seconds=120)
def packed_padded_and_sdpa(setting: Setting) -> Iterator[Figure]:
    """Full attention and a sliding window, both with two query heads per key head."""
    heads = setting.size({"hidden": 256, "heads": 4}, {"hidden": 64, "heads": 2})
    for family in FAMILIES:
        sequences, config = random_sequences(lengths(setting)), tiny_config(family, **heads)
        for dtype, bounds in BOUNDS.items():
            expected = exact(config, sequences, dtype)
            ways: dict[str, tuple[str | None, bool | None]] = {
                "sdpa": ("sdpa", None), "packed": (None, True), "padded": (None, False)
            }  # fmt: skip
            distances: dict[str, list[float]] = {}
            for way, (attention, packed) in ways.items():
                model = _same_weights(config, setting, dtype, attention)
                found = log_probs_and_gradient(model, Rows(sequences, setting.device), packed)
                distances[way] = [distance(one, other) for one, other in zip(found, expected, strict=True)]
                for part, value, bound in zip(("log-probs", "gradient"), distances[way], bounds, strict=True):
                    yield Figure(f"{family}, {str(dtype).removeprefix('torch.')}, {way}: {part}", value, bound)
            if dtype == torch.bfloat16:
                ratio = max(one / two for one, two in zip(distances["packed"], distances["sdpa"], strict=True))
                yield Figure(f"{family}, bfloat16: error of packed over that of sdpa", ratio, AGAINST_SDPA)


@check("attention/shared_prefixes", seconds=60)
def shared_prefixes(setting: Setting) -> Iterator[Figure]:
    """Pairs whose prompt is computed once, with prompts shorter and longer than the window."""
    for family in FAMILIES:
        config = tiny_config(family)
        for shared in (WINDOW // 2, 2 * WINDOW):
            sequences = random_sequences([length + shared for length in lengths(setting)], shared=shared)
            expected = exact(config, sequences, torch.float32)
            model = _same_weights(config, setting, torch.float32, None)
            found = log_probs_and_gradient(model, Rows(sequences, setting.device), True)
            case = f"{family}, prompts of {shared} tokens"
            yield Figure(f"{case}: log-probs", distance(found[0], expected[0]), BOUNDS[torch.float32][0])
            yield Figure(f"{case}: gradient", distance(found[1], expected[1]), BOUNDS[torch.float32][1])


@check("attention/rows_are_isolated", seconds=60)
def rows_are_isolated(setting: Setting) -> Iterator[Figure]:
    """A row's log-probs are the same bits whatever the other rows of the packed batch hold."""
    from rlhfkit.models import policy_output

    model = _same_weights(tiny_config("mistral"), setting, torch.float32, None)
    first = random_sequences(lengths(setting))
    second = [first[0], *([token % 100 + 5 for token in ids] for ids in first[1:])]
    with torch.no_grad():
        outputs = [policy_output(model, rows, rows.mask).logprobs[0] for rows in _on(setting, first, second)]
    size = len(first[0]) - 1
    yield Figure("largest difference", float((outputs[0][:size] - outputs[1][:size]).abs().max()), 0.0)


def _on(setting: Setting, *batches: list[list[int]]) -> list[Rows]:
    return [Rows(batch, setting.device) for batch in batches]
