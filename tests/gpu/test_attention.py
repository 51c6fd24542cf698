"""Packed, padded and Transformers' attention against one sequence at a time, eager, in float64 on the CPU."""

from typing import Any

import pytest
import torch
from tiny_models import token_logprobs
from torch import Tensor, nn

from gpu.comparing import BOUNDS, Figures, build, config_of, distance, random_sequences, rows_of
from rlhfkit.mesh import FORWARD
from rlhfkit.models import policy_output
from rlhfkit.models.attention.varlen import KERNELS, Case, choose_kernel
from rlhfkit.models.forward import ModelInputs, PaddedForward, choose_forward

FAMILIES = ("llama", "mistral")
AGAINST_SDPA = 1.5
"""Packed attention in bfloat16 may be this many times as far from the exact result as Transformers' padded sdpa."""


def lengths(device: str) -> list[int]:
    """Ragged: several buckets, single tokens, longer and shorter than the window of 16."""
    return [300, 2, 17, 129, 64, 33, 5, 257, 16, 90] if device == "cuda" else [30, 2, 17, 9, 16, 33]


class WithoutMasks(PaddedForward):
    """Padding on the right is invisible to causal attention, so that ours needs no masks."""

    def inputs(self, *arguments: Any) -> ModelInputs:
        found = super().inputs(*arguments)
        del found.arguments["attention_mask"]
        return found


def log_probs_and_gradient(model: nn.Module, rows: Any, packed: bool | None) -> list[Tensor]:
    """Log-probs of all tokens, and the gradient of a weighted sum of them as one vector."""
    model.zero_grad()
    if packed is False:  # our attention over padded rows
        setattr(model, FORWARD, WithoutMasks())
    else:
        choose_forward(model)
    out = policy_output(model, rows, rows.mask).logprobs
    (out * weights(out.shape, out.dtype, str(out.device))).sum().backward()
    return [out.detach(), gradient(model)]


def exact(config: Any, sequences: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """Float64 on the CPU with the weights rounded to ``dtype``, eager attention, each sequence alone."""
    model = build(config, "cpu", dtype, "eager").double()
    rows, alone = rows_of(sequences), []
    factors = weights(rows.mask.shape, torch.float64)
    for row, ids in enumerate(sequences):
        alone.append(token_logprobs(model, ids))
        (alone[-1] * factors[row, : len(ids) - 1]).sum().backward()
    out = torch.zeros(rows.mask.shape, dtype=torch.float64)
    out[rows.mask] = torch.cat(alone).detach()
    return [out, gradient(model)]


def weights(shape: torch.Size, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.linspace(-1, 1, shape.numel(), dtype=torch.float64).view(shape).to(device, dtype)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([one.grad.flatten().double() for one in model.parameters() if one.grad is not None])


def usable(device: str, config: Any) -> list[str]:
    """Names of the kernels for packed rows that pass their trial here."""
    size = config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, config.num_key_value_heads)
    case, found = Case(torch.device(device), torch.bfloat16, *heads, size, size, False), []
    for name in KERNELS:
        try:
            choose_kernel(case, name)
            found.append(name)
        except RuntimeError as error:
            print(f"{name}, heads of {size}: {error}")
    return found


@pytest.mark.cuda
@pytest.mark.parametrize(("size", "heads"), [(64, 4), (128, 8)])
def test_a_kernel_for_packed_rows_passes_its_trial(size: int, heads: int) -> None:
    assert usable("cuda", config_of("llama", hidden=size * heads, heads=heads))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_padded_and_sdpa_are_one_sequence_at_a_time(
    device: str, family: str, dtype: torch.dtype, figures: Figures
) -> None:
    config = config_of(family, **({"hidden": 256, "heads": 4} if device == "cuda" else {}))
    sequences = random_sequences(lengths(device))
    expected = exact(config, sequences, dtype)
    ways: dict[str, tuple[str | None, bool | None]] = {
        "sdpa": ("sdpa", None), "packed": (None, True), "padded": (None, False)
    }  # fmt: skip
    if dtype == torch.bfloat16:
        ways |= {f"packed, {kernel}": (kernel, True) for kernel in ["buckets", *usable(device, config)]}
    apart: dict[str, list[float]] = {}
    for way, (attention, packed) in ways.items():
        model = build(config, device, dtype, attention)
        found = log_probs_and_gradient(model, rows_of(sequences, device), packed)
        apart[way] = [distance(one, other) for one, other in zip(found, expected, strict=True)]
        for part, value, bound in zip(("log-probs", "gradient"), apart[way], BOUNDS[dtype], strict=True):
            figures(f"{way}: {part}", value, bound)
        if dtype == torch.bfloat16 and way.startswith("packed"):
            ratio = max(one / two for one, two in zip(apart[way], apart["sdpa"], strict=True))
            figures(f"error of {way} over that of sdpa", ratio, AGAINST_SDPA)


@pytest.mark.parametrize("shared", [8, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_are_computed_once_change_nothing(device: str, family: str, shared: int, figures: Figures) -> None:
    """Shorter and longer than the window."""
    sequences = random_sequences([length + shared for length in lengths(device)], shared=shared)
    for dtype, bounds in BOUNDS.items():
        model = build(config_of(family), device, dtype)
        found = log_probs_and_gradient(model, rows_of(sequences, device), True)
        for part, one, other, bound in zip(
            ("log-probs", "gradient"), found, exact(config_of(family), sequences, dtype), bounds, strict=True
        ):
            figures(f"{dtype}: {part}", distance(one, other), bound)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_row_has_the_same_bits_whatever_the_other_rows_hold(device: str, dtype: torch.dtype) -> None:
    first = random_sequences(lengths(device))
    second = [first[0], *([token % 100 + 5 for token in ids] for ids in first[1:])]
    model = build(config_of("mistral"), device, dtype)
    with torch.no_grad():
        one, other = (
            policy_output(model, rows, rows.mask).logprobs[0, : len(first[0]) - 1]
            for rows in (rows_of(first, device), rows_of(second, device))
        )
    assert torch.equal(one, other)


@pytest.mark.cuda
def test_ligers_kernels_give_what_pytorchs_operators_give(figures: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    from transformers.models.llama import modeling_llama

    from rlhfkit.models.load import use_liger_kernels

    # Liger replaces it for the whole family; the test puts it back.
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    sequences, config = random_sequences(lengths("cuda")), config_of("llama", hidden=256, heads=4)
    for dtype, bounds in BOUNDS.items():
        expected, model = exact(config, sequences, dtype), build(config, "cuda", dtype)
        for kernels in ("PyTorch", "Liger"):
            if kernels == "Liger":
                use_liger_kernels(model)
            for packed in (True, False):
                found = log_probs_and_gradient(model, rows_of(sequences, "cuda"), packed)
                for part, one, other, bound in zip(("log-probs", "gradient"), found, expected, bounds, strict=True):
                    figures(f"{kernels}, packed {packed}, {dtype}: {part}", distance(one, other), bound)
