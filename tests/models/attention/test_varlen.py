"""What kernels for sequences of different lengths are given, against attention to one sequence at a time.

They have no CPU build. ``varlen_reference.py`` takes their place with their signatures; on a GPU those marked ``cuda``
try them, and ``gpu/test_attention.py`` in models. Covers layout.py and packed.py too.
"""

import functools
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention import varlen_reference
from models.attention.varlen_reference import plug_in
from models.test_forward import answered, experience
from rlhfkit.data import Experience
from rlhfkit.models import ModelLoading, load_causal_lm, policy_output
from rlhfkit.models.attention import varlen
from rlhfkit.models.attention.layout import AttentionOptions, PackedLayout, read_rows
from rlhfkit.models.attention.packed import PACKED_ATTENTIONS, packed_attention

KERNELS = list(varlen.KERNELS)


@pytest.fixture(autouse=True)
def fresh_choice() -> Iterator[None]:
    yield
    varlen.choose_kernel.cache_clear()


def row_of(input_ids: Tensor) -> tuple[PackedLayout, Tensor]:
    """The layout of a batch (B, T) that is padded with 0, and the (1, N) tokens of its row."""
    lengths, prefixes, _ = read_rows(input_ids, input_ids != 0, input_ids != 0)
    layout = PackedLayout.from_lengths(lengths.tolist(), input_ids.device, prefixes.tolist(), input_ids.shape[1])
    return layout, input_ids.flatten()[layout.tokens][None]


@st.composite
def batches(draw: Any) -> tuple[list[list[int]], int, int, int, int, int | None, float | None]:
    """Rows of tokens that may begin like the row before them, heads, key heads, two head sizes, window, scaling."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 6))):
        shared = rows[-1][: draw(st.integers(0, len(rows[-1])))] if rows and draw(st.booleans()) else []
        fresh = draw(st.integers(0 if shared else 1, 12))
        rows.append(shared + draw(st.lists(st.integers(1, 3), min_size=fresh, max_size=fresh)))
    key_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    window, scaling = draw(st.none() | st.integers(1, 9)), draw(st.none() | st.floats(0.05, 1.0))
    return rows, key_heads * groups, key_heads, draw(st.integers(1, 17)), draw(st.integers(1, 17)), window, scaling


def alone(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """(1, T, heads, D) of one sequence."""
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    mask = (distance >= 0) & (distance < (window or query.shape[2]))
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("kernel", [*KERNELS, "buckets"])
@given(case=batches())
@settings(max_examples=40, deadline=None)
def test_every_sequence_attends_to_itself_alone_forward_and_backward(kernel: str, case: Any) -> None:
    rows, heads, key_heads, size, value_size, window, scaling = case
    width = max(map(len, rows))
    input_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    layout, tokens = row_of(input_ids)
    generator = torch.Generator().manual_seed(len(rows))
    shapes = [(heads, size), (key_heads, size), (key_heads, value_size)]
    leaves = [
        torch.randn((1, head, tokens.shape[1], wide), dtype=torch.float64, generator=generator, requires_grad=True)
        for head, wide in shapes
    ]
    weights = torch.randn((1, tokens.shape[1], heads, value_size), dtype=torch.float64, generator=generator)
    expected = torch.zeros_like(weights)
    for row, ids in enumerate(rows):
        places = layout.places[row, : len(ids)]
        assert tokens[0, places].tolist() == ids
        expected = expected.index_copy(1, places, alone(*(leaf[:, :, places] for leaf in leaves), scaling, window))
    with pytest.MonkeyPatch.context() as patch:
        plug_in(patch, *({kernel} - {"buckets"}))
        found, _ = packed_attention(
            torch.nn.Identity(),
            *leaves,
            None,
            scaling=scaling,
            sliding_window=window,
            packed_layout=layout,
            kernel=kernel,
        )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def group_batch() -> Experience:
    """Rows that share prompts, one of which another contains, and one of a single prompt token."""
    prompts = [[7, 8, 9, 10]] * 3 + [[7, 8], [20], [7, 8, 9, 10, 30]]
    answers = [[30, 31, 32], [30, 40], [30, 40], [9, 50], [30], [5] * 20]
    return answered(zip(prompts, answers, strict=True))


@pytest.mark.parametrize("kernel", [*KERNELS, "buckets"])
def test_a_model_gives_what_the_padded_model_gives(folder: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradient checkpointing the trial of a kernel runs within a layer whose activations are not kept."""
    plug_in(monkeypatch, *KERNELS)
    batch, results = group_batch(), []
    for packed in (True, False):
        how = ModelLoading(attention=None if packed else "sdpa", gradient_checkpointing=True)
        model: Any = load_causal_lm(folder, dtype=torch.float64, loading=how)
        if packed:
            model.config._attn_implementation = PACKED_ATTENTIONS[kernel]
        out = policy_output(model, batch, batch.action_mask, entropy=True)
        (out.logprobs + out.entropy).sum().backward()
        results.append([out.logprobs, out.entropy, *(parameter.grad for parameter in model.parameters())])
    for mine, padded in zip(*results, strict=True):
        torch.testing.assert_close(mine, padded, rtol=1e-5, atol=1e-6)  # log-probs are float32


