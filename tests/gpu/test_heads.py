"""The fused head on the device against all logits in float64 on the CPU, compiled and not."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from gpu.comparing import Figures, distance
from gpu.launch import launch
from rlhfkit.losses import linear_logprobs
from rlhfkit.losses.fused_head import logprobs as kernels
from rlhfkit.losses.fused_head import tiles

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative in norm. float32: TF32 is off; bfloat16: the order of summation before the last rounding."""
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "float32, temperature and soft cap": (torch.float32, {"temperature": 0.7, "logit_softcap": 5.0}),
    "bfloat16": (torch.bfloat16, {}),
}


class Head(NamedTuple):
    """Inputs of a head: hidden states, weight and bias, which have a gradient, and targets."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor

    def on(self, device: str, dtype: torch.dtype) -> "Head":
        return Head(*(leaf.detach().to(device, dtype).requires_grad_() for leaf in self[:3]), self.targets.to(device))


def random_head(device: str) -> Head:
    """Random numbers that bfloat16 can represent, so that all types begin with the same."""
    tokens, width, vocabulary = (1000, 256, 20000) if device == "cuda" else (60, 32, 500)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().float()

    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return Head(draw(tokens, width), draw(vocabulary, width) * 0.25, draw(vocabulary), targets)


def dense(head: Head, temperature: float = 1.0, logit_softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy with all logits in memory."""
    logits = linear(head.hidden, head.weight, head.bias)
    logits = logits if logit_softcap is None else logit_softcap * torch.tanh(logits / logit_softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, head.targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def fused(head: Head, **settings: Any) -> tuple[Tensor, Tensor]:
    out = linear_logprobs(head.hidden, head.weight, head.targets, bias=head.bias, entropy=True, **settings)
    assert out.entropy is not None
    return out.logprobs, out.entropy


def with_gradients(head: Head, compute: Callable[[Head], tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Log-probs, entropy and the gradients of the mean of both."""
    logprobs, entropy = compute(head)
    return [logprobs, entropy, *torch.autograd.grad(logprobs.mean() + entropy.mean(), head[:3])]


@pytest.mark.parametrize("case", CASES)
def test_tiles_are_dense_and_compiled(
    device: str, case: str, figures: Figures, caplog: pytest.LogCaptureFixture
) -> None:
    (dtype, settings), head = CASES[case], random_head(device)
    exact = with_gradients(head.on("cpu", torch.float64), partial(dense, **settings))
    with caplog.at_level(logging.WARNING, logger="rlhfkit"):
        found = with_gradients(head.on(device, dtype), partial(fused, **settings))
    figures("log-probs, entropy and gradients", distance(found, exact), BOUNDS[dtype])
    assert not [message for message in caplog.messages if "compil" in message]  # something slower runs instead


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_compiled_kernels_are_the_eager_tiles(
    device: str, dtype: torch.dtype, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_head(device)
    if device == "cuda":
        assert tiles.can_compile(device)
    compiled = with_gradients(head.on(device, dtype), fused)
    monkeypatch.setattr(tiles, "can_compile", lambda device: False)
    figures("apart", distance(compiled, with_gradients(head.on(device, dtype), fused)), BOUNDS[dtype] / 2)


def test_autocast_gives_what_its_type_gives(device: str, figures: Figures) -> None:
    """As with ``precision="bf16-mixed"``."""
    head = random_head(device)

    def under_autocast(one: Head) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16):
            return fused(one)

    exact = with_gradients(head.on("cpu", torch.float64), dense)
    found = with_gradients(head.on(device, torch.float32), under_autocast)
    figures("log-probs, entropy and gradients", distance(found, exact), BOUNDS[torch.bfloat16])


def first_gradient(folder: Path, device: str) -> tuple[float, int]:
    """In a process of its own, whose first compilation for a gradient is in autograd's thread."""
    threads: set[str] = set()
    original = kernels.head_gradients

    def noted(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return original(*arguments)

    kernels.head_gradients = noted
    head = random_head(device)
    found = with_gradients(head.on(device, torch.float32), fused)
    exact = with_gradients(head.on("cpu", torch.float64), dense)
    return distance(found, exact), len(threads - {"MainThread"})


def test_kernels_of_the_gradient_compile_in_the_thread_of_the_backward_pass(
    device: str, tmp_path: Path, figures: Figures
) -> None:
    [(apart, others)] = launch("gpu.test_heads:first_gradient", 1, tmp_path, on=device, device=device)
    figures("log-probs, entropy and gradients", apart, BOUNDS[torch.float32])
    assert "compil" not in (tmp_path / "rank_0.log").read_text()
    assert others == (device == "cuda")  # a CPU's backward pass runs in the thread that asks for it
