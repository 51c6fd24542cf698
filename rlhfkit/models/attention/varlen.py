"""Kernels for sequences of different lengths in one row, without padding, and the choice of one.

PyTorch's ``varlen_attn`` (with a sliding window from torch 2.11) and the packages flash-attn 2 and 3 need CUDA and half
precision. None has a CPU build, so none is trusted: before its first use for a device, dtype and head size a kernel
must give, on a few tokens, the outputs and gradients of :func:`bucket_attention`, which runs where none passes:
PyTorch's ``scaled_dot_product_attention``, on every device and in every dtype.
"""

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from rlhfkit.models.attention.layout import CPU, AttentionOptions, CumulativeLengths, PackedLayout

log = logging.getLogger(__name__)

DEVICES = ("cuda",)
"""Types of device that have kernels."""
HALF = (torch.float16, torch.bfloat16)
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.01}
"""Largest relative difference (of norms) to float32 of outputs and gradients in the trial. Rounding every product to
bfloat16 gives 0.005, to float16 0.0007; a causal mask at the wrong corner or mixed-up heads give 0.9."""


VarlenFunction = Callable[[Tensor, Tensor, Tensor, CumulativeLengths, AttentionOptions], Tensor]
"""A kernel: causal attention of queries (N, heads, D) to keys and values (K, key heads, D), as (N, heads, D)."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that may be installed."""

    title: str
    """As messages name it."""
    load: Callable[[], VarlenFunction]
    """Raises ImportError, saying what to do, where it is missing."""
    dropout: bool
    """Whether it can drop attention probabilities."""


def _torch_varlen() -> VarlenFunction:
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        raise ImportError(f"torch {torch.__version__} has no varlen_attn: it needs torch 2.11 or later") from None
    function = module.varlen_attn
    known = inspect.signature(function).parameters
    if not {"window_size", "scale"} <= set(known):
        raise ImportError(f"varlen_attn of torch {torch.__version__} has no windows: it needs torch 2.11 or later")

    def run(query: Tensor, key: Tensor, value: Tensor, lengths: CumulativeLengths, options: AttentionOptions) -> Tensor:
        # Kernels without the argument take fewer key heads unasked.
        grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] and "enable_gqa" in known else {}
        places = (lengths.queries, lengths.keys, lengths.longest_query, lengths.longest_key)
        band = _band(options.window)
        found: Tensor = function(query, key, value, *places, scale=options.scaling, window_size=band, **grouped)
        return found

    return run


def _flash_attention(name: str) -> VarlenFunction:
    package, missing = FLASH_PACKAGES[name]
    try:
        function = importlib.import_module(package).flash_attn_varlen_func
    except ModuleNotFoundError:
        raise ImportError(missing) from None
    except (ImportError, AttributeError) as error:  # built for another torch, or of another version
        raise ImportError(f"the installed {package} does not work: {error}") from None
    drops = "dropout_p" in inspect.signature(function).parameters

    def run(query: Tensor, key: Tensor, value: Tensor, lengths: CumulativeLengths, options: AttentionOptions) -> Tensor:
        more: dict[str, Any] = {"dropout_p": options.dropout} if drops else {}
        found: Any = function(
            query,
            key,
            value,
            cu_seqlens_q=lengths.queries,
            cu_seqlens_k=lengths.keys,
            max_seqlen_q=lengths.longest_query,
            max_seqlen_k=lengths.longest_key,
            softmax_scale=options.scaling,
            causal=True,
            window_size=_band(options.window),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **more,
        )
        out: Tensor = found[0] if isinstance(found, tuple) else found  # flash-attn 3 before 2025-10 adds log-sum-exps
        return out

    return run


def _band(window: int | None) -> tuple[int, int]:
    """Keys before and after its own that a query sees; -1: all."""
    return (-1 if window is None else window - 1, 0)


FLASH_PACKAGES = {
    "flash_attention_3": (
        "flash_attn_interface",
        "flash-attn 3 is not installed: build it from the folder hopper of github.com/Dao-AILab/flash-attention",
    ),
    "flash_attention_2": ("flash_attn", "flash-attn is not installed: pip install 'rlhfkit[flash]'"),
}
"""The module of each package, and what to say where it is missing."""

