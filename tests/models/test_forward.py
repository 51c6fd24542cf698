"""The policy's forward pass against Transformers' own logits."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.models import ModelLoading, load_causal_lm, policy_output
from rlhfkit.models.load import precision_dtype


def experience(lengths: list[tuple[int, int]], seed: int = 0) -> Experience:
    """Random sequences of given prompt and completion lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 99, (count,), generator=generator).tolist()

    return Experience.from_samples(
        [
            Sample(Prompt(row, tokens(p)), 0, tokens(c), [0.0] * c, [0] * c, "stop", reward=0.0)
            for row, (p, c) in enumerate(lengths)
        ]
    )


def dense_logprobs(model: torch.nn.Module, batch: Experience, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs from full logits, one sequence at a time."""
    out = torch.zeros(batch.action_mask.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.input_ids[row : row + 1, :length]
        logprobs = (model(input_ids=ids).logits[0, :-1].float() / temperature).log_softmax(-1)
        out[row, : length - 1] = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return torch.where(batch.action_mask, out, 0.0)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tied=request.param)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_dense_model(folder: Path, packed: bool, temperature: float) -> None:
    model = load_causal_lm(str(folder), loading=ModelLoading(attention=None if packed else "sdpa"))
    batch = experience([(3, 5), (7, 1), (1, 9), (4, 4)])
    out = policy_output(model, batch, batch.action_mask, temperature=temperature)
    torch.testing.assert_close(out.logprobs, dense_logprobs(model, batch, temperature), rtol=1e-5, atol=1e-5)
    assert out.entropy is None


def test_entropy_is_that_of_the_dense_model_and_has_a_gradient(folder: Path) -> None:
    model = load_causal_lm(str(folder))
    batch = experience([(3, 5), (2, 2)])
    out = policy_output(model, batch, batch.action_mask, entropy=True)
    ids = batch.input_ids[:1, : int(batch.lengths[0])]
    logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    expected = -(logprobs.exp() * logprobs).sum(-1)[2:]
    assert out.entropy is not None
    torch.testing.assert_close(out.entropy[0, 2:7], expected, rtol=1e-5, atol=1e-5)
    out.entropy.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_packed_and_padded_have_the_same_gradient(folder: Path) -> None:
    batch = experience([(3, 5), (7, 1), (1, 9), (4, 4)])
    gradients = []
    for packed in (True, False):
        model = load_causal_lm(
            str(folder), dtype=torch.float64, loading=ModelLoading(attention=None if packed else "sdpa")
        )
        policy_output(model, batch, batch.action_mask).logprobs.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_shared_prompts_change_neither_logprobs_nor_gradient(folder: Path) -> None:
    prompts = [[7, 8, 9, 10], [7, 8, 9, 10], [7, 8, 9, 10], [7, 8], [20, 21, 22]]
    completions = [[30, 31, 32], [30, 40], [30, 40], [9, 50], [30, 31, 32]]  # a pair, a double, a shorter prompt
    samples = [
        Sample(Prompt(row, prompt), 0, tokens, [0.0] * len(tokens), [0] * len(tokens), "stop", reward=0.0)
        for row, (prompt, tokens) in enumerate(zip(prompts, completions, strict=True))
    ]
    batch = Experience.from_samples(samples)
    results, gradients = [], []
    for packed in (True, False):
        model = load_causal_lm(
            str(folder), dtype=torch.float64, loading=ModelLoading(attention=None if packed else "sdpa")
        )
        seen: list[int] = []
        model.get_input_embeddings().register_forward_pre_hook(lambda _, ids, seen=seen: seen.append(ids[0].numel()))
        out = policy_output(model, batch, batch.action_mask, entropy=True)
        assert out.entropy is not None
        (out.logprobs * torch.arange(1.0, 6.0)[:, None] + out.entropy).sum().backward()
        assert seen == [7 + 1 + 0 + 1 + 6 if packed else 35]
        results.append(out.logprobs.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradient_checkpointing_changes_nothing(folder: Path) -> None:
    batch = experience([(3, 5), (1, 9)])
    gradients = []
    for checkpointing in (True, False):
        model = load_causal_lm(str(folder), loading=ModelLoading(gradient_checkpointing=checkpointing))
        policy_output(model, batch, batch.action_mask).logprobs.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_other_attention_is_padded_and_says_the_same(folder: Path) -> None:
    batch = experience([(3, 5), (1, 9)])
    ours = policy_output(load_causal_lm(str(folder)), batch, batch.action_mask)
    sdpa = load_causal_lm(str(folder), loading=ModelLoading(attention="sdpa"))
    theirs = policy_output(sdpa, batch, batch.action_mask)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_a_policy_can_generate_as_any_model_of_transformers(folder: Path, padded: bool) -> None:
    ids = torch.tensor([[5, 9, 20, 33, 7], [0, 0, 8, 41, 60]])[: 1 + padded]
    mask = (ids != 0).long()
    made = [
        load_causal_lm(str(folder), loading=ModelLoading(attention=attention)).generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False
        )
        for attention in (None, "eager")
    ]
    assert torch.equal(*made)


def test_the_output_layer_is_itself_again_afterwards(folder: Path) -> None:
    model = load_causal_lm(str(folder))
    batch = experience([(3, 5)])
    before = model(input_ids=batch.input_ids).logits
    policy_output(model, batch, batch.action_mask)
    assert torch.equal(model(input_ids=batch.input_ids).logits, before)


def test_a_batch_without_selected_tokens_still_has_a_graph(folder: Path) -> None:
    model = load_causal_lm(str(folder))
    batch = experience([(3, 5)])
    out = policy_output(model, batch, torch.zeros_like(batch.action_mask))
    out.logprobs.sum().backward()
    assert all((parameter.grad == 0).all() for parameter in model.parameters() if parameter.grad is not None)


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
