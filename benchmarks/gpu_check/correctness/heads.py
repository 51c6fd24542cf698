"""The fused heads: CUDA against the CPU, compiled against eager, and compilation inside the backward pass."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.compare import distance

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative in norm. float32: TF32 is off; bfloat16: the order of summation before the last rounding."""


class Head(NamedTuple):
    """Inputs of a head of N tokens, width H and vocabulary V."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor

    def on(self, device: str, dtype: torch.dtype) -> "Head":
        """A copy elsewhere whose first three require gradients."""
        leaves = [leaf.detach().to(device, dtype).requires_grad_() for leaf in self[:3]]
        return Head(*leaves, self.targets.to(device))


def random_head(tokens: int, width: int, vocabulary: int) -> Head:
    """Random numbers that bfloat16 can represent, so that all types begin with the same."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().float()

    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return Head(draw(tokens, width), draw(vocabulary, width) * 0.25, draw(vocabulary), targets)


def dense(head: Head, temperature: float = 1.0, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy with all logits in memory."""
    logits = linear(head.hidden, head.weight, head.bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, head.targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def with_gradients(head: Head, compute: Callable[[Head], tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """Log-probs, entropy and the gradients of the mean of both."""
    logprobs, entropy = compute(head)
    loss = logprobs.mean() if entropy is None else logprobs.mean() + entropy.mean()
    return [logprobs, *([] if entropy is None else [entropy]), *torch.autograd.grad(loss, head[:3])]


@contextmanager
def fallbacks() -> Iterator[list[str]]:
    """Collect warnings and log messages that speak of compilation, which say that something slower runs instead."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "compil" in record.getMessage().lower():
                found.append(record.getMessage())

    handler, logger = Handler(logging.WARNING), logging.getLogger("rlhfkit")
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield found
        finally:
            logger.removeHandler(handler)
            found += [str(one.message) for one in caught if "compil" in str(one.message).lower()]


def _linear(head: Head, **settings: Any) -> tuple[Tensor, Tensor | None]:
    from rlhfkit.losses import linear_logprobs

    return linear_logprobs(head.hidden, head.weight, head.targets, bias=head.bias, **settings)


@check("heads/linear_logprobs", seconds=90)
def linear_logprobs_is_dense(setting: Setting) -> Iterator[Figure]:
    """Tiles of the vocabulary against all logits in float64 on the CPU."""
    head = random_head(*setting.size((1000, 256, 20000), (60, 32, 500)))
    plain, capped = {"entropy": True}, {"entropy": True, "temperature": 0.7, "logit_softcap": 5.0}
    cases: list[tuple[str, torch.dtype, dict[str, Any]]] = [
        ("float32", torch.float32, plain),
        ("float32, temperature 0.7, soft cap", torch.float32, capped),
        ("bfloat16", torch.bfloat16, plain),
    ]
    with fallbacks() as found:
        for case, dtype, settings in cases:
            exact = with_gradients(head.on("cpu", torch.float64), partial(dense, **_dense_settings(settings)))
            got = with_gradients(head.on(setting.device, dtype), partial(_linear, **settings))
            yield Figure(case, distance(got, exact), BOUNDS[dtype])
    yield Figure("kernels that were not compiled", len(found), 0)


def _dense_settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {"temperature": settings.get("temperature", 1.0), "softcap": settings.get("logit_softcap")}


@check("heads/single_pass", seconds=60)
def single_pass_is_dense(setting: Setting) -> Iterator[Figure]:
    """Losses with gradients in the forward pass."""
    from rlhfkit.losses import linear_cross_entropy, linear_policy_gradient

    head = random_head(*setting.size((1000, 256, 20000), (60, 32, 500)))
    mask = torch.arange(len(head.targets)) % 3 > 0
    advantages = torch.randn(len(mask), generator=torch.Generator().manual_seed(1))

    def cross_entropy(one: Head, fast: bool) -> Tensor:
        if fast:
            selected = mask.to(one.hidden.device)
            return linear_cross_entropy(one.hidden, one.weight, one.targets, selected, bias=one.bias).loss
        return -dense(one)[0][mask].mean()

    def policy_gradient(one: Head, fast: bool) -> Tensor:
        weights = (advantages / len(mask)).to(one.hidden.device)
        if fast:
            return linear_policy_gradient(one.hidden, one.weight, one.targets, weights, bias=one.bias).loss
        return (weights * dense(one)[0]).sum()

    for name, loss in {"cross-entropy": cross_entropy, "policy gradient": policy_gradient}.items():
        reference = head.on("cpu", torch.float64)
        value = loss(reference, False)
        exact = [value, *torch.autograd.grad(value, reference[:3])]
        for dtype, bound in BOUNDS.items():
            one = head.on(setting.device, dtype)
            value = loss(one, True)
            got = [value, *torch.autograd.grad(value, one[:3])]
            yield Figure(f"{name}, {str(dtype).removeprefix('torch.')}", distance(got, exact), bound)


@check("heads/eager", seconds=60)
def compiled_is_eager(setting: Setting) -> Iterator[Figure]:
    """Compiled kernels against the same tiles without compilation, on the same device."""
    from rlhfkit.losses.fused_head import logprobs

    head = random_head(*setting.size((1000, 256, 20000), (60, 32, 500)))
    yield Figure("kernels are compiled on this device", "yes" if logprobs.can_compile(setting.device) else "no")
    for dtype, bound in BOUNDS.items():
        fast = with_gradients(head.on(setting.device, dtype), lambda one: _linear(one, entropy=True))
        before = logprobs.can_compile
        logprobs.can_compile = lambda device: False  # type: ignore[assignment]
        try:
            plain = with_gradients(head.on(setting.device, dtype), lambda one: _linear(one, entropy=True))
        finally:
            logprobs.can_compile = before  # type: ignore[assignment]
        yield Figure(f"compiled and eager, {str(dtype).removeprefix('torch.')}", distance(fast, plain), bound / 2)


@check("heads/autocast", seconds=60)
def autocast_is_its_dtype(setting: Setting) -> Iterator[Figure]:
    """float32 inputs under autocast to bfloat16, as with ``precision="bf16-mixed"``."""
    head = random_head(*setting.size((1000, 256, 20000), (60, 32, 500)))

    def under_autocast(one: Head) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(setting.device, torch.bfloat16):
            return _linear(one, entropy=True)

    exact = with_gradients(head.on("cpu", torch.float64), dense)
    got = with_gradients(head.on(setting.device, torch.float32), under_autocast)
    yield Figure("bf16-mixed", distance(got, exact), BOUNDS[torch.bfloat16])


@check("heads/backward_thread", seconds=90, process="fresh")
def compiles_in_the_backward_thread(setting: Setting) -> Iterator[Figure]:
    """Kernels of the gradient are first compiled in autograd's own thread, which must work in a fresh process."""
    import threading

    from rlhfkit.losses.fused_head import logprobs

    head = random_head(*setting.size((500, 128, 5000), (60, 32, 500))).on(setting.device, torch.float32)
    threads: set[str] = set()
    original = logprobs.head_gradients

    def noted(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return original(*arguments)

    logprobs.head_gradients = noted
    with fallbacks() as found:
        got = with_gradients(head, lambda one: _linear(one, entropy=True))
    yield Figure("gradient", distance(got, with_gradients(head.on("cpu", torch.float64), dense)), 1e-4)
    yield Figure("kernels that were not compiled", len(found), 0)
    yield Figure("thread of the backward pass", ", ".join(sorted(threads)))
