"""The policy's forward pass beside its numbers, which ``test_families.py`` and ``attention/test_varlen.py`` compare."""

from collections.abc import Iterable

import pytest
import torch

from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.models import ModelLoading, load_causal_lm, load_scalar_model
from rlhfkit.models.heads import ROW_TOLERANCES, row_difference
from rlhfkit.models.load import precision_dtype


def answered(texts: Iterable[tuple[list[int], list[int]]]) -> Experience:
    """Rows of these prompts and answers."""
    return Experience.from_samples(
        [
            Sample(Prompt(row, prompt), 0, tokens, [0.0] * len(tokens), [0] * len(tokens), "stop", reward=0.0)
            for row, (prompt, tokens) in enumerate(texts)
        ]
    )


def experience(lengths: list[tuple[int, int]], seed: int = 0) -> Experience:
    """Random sequences of given prompt and completion lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 99, (count,), generator=generator).tolist()

    return answered([(tokens(prompt), tokens(answer)) for prompt, answer in lengths])


@pytest.mark.parametrize("padded", [False, True])
def test_a_policy_can_generate_as_any_model_of_transformers(folder: str, padded: bool) -> None:
    ids = torch.tensor([[5, 9, 20, 33, 7], [0, 0, 8, 41, 60]])[: 1 + padded]
    mask = (ids != 0).long()
    made = [
        load_causal_lm(folder, loading=ModelLoading(attention=attention)).generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False
        )
        for attention in (None, "eager")
    ]
    assert torch.equal(*made)


def test_a_folder_that_does_not_exist_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"no model folder '\./nowhere'"):
        load_causal_lm("./nowhere")


@pytest.mark.parametrize(
    ("precision", "weights", "arithmetic"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision_tells_the_types(precision: str, weights: torch.dtype, arithmetic: torch.dtype) -> None:
    assert precision_dtype(precision) == weights
    assert precision_dtype(precision, compute=True) == arithmetic


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_what_it_is_alone_unless_others_are_seen(folder: str, kind: str, dtype: torch.dtype) -> None:
    load = load_causal_lm if kind == "policy" else load_scalar_model
    model = load(folder, dtype=dtype).eval()
    batch = experience([(3, 5), (7, 1), (1, 9), (4, 4)])
    tolerance = ROW_TOLERANCES[dtype]
    inner = model if kind == "policy" else model.model
    passes: list[int] = []
    inner.base_model.register_forward_hook(lambda *_: passes.append(1))
    assert all(row_difference(model, batch, row) < tolerance / 10 for row in range(4))
    row_difference(model, experience([(3, 5)]), 0)
    assert len(passes) == 2 * 5  # whatever the batch: every rank takes part in every pass where weights are sharded
    if kind == "critic":
        with torch.no_grad():
            inner.score.weight *= 30  # a new head gives numbers of a hundredth
    inner.get_input_embeddings().register_forward_hook(lambda _, __, out: out + 10 * out.mean(1, keepdim=True))
    assert all(row_difference(model, batch, row) > tolerance for row in range(4))
