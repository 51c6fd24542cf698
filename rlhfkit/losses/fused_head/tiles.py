"""Softmax statistics and gradients over tiles of the logits: N tokens by a slice of the vocabulary.

:mod:`rlhfkit.losses.fused_head.logprobs` goes over the vocabulary in tiles, so that the (N, V) logits never exist. For
a tile of logits ``z`` the functions here keep a running softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867)::

    m' = max(m, max_v z_v),   S' = S exp(m - m') + sum_v exp(z_v - m'),   log Z = m + log S
    A' = (A - (m' - m) S) exp(m - m') + sum_v exp(z_v - m') (z_v - m'),   entropy = log S - A / S
    Q' = Q exp(2 (m - m')) + sum_v exp(2 (z_v - m')),   sum_v p_v^2 = Q / S^2

and, once ``log Z`` and the entropy ``E`` are known, turn a recomputed tile into the gradient with respect to it::

    d logprob / d z_v = 1[v = target] - p_v,          d E / d z_v = -p_v (log p_v + E),          p_v = exp(z_v - log Z)

They work in place on buffers of the caller: besides the matrix products, memory traffic and page faults take most of
the time on a CPU. N are tokens, H the hidden size, V the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def inner(self, raw: Tensor, buffer: Tensor | None) -> Tensor:
        """``raw`` itself without a cap, else ``tanh(logit_scale * raw / cap)`` written to ``buffer``."""
        if self.softcap is None:
            return raw
        return torch.mul(raw, self.logit_scale / self.softcap, out=buffer).tanh_()

    def inner_gradient(self, gradient: Tensor, inner: Tensor) -> Tensor:
        """Turn ``d / d inner`` into ``d / d raw``, in place; overwrites ``inner``."""
        if self.softcap is None:
            return gradient
        slope = inner.square_().neg_().add_(1.0)
        return gradient.mul_(slope).mul_(self.logit_scale / self.softcap)


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


def accumulate(
    state: RunningSoftmax, inner: Tensor, factor: float, targets: Tensor, work: Tensor, spare: Tensor | None
) -> None:
    """Update the running statistics of n tokens by one (n, W) tile with logits ``factor * inner``, in place.

    ``targets`` (n,) are relative to the tile's first vocabulary entry, outside [0, W) when in another tile. ``work``
    (n, W) in the reduction dtype is a buffer, which ``inner`` may be; ``spare`` a second one, only for the entropy.
    """
    inside, index = _locate(targets, inner.shape[1])
    chosen = inner.gather(1, index).squeeze(1).to(work.dtype) * factor
    state.chosen.copy_(torch.where(inside, chosen, state.chosen))
    peak = torch.maximum(state.peak, inner.amax(1).to(work.dtype) * factor)
    shifted = torch.add(-peak[:, None], inner, alpha=factor, out=work)
    decay = (state.peak - peak).exp_()
    if state.weighted is None:
        exponential = shifted.exp_()
        state.total.mul_(decay).add_(exponential.sum(1))
    else:
        exponential = torch.exp(shifted.clamp_(min=NEGLIGIBLE), out=spare)
        state.weighted.sub_((peak - state.peak) * state.total).mul_(decay)
        state.total.mul_(decay).add_(exponential.sum(1))
        state.weighted.add_(shifted.mul_(exponential).sum(1))
    state.peak.copy_(peak)


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
    inner: Tensor, factor: float, targets: Tensor, gradient: OutputGradient, work: Tensor, spare: Tensor | None
) -> Tensor:
    """Gradient of the loss with respect to the recomputed ``inner``, (n, W), in ``work``; see :func:`accumulate`."""
    logp = torch.add(-gradient.log_normalizer[:, None], inner, alpha=factor, out=work)
    if gradient.entropy is None or gradient.entropy_value is None:
        assert gradient.logprobs is not None
        result = logp.exp_().mul_((-factor * gradient.logprobs)[:, None])
    else:
        probability = torch.exp(logp.clamp_(min=NEGLIGIBLE), out=spare)
        slope = -factor * gradient.entropy
        offset = slope * gradient.entropy_value
        if gradient.logprobs is not None:
            offset = offset - factor * gradient.logprobs
        result = torch.addcmul(offset[:, None], slope[:, None], logp, out=work).mul_(probability)
    return _add_target_term(result, factor, targets, gradient)


def _add_target_term(result: Tensor, factor: float, targets: Tensor, gradient: OutputGradient) -> Tensor:
    """Add the term of ``1[v = target]``, in place, for the targets in this tile."""
    if gradient.logprobs is not None:
        inside, index = _locate(targets, result.shape[1])
        result.scatter_add_(1, index, torch.where(inside, factor * gradient.logprobs, 0.0)[:, None])
    return result


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
        self._size = shape[0] * shape[1]
        self._device = device
        self._raw = self._buffer(dtype)
        self._allocate(entropy=entropy)

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._size, dtype=dtype, device=self._device)

    def _allocate(self, *, entropy: bool) -> None:
        """Allocate the buffers beyond the raw logits."""
        self._work = self._buffer(self.reduction) if self.dtype != self.reduction else None
        self._spare = self._buffer(self.reduction) if entropy else None
        self._inner = self._buffer(self.reduction) if self.transform.softcap is not None else None

    def product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Raw logits ``hidden @ weight.T + bias``, (n, W), in a buffer that the next product overwrites."""
        out = _view(self._raw, (hidden.shape[0], weight.shape[0]))
        if bias is None:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.addmm(bias, hidden, weight.t(), out=out)

    def accumulate(self, state: RunningSoftmax, raw: Tensor, targets: Tensor) -> None:
        """Update the running statistics of n tokens by a tile; ``targets`` as in :func:`accumulate`."""
        accumulate(state, self._inner_of(raw), self.transform.factor, targets, *self._buffers(raw))

    def gradient(self, raw: Tensor, targets: Tensor, outer: OutputGradient) -> Tensor:
        """Gradient of the loss with respect to the raw logits, (n, W) in the dtype of the matrix products."""
        inner = self._inner_of(raw)
        tile = tile_gradient(inner, self.transform.factor, targets, outer, *self._buffers(raw))
        tile = self.transform.inner_gradient(tile, inner)
        # The raw logits are no longer needed: what is too wide for the matrix products takes their place.
        return tile if self.dtype == self.reduction else raw.copy_(tile)

    def _inner_of(self, raw: Tensor) -> Tensor:
        return self.transform.inner(raw, None if self._inner is None else _view(self._inner, raw.shape))

    def _buffers(self, raw: Tensor) -> tuple[Tensor, Tensor | None]:
        work = raw if self._work is None else _view(self._work, raw.shape)
        return work, None if self._spare is None else _view(self._spare, raw.shape)


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
