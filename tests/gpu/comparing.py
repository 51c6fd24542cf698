"""Figures with bounds, how far two results are apart, and models with random weights."""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves

BOUNDS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2e-2, 6e-2)}
"""Of log-probs and of the gradient of all weights, relative in norm. bfloat16 has 8 bits, the models two layers."""


class Figures:
    """Numbers of a test with their bounds."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, float]] = []

    def __call__(self, name: str, value: float, bound: float) -> None:
        """Note a number and the largest value that passes."""
        self.found.append((name, float(value), bound))

    def add(self, found: Mapping[str, Any], bound: float) -> None:
        """Note numbers by name, and those by name in each."""
        for name, value in found.items():
            for part, number in value.items() if isinstance(value, Mapping) else {"": value}.items():
                self(f"{name} {part}", number, bound)

    def check(self) -> None:
        """Fail with all numbers beyond their bounds; NaN is beyond any."""
        beyond = [f"{name}: {value:g} (at most {bound:g})" for name, value, bound in self.found if not value <= bound]
        assert not beyond, "\n".join(beyond)
        assert self.found

    def worst(self) -> str:
        """The number that is nearest to its bound, or furthest beyond."""
        if not self.found:
            return ""

        def share(figure: tuple[str, float, float]) -> float:
            _, value, bound = figure
            return math.inf if not value <= bound else value / bound if bound else 0.0

        name, value, bound = max(self.found, key=share)
        return f"{name}: {value:.3g} (at most {bound:g}; {len(self.found)} figures)"


def distance(found: Any, expected: Any) -> float:
    """Largest relative distance in norm between tensors of two results; infinite if shapes differ.

    NaN and infinities must be in the same places.
    """
    pairs = zip(tensors_of(found), tensors_of(expected), strict=True)
    return max((_distance(one, other) for one, other in pairs), default=0.0)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of nested tuples, lists and dictionaries, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _distance(found: Tensor, expected: Tensor) -> float:
    one, other = found.detach().cpu().double(), expected.detach().cpu().double()
    if one.shape != other.shape:
        return math.inf
    finite = other.isfinite()
    if not torch.equal(one.isfinite(), finite) or not torch.equal(one.isnan(), other.isnan()):
        return math.inf
    # Scalars near 0 are differences of larger numbers: 1e-3 keeps their rounding from counting as a distance.
    return float((one - other)[finite].norm() / other[finite].norm().clamp(min=1e-3))


def config_of(family: str, *, hidden: int = 64, heads: int = 2) -> Any:
    """``llama``, or ``mistral`` with a window of 16; two query heads for each key head."""
    from transformers import LlamaConfig, MistralConfig

    kind, more = (MistralConfig, {"sliding_window": 16}) if family == "mistral" else (LlamaConfig, {})
    return kind(
        vocab_size=128, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=2048,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1, initializer_range=0.1, **more,
    )  # fmt: skip


def build(config: Any, device: str, dtype: torch.dtype, attention: str | None = None) -> nn.Module:
    """A model with the same random weights on any device; ``attention`` as in ``load_causal_lm``, ``None``: packed."""
    from transformers import AutoModelForCausalLM

    from rlhfkit.models.attention.families import use_packed_attention

    torch.manual_seed(0)
    own = attention if attention in ("sdpa", "eager") else "sdpa"
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=own)
    if own != attention:
        use_packed_attention(model, attention)
    return model.to(dtype).to(device)


def rows_of(sequences: Sequence[Sequence[int]], device: str = "cpu") -> Any:
    """Sequences padded on the right, as a forward pass of the policy reads them; all tokens but the first count."""
    ids = [torch.tensor(one, device=device) for one in sequences]
    there = pad_sequence([torch.ones_like(one, dtype=torch.bool) for one in ids], batch_first=True)
    padded = pad_sequence(ids, batch_first=True)
    return SimpleNamespace(input_ids=padded, attention_mask=there, mask=there[:, 1:])


def random_sequences(lengths: Sequence[int], *, shared: int = 0) -> list[list[int]]:
    """Random token ids; with ``shared``, sequences 2i and 2i + 1 begin with that many tokens of their own."""
    generator = torch.Generator().manual_seed(len(lengths) + shared)
    made = [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]
    for first, second in zip(made[::2], made[1::2], strict=False):
        second[: min(shared, len(second))] = first[: min(shared, len(second))]
    return made
