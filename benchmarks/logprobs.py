"""Time and memory of the ways to get log-probs out of a language-model head, forward and backward; one JSON line.

    python benchmarks/logprobs.py                        # a small size and the large one (several minutes on two cores)
    python benchmarks/logprobs.py --sizes small --repeats 5

Variants, each giving gradients to the hidden states and to the weight of the head:

- ``dense``: ``log_softmax(hidden @ weight.T)`` and ``gather``, what a model without a fused head does. The yardstick.
- ``dense_entropy``: the same with the entropy of every token in the loss.
- ``linear``, ``linear_entropy``: :func:`rlhfkit.losses.linear_logprobs`.
- ``trl``, ``trl_entropy``: TRL's ``ChunkedLogProbFunction`` as its trainers call it, when ``trl`` (1.16 or later)
  can be imported.

All variants run in turn, repeat by repeat, in one process, so that a change of the machine's load meets all of them.
``seconds`` is the fastest wall-clock time and ``cpu_seconds`` the least processor time; ``time_ratio`` and
``cpu_time_ratio`` are those over the yardstick's (``dense``, or ``dense_entropy`` for variants with entropy in their
name). ``peak_mb`` is the largest memory beyond inputs, the returned gradients
included: the high-water mark of the resident set on CPU (Linux only), of allocated memory on CUDA.
"""

import argparse
import ctypes
import gc
import importlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlhfkit.losses import linear_logprobs


@dataclass(frozen=True)
class Size:
    """Tokens (N), width of the hidden state (H) and vocabulary (V)."""

    tokens: int
    hidden: int
    vocabulary: int


SIZES = {"small": Size(512, 384, 32000), "large": Size(4096, 1024, 151936)}
TRL_CHUNK_SIZE = 32768  # trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE of TRL 1.16.0

Variant = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Maps hidden (N, H), weight (V, H), targets (N,) and coefficients (N,) to a scalar loss."""


def dense(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor) -> Tensor:
    """The yardstick: logits, log-softmax, gather."""
    logprobs = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return (logprobs.gather(-1, targets[:, None]).squeeze(-1) * coefficients).sum()


def dense_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor) -> Tensor:
    """The yardstick with entropy: one log-softmax serves both."""
    logprobs = torch.log_softmax((hidden @ weight.t()).float(), -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    return (chosen * coefficients).sum() - 0.01 * entropy.mean()


def linear(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor) -> Tensor:
    """Two passes over tiles of the vocabulary."""
    return (linear_logprobs(hidden, weight, targets).logprobs * coefficients).sum()


def linear_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor) -> Tensor:
    """Two passes, with the entropy's gradient."""
    output = linear_logprobs(hidden, weight, targets, entropy=True)
    assert output.entropy is not None
    return (output.logprobs * coefficients).sum() - 0.01 * output.entropy.mean()


def trl_variants() -> tuple[dict[str, Variant], str]:
    """TRL's kernel as variants, and what to say about it in the report."""
    try:
        trl = importlib.import_module("trl")
        function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    except (ImportError, AttributeError) as error:
        return {}, f"not timed: {error}"

    def plain(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor) -> Tensor:
        output = function.apply(hidden, weight, None, targets, 1.0, TRL_CHUNK_SIZE, None, 1.0, ())
        return (output[0] * coefficients).sum()

    def entropy(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor) -> Tensor:
        output = function.apply(hidden, weight, None, targets, 1.0, TRL_CHUNK_SIZE, None, 1.0, ("entropy",))
        return (output[0] * coefficients).sum() - 0.01 * output[1].mean()

    return {"trl": plain, "trl_entropy": entropy}, f"ChunkedLogProbFunction of trl {trl.__version__}"


class PeakMemory:
    """Bytes above the level at :meth:`start`: allocated ones on CUDA, resident ones on Linux, else unknown."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0

    def start(self) -> None:
        """Release what is free and set the high-water mark to the present level."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._base = torch.cuda.memory_allocated()
        elif platform.system() == "Linux":
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
            self._base = _status("VmRSS")

    def stop(self) -> float | None:
        """Megabytes (10^6 bytes) above the level at the start; ``None`` where it cannot be known."""
        if self._device.type == "cuda":
            return (torch.cuda.max_memory_allocated() - self._base) / 1e6
        return (_status("VmHWM") - self._base) / 1e6 if platform.system() == "Linux" else None


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def measure(size: Size, variants: dict[str, Variant], repeats: int, device: torch.device, dtype: torch.dtype) -> dict:
    """Seconds, peak memory and their ratios to the yardstick for one size."""
    torch.manual_seed(0)
    hidden = torch.randn(size.tokens, size.hidden, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(size.vocabulary, size.hidden, device=device, dtype=dtype) * 0.02).requires_grad_()
    targets = torch.randint(0, size.vocabulary, (size.tokens,), device=device)
    coefficients = torch.full((size.tokens,), -1.0 / size.tokens, device=device)
    results: dict[str, dict] = {
        name: {"seconds": [], "cpu_seconds": [], "peak_mb": None, "weight_grad_norm": None} for name in variants
    }
    memory = PeakMemory(device)
    for _ in range(repeats):
        for name, variant in variants.items():
            hidden.grad = weight.grad = None
            memory.start()
            wall, cpu = time.perf_counter(), time.process_time()
            variant(hidden, weight, targets, coefficients).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            result = results[name]
            result["seconds"].append(time.perf_counter() - wall)
            result["cpu_seconds"].append(time.process_time() - cpu)
            result["peak_mb"] = memory.stop()
            assert weight.grad is not None
            result["weight_grad_norm"] = weight.grad.float().norm().item()
    for result in results.values():
        result["seconds"], result["cpu_seconds"] = min(result["seconds"]), min(result["cpu_seconds"])
    for name, result in results.items():
        yardstick = results.get("dense_entropy" if name.endswith("_entropy") else "dense")
        if yardstick is not None:
            result["time_ratio"] = result["seconds"] / yardstick["seconds"]
            result["cpu_time_ratio"] = result["cpu_seconds"] / yardstick["cpu_seconds"]
            if result["peak_mb"] is not None:
                result["peak_ratio"] = result["peak_mb"] / yardstick["peak_mb"]
    return {**asdict(size), "variants": results}


def main() -> None:
    """Parse the command line, measure, print one JSON line."""
    own: dict[str, Variant] = {
        "dense": dense,
        "linear": linear,
        "dense_entropy": dense_entropy,
        "linear_entropy": linear_entropy,
    }
    peers, remark = trl_variants()
    variants = own | peers
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--tokens", type=int, default=None, help="instead of the size's own number of tokens")
    parser.add_argument("--variants", nargs="+", choices=variants, default=list(variants))
    parser.add_argument(
        "--repeats", type=int, default=1, help="of the large size; the small one gets four times as many"
    )
    parser.add_argument("--threads", type=int, default=None, help="torch's own choice by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    chosen = {name: variants[name] for name in arguments.variants}
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    warmup = Size(64, 64, 1024)
    measure(warmup, chosen, 1, device, dtype)
    sizes = {
        name: measure(
            replace(SIZES[name], tokens=arguments.tokens or SIZES[name].tokens),
            chosen,
            arguments.repeats * (4 if name == "small" else 1),
            device,
            dtype,
        )
        for name in arguments.sizes
    }
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": str(device)}
    print(json.dumps({**setting, "dtype": arguments.dtype, "trl": remark, "sizes": sizes}))


if __name__ == "__main__":
    main()
