"""``CompiledTiles``: tiles of logits on CUDA, with the arithmetic between two matrix products as one compiled kernel.

``torch.compile`` turns the functions here, without side effects, into Triton kernels that read a tile once or twice and
write it once. The in-place ones of :mod:`rlhfkit.losses.fused_head.tiles`, which has the formulas, run where that is
switched off (``TORCH_COMPILE_DISABLE=1``, PyTorch's own switch), without Triton, and after a compilation that failed,
as it does without a C compiler.
"""

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhfkit.losses.fused_head.tiles import NEGLIGIBLE, OutputGradient, RunningSoftmax, Tiles

log = logging.getLogger(__name__)

_BACKEND = "inductor"  # of torch.compile
_SLOWER = "log-probs of the output layer run without compiled kernels, which is slower"
_failed = False


class CompiledTiles(Tiles):
    """:class:`Tiles` with compiled arithmetic and no buffers."""

    def _allocate(self, *, entropy: bool) -> None:
        """Allocate nothing: intermediate values stay in registers."""

    def accumulate(self, state: RunningSoftmax, raw: Tensor, targets: Tensor) -> None:
        """Update the running statistics by a tile."""
        constants = (self.transform.logit_scale, self.transform.softcap, self.transform.temperature)
        sums = (state.peak, state.total, state.chosen, state.weighted)
        updated = run_compiled(tile_statistics, raw, targets, *sums, *constants)
        for old, new in zip(sums, updated, strict=True):
            if old is not None:
                old.copy_(new)

    def gradient(self, raw: Tensor, targets: Tensor, outer: OutputGradient) -> Tensor:
        """Gradient of the loss with respect to the raw logits."""
        constants = (self.transform.logit_scale, self.transform.softcap, self.transform.temperature)
        values = (outer.logprobs, outer.entropy, outer.log_normalizer, outer.entropy_value)
        found: Tensor = run_compiled(tile_gradient, raw, targets, *values, *constants)
        return found


def can_compile(device: str) -> bool:
    """Whether tiles on this type of device are compiled: CUDA with Triton, and not inside a caller's ``torch.compile``.

    Logs once why not, if it could be otherwise.
    """
    if _failed or torch.compiler.is_compiling() or not _has_kernels(device):
        return False
    switches = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")  # the second is the older name
    return all(os.environ.get(switch, "0") in ("", "0") for switch in switches)


@functools.cache
def _has_kernels(device: str) -> bool:
    if device != "cuda":
        return False
    old = torch.cuda.get_device_capability() < (7, 0)
    if old or importlib.util.find_spec("triton") is None:
        log.warning("%s: %s", _SLOWER, "Triton does not support this GPU" if old else "Triton is not installed")
        return False
    return True


def run_compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function without side effects, compiled; as it is, and from then on all, once a compilation has failed."""
    global _failed
    if _failed:
        return function(*arguments)
    try:
        return _compiled(function, _BACKEND)(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and their drivers raise errors of any type
        result = function(*arguments)  # raises what is no compiler's error
        _failed = True
        reason = next((line for line in str(error).splitlines() if line.strip()), "")[:300]
        log.warning("%s: %s: %s", _SLOWER, type(error).__name__, reason)
        return result


@functools.cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, dynamic=True)


def tile_statistics(
    raw: Tensor,
    targets: Tensor,
    peak: Tensor,
    total: Tensor,
    chosen: Tensor,
    weighted: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The new peak, total, chosen and weighted (n,) after a tile: ``tiles.accumulate`` without side effects.

    ``raw`` are (n, W) raw logits, ``targets`` (n,) targets minus the tile's first vocabulary entry; the others are
    fields of ``RunningSoftmax`` and ``LogitTransform``.
    """
    logits, _ = _logits(raw, peak.dtype, logit_scale, softcap, temperature)
    match = _match(targets, raw.shape[1])
    inside = (targets >= 0) & (targets < raw.shape[1])
    chosen = torch.where(inside, torch.where(match, logits, 0.0).sum(1), chosen)
    new_peak = torch.maximum(peak, logits.amax(1))
    shifted = logits - new_peak[:, None]
    decay = torch.exp(peak - new_peak)
    if weighted is not None:
        shifted = shifted.clamp(min=NEGLIGIBLE)
        exponential = torch.exp(shifted)
        weighted = (weighted - (new_peak - peak) * total) * decay + (exponential * shifted).sum(1)
    else:
        exponential = torch.exp(shifted)
    return new_peak, total * decay + exponential.sum(1), chosen, weighted


def tile_gradient(
    raw: Tensor,
    targets: Tensor,
    to_logprobs: Tensor | None,
    to_entropy: Tensor | None,
    log_normalizer: Tensor,
    entropy: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
) -> Tensor:
    """Gradient (n, W) with respect to the raw logits, in their dtype: ``tiles.tile_gradient`` without side effects.

    ``raw`` are (n, W) raw logits, ``targets`` (n,) targets minus the tile's first vocabulary entry; the others are
    fields of ``OutputGradient`` and ``LogitTransform``.
    """
    logits, slope = _logits(raw, log_normalizer.dtype, logit_scale, softcap, temperature)
    logp = (logits - log_normalizer[:, None]).clamp(min=NEGLIGIBLE)
    probability = torch.exp(logp)
    result = torch.zeros_like(logits)
    if to_logprobs is not None:
        result = (_match(targets, raw.shape[1]).to(logits.dtype) - probability) * to_logprobs[:, None]
    if to_entropy is not None and entropy is not None:
        result = result - probability * (logp + entropy[:, None]) * to_entropy[:, None]
    return (result * slope).to(raw.dtype)


def _logits(
    raw: Tensor, dtype: torch.dtype, logit_scale: float, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor | float]:
    """Logits of the softmax and their slope with respect to the raw ones."""
    scaled = raw.to(dtype) * logit_scale
    if softcap is None:
        return scaled / temperature, logit_scale / temperature
    capped = torch.tanh(scaled / softcap)
    return capped * (softcap / temperature), (1.0 - capped * capped) * (logit_scale / temperature)


def _match(targets: Tensor, width: int) -> Tensor:
    """(n, W), true at the target: a comparison fuses into the kernel and is deterministic, a scatter is neither."""
    return torch.arange(width, device=targets.device)[None, :] == targets[:, None]
