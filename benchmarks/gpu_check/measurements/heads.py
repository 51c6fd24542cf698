"""The fused heads beside all logits in memory: seconds, memory, and how long the first call compiles."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.compare import peak_gib, seconds_of


def ways(mask: Tensor) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Losses of hidden states, weight and targets, by name."""
    from rlhfkit.losses import linear_cross_entropy, linear_logprobs

    def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(linear(hidden, weight).float(), targets)

    def tiles(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return -linear_logprobs(hidden, weight, targets).logprobs.mean()

    def with_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        out = linear_logprobs(hidden, weight, targets, entropy=True)
        assert out.entropy is not None
        return -out.logprobs.mean() - out.entropy.mean()

    def single_pass(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, mask).loss

    return {
        "dense": dense,
        "linear_logprobs": tiles,
        "linear_logprobs with entropy": with_entropy,
        "linear_cross_entropy": single_pass,
    }


@check("measure/heads", seconds=90)
def heads(setting: Setting) -> Iterator[Figure]:
    """16k tokens, 152k words, width 3584 (Qwen2.5 7B), bfloat16, forward and backward."""
    tokens, width, vocabulary = setting.size((16384, 3584, 152064), (64, 32, 512))
    generator = torch.Generator(setting.device if setting.on_gpu else "cpu").manual_seed(0)

    def draw(rows: int, scale: float) -> Tensor:
        made = torch.randn(rows, width, device=generator.device, dtype=torch.bfloat16, generator=generator)
        return (scale * made).to(setting.device).requires_grad_()

    hidden, weight = draw(tokens, 1.0), draw(vocabulary, 0.02)
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device=generator.device).to(setting.device)
    for name, loss in ways(torch.ones_like(targets).bool()).items():

        def step(loss: Callable[[Tensor, Tensor, Tensor], Tensor] = loss) -> None:
            torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))

        try:
            yield from measured(name, step, setting)
        except torch.OutOfMemoryError as error:
            yield Figure(name, f"out of memory: {error}"[:120])


def measured(name: str, step: Callable[[], None], setting: Setting) -> Iterator[Figure]:
    """Seconds and memory of a step."""
    start = time.perf_counter()
    step()
    setting.synchronize()
    yield Figure(f"{name}: first call", time.perf_counter() - start, unit="s")
    yield Figure(f"{name}: forward and backward", seconds_of(step, setting), unit="s")
    peak = peak_gib(step, setting)
    if peak is not None:
        yield Figure(f"{name}: peak memory beside inputs", peak, unit="GiB")
