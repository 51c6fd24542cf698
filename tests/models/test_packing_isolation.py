"""No sample sees another: in packed rows, in padded ones, with any attention, and without an (N, N) mask."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from rlhfkit.data import TokenBatch, TokenExample, collate_tokens
from rlhfkit.models import ModelLoading, load_causal_lm, policy_output
from rlhfkit.models.attention.layout import PackedLayout

LENGTHS = [5, 17, 3, 9, 16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def batch(lengths: list[int], seed: int = 0) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(3, 99, (length,), generator=generator).tolist() for length in lengths]
    return collate_tokens([TokenExample(ids, [True] * len(ids)) for ids in tokens])


def logprobs(model: torch.nn.Module, samples: TokenBatch) -> torch.Tensor:
    with torch.no_grad():
        return policy_output(model, samples, samples.loss_mask).logprobs


@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_changing_one_sample_changes_no_other(folder: Path, attention: str | None, changed: int) -> None:
    model = load_causal_lm(str(folder), loading=ModelLoading(attention=attention))
    samples = batch(LENGTHS)
    before = logprobs(model, samples)
    samples.input_ids[changed, : LENGTHS[changed]] = (samples.input_ids[changed, : LENGTHS[changed]] + 40) % 96 + 3
    after = logprobs(model, samples)
    others = [row for row in range(len(LENGTHS)) if row != changed]
    torch.testing.assert_close(after[others], before[others], rtol=0, atol=1e-6)
    assert (after[changed] - before[changed]).abs().max() > 0.1


def test_a_sample_in_a_pack_is_what_it_is_alone(folder: Path) -> None:
    """Positions restart with every sample, else rotary embeddings would give other numbers."""
    model = load_causal_lm(str(folder))
    samples = batch(LENGTHS)
    together = logprobs(model, samples)
    for row, length in enumerate(LENGTHS):
        alone = logprobs(model, samples.select([row]))
        torch.testing.assert_close(together[row, : length - 1], alone[0], rtol=0, atol=2e-6)
    layout, _ = PackedLayout.from_batch(samples.input_ids, samples.attention_mask)
    assert layout.position_ids[0].tolist() == [position for length in LENGTHS for position in range(length)]


def test_a_mask_of_ones_mixes_packed_samples_in_transformers_and_ours_never_gives_one(folder: Path) -> None:
    """Transformers 5.19 finds packed samples by positions that restart, unless it is given a mask that hides nothing.

    With the mask, samples see one another, and nothing says so: what this file would find if it happened to us.
    """
    ours, theirs = load_causal_lm(str(folder)), load_causal_lm(str(folder), loading=ModelLoading(attention="sdpa"))
    samples = batch(LENGTHS)
    layout, tokens = PackedLayout.from_batch(samples.input_ids, samples.attention_mask)
    expected = logprobs(ours, samples)[samples.loss_mask]

    def packed(**arguments: Any) -> torch.Tensor:
        with torch.no_grad():
            logits = theirs(input_ids=tokens, position_ids=layout.position_ids, use_cache=False, **arguments).logits
        every = logits[0].log_softmax(-1)[layout.places[:, :-1][samples.loss_mask]]
        return every.gather(-1, samples.input_ids[:, 1:][samples.loss_mask][:, None])[:, 0]

    torch.testing.assert_close(packed(), expected, rtol=0, atol=1e-5)
    assert (packed(attention_mask=torch.ones_like(tokens)) - expected).abs().max() > 0.1
    given = []
    hook = ours.model.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    logprobs(ours, samples)
    hook.remove()
    assert given == [None]


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
def test_no_tensor_grows_with_the_square_of_the_packed_row(folder: Path, count: int) -> None:
    """The largest one has 128 numbers a token (the gate of the feed-forward network, the logits): no (N, N) mask."""
    model = load_causal_lm(str(folder))
    samples = batch([32] * count)
    with Largest() as seen:
        logprobs(model, samples)
    total = 32 * count
    assert seen.entries <= 128 * total
    dense = load_causal_lm(str(folder), loading=ModelLoading(attention="sdpa"))
    layout, tokens = PackedLayout.from_batch(samples.input_ids, samples.attention_mask)
    with Largest() as theirs, torch.no_grad():
        dense.model(input_ids=tokens, position_ids=layout.position_ids, use_cache=False)
    assert theirs.entries >= tokens.numel() ** 2  # what is avoided