KERNELS = {
    "flash_attention_3": Kernel("flash-attn 3", lambda: _flash_attention("flash_attention_3"), False),
    "varlen": Kernel("torch's varlen_attn", _torch_varlen, False),
    "flash_attention_2": Kernel("flash-attn 2", lambda: _flash_attention("flash_attention_2"), True),
}
"""By the names of :data:`~rlhfkit.models.attention.packed.PACKED_ATTENTIONS`; the first that passes is taken."""


@dataclass(frozen=True)
class Case:
    """What decides whether a kernel can be used."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    size: int
    """Of queries and keys."""
    value_size: int
    dropout: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> "Case":
        """The case of queries, keys and values of shapes (heads, N, D)."""
        return cls(query.device, query.dtype, query.shape[0], key.shape[0], query.shape[2], value.shape[2], dropout > 0)

    def __str__(self) -> str:
        groups = "" if self.heads == self.key_heads else f" for {self.key_heads} key heads"
        sizes = f"{self.size}" if self.size == self.value_size else f"{self.size} and {self.value_size}"
        said = f"{self.device}, {str(self.dtype).removeprefix('torch.')}, {self.heads} heads{groups} of size {sizes}"
        return f"{said}, dropout" if self.dropout else said


@cache
def choose_kernel(case: Case, name: str) -> VarlenFunction | None:
    """The kernel for a case, chosen and logged once; ``None``: the buckets.

    ``name`` forces one of :data:`KERNELS`, or ``buckets``; ``auto`` takes the first that passes.

    Raises:
        RuntimeError: If a kernel is forced that cannot be used.
    """
    if name == "buckets" or (name == "auto" and (case.device.type not in DEVICES or case.dtype not in HALF)):
        log.info("packed attention runs in buckets of PyTorch's own attention (%s)", case)
        return None
    problems = []
    for candidate, kernel in KERNELS.items():
        if name not in ("auto", candidate):
            continue
        found, problem = _usable(kernel, case)
        if found is not None:
            log.info("packed attention runs with %s (%s)", kernel.title, case)
            return found
        problems.append(f"{kernel.title}: {problem}")
    if name != "auto":
        raise RuntimeError(
            f"attention={name!r} cannot be used ({case}). {'; '.join(problems)}. "
            "attention='auto' takes a kernel that can"
        )
    log.warning(
        "packed attention runs in padded buckets, which is slower, as no kernel can be used for %s. %s",
        case,
        "; ".join(problems),
    )
    return None


def _usable(kernel: Kernel, case: Case) -> tuple[VarlenFunction | None, str]:
    """A kernel, or why it cannot be used."""
    if case.device.type not in DEVICES:
        return None, "needs a CUDA device"
    if case.dtype not in HALF:
        return None, "needs bfloat16 or float16 (precision='bf16-true' or 'bf16-mixed')"
    if case.dropout and not kernel.dropout:
        return None, "has no attention dropout"
    try:
        function = kernel.load()
        problem = trial(function, case)
    except Exception as error:  # kernels refuse devices and head sizes by errors of any type
        first = next(iter(str(error).strip().splitlines()), "")[:200]
        return None, first if isinstance(error, ImportError) else f"{type(error).__name__}: {first}"
    return (function, "") if problem is None else (None, problem)


def varlen_attention(
    function: VarlenFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    options: AttentionOptions,
) -> Tensor:
    """Causal attention within each sequence of a packed row by a kernel: (N, heads, D) from (heads, N, D).

    Kernels take one head size, a multiple of 8: zeros are appended to smaller ones, which changes nothing.
    """
    size, value_size = query.shape[2], value.shape[2]
    width = -(-max(size, value_size) // 8) * 8
    lengths = layout.cumulative
    query, key, value = (_widened(x, width).transpose(0, 1) for x in (query, key, value))
    if lengths.gather is not None:
        key, value = key[lengths.gather], value[lengths.gather]
    if options.scaling is None:
        options = options._replace(scaling=size**-0.5)
    return function(query, key, value, lengths, options)[..., :value_size]


def _widened(heads: Tensor, width: int) -> Tensor:
    return heads if heads.shape[2] == width else pad(heads, (0, width - heads.shape[2]))  # pad copies in any case


def trial(function: VarlenFunction, case: Case) -> str | None:
    """Compare a kernel with the buckets in float32, outputs and gradients; returns a problem, or ``None``.

    Four short sequences, of which two share prefixes with their neighbour, without and with a window of 4.
    """
    # Within a layer that gradient checkpointing recomputes, the trial keeps its own activations.
    own_activations = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(case.device.type, enabled=False),
        own_activations,
    ):
        layout = PackedLayout.from_lengths([5, 9, 20, 1], case.device, [0, 3, 7, 0])
        row, generator = int(layout.tokens.numel()), torch.Generator(CPU).manual_seed(0)
        sizes = ((case.heads, case.size), (case.key_heads, case.size), (case.key_heads, case.value_size))
        tensors = [
            torch.randn((heads, row, size), generator=generator, device=CPU).to(case.dtype) for heads, size in sizes
        ]
        weights = torch.randn((row, case.heads, case.value_size), generator=generator, device=CPU).to(case.device)
        for window in (None, 4):
            results, options = [], AttentionOptions(window=window)
            for exact in (True, False):
                dtype = torch.float32 if exact else case.dtype
                query, key, value = (tensor.to(case.device, dtype).requires_grad_() for tensor in tensors)
                if exact:
                    out = bucket_attention(query, key, value, layout, options)
                else:
                    out = varlen_attention(function, query, key, value, layout, options)
                gradients = torch.autograd.grad((out.float() * weights).sum(), (query, key, value))
                results.append([out.detach(), *gradients])
            far = max(float((mine.float() - other).norm() / other.norm()) for other, mine in zip(*results, strict=True))
            if not far <= TOLERANCE[case.dtype]:
                return f"its results on a few tokens are {far:.0%} away from PyTorch's own attention, window {window}"
    return None


# ------------------------------------------------------------------------------------------------ on every device


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """(queries, keys) causal band whose last row sees the last key; ``None`` if all entries are true."""
    if queries == 1 and (window is None or keys <= window):
        return None
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < (window or keys))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
    causal: bool = True,
) -> Tensor:
    """Attention of (B, heads, queries, D) to (B, key heads, keys, D), causal when there is no mask.

    Where PyTorch's fused kernels would refuse fewer key heads than query heads, keys and values are repeated: torch
    2.13 would compute a (queries, keys) matrix for every head.
    """
    queries, keys, window = query.shape[2], key.shape[2], options.window
    plain = mask is None and causal and queries == keys and (window is None or keys <= window)
    if mask is None and causal and not plain:
        mask = causal_mask(queries, keys, window, query.device)
    grouped = query.shape[1] != key.shape[1]
    if grouped and not _takes_groups(query, value, mask):
        key, value = (_repeated(heads, query.shape[1]) for heads in (key, value))
        grouped = False
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=plain,
        scale=options.scaling,
        enable_gqa=grouped,
    )


def _takes_groups(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch has a fused kernel for fewer key heads: on CUDA only flash attention is one, on CPUs all are."""
    if query.device.type == "cpu":
        return True
    half = query.dtype in (torch.float16, torch.bfloat16)
    if mask is not None or not half or not query.shape[-1] == value.shape[-1] <= 256:
        return False
    return query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) >= (8, 0)


def _repeated(heads: Tensor, count: int) -> Tensor:
    """(B, key heads, T, D) as (B, count, T, D), each head repeated for the query heads that read it."""
    batch, fewer, length, size = heads.shape
    copies = heads[:, :, None].expand(batch, fewer, count // fewer, length, size)
    return copies.reshape(batch, count, length, size)


def bucket_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    options: AttentionOptions,
) -> Tensor:
    """Causal attention within each sequence of a packed row: (N, heads, D) from (heads, N, D).

    Sequences are grouped by the next power of two of their length and padded within a group (less than twofold): no
    (N, N) mask and at most log2(T) kernel calls. Rows that are not packed take :func:`attend` as they are.
    """
    pieces = []
    for bucket in layout.buckets:
        q, k, v = (x[:, bucket.gather].transpose(0, 1) for x in (query, key, value))  # (S, heads, L, D)
        attended = attend(q, k, v, None, options).transpose(1, 2)
        pieces.append(attended.flatten(0, 1)[bucket.real])  # (tokens, heads, D)
    return torch.cat(pieces)[layout.order]
