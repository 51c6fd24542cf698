"""Softmax statistics and gradients over tiles of the logits: N tokens by a slice of the vocabulary.

:mod:`rlhfkit.losses.fused_head.logprobs` goes over the vocabulary in tiles, so that the (N, V) logits never exist. For
a tile of logits ``z`` the functions here keep a running softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867)::

    m' = max(m, max_v z_v),   S' = S exp(m - m') + sum_v exp(z_v - m'),   log Z = m + log S
    A' = (A - (m' - m) S) exp(m - m') + sum_v exp(z_v - m') (z_v - m'),   entropy = log S - A / S

and, once ``log Z`` and the entropy ``E`` are known, turn a recomputed tile into the gradient with respect to it::

    d logprob / d z_v = 1[v = target] - p_v,          d E / d z_v = -p_v (log p_v + E),          p_v = exp(z_v - log Z)

The same two functions run everywhere. On a CPU they get buffers to write to, since memory traffic and page faults take
most of the time beside the matrix products; on CUDA ``torch.compile`` makes one kernel of each, which reads a tile once
or twice and writes it once; not where that is switched off (``TORCH_COMPILE_DISABLE=1``, PyTorch's own switch), without
Triton, and after a compilation that failed, as it does without a C compiler. N are tokens, H the hidden size, V the
vocabulary.
"""

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

# exp() of this is 0 even in float64; a logit of -inf (a masked vocabulary entry) must give p log p = 0, not 0 * -inf.
NEGLIGIBLE = -1e4


@dataclass(frozen=True)
class LogitTransform:
    """The map from ``x = hidden @ weight.T + bias`` to the logits of the softmax.

    ``logits = softcap(logit_scale * x) / temperature`` with ``softcap(x) = cap * tanh(x / cap)`` (Gemma 2, 2024,
    arXiv:2408.00118), applied as ``logits = factor * inner(x)`` to save a pass. ``logit_scale`` is Cohere's, or one
    over Granite's ``logits_scaling``.
    """

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "logit_scale"):
            value = getattr(self, name)
            if not 0.0 < value < float("inf"):
                raise ValueError(f"{name} must be a finite number above 0, got {value}")
        if self.softcap is not None and not 0.0 < self.softcap < float("inf"):
            raise ValueError(f"logit_softcap must be a finite number above 0, or None for no cap, got {self.softcap}")

    @property
    def factor(self) -> float:
        """Factor from ``inner`` to the logits."""
        return (self.logit_scale if self.softcap is None else self.softcap) / self.temperature

    @property
    def slope(self) -> float | None:
        """Factor on the raw logits inside ``tanh``; ``None`` without a cap, where ``inner`` are the raw logits."""
        return None if self.softcap is None else self.logit_scale / self.softcap


@dataclass
class RunningSoftmax:
    """Softmax statistics of the vocabulary seen so far, each (N,) in the reduction dtype.

    Attributes:
        peak: Largest logit.
        total: ``sum exp(z - peak)``.
        chosen: Logit of the target; NaN until its tile was seen, and so for a target outside the vocabulary.
        weighted: ``sum exp(z - peak) (z - peak)``; ``None`` when no entropy is wanted.
    """

    peak: Tensor
    total: Tensor
    chosen: Tensor
    weighted: Tensor | None

    @classmethod
    def empty(cls, tokens: int, dtype: torch.dtype, device: torch.device, *, entropy: bool) -> "RunningSoftmax":
        """Statistics of no logits for ``tokens`` rows."""
        # The lowest finite number, not -inf: a tile whose logits are all -inf would give -inf - -inf = nan.
        peak = torch.full((tokens,), torch.finfo(dtype).min, dtype=dtype, device=device)
        zeros = torch.zeros_like(peak)
        weighted = torch.zeros_like(peak) if entropy else None
        return cls(peak, zeros, torch.full_like(peak, float("nan")), weighted)

    def rows(self, rows: slice) -> "RunningSoftmax":
        """The statistics of a slice of the tokens (views)."""
        weighted = None if self.weighted is None else self.weighted[rows]
        return RunningSoftmax(self.peak[rows], self.total[rows], self.chosen[rows], weighted)

    def update(self, *statistics: Tensor | None) -> None:
        """Write the results of :func:`tile_statistics`, in place."""
        for old, new in zip((self.peak, self.total, self.chosen, self.weighted), statistics, strict=True):
            if old is not None and new is not None:
                old.copy_(new)

    def move_peak(self, peak: Tensor) -> None:
        """Refer the sums to another ``peak`` (N,), which is at least the own one, in place."""
        decay = (self.peak - peak).exp_()
        if self.weighted is not None:
            self.weighted.sub_((peak - self.peak) * self.total).mul_(decay)
        self.total.mul_(decay)
        self.peak.copy_(peak)

    def log_normalizer(self) -> Tensor:
        """``log Z``, shape (N,)."""
        return self.peak + self.total.log()

    def entropy(self) -> Tensor | None:
        """Entropy in nats, shape (N,), if it was asked for."""
        return None if self.weighted is None else self.total.log() - self.weighted / self.total


