"""What every fused head needs: argument checks, the dtype of the matrix products, and buffers for tiles of logits.

N stands for tokens, H for the width of the hidden state, V for the vocabulary.
"""

import torch
from torch import Tensor

from rlhfkit.losses.vocabulary_tiles import LogitTransform

# A tile of 4096 tokens by 2048 vocabulary entries: large enough for matrix products at full speed on two to a few dozen
# cores, small enough (32 MiB in float32) to be cheap next to anything else. GPUs need more work per kernel.
_MAX_ROWS = 4096
_TILE_BYTES = {"cpu": 32 * 2**20}
_DEFAULT_TILE_BYTES = 256 * 2**20


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
    if chunk is not None:
        return rows, min(chunk, vocabulary)
    columns = _TILE_BYTES.get(device, _DEFAULT_TILE_BYTES) // (rows * dtype.itemsize)
    return rows, max(1, min(vocabulary, max(256, columns // 256 * 256)))


class TileBuffers:
    """Buffers for tiles of logits, and their matrix product; allocated once per call and used for every tile."""

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, entropy: bool, softcap: bool
    ) -> None:
        self.dtype = dtype
        self.reduction = torch.promote_types(dtype, torch.float32)
        size = shape[0] * shape[1]
        self._raw = torch.empty(size, dtype=dtype, device=device)
        reductions = [torch.empty(size, dtype=self.reduction, device=device) for _ in range(entropy + softcap)]
        narrow = dtype != self.reduction
        self._work = torch.empty(size, dtype=self.reduction, device=device) if narrow else self._raw
        self._spare = reductions.pop() if entropy else None
        self._inner = reductions.pop() if softcap else None

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The transform's ``inner`` of a tile, and the two buffers for ``accumulate`` and ``tile_gradient``."""
        rows, columns = hidden.shape[0], weight.shape[0]

        def view(buffer: Tensor | None) -> Tensor | None:
            return None if buffer is None else buffer[: rows * columns].view(rows, columns)

        raw, work = view(self._raw), view(self._work)
        assert raw is not None
        assert work is not None
        if bias is None:
            torch.mm(hidden, weight.t(), out=raw)
        else:
            torch.addmm(bias, hidden, weight.t(), out=raw)
        return transform.inner(raw, view(self._inner)), work, view(self._spare)

    def narrow(self, gradient: Tensor) -> Tensor:
        """A finished gradient in the dtype of the matrix products (the raw logits are no longer needed then)."""
        if self.dtype == self.reduction:
            return gradient
        return self._raw[: gradient.numel()].view(gradient.shape).copy_(gradient)


def block_rows(columns: int, device: str) -> int:
    """Tokens whose whole rows of ``columns`` float32 logits make one tile."""
    return max(1, _TILE_BYTES.get(device, _DEFAULT_TILE_BYTES) // (4 * columns))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in place, for a ``total`` of the same or a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
