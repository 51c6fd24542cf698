import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.losses import (
    cross_entropy_loss,
    grpo_loss,
    linear_cross_entropy,
    linear_logprobs,
    linear_policy_gradient,
)

from ..head_cases import dense_logprobs, random_head
from .test_logprobs import KNOBS, LargestTensor


def random_mask(*shape, seed=0):
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask.view(-1)[0] = True
    return mask


def random_coefficients(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_policy_gradient_equals_autograd_through_the_dense_head(knobs, entropy, chunk):
    head = random_head(2, 4)
    coefficients = random_coefficients(2, 4)
    bonus = random_coefficients(2, 4, seed=2) if entropy else None
    output = linear_policy_gradient(
        head.hidden, head.weight, head.targets, coefficients,
        entropy_coefficients=bonus, bias=head.bias, chunk=chunk, **knobs,
    )  # fmt: skip
    logprobs, entropies = dense_logprobs(head.hidden, head.weight, head.targets, bias=head.bias, **knobs)
    loss = (coefficients * logprobs).sum() + (0.0 if bonus is None else (bonus * entropies).sum())
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(output.logprobs, logprobs.detach())
    assert not output.logprobs.requires_grad
    if entropy:
        torch.testing.assert_close(output.entropy, entropies.detach())
    # The loss does not end the graph: its gradients are scaled by what comes after it.
    gradients = torch.autograd.grad(-0.5 * output.loss, head.leaves)
    for mine, expected in zip(gradients, torch.autograd.grad(-0.5 * loss, head.leaves), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("denominator", [None, 17.0, torch.tensor(5)])
def test_cross_entropy_equals_the_loss_on_log_probs(denominator):
    head, mask = random_head(3, 5), random_mask(3, 5)
    output = linear_cross_entropy(
        head.hidden, head.weight, head.targets, mask, denominator=denominator, bias=head.bias, chunk=4
    )
    logprobs = linear_logprobs(head.hidden, head.weight, head.targets, bias=head.bias).logprobs
    loss = cross_entropy_loss(logprobs, mask, denominator=denominator).loss
    torch.testing.assert_close(output.loss, loss)
    gradients = torch.autograd.grad(output.loss, head.leaves)
    for mine, expected in zip(gradients, torch.autograd.grad(loss, head.leaves), strict=True):
        torch.testing.assert_close(mine, expected)


def test_cross_entropy_equals_torch_in_float32():
    head = random_head(12, width=8, vocabulary=50, dtype=torch.float32)
    targets = torch.where(random_mask(12), head.targets, -100)
    output = linear_cross_entropy(head.hidden, head.weight, targets, targets != -100, chunk=5)
    loss = torch.nn.functional.cross_entropy(head.hidden @ head.weight.t(), targets, ignore_index=-100)
    torch.testing.assert_close(output.loss, loss)
    gradients = torch.autograd.grad(output.loss, head.leaves[:2])
    for mine, expected in zip(gradients, torch.autograd.grad(loss, head.leaves[:2]), strict=True):
        torch.testing.assert_close(mine, expected)


def test_first_on_policy_update_of_grpo_has_the_same_gradient():
    head, mask = random_head(4, 6), random_mask(4, 6)
    advantages = random_coefficients(4)[:, None].expand(4, 6)
    denominator = mask.sum()
    logprobs = linear_logprobs(head.hidden, head.weight, head.targets).logprobs
    loss = grpo_loss(
        logprobs, logprobs.detach(), advantages, mask, aggregation="token-mean", denominator=denominator
    ).loss
    output = linear_policy_gradient(
        head.hidden, head.weight, head.targets, torch.where(mask, -advantages, 0.0) / denominator
    )
    for mine, expected in zip(
        torch.autograd.grad(output.loss, head.leaves[:2]), torch.autograd.grad(loss, head.leaves[:2]), strict=True
    ):
        torch.testing.assert_close(mine, expected)


@given(chunk=st.integers(1, 12), split=st.integers(0, 9), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_micro_batches_and_chunks_add_up(chunk, split, seed):
    head, mask = random_head(9, seed=seed), random_mask(9, seed=seed)
    denominator = mask.sum()

    def gradients(rows, size):
        output = linear_cross_entropy(
            head.hidden[rows], head.weight, head.targets[rows], mask[rows],
            denominator=denominator, bias=head.bias, chunk=size,
        )  # fmt: skip
        return [output.loss, *torch.autograd.grad(output.loss, head.leaves)]

    whole = gradients(slice(None), None)
    parts = zip(gradients(slice(0, split), chunk), gradients(slice(split, None), chunk), strict=True)
    for (first, second), expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(first + second, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 16])
def test_narrow_dtypes_are_as_exact_as_the_dense_head(dtype, chunk):
    head = random_head(64, width=32, vocabulary=300, dtype=dtype)
    exact = head.to(torch.float64)
    coefficients = random_coefficients(64) / 64

    def dense(case):
        logprobs, _ = dense_logprobs(case.hidden, case.weight, case.targets, bias=case.bias, temperature=3.0)
        return torch.autograd.grad((logprobs * coefficients).sum(), case.leaves)

    output = linear_policy_gradient(
        head.hidden, head.weight, head.targets, coefficients, bias=head.bias, temperature=3.0, chunk=chunk
    )
    ours = torch.autograd.grad(output.loss, head.leaves)
    assert [gradient.dtype for gradient in ours] == [dtype] * 3
    for mine, theirs, truth in zip(ours, dense(head), dense(exact), strict=True):
        # Half as much again for another order of summation.
        assert (mine.double() - truth).norm() <= 1.5 * (theirs.double() - truth).norm() + 1e-7 * truth.norm()


@pytest.mark.parametrize("entropy", [False, True])
def test_nothing_as_large_as_the_logits_is_ever_allocated(entropy):
    tokens, vocabulary, width, chunk = 64, 4096, 8, 4
    head = random_head(tokens, width=width, vocabulary=vocabulary, dtype=torch.float32)
    with LargestTensor() as mode:
        mask = torch.ones(tokens, dtype=torch.bool)
        linear_cross_entropy(
            head.hidden, head.weight, head.targets, mask, bias=head.bias, entropy=entropy, chunk=chunk
        ).loss.backward()
    assert head.weight.grad is not None
    assert 0 < mode.largest <= max(vocabulary * width, chunk * vocabulary)


def test_masked_nan_reaches_neither_loss_nor_gradient():
    head, mask = random_head(6), random_mask(6)
    clean = linear_cross_entropy(head.hidden, head.weight, head.targets, mask, chunk=4)
    dirty_hidden = torch.where(mask[:, None], head.hidden.detach(), torch.nan).requires_grad_()
    dirty = linear_cross_entropy(dirty_hidden, head.weight, torch.where(mask, head.targets, -100), mask, chunk=4)
    assert torch.equal(dirty.loss, clean.loss)
    gradients = torch.autograd.grad(dirty.loss, (dirty_hidden, head.weight))
    expected = torch.autograd.grad(clean.loss, (head.hidden, head.weight))
    for mine, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_batch_without_trained_tokens_gives_zero():
    head = random_head(4)
    output = linear_cross_entropy(head.hidden, head.weight, head.targets, torch.zeros(4), bias=head.bias)
    assert output.loss == 0.0
    for gradient in torch.autograd.grad(output.loss, head.leaves):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_no_tokens_at_all_give_zero():
    head = random_head(0)
    output = linear_cross_entropy(head.hidden, head.weight, head.targets, torch.ones(0), bias=head.bias)
    for gradient in torch.autograd.grad(output.loss, head.leaves):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_without_gradients_it_is_a_plain_evaluation():
    head, mask = random_head(5), random_mask(5)
    with torch.no_grad():
        evaluated = linear_cross_entropy(head.hidden, head.weight, head.targets, mask, entropy=True)
    trained = linear_cross_entropy(head.hidden, head.weight, head.targets, mask, entropy=True)
    assert not evaluated.loss.requires_grad
    torch.testing.assert_close(evaluated.loss, trained.loss.detach())
    torch.testing.assert_close(evaluated.logprobs[mask], trained.logprobs[mask])
    torch.testing.assert_close(evaluated.entropy[mask], trained.entropy[mask])


def test_a_frozen_head_gets_no_gradient():
    head, mask = random_head(5), random_mask(5)
    frozen = head.weight.detach()
    linear_cross_entropy(head.hidden, frozen, head.targets, mask, chunk=2).loss.backward()
    assert frozen.grad is None
    whole = linear_cross_entropy(head.hidden, head.weight, head.targets, mask)
    torch.testing.assert_close(head.hidden.grad, torch.autograd.grad(whole.loss, head.hidden)[0])


def test_autocast_computes_in_the_narrow_dtype_and_returns_wide_gradients():
    head, mask = random_head(16, width=8, vocabulary=40, dtype=torch.float32), torch.ones(16)
    narrow = head.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        output = linear_cross_entropy(head.hidden, head.weight, head.targets, mask, bias=head.bias)
    plain = linear_cross_entropy(narrow.hidden, narrow.weight, narrow.targets, mask, bias=narrow.bias)
    assert torch.equal(output.loss, plain.loss)
    for mine, expected in zip(
        torch.autograd.grad(output.loss, head.leaves), torch.autograd.grad(plain.loss, narrow.leaves), strict=True
    ):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.bfloat16(), expected)


def test_a_second_backward_is_refused():
    head = random_head(3)
    loss = linear_cross_entropy(head.hidden, head.weight, head.targets, torch.ones(3)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_compiles_without_graph_breaks():
    head, mask = random_head(6, vocabulary=40, dtype=torch.float32), random_mask(6)

    def loss(hidden, weight, bias):
        return linear_cross_entropy(hidden * 2, weight, head.targets, mask, bias=bias, chunk=4).loss

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for mine, expected in zip(
        torch.autograd.grad(compiled(*head.leaves), head.leaves),
        torch.autograd.grad(loss(*head.leaves), head.leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(2)}, r"must have the same shape, got targets \(3,\), mask \(2,\)"),
        ({"hidden": torch.zeros(4, 5)}, r"targets must have the shape of hidden without its last dimension"),
        ({"targets": torch.tensor([0, 11, 2])}, r"lie in \[0, 11\)"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"chunk": 0}, "chunk is a number of tokens"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_arguments_are_named(change, message):
    arguments = {
        "hidden": torch.zeros(3, 5),
        "weight": torch.zeros(11, 5),
        "targets": torch.zeros(3).long(),
        "mask": torch.ones(3),
    }
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**arguments, **change})


def test_coefficients_must_fit():
    with pytest.raises(ValueError, match=r"coefficients \(2,\)"):
        linear_policy_gradient(torch.zeros(3, 5), torch.zeros(11, 5), torch.zeros(3).long(), torch.zeros(2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_gives_what_the_cpu_gives(dtype):
    head, mask = random_head(300, width=64, vocabulary=5000, dtype=dtype), random_mask(300)

    def run(device):
        leaves = [leaf.detach().to(device).requires_grad_() for leaf in head.leaves]
        output = linear_cross_entropy(
            leaves[0], leaves[1], head.targets.to(device), mask.to(device), bias=leaves[2], temperature=8.0, chunk=100
        )
        return [output.loss, *torch.autograd.grad(output.loss, leaves)]

    # TF32 is off by default; bfloat16 results differ by the order of summation before the last rounding.
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for mine, expected in zip(run("cuda"), run("cpu"), strict=True):
        assert (mine.cpu().double() - expected.double()).norm() <= tolerance * expected.double().norm()
