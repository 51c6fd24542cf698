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


def kernels(setting: Setting, config: Any) -> dict[str, str]:
    """Why each kernel for packed rows cannot be used for a model in bfloat16; empty: it can."""
    from rlhfkit.models.attention.varlen import KERNELS, Case, choose_kernel

    size = config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, config.num_key_value_heads)
    case = Case(torch.device(setting.device), torch.bfloat16, *heads, size, size, False)
    found = {}
    for name in KERNELS:
        try:
            choose_kernel(case, name)
            found[name] = ""
        except RuntimeError as error:
            found[name] = str(error).split("). ", 1)[-1].split(". attention='auto'")[0]
    return found


def usable(setting: Setting, config: Any) -> list[str]:
    """Names of the kernels that can be used."""
    return [name for name, problem in kernels(setting, config).items() if not problem]


@check("attention/kernels", seconds=60)
def kernels_for_packed_rows(setting: Setting) -> Iterator[Figure]:
    """Which kernels pass their trial here; on a GPU at least one must."""
    for size, heads in ((64, 4), (128, 8)):
        found = kernels(setting, tiny_config(hidden=size * heads, heads=heads))
        for name, problem in found.items():
            yield Figure(f"heads of {size}: {name}", problem or "works")
        if setting.on_gpu:
            yield Figure(f"heads of {size}: no kernel works", float(all(found.values())), 0)


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
            if dtype == torch.bfloat16:
                ways |= {f"packed, {kernel}": (kernel, True) for kernel in ["buckets", *usable(setting, config)]}
            distances: dict[str, list[float]] = {}
            for way, (attention, packed) in ways.items():
                model = _same_weights(config, setting, dtype, attention)
                found = log_probs_and_gradient(model, Rows(sequences, setting.device), packed)
                distances[way] = [distance(one, other) for one, other in zip(found, expected, strict=True)]
                for part, value, bound in zip(("log-probs", "gradient"), distances[way], bounds, strict=True):
                    yield Figure(f"{family}, {str(dtype).removeprefix('torch.')}, {way}: {part}", value, bound)
            if dtype == torch.bfloat16:
                for way in (way for way in ways if way.startswith("packed")):
                    ratio = max(one / two for one, two in zip(distances[way], distances["sdpa"], strict=True))
                    yield Figure(f"{family}, bfloat16: error of {way} over that of sdpa", ratio, AGAINST_SDPA)


@check("attention/shared_prefixes", seconds=60)
def shared_prefixes(setting: Setting) -> Iterator[Figure]:
    """Pairs whose prompt is computed once, with prompts shorter and longer than the window."""
    for family in FAMILIES:
        config = tiny_config(family)
        for shared in (WINDOW // 2, 2 * WINDOW):
            sequences = random_sequences([length + shared for length in lengths(setting)], shared=shared)
            for dtype, bounds in BOUNDS.items():
                expected = exact(config, sequences, dtype)
                model = _same_weights(config, setting, dtype, None)
                found = log_probs_and_gradient(model, Rows(sequences, setting.device), True)
                case = f"{family}, {str(dtype).removeprefix('torch.')}, prompts of {shared} tokens"
                for part, one, other, bound in zip(("log-probs", "gradient"), found, expected, bounds, strict=True):
                    yield Figure(f"{case}: {part}", distance(one, other), bound)


@check("attention/rows_are_isolated", seconds=60)
def rows_are_isolated(setting: Setting) -> Iterator[Figure]:
    """A row's log-probs are the same bits whatever the other rows of the packed batch hold."""
    from rlhfkit.models import policy_output

    first = random_sequences(lengths(setting))
    second = [first[0], *([token % 100 + 5 for token in ids] for ids in first[1:])]
    size = len(first[0]) - 1
    for dtype in BOUNDS:
        model = _same_weights(tiny_config("mistral"), setting, dtype, None)
        with torch.no_grad():
            batches = [Rows(batch, setting.device) for batch in (first, second)]
            one, other = (policy_output(model, rows, rows.mask).logprobs[0, :size] for rows in batches)
        name = str(dtype).removeprefix("torch.")
        yield Figure(f"{name}: largest difference", float((one - other).abs().max()), 0.0)