def test_the_installed_varlen_attn_takes_what_it_is_given() -> None:
    """Its shapes are checked by PyTorch's own function on the device that has no numbers."""
    pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.11 or later")
    layout = PackedLayout.from_lengths([5, 9, 20], torch.device("meta"), [0, 3, 0])
    query, key, value = (torch.empty((heads, 31, 24), dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    function = varlen.KERNELS["varlen"].load()
    for window in (None, 4):
        out = varlen.varlen_attention(function, query, key, value, layout, AttentionOptions(window=window))
        assert out.shape == (31, 4, 24)
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    mine = inspect.signature(varlen_reference.varlen_attn).parameters
    assert [known[name].kind for name in mine] == [parameter.kind for parameter in mine.values()]


def top_left(
    function: Any, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *sizes: int, **how: Any
) -> Tensor:
    """A kernel whose first query belongs to the first key, as in flash-attn 2.0: the row in reverse."""
    keys, ends = [], cu_k.tolist()
    for first, queries in zip(ends, cu_q.diff().tolist(), strict=False):
        keys += range(first, first + queries)
    return function(query, key[keys], value[keys], cu_q, cu_q, sizes[0], sizes[0], **how)


def wide_window(function: Any, *given: Any, window_size: tuple[int, int], **how: Any) -> Tensor:
    """A kernel whose window sees one key more."""
    before = window_size[0]
    return function(*given, window_size=(before + (before >= 0), 0), **how)


def other_heads(function: Any, query: Tensor, key: Tensor, *given: Any, **how: Any) -> Tensor:
    """A kernel in which query heads read the key heads in turn."""
    return function(query.unflatten(1, (-1, key.shape[1])).transpose(1, 2).flatten(1, 2), key, *given, **how)


def refusing(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nat line 3")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (top_left, "away from PyTorch's own attention, window None"),
        (wide_window, "away from PyTorch's own attention, window 4"),
        (other_heads, "away from PyTorch's own attention, window None"),
        (refusing, "RuntimeError: FlashAttention only supports Ampere GPUs or newer."),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_fails_its_trial_is_not_used_and_one_line_says_why(
    wrong: Any, why: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plug_in(monkeypatch, "varlen", wrap=lambda right: functools.wraps(right)(functools.partial(wrong, right)))
    case = varlen.Case(torch.device("cpu"), dtype, 4, 2, 16, 16, dropout=False)
    with caplog.at_level(logging.INFO, logger="rlhfkit"):
        assert [varlen.choose_kernel(case, "auto") for _ in range(2)] == [None, None]
    (line,) = caplog.messages
    assert line.startswith("packed attention runs in padded buckets")
    assert why in line
    assert "flash-attn is not installed: pip install 'rlhfkit[flash]'" in line
    with pytest.raises(RuntimeError, match=r"attention='varlen' cannot be used.*attention='auto' takes"):
        varlen.choose_kernel(case, "varlen")


def without(*names: str) -> Any:
    """``varlen_attn`` as an older torch has it."""

    def wrap(function: Any) -> Any:
        def older(*args: Any, **kwargs: Any) -> Tensor:
            assert not set(names) & set(kwargs)
            return function(*args, **({"enable_gqa": True} | kwargs))

        known = inspect.signature(function)
        kept = [parameter for name, parameter in known.parameters.items() if name not in names]
        older.__signature__ = known.replace(parameters=kept)  # type: ignore[attr-defined]
        return older

    return wrap


def test_older_versions_of_varlen_attn_are_used_where_they_have_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2.11 of torch takes fewer key heads unasked; 2.10 has no windows."""
    case = varlen.Case(torch.device("cpu"), torch.bfloat16, 4, 2, 16, 16, dropout=False)
    plug_in(monkeypatch, "varlen", wrap=without("enable_gqa"))
    assert varlen.choose_kernel(case, "varlen") is not None
    plug_in(monkeypatch, "varlen", wrap=without("enable_gqa", "window_size"))
    with pytest.raises(RuntimeError, match=r"has no windows: it needs torch 2\.11 or later"):
        varlen.choose_kernel(case, "varlen")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 256])
def test_rounding_in_half_precision_passes_the_trial(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference rounds every product, more than kernels do, which keep sums in float32."""
    plug_in(monkeypatch, "varlen")
    case = varlen.Case(torch.device("cpu"), dtype, 4, 2, size, size, dropout=False)
    assert varlen.trial(varlen.KERNELS["varlen"].load(), case) is None
    monkeypatch.setitem(varlen.TOLERANCE, dtype, varlen.TOLERANCE[dtype] / 2)
    assert varlen.trial(varlen.KERNELS["varlen"].load(), case) is None  # by a margin


def test_the_first_kernel_that_can_run_is_chosen_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(varlen, "DEVICES", ("cuda",))
    titles = {name: kernel.title for name, kernel in varlen.KERNELS.items()}
    case = varlen.Case(torch.device("cpu"), torch.bfloat16, 4, 4, 8, 8, dropout=False)
    dropping = varlen.Case(torch.device("cpu"), torch.bfloat16, 4, 4, 8, 8, dropout=True)
    for installed, expected in ((KERNELS, "flash_attention_3"), (KERNELS[1:], "varlen"), (KERNELS[2:], KERNELS[2])):
        plug_in(monkeypatch, *installed)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="rlhfkit"):
            for _ in range(2):
                assert varlen.choose_kernel(case, "auto") is not None
        assert caplog.messages == [f"packed attention runs with {titles[expected]} (cpu, bfloat16, 4 heads of size 8)"]
        monkeypatch.undo()
    plug_in(monkeypatch, *KERNELS)
    with caplog.at_level(logging.INFO, logger="rlhfkit"):
        assert varlen.choose_kernel(dropping, "auto") is not None
    assert caplog.messages[-1].startswith("packed attention runs with flash-attn 2 ")
    with pytest.raises(RuntimeError, match="has no attention dropout"):
        varlen.choose_kernel(dropping, "varlen")
    row = torch.randn(1, 4, 6, 8, dtype=torch.bfloat16)
    layout = PackedLayout.from_lengths([4, 2], torch.device("cpu"))
    out, _ = packed_attention(torch.nn.Identity(), row, row, row, None, dropout=1.0, packed_layout=layout)
    assert not out.any()  # the probability reaches the kernel


def test_a_nan_in_one_sequence_stays_there() -> None:
    lengths = [4, 3, 5]
    query, key, value = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    value[:, :, 5] = torch.nan  # second token of the second sequence
    layout = PackedLayout.from_lengths(lengths, query.device)
    out, _ = packed_attention(torch.nn.Identity(), query, key, value, None, packed_layout=layout)
    assert out[:, :4].isfinite().all()
    assert out[:, 7:].isfinite().all()
    assert out[:, 5:7].isnan().all()


def test_padding_within_a_bucket_is_less_than_twofold() -> None:
    lengths = list(range(1, 65))
    layout = PackedLayout.from_lengths(lengths, torch.device("cpu"))
    for bucket in layout.buckets:
        assert bucket.gather.numel() < 2 * len(bucket.real)


def test_a_layer_that_is_not_causal_sees_everything() -> None:
    query, key, value = (torch.randn(1, heads, 6, 8) for heads in (4, 2, 2))
    tower = torch.nn.Identity()
    tower.is_causal = False
    out, _ = packed_attention(tower, query, key, value, None)
    everything = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(out, everything.transpose(1, 2))


class Largest(TorchDispatchMode):
    """Remembers the most entries of any tensor that an operation makes."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.entries = max(self.entries, tensor.numel())
        return out


@pytest.mark.parametrize("count", [16, 64])
def test_no_tensor_grows_with_the_square_of_the_packed_row(folder: str, count: int) -> None:
    """The largest one has 128 numbers a token (the gate of the feed-forward network, the logits): no (N, N) mask."""
    model, batch = load_causal_lm(folder), experience([(4, 28)] * count)
    with Largest() as seen, torch.no_grad():
        policy_output(model, batch, batch.action_mask)
    assert seen.entries <= 128 * 32 * count


def test_indices_are_made_on_the_cpu_whatever_the_default_device_is() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0], [4, 0, 0, 0]])
    expected, row = row_of(ids)
    with torch.device("meta"):
        layout, tokens = row_of(ids)
        for mine, other in [
            (tokens, row),
            (layout.places, expected.places),
            (layout.position_ids, expected.position_ids),
            (layout.order, expected.order),
            (layout.cumulative.keys, expected.cumulative.keys),
        ]:
            assert torch.equal(mine, other)
        assert layout.cumulative.gather is not None
        assert layout.cumulative.gather.tolist() == [0, 1, 2, 3, 0, 1, 4, 5]


def test_fewer_key_heads_are_repeated_where_fused_kernels_would_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device without numbers, as CUDA would: with a mask, in float32, or with values of another size."""
    given: list[tuple[int, bool]] = []

    def note(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, **kwargs: Any) -> Tensor:
        given.append((key.shape[1], enable_gqa))
        return scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa, **kwargs)

    monkeypatch.setattr(varlen, "scaled_dot_product_attention", note)
    for device, dtype, window, size in [
        ("meta", torch.bfloat16, None, 8),
        ("meta", torch.bfloat16, 3, 8),
        ("meta", torch.float32, None, 8),
        ("meta", torch.bfloat16, None, 16),
        ("cpu", torch.float32, 3, 8),
    ]:
        q, k, v = (
            torch.empty((2, heads, 9, wide), dtype=dtype, device=device) for heads, wide in ((4, 8), (2, 8), (2, size))
        )
        assert varlen.attend(q, k, v, None, AttentionOptions(window=window)).shape == (2, 4, 9, size)
    assert given == [(2, True), (4, False), (4, False), (4, False), (2, True)]
    keys = torch.randn(2, 3, 5, 4)
    assert torch.equal(varlen._repeated(keys, 6), keys.repeat_interleave(2, 1))


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_on_a_gpu_pass_their_trial(kernel: str, dtype: torch.dtype) -> None:
    try:
        function = varlen.KERNELS[kernel].load()
    except ImportError as error:
        pytest.skip(str(error))
    for heads, key_heads, size in [(4, 4, 64), (8, 2, 128), (4, 1, 80), (4, 2, 256)]:
        case = varlen.Case(torch.device("cuda"), dtype, heads, key_heads, size, size, dropout=False)
        assert varlen.trial(function, case) is None