def tile_statistics(
    raw: Tensor,
    targets: Tensor,
    peak: Tensor,
    total: Tensor,
    chosen: Tensor,
    weighted: Tensor | None,
    factor: float,
    slope: float | None,
    work: Tensor | None = None,
    spare: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The new statistics (n,) of a :class:`RunningSoftmax` after one more (n, W) tile of raw logits.

    ``targets`` (n,) are relative to the tile's first vocabulary entry, outside [0, W) when in another tile. ``factor``
    and ``slope`` are those of :class:`LogitTransform`. ``work`` (n, W) in the reduction dtype is written to, and may be
    ``raw``; ``spare`` likewise, only for the entropy. New tensors in place of ``None``.
    """
    inner = raw if slope is None else raw.to(peak.dtype, copy=True).mul_(slope).tanh_()
    inside, index = _locate(targets, inner.shape[1])
    chosen = torch.where(inside, inner.gather(1, index).squeeze(1).to(peak.dtype) * factor, chosen)
    new_peak = torch.maximum(peak, inner.amax(1).to(peak.dtype) * factor)
    shifted = torch.add(-new_peak[:, None], inner, alpha=factor, out=work)
    decay = (peak - new_peak).exp()
    if weighted is None:
        exponential = shifted.exp_()
        return new_peak, total * decay + exponential.sum(1), chosen, None
    exponential = torch.exp(shifted.clamp_(min=NEGLIGIBLE), out=spare)
    weighted = (weighted - (new_peak - peak) * total) * decay
    new_total = total * decay + exponential.sum(1)
    return new_peak, new_total, chosen, weighted + shifted.mul_(exponential).sum(1)


@dataclass
class OutputGradient:
    """Gradients and saved statistics, each (N,) in the reduction dtype.

    Attributes:
        logprobs: ``d loss / d logprob``; ``None`` when no loss used the log-probs.
        entropy: ``d loss / d entropy``; ``None`` likewise.
        log_normalizer: ``log Z``.
        entropy_value: ``E``, only with ``entropy``.
    """

    logprobs: Tensor | None
    entropy: Tensor | None
    log_normalizer: Tensor
    entropy_value: Tensor | None

    def rows(self, rows: slice) -> "OutputGradient":
        """The same for a slice of the tokens (views)."""
        parts = (self.logprobs, self.entropy, self.log_normalizer, self.entropy_value)
        # mypy does not see that exactly the optional fields can be None here.
        return OutputGradient(*(None if part is None else part[rows] for part in parts))  # type: ignore[arg-type]


def tile_gradient(
    raw: Tensor,
    targets: Tensor,
    to_logprobs: Tensor | None,
    to_entropy: Tensor | None,
    log_normalizer: Tensor,
    entropy: Tensor | None,
    factor: float,
    slope: float | None,
    work: Tensor | None = None,
    spare: Tensor | None = None,
) -> Tensor:
    """Gradient (n, W) with respect to the raw logits, from the fields of an :class:`OutputGradient`.

    Buffers as in :func:`tile_statistics`; the result is ``work``, without buffers a tensor in the dtype of ``raw``.
    """
    inner = raw if slope is None else raw.to(log_normalizer.dtype, copy=True).mul_(slope).tanh_()
    logp = torch.add(-log_normalizer[:, None], inner, alpha=factor, out=work)
    if to_entropy is None or entropy is None:
        assert to_logprobs is not None
        result = logp.exp_().mul_((-factor * to_logprobs)[:, None])
    else:
        probability = torch.exp(logp.clamp_(min=NEGLIGIBLE), out=spare)
        weight = -factor * to_entropy
        offset = weight * entropy
        if to_logprobs is not None:
            offset = offset - factor * to_logprobs
        result = torch.addcmul(offset[:, None], weight[:, None], logp, out=work).mul_(probability)
    if to_logprobs is not None:
        result = _add_at_targets(result, targets, factor * to_logprobs)
    if slope is not None:
        result = result.mul_(inner.square_().neg_().add_(1.0)).mul_(slope)
    return result.to(raw.dtype) if work is None else result


def _add_at_targets(values: Tensor, targets: Tensor, added: Tensor) -> Tensor:
    """Add (n,) to (n, W) at the targets that are in this tile, in place."""
    if torch.compiler.is_compiling():  # a comparison fuses into the kernel and is deterministic, a scatter is neither
        match = torch.arange(values.shape[1], device=targets.device)[None, :] == targets[:, None]
        return values + torch.where(match, added[:, None], 0.0)
    inside, index = _locate(targets, values.shape[1])
    return values.scatter_add_(1, index, torch.where(inside, added, 0.0)[:, None])


def slices(total: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most ``size`` that cover ``range(total)``."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _locate(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(n,) whether each target is in this tile, and (n, 1) a valid column for each."""
    return (targets >= 0) & (targets < width), targets.clamp(0, width - 1)[:, None]


# A tile of 4096 tokens by 2048 vocabulary entries: large enough for matrix products at full speed on two to a few dozen
# cores, small enough (32 MiB in float32) to be cheap next to anything else. GPUs need more work per kernel.
MAX_ROWS = 4096
TILE_BYTES = {"cpu": 32 * 2**20}
DEFAULT_TILE_BYTES = 256 * 2**20


def matmul_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Dtype of the matrix products: autocast's when it is on, else the wider one of the two inputs."""
    device = hidden.device.type
    wider = torch.promote_types(hidden.dtype, weight.dtype)
    if wider != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return wider


def check_head_arguments(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless the arguments of a head fit together; the message names what was given."""
    if hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be (..., H) and weight (V, H), got hidden {tuple(hidden.shape)} and weight "
            f"{tuple(weight.shape)}; a weight of shape (0,) is a ZeRO-3 partition that was not gathered"
        )
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"hidden and weight must be floating point, got {hidden.dtype} and {weight.dtype}")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets must have the shape of hidden without its last dimension, {tuple(hidden.shape[:-1])}, "
            f"got {tuple(targets.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    check_targets(targets, weight.shape[0])


def check_targets(targets: Tensor, vocabulary: int) -> None:
    """Raise ValueError for targets that are no token ids; their range is checked on the CPU only, to avoid a sync."""
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 token ids, got {targets.dtype}")
    if targets.device.type != "cpu" or torch.compiler.is_compiling() or targets.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in targets.aminmax())
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"targets must lie in [0, {vocabulary}), got values from {lowest} to {highest}; "
            "give ignored positions (-100) any valid token id and leave them out with the loss mask"
        )


def tile_shape(tokens: int, vocabulary: int, chunk: int | None, dtype: torch.dtype, device: str) -> tuple[int, int]:
    """Rows and columns of a tile: as many tokens as possible, and columns by ``chunk`` or the bytes of the tile."""
    rows = max(1, min(tokens, MAX_ROWS))
    return rows, tile_columns(rows, vocabulary, dtype, device) if chunk is None else min(chunk, vocabulary)


def tile_columns(rows: int, vocabulary: int, dtype: torch.dtype, device: str) -> int:
    """Columns of a tile of ``rows`` tokens: what fits its bytes, but enough for an efficient matrix product."""
    columns = TILE_BYTES.get(device, DEFAULT_TILE_BYTES) // (rows * dtype.itemsize)
    return max(1, min(vocabulary, max(256, columns // 256 * 256)))


class Tiles:
    """Matrix product, running statistics and gradient of tiles of logits, in buffers that are reused for every tile.

    Args:
        shape: Largest tile, rows and columns.
        dtype: Of the matrix products.
        device: Of the buffers.
        transform: From raw logits to those of the softmax.
        entropy: Whether the entropy or its gradient is needed.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        transform: LogitTransform,
        *,
        entropy: bool,
    ) -> None:
        self.dtype = dtype
        self.reduction = torch.promote_types(dtype, torch.float32)
        self.transform = transform
        self.is_compiled = can_compile(device.type)
        """Whether the arithmetic between matrix products is one kernel, whose intermediate values stay in registers."""
        size = shape[0] * shape[1]
        self._raw = torch.empty(size, dtype=dtype, device=device)
        self._work = self._spare = None
        if not self.is_compiled:
            narrow = dtype != self.reduction
            self._work = torch.empty(size, dtype=self.reduction, device=device) if narrow else self._raw
            self._spare = torch.empty(size, dtype=self.reduction, device=device) if entropy else None

    def product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Raw logits ``hidden @ weight.T + bias``, (n, W), in a buffer that the next product overwrites."""
        out = _view(self._raw, (hidden.shape[0], weight.shape[0]))
        if bias is None:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.addmm(bias, hidden, weight.t(), out=out)

    def accumulate(self, state: RunningSoftmax, raw: Tensor, targets: Tensor) -> None:
        """Update the running statistics of n tokens by a tile; ``targets`` as in :func:`tile_statistics`."""
        statistics = state.peak, state.total, state.chosen, state.weighted
        state.update(*self._run(tile_statistics, raw, targets, *statistics))

    def gradient(self, raw: Tensor, targets: Tensor, outer: OutputGradient) -> Tensor:
        """Gradient of the loss with respect to the raw logits, (n, W) in the dtype of the matrix products."""
        saved = outer.logprobs, outer.entropy, outer.log_normalizer, outer.entropy_value
        found: Tensor = self._run(tile_gradient, raw, targets, *saved)
        # The raw logits are no longer needed: what is too wide for the matrix products takes their place.
        return found if found.dtype == self.dtype else raw.copy_(found)

    def _run(self, function: Callable[..., Any], raw: Tensor, *values: Tensor | None) -> Any:
        arguments = raw, *values, self.transform.factor, self.transform.slope
        if self.is_compiled:
            return run_compiled(function, *arguments)
        buffers = (None if buffer is None else _view(buffer, raw.shape) for buffer in (self._work, self._spare))
        return function(*arguments, *buffers)


def _view(buffer: Tensor, shape: torch.Size | tuple[int, int]) -> Tensor:
    """The beginning of a flat buffer as a contiguous matrix."""
    return buffer[: shape[0] * shape[1]].view(shape)


def block_rows(columns: int, device: str) -> int:
    """Tokens whose whole rows of ``columns`` float32 logits make one tile."""
    return max(1, TILE_BYTES.get(device, DEFAULT_TILE_BYTES) // (4 * columns))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in place, for a ``total`` of the same or a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def set_product(result: Tensor, left: Tensor, right: Tensor) -> None:
    """``result = left @ right``, in place, for a ``result`` of any dtype."""
    if result.dtype == left.dtype:
        torch.mm(left, right, out=result)
    else:
        result.copy_(left @ right)


# ------------------------------------------------------------------------------------------------ compiled

_BACKEND = "inductor"  # of torch.compile
_SLOWER = "log-probs of the output layer run without compiled kernels, which is slower"
_failed = False


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
