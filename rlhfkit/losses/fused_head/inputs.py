"""What every fused head needs: argument checks, the dtype of the matrix products, and buffers for tiles of logits.

N stands for tokens, H for the width of the hidden state, V for the vocabulary.
"""

import torch
from torch import Tensor

from rlhfkit.losses.fused_head.tiles import (
    LogitTransform,
    OutputGradient,
    RunningSoftmax,
    accumulate,
    tile_gradient,
)

# A tile of 4096 tokens by 2048 vocabulary entries: large enough for matrix products at full speed on two to a few dozen
# cores, small enough (32 MiB in float32) to be cheap next to anything else. GPUs need more work per kernel.
_MAX_ROWS = 4096
_TILE_BYTES = {"cpu": 32 * 2**20}
_DEFAULT_TILE_BYTES = 256 * 2**20
# A block of tokens that keeps all its logits (single-pass losses): 330 tokens of a vocabulary of 151936 in float32.
_BLOCK_BYTES = {"cpu": 192 * 2**20}
_DEFAULT_BLOCK_BYTES = 2**30


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
    """Raise ValueError for targets that are no token ids; their range is checked where that costs no sync (CPU)."""
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
    """Rows and columns of a tile: as many tokens as possible, and vocabulary entries by the bytes of the tile.

    Args:
        tokens: N.
        vocabulary: V.
        chunk: Columns the caller asked for, or ``None``.
        dtype: Of the tile.
        device: Type of the device.
    """
    rows = max(1, min(tokens, _MAX_ROWS))
    return rows, tile_columns(rows, vocabulary, dtype, device) if chunk is None else min(chunk, vocabulary)


def tile_columns(rows: int, vocabulary: int, dtype: torch.dtype, device: str) -> int:
    """Vocabulary entries in a tile of ``rows`` tokens: what fits its bytes, but enough for a decent matrix product."""
    columns = _TILE_BYTES.get(device, _DEFAULT_TILE_BYTES) // (rows * dtype.itemsize)
    return max(1, min(vocabulary, max(256, columns // 256 * 256)))


def retained_rows(tokens: int, vocabulary: int, chunk: int | None, dtype: torch.dtype, device: str) -> int:
    """Tokens in a block that keeps all its logits: by the bytes of the block, all blocks about equally large."""
    limit = _BLOCK_BYTES.get(device, _DEFAULT_BLOCK_BYTES) // (vocabulary * dtype.itemsize) if chunk is None else chunk
    blocks = max(1, -(-tokens // max(1, limit)))
    return max(1, -(-tokens // blocks))


class Tiles:
    """The work on tiles of logits: matrix product, running statistics, gradient.

    Buffers are allocated once per call and used for every tile; everything happens in place in them.

    Args:
        shape: Largest tile, rows and columns.
        dtype: Of the matrix products.
        device: Where.
        transform: From raw logits to those of the softmax.
        entropy: Whether the entropy or its gradient is needed.
        keep_raw: The raw logits live in memory of the caller and are kept, instead of being overwritten at once.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        transform: LogitTransform,
        *,
        entropy: bool,
        keep_raw: bool = False,
    ) -> None:
        self.dtype = dtype
        self.reduction = torch.promote_types(dtype, torch.float32)
        self.transform = transform
        self._size = shape[0] * shape[1]
        self._device = device
        self._raw = self._buffer(dtype) if not keep_raw else None
        self._allocate(entropy=entropy, keep_raw=keep_raw)

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._size, dtype=dtype, device=self._device)

    def _allocate(self, *, entropy: bool, keep_raw: bool) -> None:
        """Buffers beyond the raw logits."""
        self._work = self._buffer(self.reduction) if keep_raw or self.dtype != self.reduction else None
        self._spare = self._buffer(self.reduction) if entropy else None
        self._inner = self._buffer(self.reduction) if self.transform.softcap is not None else None

    def product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Raw logits ``hidden @ weight.T + bias``, shape (n, W), in ``out`` or in the buffer for them."""
        if out is None:
            assert self._raw is not None
            out = _view(self._raw, (hidden.shape[0], weight.shape[0]))
        if bias is None:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.addmm(bias, hidden, weight.t(), out=out)

    def accumulate(self, state: RunningSoftmax, raw: Tensor, targets: Tensor) -> None:
        """Take a tile into the running statistics of its n tokens; ``targets`` as in :func:`accumulate`."""
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
    return max(1, _TILE_BYTES.get(device, _DEFAULT_TILE_BYTES) // (4 * columns))


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
