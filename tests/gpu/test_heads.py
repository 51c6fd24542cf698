"""The fused head on the device against all logits in float64 on the CPU, compiled and not."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from losses.fused_head.test_logprobs import Head, dense, fused, random_head
from torch import Tensor

from gpu.comparing import Figures, distance
from gpu.launch import launch
from rlhfkit.losses.fused_head import logprobs as kernels
from rlhfkit.losses.fused_head import tiles

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative in norm. float32: TF32 is off; bfloat16: the order of summation before the last rounding."""
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "float32, temperature and soft cap": (torch.float32, {"temperature": 0.7, "logit_softcap": 5.0}),
    "bfloat16": (torch.bfloat16, {}),
}


def head_for(device: str) -> Head:
    """Random numbers that bfloat16 can represent, so that all types begin with the same."""
    tokens, width, vocabulary = (1000, 256, 20000) if device == "cuda" else (60, 32, 500)
    head = random_head(tokens, width=width, vocabulary=vocabulary).to(torch.bfloat16)
    return head._replace(weight=head.weight * 0.25)


ours = partial(fused, entropy=True)


def with_gradients(head: Head, device: str, dtype: torch.dtype, compute: Callable[[Head], Any]) -> list[Tensor]:
    """Log-probs, entropy and the gradients of the mean of both."""
    leaves = (leaf.detach().to(device, dtype).requires_grad_() for leaf in head.leaves)
    head = Head(*leaves, head.targets.to(device))
    logprobs, entropy, *_ = compute(head)
    return [logprobs, entropy, *torch.autograd.grad(logprobs.mean() + entropy.mean(), head.leaves)]


@pytest.mark.parametrize("case", CASES)
def test_tiles_are_dense_compiled_or_not(
    device: str, case: str, figures: Figures, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dtype, settings), head = CASES[case], head_for(device)
    exact = with_gradients(head, "cpu", torch.float64, partial(dense, **settings))
    if device == "cuda":
        assert tiles.can_compile(device)
    for way in ("compiled", "eager"):
        with caplog.at_level(logging.WARNING, logger="rlhfkit"):
            found = with_gradients(head, device, dtype, partial(ours, **settings))
        figures(f"{way}: log-probs, entropy and gradients", distance(found, exact), BOUNDS[dtype])
        monkeypatch.setattr(tiles, "can_compile", lambda device: False)
    assert not [message for message in caplog.messages if "compil" in message]  # something slower runs instead


def test_autocast_gives_what_its_type_gives(device: str, figures: Figures) -> None:
    """As with ``precision="bf16-mixed"``."""
    head = head_for(device)
    exact = with_gradients(head, "cpu", torch.float64, dense)
    found = with_gradients(head, device, torch.float32, torch.autocast(device, torch.bfloat16)(ours))
    figures("log-probs, entropy and gradients", distance(found, exact), BOUNDS[torch.bfloat16])


def first_gradient(folder: Path, device: str) -> tuple[float, int]:
    """In a process of its own, whose first compilation for a gradient is in autograd's thread."""
    threads: set[str] = set()
    original = kernels.head_gradients

    def noted(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return original(*arguments)

    kernels.head_gradients = noted
    head = head_for(device)
    found = with_gradients(head, device, torch.float32, ours)
    exact = with_gradients(head, "cpu", torch.float64, dense)
    return distance(found, exact), len(threads - {"MainThread"})


def test_kernels_of_the_gradient_compile_in_the_thread_of_the_backward_pass(
    device: str, tmp_path: Path, figures: Figures
) -> None:
    [(apart, others)] = launch("gpu.test_heads:first_gradient", 1, tmp_path, on=device, device=device)
    figures("log-probs, entropy and gradients", apart, BOUNDS[torch.float32])
    assert "compil" not in (tmp_path / "rank_0.log").read_text()
    assert others == (device == "cuda")  # a CPU's backward pass runs in the thread that asks for it
